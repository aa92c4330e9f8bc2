"""The center's addresses, our identity, and one gRPC channel per server: opened on first use and again after a fork.

With several servers, each call goes to a healthy one, see `servers`: an attempt that is not answered within its
deadline is repeated on another server, which is safe because every call of the center is idempotent. If no server is
healthy, the call waits for its full deadline on at most two servers at once, so a slow center gets no storm of
retries.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

import grpc

from tmc_client import errors
from tmc_client.connecting import wire
from tmc_client.connecting.servers import Server, Servers
from tmc_client.extras import needed_by
from tmc_client.forks import abandon, notice_fork, watch_forks
from tmc_common.addresses import HostPort, is_loopback
from tmc_common.proxies import proxy_options

if TYPE_CHECKING:
    from tmc_client.discovery import ConsulAddress

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)  # of an app or an environment, as the center takes them


@dataclass(frozen=True, kw_only=True)
class Tls:
    """PEM files. authority: the CA to trust.  certificate, key: the client certificate, if the center requires one.

    server_name: the name in the servers' certificates, if their addresses have another one or come from Consul.
    """

    authority: str | None = None
    certificate: str | None = None
    key: str | None = None
    server_name: str | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        def read(path: str | None) -> bytes | None:
            return Path(path).read_bytes() if path else None

        return grpc.ssl_channel_credentials(read(self.authority), read(self.key), read(self.certificate))

    @property
    def options(self) -> tuple[tuple[str, str], ...]:
        """Channel options beside the credentials."""
        return (("grpc.ssl_target_name_override", self.server_name),) if self.server_name else ()


@dataclass(frozen=True, kw_only=True)
class Identity:
    """The app, its key, the environment it runs in, and host:port where it answers checks (without discovery).

    check_ledger: the id of the only ledger it answers them from there; b"": unknown, or several.
    operator_token: an admin token, where an operator acts for the app.
    """

    app: str
    key: str = field(default="", repr=False)
    tag: str = ""
    check_address: str = ""
    check_ledger: bytes = b""
    operator_token: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        """Raises InvalidRequest: no center takes these names; nobody could call check_address."""
        for name, value in (("app", self.app), ("tag", self.tag)):
            if value and not _NAME.fullmatch(value):
                raise errors.InvalidRequest(
                    f"{name}={value!r} is no name of {'an app' if name == 'app' else 'an environment'}: give 1 to 64 characters "
                    "of A-Z a-z 0-9 _ -.",
                    field=name,
                )
        if not self.check_address:
            return
        try:
            place = HostPort.parse(self.check_address)
        except (ValueError, AttributeError):
            place = None
        if place is None or place.is_unspecified or not place.port:
            raise errors.InvalidRequest(
                f"check_address={self.check_address!r} is no address of this service: give 'host:port' that the center can "
                "reach.",
                field="check_address",
            )

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        pairs = [("tmc-app", self.app)]
        if self.tag:
            pairs.append(("tmc-tag", self.tag))
        pairs += announcement(self.check_address, self.check_ledger)
        if self.key:
            pairs.append(("authorization", f"Bearer {self.key}"))
        if self.operator_token:
            pairs.append(("tmc-operator", f"Bearer {self.operator_token}"))
        return tuple(pairs)


def announcement(check_address: str, ledger_id: bytes) -> tuple[tuple[str, str], ...]:
    """Metadata."""
    if not check_address:
        return ()
    pairs = (("tmc-check-address", check_address),)
    return (*pairs, ("tmc-check-ledger", ledger_id.hex())) if ledger_id else pairs


class Caller(Protocol):
    """Makes the calls of a Center: a Connection over gRPC, or a submit queue in a broker."""

    address: str
    identity: Identity

    def announce(self, check_address: str, ledger_id: bytes = b"") -> None:
        """Send this check address with every call from now on, unless there is one. ledger_id: see Identity.check_ledger.

        "": that which there is.
        """

    def unary(self, path: str, response_class: Any) -> Callable[..., Any]:
        """A blocking call of one method, with our metadata: (request, timeout=seconds, metadata=more) -> response.

        Calling it raises grpc.RpcError, or Unavailable when there is nobody to ask. Raises InvalidRequest: only gRPC has it.
        """

    def stream(self, path: str, response_class: Any, requests: Iterator[Any]) -> Any:
        """Open a bidirectional stream of one method, with our metadata. Raises InvalidRequest: only gRPC has it."""

    def close(self) -> None: ...


def addresses_of(address: str) -> list[str]:
    """host:port, or several with commas. Raises ValueError."""
    parts = [part.strip() for part in address.split(",")]
    try:
        if not all(HostPort.parse(part).port for part in parts):
            raise ValueError("port 0")
    except ValueError:
        raise ValueError(
            f"{without_secrets(address)!r} is no address of a center: give host:port, several with commas, "
            "consul://HOST:PORT/SERVICE?tag=TAG, embedded+sqlite:///FILE, or amqp+submit://USER:PASSWORD@BROKER/"
        ) from None
    return list(dict.fromkeys(parts))


CHANNEL_OPTIONS: tuple[tuple[str, str | int], ...] = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.lb_policy_name", "round_robin"),  # for a name with several addresses
    ("grpc.dns_min_time_between_resolutions_ms", 2_000),  # 30 s by default: too long after a rolling update
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # A dead connection is detected within 15 s, also on streams and while nothing is sent.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),  # after a fork nothing is shared with the parent's channel
)
_OLD_CHANNEL_S = 30.0  # longer than any call: calls in flight on the old channel still get their answers
_AT_ONCE = 2  # servers that one call is sent to in parallel while none is known to be healthy
_PROBE = "/grpc.health.v1.Health/Check"
_PROBE_S = 1.0
_SERVING = b"\x08\x01"  # HealthCheckResponse(status=SERVING)


class _Link:
    """The channel to one server and the methods made on it."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.channel = channel
        self.methods: dict[str, Any] = {}


class Connection:
    """Lazily opened channels. Thread-safe. address: as `addresses_of`, or consul://HOST:PORT/SERVICE?tag=TAG."""

    def __init__(
        self,
        address: str,
        identity: Identity,
        tls: Tls | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        insecure: bool = False,
        proxy: str | None = None,
    ) -> None:
        """insecure: allow the key in the clear to other machines. Raises InvalidRequest where that is not allowed.

        proxy: see `proxy_options`. Raises InvalidRequest: it is none.
        """
        self.address: str = without_secrets(address)  # as it may be shown
        self.identity: Identity = identity
        self._consul = _in_consul(address)
        self._watch: Any = None
        self._addresses = [] if self._consul else addresses_of(address)
        self._tls = tls
        try:
            self._options = (*CHANNEL_OPTIONS, *proxy_options(proxy))
        except ValueError as exc:
            raise errors.InvalidRequest(f"{exc}.", field="proxy") from exc
        self._insecure = insecure or os.environ.get("TMC_INSECURE", "") not in ("", "0")
        for each in self._addresses:
            self._refuse_clear(each)
        self._monotonic = monotonic
        _work_with_gevent()
        self._reset()
        watch_forks(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._servers: Servers | None = Servers(self._addresses, self._monotonic) if self._addresses else None
        self._links: dict[str, _Link] = {}
        self._prober: threading.Thread | None = None
        self._closing = threading.Event()

    def __repr__(self) -> str:
        return f"Connection({self.address!r}, app={self.identity.app!r})"

    def announce(self, check_address: str, ledger_id: bytes = b"") -> None:
        """See Caller."""
        with self._lock:
            first = self.identity.check_address or check_address
            is_new = first != self.identity.check_address or ledger_id != self.identity.check_ledger
            if is_new and check_address in ("", first):
                self.identity = replace(self.identity, check_address=first, check_ledger=ledger_id)
                for link in self._links.values():
                    link.methods = {}

    def _known(self) -> Servers:
        """Raises Unavailable: Consul knows no instance."""
        if self._servers is not None and (self._consul is None or self._watch is not None):
            return self._servers
        with self._lock:
            if self._consul is not None and self._watch is None:
                from tmc_client.discovery import Watch

                self._watch = Watch(self._consul, self._moved)
                self._watch.start()
            if self._servers is None:
                assert self._consul is not None
                raise errors.Unavailable(
                    f"Consul knows no passing instance of {self._consul.service!r} with tag {self._consul.tag!r}: "
                    "is a server running and registered with that tag, and may the token (CONSUL_HTTP_TOKEN) read it?"
                )
            return self._servers

    def _moved(self, addresses: Sequence[str]) -> None:
        """Take over changed instances from the watch. Calls in flight finish on the old channels."""
        self._addresses = list(dict.fromkeys(addresses))
        if self._servers is None:
            self._servers = Servers(self._addresses, self._monotonic)
        else:
            self._servers.replace(self._addresses)
        gone = [self._links.pop(address) for address in list(self._links) if address not in self._addresses]
        for link in gone:
            closing = threading.Timer(_OLD_CHANNEL_S, link.channel.close)
            closing.daemon = True
            closing.start()

    def _link(self, server: Server) -> _Link:
        link = self._links.get(server.address)
        if link is None:
            with self._lock:
                link = self._links.get(server.address)
                if link is None:
                    link = self._links[server.address] = _Link(self._new_channel(server.address))
        return link

    def _new_channel(self, address: str) -> grpc.Channel:
        self._refuse_clear(address)
        if self._tls is None:
            return grpc.insecure_channel(address, self._options)
        return grpc.secure_channel(address, self._tls.credentials(), (*self._options, *self._tls.options))

    def _refuse_clear(self, address: str) -> None:
        """Raise InvalidRequest if the key would be sent in the clear, where an eavesdropper could read it."""
        secret = self.identity.key or self.identity.operator_token
        if secret and self._tls is None and not self._insecure and not is_loopback(address):
            raise errors.InvalidRequest(
                f"The key of {self.identity.app!r} would travel in the clear to {address}: give tls=tmc.Tls(authority=...), "
                "or insecure=True (TMC_INSECURE=1) in a network that you trust."
            )

    def _method(self, server: Server, path: str, response_class: Any) -> tuple[Any, Any]:
        """Returns: the method and the metadata to call it with."""
        methods = self._link(server).methods
        method = methods.get(path)
        if method is None:
            raw = self._link(server).channel.unary_unary(
                path, request_serializer=_serialize, response_deserializer=response_class.FromString
            )
            method = methods[path] = (raw, self.identity.metadata)
        found: tuple[Any, Any] = method
        return found

    def unary(self, path: str, response_class: Any) -> Callable[..., Any]:
        """See Caller."""
        return partial(self._call, path, response_class)

    def _call(
        self, path: str, response_class: Any, request: Any, timeout: float, metadata: tuple[tuple[str, str], ...] = ()
    ) -> Any:
        notice_fork()
        servers = self._known()
        only = servers.only
        if only is not None:
            raw, ours = self._method(only, path, response_class)
            return raw(request, timeout=timeout, metadata=ours + metadata)
        end = self._monotonic() + timeout
        silent: list[Server] = []
        refused: list[Server] = []
        error: Exception = errors.DeadlineExceeded("No server of the center answered in time.")
        while (server := servers.pick([*silent, *refused])) is not None:
            began = self._monotonic()
            limit = min(server.try_s, end - began)
            if limit <= 0:
                raise error
            raw, ours = self._method(server, path, response_class)
            try:
                response = raw(request, timeout=limit, metadata=ours + metadata)
            except grpc.RpcError as exc:
                if not wire.is_unanswered(exc):
                    servers.answered(server, self._monotonic() - began)
                    raise
                error, late = exc, wire.is_late(exc)
                if late and limit < server.try_s:
                    raise  # the caller's own deadline: says nothing about the server
                self._suspect(servers, server)
                (silent if late else refused).append(server)
            else:
                servers.answered(server, self._monotonic() - began)
                return response
        waiting = deque(server for server in servers.by_last_answer() if server not in refused)
        return self._call_patiently(servers, waiting, path, response_class, request, metadata, end, error)

    def _call_patiently(
        self,
        servers: Servers,
        waiting: deque[Server],
        path: str,
        response_class: Any,
        request: Any,
        metadata: tuple[tuple[str, str], ...],
        end: float,
        error: Exception,
    ) -> Any:
        """Wait, without a healthy server, for the first answer of any server until the call's own deadline."""
        ended: SimpleQueue[Any] = SimpleQueue()
        under_way: dict[Any, tuple[Server, float]] = {}
        try:
            while (left := end - self._monotonic()) > 0 and (waiting or under_way):
                patience = left + 1.0  # gRPC ends the calls at their deadline
                if waiting and len(under_way) < _AT_ONCE:
                    server = waiting.popleft()
                    raw, ours = self._method(server, path, response_class)
                    began = self._monotonic()
                    call = raw.future(request, timeout=left, metadata=ours + metadata)
                    under_way[call] = (server, began)
                    call.add_done_callback(ended.put)
                    if waiting and len(under_way) < _AT_ONCE:
                        patience = server.patience_s
                try:
                    call = ended.get(timeout=patience)
                except Empty:
                    continue
                server, began = under_way.pop(call)
                if call.cancelled():
                    raise errors.Unavailable("The connection was closed before the center answered.")
                failure = call.exception()
                if failure is None or not wire.is_unanswered(failure):
                    servers.answered(server, self._monotonic() - began)
                    return call.result()
                error = failure
                self._suspect(servers, server)
            raise error
        finally:
            for call in under_way:
                call.cancel()

    def stream(self, path: str, response_class: Any, requests: Iterator[Any]) -> Any:
        """Open a bidirectional stream of one method, with our metadata, on a healthy server if there is one."""
        notice_fork()
        servers = self._known()
        server = servers.only or servers.pick() or servers.by_last_answer()[0]
        raw = self._link(server).channel.stream_stream(
            path, request_serializer=_serialize, response_deserializer=response_class.FromString
        )
        call = raw(requests, metadata=self.identity.metadata)

        def ended() -> None:
            if call.code() is grpc.StatusCode.UNAVAILABLE:
                self._suspect(servers, server)

        if servers.only is None:
            call.add_callback(ended)
        return call

    def _suspect(self, servers: Servers, server: Server) -> None:
        servers.unanswered(server)
        with self._lock:
            if self._prober is None and not self._closing.is_set():
                self._prober = threading.Thread(
                    target=self._probe, args=(servers, self._closing), name="tmc-probe", daemon=True
                )
                self._prober.start()

    def _probe(self, servers: Servers, closing: threading.Event) -> None:
        """Ask suspects until none is left; the thread ends with the last one."""
        while True:
            with self._lock:
                pause = servers.next_probe_s()
                if pause is None or closing.is_set():
                    self._prober = None
                    return
            closing.wait(pause)
            for server in servers.due_probes():
                servers.probed(server, self._is_serving(server))

    def _is_serving(self, server: Server) -> bool:
        try:
            ask = self._link(server).channel.unary_unary(_PROBE, _bytes, _bytes)
            answer: bytes = ask(b"", timeout=_PROBE_S)
        except (grpc.RpcError, ValueError):  # ValueError: the channel was closed meanwhile
            return False
        return answer == _SERVING

    def close(self) -> None:
        with self._lock:
            self._closing.set()
            self._closing = threading.Event()
            links, self._links = self._links, {}
            watch, self._watch = self._watch, None
        if watch is not None:
            watch.stop()
        for link in links.values():
            link.channel.close()

    def after_fork(self) -> None:
        """See forks.ForkAware."""
        abandon(self._links, [(link.channel, link.methods) for link in self._links.values()])
        self._watch = None
        self._reset()


def _work_with_gevent() -> None:
    """Let gRPC wait with gevent: where threads are greenlets, its calls would stop all of them, and a server of ours for ever."""
    monkey = sys.modules.get("gevent.monkey")
    if monkey is not None and monkey.is_module_patched("threading"):
        from grpc.experimental import gevent

        gevent.init_gevent()  # again does no harm


def without_secrets(address: str) -> str:
    """Return the address without a password, Consul's token, and what else its name says is a secret."""
    shown = re.sub(r"(://[^/:@]*:)[^@]*@", r"\1***@", address)
    return re.sub(r"([?&][^=&]*(?:token|password|secret|key)[^=&]*=)[^&]*", r"\1***", shown, flags=re.IGNORECASE)


def _in_consul(address: str) -> ConsulAddress | None:
    """Raises ValueError for a malformed address, MissingExtra without tmc-client[consul]."""
    if not address.startswith("consul://"):
        return None
    with needed_by("consul://"):
        from tmc_client.discovery import ConsulAddress

    return ConsulAddress.parse(address)


def _serialize(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data


def _bytes(data: bytes) -> bytes:
    return data
