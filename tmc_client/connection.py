"""Where the center is, who we are, and the gRPC channel: opened at first use, opened anew in a forked child."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import grpc

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
    """The app, its key and the environment it runs in."""

    app: str
    key: str = field(default="", repr=False)
    tag: str = ""

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        pairs = [("tmc-app", self.app)]
        if self.tag:
            pairs.append(("tmc-tag", self.tag))
        if self.key:
            pairs.append(("authorization", f"Bearer {self.key}"))
        return tuple(pairs)


def target_of(address: str) -> str:
    """host:port, or several IPv4 addresses with commas; gRPC spreads calls over them."""
    parts = [part.strip() for part in address.split(",")]
    if "://" in address or not all(part.rpartition(":")[2].isdigit() and part.rpartition(":")[0] for part in parts):
        raise ValueError(f"{address!r} is no address of a center: give host:port, or several IPv4 ones with commas")
    return parts[0] if len(parts) == 1 else "ipv4:" + ",".join(parts)


class Connection:
    """One lazily opened channel. Thread-safe."""

    def __init__(self, address: str, identity: Identity, tls: Tls | None = None) -> None:
        self.address = address
        self.identity = identity
        self._target = target_of(address)
        self._tls = tls
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = None
        self._methods: dict[str, Any] = {}
        watch_forks(self)

    def __repr__(self) -> str:
        return f"Connection({self.address!r}, app={self.identity.app!r})"

    def _open(self) -> grpc.Channel:
        with self._lock:
            if self._channel is None:
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
                    self._channel = grpc.insecure_channel(self._target, options)
                else:
                    self._channel = grpc.secure_channel(self._target, self._tls.credentials(), options)
            return self._channel

    def unary(self, path: str, response_class: Any) -> Callable[..., Any]:
        """A blocking call of one method, with our metadata: (request, timeout=seconds) -> response."""
        method = self._methods.get(path)
        if method is None:
            raw = self._open().unary_unary(
                path, request_serializer=_serialize, response_deserializer=response_class.FromString
            )
            metadata = self.identity.metadata
            method = self._methods[path] = lambda request, timeout: raw(request, timeout=timeout, metadata=metadata)
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
        if channel is not None:
            channel.close()

    def after_fork(self) -> None:
        """See ForkAware."""
        _ABANDONED.extend([self._channel, self._methods])
        self._lock = threading.Lock()
        self._channel = None
        self._methods = {}


def _serialize(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data
