"""Consul: who serves what, and telling it that we do. Needs `tmc-center[consul]`.

A watch keeps the last list that Consul gave: while Consul is away or has forgotten everything, calls go on as before.
"""

from __future__ import annotations

import logging
import threading
import urllib.parse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import requests
from consul import Consul, ConsulException

log = logging.getLogger("tmc_client.discovery")

_WAIT_S = 55
_PAUSE_S = 1.0


@dataclass(frozen=True, kw_only=True)
class ConsulAddress:
    """consul://HOST:PORT/SERVICE?tag=TAG&token=TOKEN"""

    agent: str
    service: str
    tag: str
    token: str = field(repr=False)

    @classmethod
    def parse(cls, text: str) -> ConsulAddress:
        """Raises ValueError saying what is expected."""
        # What is given may hold a token, so the sentence does not repeat it.
        expected = "This is no address in Consul: give consul://HOST:PORT/SERVICE?tag=TAG&token=TOKEN (both optional)."
        try:
            parts = urllib.parse.urlsplit(text)
            agent = f"{parts.hostname}:{parts.port or 8500}"
        except ValueError:
            raise ValueError(expected) from None
        query = dict(urllib.parse.parse_qsl(parts.query))
        service = parts.path.strip("/")
        if parts.scheme != "consul" or not parts.hostname or not service or set(query) - {"tag", "token"}:
            raise ValueError(expected)
        return cls(agent=agent, service=service, tag=query.get("tag", ""), token=query.get("token", ""))


def agent_client(agent: str, token: str, timeout_s: float) -> Consul:
    """A client of the agent at host:port. One thread at a time.

    Proxies and credentials of the environment are not used: the agent's address is the operators' own, and a proxy would
    see the token.
    """
    host, _, port = agent.rpartition(":")
    client = Consul(host=host, port=int(port), token=token or None, connections_timeout=timeout_s)
    client.http.session.trust_env = False
    return client


def passing(nodes: Sequence[Any]) -> list[str]:
    """host:port of each instance in an answer of the health endpoint."""
    return sorted(
        f"{node['Service']['Address'] or node['Node']['Address']}:{node['Service']['Port']}" for node in nodes
    )


class Watch:
    """Follows the passing instances of one service. on_change: called in the watch's thread with a new list, never empty."""

    def __init__(self, address: ConsulAddress, on_change: Callable[[list[str]], None]) -> None:
        self._address = address
        self._on_change = on_change
        self._client = agent_client(address.agent, address.token, timeout_s=5)
        self._stopping = threading.Event()
        self._known: list[str] = []
        self._index = 0
        self._away = False
        self._thread = threading.Thread(target=self._run, name="tmc-watch", daemon=True)

    def start(self) -> list[str]:
        """Ask once, then go on in a thread. Returns: the instances now; none when nobody passes or Consul is away."""
        self._ask(blocking=False)
        self._thread.start()
        return self._known

    def stop(self) -> None:
        self._stopping.set()  # the thread ends with its question, at most a minute later; it holds nothing

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                answered = self._ask(blocking=True)
            except Exception:
                log.exception("following the instances failed and goes on")
                answered = False
            if not answered:
                self._stopping.wait(_PAUSE_S)

    def _ask(self, blocking: bool) -> bool:
        """Returns: Consul answered."""
        try:
            index, nodes = self._client.health.service(
                self._address.service,
                passing=True,
                tag=self._address.tag or None,
                index=self._index if blocking else None,
                wait=f"{_WAIT_S}s",
            )
        except (ConsulException, requests.RequestException) as exc:
            if not self._away:
                log.warning("Consul does not answer, the last known instances are used: %s", exc)
            self._away, self._index = True, 0
            return False
        self._away = False
        self._index = int(index) if int(index) >= self._index else 0  # gone backwards: Consul was restored or wiped
        found = passing(nodes)
        if found and found != self._known:
            self._known = found
            self._on_change(found)
        elif not found and self._known and blocking:
            self._stopping.wait(_PAUSE_S)  # an empty catalog is no reason to stop calling those who were there
        return True


class Registration:
    """Keeps one instance registered: registers it, again after Consul forgot it, and deregisters it at the end.

    address: host:port where the service answers.  check: "grpc" (grpc.health.v1), "tcp", or an http:// address.
    """

    def __init__(
        self, agent: str, service: str, address: str, *, tag: str = "", check: str = "grpc", token: str = "",
        tls: bool = False,
    ) -> None:  # fmt: skip
        self._client = agent_client(agent, token, timeout_s=3)
        self._service = service
        self._tag = tag
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._check = _check(check, address, tls)
        self.id = f"{service}-{self._host}-{port}" + (f"-{tag}" if tag else "")
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def run_once(self) -> bool:
        """Register when the agent does not know us. Returns: it did not. Raises ConsulException, RequestException."""
        with self._lock:
            if self._stopping.is_set() or self.id in self._client.agent.services():
                return False
            self._client.agent.service.register(
                self._service, service_id=self.id, address=self._host, port=self._port,
                tags=[self._tag] if self._tag else [], check=self._check,
            )  # fmt: skip
            return True

    def deregister(self) -> None:
        """Nobody is sent here any more. While Consul is away its own check finds out."""
        self._stopping.set()
        with self._lock:
            try:
                self._client.agent.service.deregister(self.id)
            except (ConsulException, requests.RequestException) as exc:
                log.warning("%s stays registered until Consul's check fails: %s", self.id, exc)

    def start(self, every: timedelta = timedelta(seconds=15)) -> None:
        """For services: keep it registered in a thread of its own."""
        self._thread = threading.Thread(target=self._run, args=(every.total_seconds(),), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self.deregister()
        if self._thread is not None:
            self._thread.join(5)

    def __enter__(self) -> Registration:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run(self, every_s: float) -> None:
        while not self._stopping.is_set():
            pause = every_s
            try:
                self.run_once()
            except (ConsulException, requests.RequestException) as exc:
                log.warning("Consul does not answer, %s is registered later: %s", self.id, exc)
                pause = min(every_s, 2.0)
            self._stopping.wait(pause)


def _check(kind: str, address: str, tls: bool) -> dict[str, Any]:
    """In the agent's own words: the library's helper for gRPC checks sends a field that agents refuse.

    Passing from the start: whoever registers itself is serving.
    """
    common = {"Interval": "5s", "Timeout": "2s", "DeregisterCriticalServiceAfter": "1m", "Status": "passing"}
    if kind == "grpc":
        return {"GRPC": address, "GRPCUseTLS": tls, **common}
    if kind == "tcp":
        return {"TCP": address, **common}
    if kind.startswith(("http://", "https://")):
        return {"HTTP": kind, **common}
    raise ValueError(f"{kind!r} is no health check: give grpc, tcp, or an http:// address")
