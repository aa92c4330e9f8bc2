"""ID tokens of an OpenID provider, verified with the keys that it publishes. Source: OpenID Connect Core, 3.1.3.7."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import JWKRegistry, KeySet

from tmc_common.eventlog import EventLog
from tmc_common.limited import UNCOMPRESSED, parsed, read_body

log = EventLog("tmc.login")

REFRESH_S = 300.0
_ALGORITHMS = ["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]
_REMEMBERED = 1_000
_WAKE_AGAIN_S = 10.0
_TIMEOUT_S = 10.0
_MOST_BYTES = 1 << 20  # of an answer
_LONGEST_TOKEN = 8_192
_PARTS = 3
_LEEWAY_S = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """issuer: its URL.  audiences: client ids whose tokens count.  claim: the one that names the operator."""

    issuer: str
    audiences: Sequence[str]
    claim: str = "sub"


class OidcTokens:
    """On the loop, except `refresh`. wake: have `refresh` called soon, since a token names a key that is not known."""

    def __init__(
        self,
        provider: Provider,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._provider = provider
        self._clock = clock
        self._monotonic = monotonic
        self._keys: KeySet | None = None
        self._verified: OrderedDict[bytes, tuple[str, float]] = OrderedDict()
        self._next_wake = 0.0
        self.wake: Callable[[], None] = lambda: None

    def name_of(self, token: str) -> str | None:
        """The name that the provider vouches for. None: this is no valid token of it. Does not block."""
        if token.count(".") != _PARTS - 1 or len(token) > _LONGEST_TOKEN:
            return None
        digest = hashlib.sha256(token.encode()).digest()
        known = self._verified.get(digest)
        if known is None:
            known = self._verify(token)
            if known is None:
                return None
            self._verified[digest] = known
            if len(self._verified) > _REMEMBERED:
                self._verified.popitem(last=False)
        name, expires = known
        return name if self._clock() < expires else None

    def _verify(self, token: str) -> tuple[str, float] | None:
        """The name, and when the token expires."""
        keys = self._keys
        if keys is None:
            self._ask_for_keys()
            return None
        provider = self._provider
        demanded = jwt.JWTClaimsRegistry(
            now=lambda: int(self._clock()),
            leeway=_LEEWAY_S,  # the provider's clock may be ahead of ours
            iss={"essential": True, "value": provider.issuer},
            aud={"essential": True, "values": list(provider.audiences)},
            exp={"essential": True},
        )
        try:
            found = jwt.decode(token, keys, algorithms=_ALGORITHMS)
            demanded.validate(found.claims)
        except Exception as exc:  # noqa: BLE001 - of a token that anyone can send, and of a library that may trip over it
            log.debug("oidc_token_refused", "an ID token is not valid: %r", exc)
            self._ask_for_keys()
            return None
        why = self._objection(found.header, found.claims)
        if why:
            log.info("oidc_token_refused", "an ID token of the provider is refused: %s", why)
            return None
        return found.claims[provider.claim], float(found.claims["exp"])

    def _objection(self, header: Mapping[str, Any], claims: Mapping[str, Any]) -> str:
        """Return what speaks against a token that the provider did sign; "": nothing."""
        provider = self._provider
        if str(header.get("typ", "JWT")).upper() != "JWT" or "events" in claims:
            return "it is another kind of token"
        if claims.get("azp", provider.audiences[0]) not in provider.audiences:
            return f"it was made for {claims['azp']!r}"
        name = claims.get(provider.claim)
        if not isinstance(name, str) or not name:
            return f"it has no claim {provider.claim!r}"
        if provider.claim == "email" and claims.get("email_verified") is not True:
            return f"the provider has not verified {name!r}"
        return ""

    def _ask_for_keys(self) -> None:
        """Providers change their keys; a flood of bad tokens must not become a flood of requests."""
        now = self._monotonic()
        if now >= self._next_wake:
            self._next_wake = now + _WAKE_AGAIN_S
            self.wake()

    def refresh(self) -> bool:
        """Fetch the provider's keys. Blocks. Raises OSError, ValueError."""
        issuer = self._provider.issuer
        try:
            described = _get(f"{issuer.rstrip('/')}/.well-known/openid-configuration")
            if described.get("issuer") != issuer:
                raise ValueError(f"the provider calls itself {described.get('issuer')!r}: set [oidc] issuer to that")
            keys = _get(described["jwks_uri"])
            self._keys = KeySet([key for each in keys["keys"] if (key := _key(each)) is not None])
        except (httpx.HTTPError, KeyError, TypeError) as exc:
            raise OSError(f"the OpenID provider {issuer} does not publish its keys: {exc!r}") from exc
        return False


def _key(published: Any) -> Any:
    """Read a key; None if it is a secret, or of a kind that we do not understand, which is to be ignored. Source: RFC 7517, 5."""
    try:
        return None if published["kty"] == "oct" else JWKRegistry.import_key(published)
    except (JoseError, KeyError, TypeError, ValueError) as exc:
        log.debug("oidc_key_ignored", "a key of the OpenID provider is not usable: %r", exc)
        return None


def _get(url: str) -> Any:
    """Raises httpx.HTTPError, ValueError."""
    with httpx.stream("GET", url, timeout=_TIMEOUT_S, headers=UNCOMPRESSED) as answer:
        answer.raise_for_status()
        return parsed(read_body(answer, _MOST_BYTES, _TIMEOUT_S))
