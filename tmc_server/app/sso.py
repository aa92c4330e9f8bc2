"""ID tokens of an OpenID provider, if one is configured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tmc_server.app.maintenance import CannotStart
from tmc_server.config import OidcConfig
from tmc_server.duties.periodic import Periodic


class SingleSignOn:
    """name_of: see identity.oidc.OidcTokens; no token is valid without a provider."""

    def __init__(self, settings: OidcConfig) -> None:
        self.name_of: Callable[[str], str | None] = lambda _token: None
        self._tokens: Any = None
        if not settings.issuer:
            return
        try:
            from tmc_server.identity.oidc import OidcTokens, Provider
        except ModuleNotFoundError as exc:
            raise CannotStart(f"[oidc] needs {exc.name}: install tmc-center[oidc].") from exc
        provider = Provider(issuer=settings.issuer, audiences=settings.audiences, claim=settings.claim)
        self._tokens = OidcTokens(provider)
        self.name_of = self._tokens.name_of

    def duties(self) -> list[Periodic]:
        if self._tokens is None:
            return []
        from tmc_server.identity.oidc import REFRESH_S

        fetching = Periodic("oidc", self._tokens.refresh, REFRESH_S)
        self._tokens.wake = fetching.wake
        return [fetching]
