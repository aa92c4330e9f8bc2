"""Service discovery as configured: how this server is found, and how it finds producers' services."""

from __future__ import annotations

from typing import Any

from tmc_common.addresses import HostPort
from tmc_server.app.maintenance import CannotStart
from tmc_server.config import Config
from tmc_server.discovery.static import RecordedInstances, StaticInstances
from tmc_server.domain.ports.checks import Instances
from tmc_server.duties.periodic import Periodic
from tmc_server.errors import DiscoveryUnavailable
from tmc_server.store.engines import Database
from tmc_server.store.senders import SqlSeenSenders


class Discovery:
    """Where producers' instances are, and how others find this server."""

    def __init__(self, config: Config, catalog: Database) -> None:
        self._config = config
        self.senders = SqlSeenSenders(catalog)
        self.instances = self._instances()
        self._registration: Any = None

    def _instances(self) -> Instances:
        discovery = self._config.discovery
        if discovery.kind == "recorded":
            return RecordedInstances(self.senders)
        if discovery.kind == "static":
            return StaticInstances(discovery.instances)
        try:
            from tmc_server.discovery.consul import ConsulInstances
        except ModuleNotFoundError as exc:
            raise CannotStart(f"[discovery] needs {exc.name}: install tmc-center[consul].") from exc
        return ConsulInstances(self._config.consul.agent, self._config.consul.token.get_secret_value())

    def duties(self, port: int) -> list[Periodic]:
        """Return what keeps this server findable. port: where it listens."""
        duties = []
        if self._config.discovery.kind == "recorded":
            duties.append(Periodic("senders", self.senders.run_once, 1.0))
        consul = self._config.consul
        if consul.agent:
            try:
                from tmc_common.consul import Registration
            except ModuleNotFoundError as exc:
                raise CannotStart(f"[consul] needs {exc.name}: install tmc-center[consul].") from exc
            address = consul.advertise or str(HostPort(HostPort.parse(self._config.server.listen).host, port))
            self._registration = Registration(
                consul.agent,
                consul.service,
                address,
                tag=consul.tag,
                token=consul.token.get_secret_value(),
                tls=bool(self._config.tls.certificate),
            )
            duties.append(Periodic("registration", self._register, 5.0))
        return duties

    def _register(self) -> bool:
        """Raises DiscoveryUnavailable."""
        from tmc_common.consul import AGENT_ERRORS

        try:
            return bool(self._registration.run_once())
        except AGENT_ERRORS as exc:
            raise DiscoveryUnavailable(
                f"Consul at {self._config.consul.agent} does not register this server, so callers may not find it: check "
                f"[consul] agent and token ({exc})"
            ) from exc

    def deregister(self) -> None:
        if self._registration is not None:
            self._registration.deregister()
