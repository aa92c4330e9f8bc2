"""From call metadata to a caller. Keys are compared by their SHA-256; one error for unknown apps and wrong keys."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from tmc_server.domain.catalog import App, Catalog
from tmc_server.errors import AdminOnly, CredentialsMissing
from tmc_server.requests import validation
from tmc_server.requests.caller import Caller

DEV_OPERATOR = "developer"


class Credentials(Protocol):
    """The server's copy of who exists."""

    @property
    def current(self) -> Catalog: ...
    @property
    def operators(self) -> Mapping[bytes, str]: ...


class Authentication:
    """open_app: makes or finds an app without a key; only for `tmc dev`, where everybody on loopback is welcome."""

    def __init__(self, credentials: Credentials, open_app: Callable[[str], App] | None = None) -> None:
        self._credentials = credentials
        self._open_app = open_app

    def app(self, metadata: Iterable[tuple[str, str | bytes]]) -> Caller:
        """Raises CredentialsMissing, CredentialsInvalid, InvalidField for the tag."""
        values = _texts(metadata)
        tag = validation.tag(values.get("tmc-tag", ""), "tmc-tag")
        app_id = values.get("tmc-app", "")
        check_address = validation.address(values.get("tmc-check-address", ""), "tmc-check-address")
        if self._open_app is not None:
            return Caller(self._open_app(app_id or "dev"), tag, check_address)
        key = _bearer(values)
        if not app_id or not key:
            raise CredentialsMissing
        return Caller(self._credentials.current.authenticated(app_id, _hash(key)), tag, check_address)

    def admin(self, metadata: Iterable[tuple[str, str | bytes]]) -> str:
        """The operator's name. Raises AdminOnly."""
        if self._open_app is not None:
            return DEV_OPERATOR
        key = _bearer(_texts(metadata))
        name = self._credentials.operators.get(_hash(key)) if key else None
        if name is None:
            raise AdminOnly
        return name


def _texts(metadata: Iterable[tuple[str, str | bytes]]) -> dict[str, str]:
    return {name: value for name, value in metadata if isinstance(value, str)}


def _bearer(values: Mapping[str, str]) -> str:
    scheme, _, key = values.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
