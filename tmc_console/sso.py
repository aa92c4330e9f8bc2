"""Log in by an OpenID provider: the authorization code flow with PKCE. The center verifies the ID token that comes of it.

Source: OpenID Connect Core, 3.1; RFC 7636.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import quote

import httpx

from tmc_common.limited import UNCOMPRESSED, parsed, read_body_async
from tmc_console.sso_names import LoginFailed, Provider

_DESCRIBED_S = 300.0
_TIMEOUT_S = 10.0
_MOST_BYTES = 1 << 20  # of an answer


@dataclass(frozen=True, kw_only=True)
class _Begun:
    """A login that was sent to the provider. The browser keeps it, in a cookie that no other site can read or set."""

    state: str
    nonce: str
    verifier: str
    back: str
    next_path: str

    def cookie(self) -> str:
        return base64.urlsafe_b64encode(json.dumps(asdict(self)).encode()).decode()

    @classmethod
    def from_cookie(cls, text: str) -> _Begun | None:
        """Read the cookie; None if there is none, or it is none of ours."""
        try:
            values = json.loads(base64.urlsafe_b64decode(text))
            return cls(**{name: str(values[name]) for name in cls.__dataclass_fields__})
        except (ValueError, KeyError, TypeError):
            return None


class SingleSignOn:
    """Keeps nothing of a login that is under way."""

    def __init__(self, provider: Provider, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._provider = provider
        self._monotonic = monotonic
        self._description: tuple[float, dict[str, str]] = (float("-inf"), {})

    async def begin(self, back: str, next_path: str) -> tuple[str, str]:
        """back: the address that the provider sends the browser to. Returns: the provider's page, and a cookie.

        Raises LoginFailed.
        """
        described = await self._described()
        state, nonce, verifier = (secrets.token_urlsafe(32) for _ in range(3))
        begun = _Begun(
            state=state, nonce=nonce, verifier=verifier + secrets.token_urlsafe(16), back=back, next_path=next_path
        )
        challenge = base64.urlsafe_b64encode(hashlib.sha256(begun.verifier.encode()).digest()).rstrip(b"=").decode()
        asked = {
            "response_type": "code",
            "client_id": self._provider.client_id,
            "redirect_uri": back,
            "scope": self._provider.scope,
            "state": state,
            "nonce": nonce,
            "code_challenge": challenge,
            "code_challenge_method": "S256",
        }
        return str(httpx.URL(described["authorization_endpoint"]).copy_merge_params(asked)), begun.cookie()

    async def finish(self, state: str, code: str, cookie: str) -> tuple[str, str]:
        """The provider sent the browser back. Returns: the ID token, and where to go next. Raises LoginFailed."""
        begun = _Begun.from_cookie(cookie)
        if begun is None or not hmac.compare_digest(state.encode(), begun.state.encode()):
            raise LoginFailed("This login was not begun in this browser, or has expired: log in again.")
        described = await self._described()
        token = await self._token(described["token_endpoint"], begun, code)
        if not hmac.compare_digest(_nonce_in(token).encode(), begun.nonce.encode()):
            raise LoginFailed("The identity provider answered another login: log in again.")
        return token, begun.next_path

    async def _token(self, endpoint: str, begun: _Begun, code: str) -> str:
        """The ID token for a code. Raises LoginFailed."""
        provider = self._provider
        asked = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": begun.back,
            "client_id": provider.client_id,
            "code_verifier": begun.verifier,
        }
        login = httpx.BasicAuth(quote(provider.client_id), quote(provider.secret)) if provider.secret else None
        try:
            answer = await _asked("POST", endpoint, data=asked, auth=login)
            return str(answer["id_token"])
        except (httpx.HTTPError, ValueError, KeyError, TypeError, TimeoutError) as exc:
            raise LoginFailed("The identity provider refused the login: log in again.") from exc

    async def _described(self) -> dict[str, str]:
        """Raises LoginFailed."""
        read, known = self._description
        if self._monotonic() - read < _DESCRIBED_S:
            return known
        issuer = self._provider.issuer
        try:
            found = await _asked("GET", f"{issuer.rstrip('/')}/.well-known/openid-configuration")
            if found["issuer"] != issuer:
                raise ValueError(f"it calls itself {found['issuer']!r}")
            described = {name: str(found[name]) for name in ("authorization_endpoint", "token_endpoint")}
        except (httpx.HTTPError, ValueError, KeyError, TypeError, TimeoutError) as exc:
            raise LoginFailed("The identity provider cannot be reached: try again, or log in with a token.") from exc
        self._description = (self._monotonic(), described)
        return described


async def _asked(method: str, url: str, **options: Any) -> Any:
    """Return what a provider answers. Raises httpx.HTTPError, ValueError, TimeoutError."""
    async with (
        asyncio.timeout(_TIMEOUT_S),
        httpx.AsyncClient(timeout=_TIMEOUT_S) as client,
        client.stream(method, url, headers=UNCOMPRESSED, **options) as answer,
    ):
        answer.raise_for_status()
        return parsed(await read_body_async(answer, _MOST_BYTES))


def _nonce_in(token: str) -> str:
    """Return the nonce in the token; the center verifies its signature. "": it says none."""
    try:
        payload = token.split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        return str(claims.get("nonce", ""))
    except (IndexError, ValueError, AttributeError):
        return ""
