"""The kinds of checks that this server can do: ours, and what is installed under the entry point `tmc.checkers`."""

from __future__ import annotations

import ssl
from pathlib import Path

import grpc

from tmc_common.plugins import installed
from tmc_server.app.maintenance import CannotStart
from tmc_server.checks.addressing import Addressing
from tmc_server.checks.asking import CheckDispatcher
from tmc_server.checks.channels import Channels
from tmc_server.checks.grpc import GrpcChecks
from tmc_server.checks.http import HttpChecks
from tmc_server.checks.reflection import ReflectionChecks
from tmc_server.config import ChecksConfig, Config
from tmc_server.domain.egress import Egress
from tmc_server.domain.ports.checks import Asker, Instances
from tmc_server.outgoing import client_tls

ENTRY_POINTS = "tmc.checkers"


class Checks:
    """asking: all kinds, with discovery and the allow-list in front of them."""

    def __init__(self, config: Config, instances: Instances) -> None:
        settings = config.checks
        try:
            self._channels = Channels(_credentials(settings))
            askers: dict[str, Asker] = {
                "grpc": GrpcChecks(self._channels),
                "http": HttpChecks(client_tls(settings.authority, settings.certificate, settings.key)),
                "reflection": ReflectionChecks(self._channels),
            }
        except (OSError, ssl.SSLError) as exc:
            raise CannotStart(f"[checks] authority, certificate or key cannot be read: {exc}.") from exc
        for name, entry in installed(ENTRY_POINTS).items():
            askers[name] = entry.load()()
        # Senders name their addresses themselves: those go where the allow-list says, and nowhere else.
        trusted = config.discovery.kind != "recorded"
        self.asking = CheckDispatcher(askers, Addressing(instances, Egress(settings.allow), trusted))

    def close(self) -> None:
        self.asking.close()
        self._channels.close()


def _credentials(settings: ChecksConfig) -> grpc.ChannelCredentials:
    def read(path: str | None) -> bytes | None:
        return Path(path).read_bytes() if path else None

    return grpc.ssl_channel_credentials(read(settings.authority), read(settings.key), read(settings.certificate))
