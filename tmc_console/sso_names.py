"""What the rest of the console knows of single sign-on, whose libraries are an extra."""

from __future__ import annotations

from dataclasses import dataclass, field

LOGIN_COOKIE = "tmc_sso"
LOGIN_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Provider:
    """An OpenID provider. issuer: its URL.  secret "": a public client.  scope: what is asked for."""

    issuer: str
    client_id: str
    secret: str = field(default="", repr=False)
    scope: str = "openid email"


class LoginFailed(Exception):
    """The sentence says what to do."""
