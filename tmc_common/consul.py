"""Consul: an agent's client, and keeping one instance of a service registered. Needs `tmc-client[consul]`."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import requests
from consul import Consul, ConsulException

from tmc_common.addresses import HostPort
from tmc_common.eventlog import EventLog

log = EventLog("tmc_common.consul")

AGENT_ERRORS = (ConsulException, requests.RequestException, ValueError)
"""Errors of calls to an agent that is away, refuses them, or is none: the last is of an answer that is no JSON."""


def agent_client(agent: str, token: str, timeout_s: float) -> Consul:
    """A client of the agent at host:port. One thread at a time.

    token: "": that of CONSUL_HTTP_TOKEN, if it is set. Proxies and credentials of the environment are not used: the
    agent's address is the operators' own, and a proxy would see the token.
    """
    place = HostPort.parse(agent)
    client = Consul(host=place.in_url, port=place.port, token=token or None, connections_timeout=timeout_s)
    client.token = token or client.token  # the library prefers the environment's
    client.http.session.trust_env = False
    return client


def passing(nodes: Sequence[Any]) -> list[str]:
    """host:port of each instance in an answer of the health endpoint."""

    def place(node: Any) -> HostPort:
        host = node["Service"]["Address"] or node["Node"]["Address"]
        return HostPort(host.strip("[]"), node["Service"]["Port"])

    return sorted(str(place(node)) for node in nodes)


class Registration:
    """Keeps one instance registered: registers it, again after Consul forgot it, and deregisters it at the end.

    address: host:port where the service answers.  check: "grpc" (grpc.health.v1), "tcp", or an http:// address.
    """

    def __init__(
        self,
        agent: str,
        service: str,
        address: str,
        *,
        tag: str = "",
        check: str = "grpc",
        token: str = "",
        tls: bool = False,
    ) -> None:
        self._client = agent_client(agent, token, timeout_s=3)
        self._service = service
        self._tag = tag
        self._host, self._port = HostPort.parse(address)
        self._check = _check(check, address, tls)
        self.id = f"{service}-{self._host}-{self._port}" + (f"-{tag}" if tag else "")
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._registered = False

    def run_once(self) -> bool:
        """Register at the first call, and whenever the agent has forgotten us. Returns: it was necessary.

        At the first call even if the agent knows us: of an earlier run, with its check and its token.
        Raises ConsulException, RequestException.
        """
        with self._lock:
            if self._stopping.is_set() or (self._registered and self.id in self._client.agent.services()):
                return False
            self._client.agent.service.register(
                self._service,
                service_id=self.id,
                address=self._host,
                port=self._port,
                tags=[self._tag] if self._tag else [],
                check=self._check,
            )
            self._registered = True
            return True

    def deregister(self) -> None:
        """Deregister the instance. If Consul is unreachable, its own check will notice that the instance is gone."""
        self._stopping.set()
        with self._lock:
            try:
                self._client.agent.service.deregister(self.id)
            except AGENT_ERRORS as exc:
                log.warning("deregistration_failed", "%s stays registered until Consul's check fails: %s", self.id, exc)

    def start(self, every: timedelta = timedelta(seconds=15)) -> None:
        """Keep it registered in a thread of its own."""
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
            except AGENT_ERRORS as exc:
                log.warning("registration_delayed", "Consul does not answer, %s is registered later: %s", self.id, exc)
                pause = min(every_s, 2.0)
            self._stopping.wait(pause)


def _check(kind: str, address: str, tls: bool) -> dict[str, Any]:
    """The check as the agent's API expects it: the library's helper for gRPC checks sends a field that agents refuse.

    It is passing from the start, because a service registers itself when it is serving.
    """
    common = {"Interval": "5s", "Timeout": "2s", "DeregisterCriticalServiceAfter": "1m", "Status": "passing"}
    if kind == "grpc":
        return {"GRPC": address, "GRPCUseTLS": tls, **common}
    if kind == "tcp":
        return {"TCP": address, **common}
    if kind.startswith(("http://", "https://")):
        return {"HTTP": kind, **common}
    raise ValueError(f"{kind!r} is no health check: give grpc, tcp, or an http:// address")
