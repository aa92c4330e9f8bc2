"""Where the center is, who we are, and the gRPC channel: opened at first use, opened anew in a forked child."""

from __future__ import annotations

import os
import re
import socket
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import grpc

from tmc_client import errors

if TYPE_CHECKING:
    from tmc_client.discovery import ConsulAddress

_ABANDONED: list[object] = []  # channels of a parent process: closing or freeing them in a child would crash it
_ALIVE: weakref.WeakSet[ForkAware] = weakref.WeakSet()


class ForkAware(Protocol):
    """Something with threads or sockets that a forked child must not use."""

    def after_fork(self) -> None:
        """In the child: forget everything, start anew at the next use."""


def watch_forks(owner: ForkAware) -> None:
    """Call `owner.after_fork()` in every forked child."""
    _ALIVE.add(owner)


def _in_child() -> None:
    for owner in list(_ALIVE):
        owner.after_fork()


os.register_at_fork(after_in_child=_in_child)


@dataclass(frozen=True)
class Tls:
    """PEM files. authority: whom to trust.  certificate, key: who we are, when the center asks for it."""

    authority: str | None = None
    certificate: str | None = None
    key: str | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        def read(path: str | None) -> bytes | None:
            return Path(path).read_bytes() if path else None

        return grpc.ssl_channel_credentials(read(self.authority), read(self.key), read(self.certificate))


@dataclass(frozen=True)
class Identity:
    """The app, its key, the environment it runs in, and host:port where it answers checks (without discovery)."""

    app: str
    key: str = field(default="", repr=False)
    tag: str = ""
    check_address: str = ""

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        pairs = [("tmc-app", self.app)]
        if self.tag:
            pairs.append(("tmc-tag", self.tag))
        if self.check_address:
            pairs.append(("tmc-check-address", self.check_address))
        if self.key:
            pairs.append(("authorization", f"Bearer {self.key}"))
        return tuple(pairs)


def target_of(address: str) -> str:
    """host:port, or several IPv4 addresses with commas; gRPC spreads calls over them. Raises ValueError."""
    parts = [part.strip() for part in address.split(",")]
    if "://" in address or not all(part.rpartition(":")[2].isdigit() and part.rpartition(":")[0] for part in parts):
        raise ValueError(
            f"{_without_token(address)!r} is no address of a center: give host:port, several IPv4 ones with commas, or "
            "consul://HOST:PORT/SERVICE?tag=TAG"
        )
    return parts[0] if len(parts) == 1 else "ipv4:" + ",".join(parts)


_OLD_CHANNEL_S = 30.0  # longer than any call: who still uses the old channel gets its answer


class Connection:
    """One lazily opened channel. Thread-safe. address: as `target_of`, or consul://HOST:PORT/SERVICE?tag=TAG."""

    def __init__(self, address: str, identity: Identity, tls: Tls | None = None) -> None:
        self.address = _without_token(address)  # as it may be shown
        self.identity = identity
        self._consul = _in_consul(address)
        self._watch: Any = None
        self._target = "" if self._consul else target_of(address)
        self._tls = tls
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = None
        self._methods: dict[str, Any] = {}
        watch_forks(self)

    def __repr__(self) -> str:
        return f"Connection({self.address!r}, app={self.identity.app!r})"

    def _open(self) -> grpc.Channel:
        """Raises Unavailable: Consul knows no instance."""
        with self._lock:
            if self._channel is None:
                self._channel = self._new_channel(self._find())
            return self._channel

    def announce(self, check_address: str) -> None:
        """From now on say with each call where this service answers checks, unless connect() was told another place."""
        with self._lock:
            if not self.identity.check_address:
                self.identity = replace(self.identity, check_address=check_address)
                self._methods = {}

    def _find(self) -> str:
        if self._consul is None:
            return self._target
        if self._watch is None:
            from tmc_client.discovery import Watch

            self._watch = Watch(self._consul, self._moved)
            self._watch.start()
        if not self._target:
            raise errors.Unavailable(
                f"Consul knows no passing instance of {self._consul.service!r} with tag {self._consul.tag!r}: "
                "is a server running, and registered with that tag?"
            )
        return self._target

    def _moved(self, addresses: Sequence[str]) -> None:
        """From the watch: the instances are others now. Calls under way end on the old channel."""
        resolved = [address for address in map(_as_ipv4, addresses) if address]
        if not resolved:
            return  # none of these names means anything here: go on with those we know
        target = target_of(",".join(resolved))
        if self._target == target:
            return
        self._target = target
        old = self._channel
        if old is None:
            return
        fresh = self._new_channel(target)
        with self._lock:
            old, self._channel, self._methods = self._channel, fresh, {}
        if old is not None:
            closing = threading.Timer(_OLD_CHANNEL_S, old.close)
            closing.daemon = True
            closing.start()

    def _new_channel(self, target: str) -> grpc.Channel:
        options = [
            ("grpc.max_receive_message_length", -1),
            ("grpc.max_send_message_length", -1),
            ("grpc.lb_policy_name", "round_robin"),
            ("grpc.initial_reconnect_backoff_ms", 200),
            ("grpc.min_reconnect_backoff_ms", 200),
            ("grpc.max_reconnect_backoff_ms", 2_000),
            ("grpc.keepalive_time_ms", 20_000),
            ("grpc.use_local_subchannel_pool", 1),  # after a fork nothing is shared with the parent's channel
        ]
        if self._tls is None:
            return grpc.insecure_channel(target, options)
        return grpc.secure_channel(target, self._tls.credentials(), options)

    def unary(self, path: str, response_class: Any) -> Callable[..., Any]:
        """A blocking call of one method, with our metadata: (request, timeout=seconds) -> response."""
        method = self._methods.get(path)
        if method is None:
            methods, channel = self._methods, self._open()
            raw = channel.unary_unary(
                path, request_serializer=_serialize, response_deserializer=response_class.FromString
            )
            metadata = self.identity.metadata
            method = methods[path] = lambda request, timeout: raw(request, timeout=timeout, metadata=metadata)
        return method

    def stream(self, path: str, response_class: Any, requests: Iterator[Any]) -> Any:
        """A bidirectional stream of one method, with our metadata."""
        raw = self._open().stream_stream(
            path, request_serializer=_serialize, response_deserializer=response_class.FromString
        )
        return raw(requests, metadata=self.identity.metadata)

    def close(self) -> None:
        with self._lock:
            channel, self._channel, self._methods = self._channel, None, {}
            watch, self._watch = self._watch, None
        if watch is not None:
            watch.stop()
        if channel is not None:
            channel.close()

    def after_fork(self) -> None:
        """See ForkAware."""
        _ABANDONED.extend([self._channel, self._methods])
        self._lock = threading.Lock()
        self._channel = None
        self._methods = {}
        self._watch = None


def _as_ipv4(address: str) -> str:
    """gRPC takes a list of IPv4 addresses, not of names. "": the name means nothing here."""
    host, _, port = address.rpartition(":")
    try:
        return f"{socket.gethostbyname(host)}:{port}"
    except OSError:
        return ""


def _without_token(address: str) -> str:
    return re.sub(r"([?&]token=)[^&]*", r"\1***", address)


def _in_consul(address: str) -> ConsulAddress | None:
    """Raises ValueError for a malformed address, ModuleNotFoundError without tmc-center[consul]."""
    if not address.startswith("consul://"):
        return None
    from tmc_client.discovery import ConsulAddress

    return ConsulAddress.parse(address)


def _serialize(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data
