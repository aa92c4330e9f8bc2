"""From call metadata to a caller. Keys are compared by their SHA-256; one error for unknown apps and wrong keys.

Failed logins are counted, and logged at most once a second: an operator sees them, a flood does not fill the disk.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from tmc_common.eventlog import EventLog
from tmc_server.domain.catalog import App, Catalog
from tmc_server.domain.operators import CERTIFICATE, OIDC, KnownOperators, Operator, Role, identity
from tmc_server.domain.ports.checks import Instance
from tmc_server.errors import (
    AdminOnly,
    AppDisabled,
    CertificateOfAnother,
    CredentialsInvalid,
    CredentialsMissing,
    KeyOfAnotherTag,
    TmcError,
)
from tmc_server.metrics import METRICS
from tmc_server.requests import validation
from tmc_server.requests.caller import Caller
from tmc_server.rpc.permission import demand_role

log = EventLog("tmc.login")

DEV_OPERATOR = Operator(name="developer", role=Role.ADMIN, reads_bodies=True)
_SAID_CHARACTERS = 64
_TRACEPARENT = "traceparent"
_TRACE_ID = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}", re.ASCII)
_CONTEXT_CHARACTERS = 512


class Credentials(Protocol):
    """The server's copy of who exists."""

    @property
    def current(self) -> Catalog: ...
    @property
    def operators(self) -> KnownOperators: ...


class Call(Protocol):
    """The parts of a call that the log of a failed login needs."""

    def peer(self) -> str: ...
    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]] | None: ...


class CertificateOf(Protocol):
    """A call: what its connection proved. Names are as the certificate has them."""

    def auth_context(self) -> Mapping[str, Iterable[bytes]]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedLogin:
    """Some of one kind. app, peer: of the last one, the app as Python would write it."""

    kind: str
    app: str
    peer: str
    count: int


class FailedLogins:
    """Counts them all, writes one line per `pause_s` at most. Never the key."""

    KINDS: Mapping[type[TmcError], str] = {
        CredentialsMissing: "missing",
        CredentialsInvalid: "invalid",
        AdminOnly: "admin",
        AppDisabled: "disabled",
        KeyOfAnotherTag: "tag",
        CertificateOfAnother: "certificate",
    }

    def __init__(self, pause_s: float = 1.0, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._pause_s = pause_s
        self._monotonic = monotonic
        self._counters = {error: METRICS.login_failures.labels(kind) for error, kind in self.KINDS.items()}
        self._next = 0.0
        self._untold = 0
        self._lock = threading.Lock()
        self._unwritten: dict[str, FailedLogin] = {}

    def note(self, error: TmcError, call: Call) -> bool:
        """Count and log this error if it was a failed login. Returns: whether it was."""
        counter = self._counters.get(type(error))
        if counter is None:
            return False
        counter.inc()
        kind = self.KINDS[type(error)]
        app = ascii(_texts(call.invocation_metadata() or ()).get("tmc-app", "")[:_SAID_CHARACTERS])
        self._add(FailedLogin(kind=kind, app=app, peer=call.peer(), count=1))
        now = self._monotonic()
        if now < self._next:
            self._untold += 1
            return True
        log.warning(
            "login_failed",
            "failed login (%s) as app %s from %s; %d more since the last of these lines",
            kind,
            app,
            call.peer(),
            self._untold,
        )
        self._next, self._untold = now + self._pause_s, 0
        return True

    def _add(self, more: FailedLogin) -> None:
        with self._lock:
            before = self._unwritten.get(more.kind)
            self._unwritten[more.kind] = replace(more, count=more.count + (before.count if before is not None else 0))

    def write(self, write: Callable[[FailedLogin], None]) -> None:
        """Hand over those since the last time, one per kind; what cannot be written is kept. From any thread."""
        with self._lock:
            taken, self._unwritten = self._unwritten, {}
        waiting = list(taken.values())
        try:
            while waiting:
                write(waiting[0])
                del waiting[0]
        finally:
            for each in waiting:
                self._add(each)


class Authentication:
    """open_app: makes or finds an app, for centers that make names at their first use.

    secret: with open_app, the key of all apps and the token of operators; empty, as in `tmc dev`: everyone is welcome.

    bind_apps: the client's certificate must name the app, for apps only.  clock: seconds since the epoch, for tokens that expire.
    oidc: the name that an OpenID provider vouches for with a token; None: it does not.
    """

    def __init__(
        self,
        credentials: Credentials,
        open_app: Callable[[str], App] | None = None,
        *,
        secret: str = "",
        bind_apps: bool = False,
        clock: Callable[[], float] = time.time,
        oidc: Callable[[str], str | None] = lambda _token: None,
    ) -> None:
        self._oidc = oidc
        self._credentials = credentials
        self._open_app = open_app
        self._secret = secret
        self._bind_apps = bind_apps
        self._clock = clock
        self.failed = FailedLogins()
        self.note = self.failed.note

    @property
    def catalog(self) -> Catalog:
        """Return the catalog: another object whenever keys may have changed."""
        return self._credentials.current

    def app(self, metadata: Iterable[tuple[str, str | bytes]]) -> Caller:
        """Raises CredentialsMissing, CredentialsInvalid, AppDisabled, KeyOfAnotherTag, AdminOnly, RoleRequired, InvalidField."""
        values = _texts(metadata)
        app, only_tag = self._app(values)
        if app.disabled:  # only its own key learns that
            raise AppDisabled
        tag = validation.tag(values.get("tmc-tag", ""), "tmc-tag")
        if only_tag and tag not in ("", only_tag):
            raise KeyOfAnotherTag
        address = validation.address(values.get("tmc-check-address", ""), "tmc-check-address")
        ledger_id = validation.hexadecimal_id(values.get("tmc-check-ledger", ""), "tmc-check-ledger")
        operator = self._operator(values["tmc-operator"]) if "tmc-operator" in values else None
        if operator is not None:
            demand_role(operator, Role.OPERATOR)
        return Caller(
            app=app,
            tag=only_tag or tag,
            instance=Instance(address, ledger_id) if address else None,
            only_this_tag=bool(only_tag),
            operator=operator,
            context=_trace(values) if _TRACEPARENT in values else {},
        )

    def _app(self, values: Mapping[str, str]) -> tuple[App, str]:
        """The app, and the only tag that its key works for."""
        app_id = values.get("tmc-app", "")
        if self._open_app is not None and self._is_welcome(values.get("authorization", "")):
            return self._open_app(app_id or "dev"), ""
        key = _bearer(values.get("authorization", ""))
        if not app_id or not key:
            raise CredentialsMissing
        return self._credentials.current.authenticated(app_id, _hash(key))

    def _is_welcome(self, authorization: str) -> bool:
        return hmac.compare_digest(_bearer(authorization).encode() if self._secret else b"", self._secret.encode())

    def certificate(self, caller: Caller, call: CertificateOf) -> None:
        """Raises CertificateOfAnother: the connection's certificate does not name the caller's app."""
        if self._bind_apps and caller.app.id not in _names(call.auth_context()):
            raise CertificateOfAnother

    def operator(self, metadata: Iterable[tuple[str, str | bytes]], proven: Mapping[str, Iterable[bytes]]) -> Operator:
        """Identify the operator by token, or without one by the certificate.

        proven: what the connection's certificate says. Raises AdminOnly.
        """
        authorization = _texts(metadata).get("authorization", "")
        if not authorization:
            identities = self._credentials.operators.identities
            named = {
                each.name: each for name in _names(proven) if (each := identities.get(identity(CERTIFICATE, name)))
            }
            if len(named) == 1:
                return next(iter(named.values()))
        return self._operator(authorization)

    def _operator(self, authorization: str) -> Operator:
        if self._open_app is not None and self._is_welcome(authorization):
            return DEV_OPERATOR
        key = _bearer(authorization)
        known = self._credentials.operators
        token = known.tokens.get(_hash(key)) if key else None
        if token is not None and token.is_valid(round(self._clock() * 1000)):
            return token.operator
        vouched = self._oidc(key) if key and token is None else None
        operator = known.identities.get(identity(OIDC, vouched)) if vouched is not None else None
        if operator is None:
            if vouched is not None:
                log.info("identity_unknown", "no operator has the identity %s", identity(OIDC, vouched))
            raise AdminOnly
        return operator


def _names(proven: Mapping[str, Iterable[bytes]]) -> set[str]:
    """Return whom a certificate names: its alternative names and its common name."""
    kinds = ("x509_subject_alternative_name", "x509_common_name")
    return {name.decode(errors="replace") for kind in kinds for name in proven.get(kind, ())}


def _texts(metadata: Iterable[tuple[str, str | bytes]]) -> dict[str, str]:
    return {name: value for name, value in metadata if isinstance(value, str)}


def _trace(values: Mapping[str, str]) -> dict[str, str]:
    """Return what W3C says about the trace; {}: it is malformed.

    Baggage beyond what fits beside a message's own headers is left out.
    """
    if not _TRACE_ID.fullmatch(values[_TRACEPARENT]):
        return {}
    found = {_TRACEPARENT: values[_TRACEPARENT]}
    for name in ("tracestate", "baggage"):
        if name in values and len(values[name]) <= _CONTEXT_CHARACTERS and values[name].isprintable():
            found[name] = values[name]
    return found


def _bearer(authorization: str) -> str:
    scheme, _, key = authorization.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
