"""The RPC about the configuration of the server that is called."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from tmc_common.protocol import admin_pb2
from tmc_server.domain.operators import Operator
from tmc_server.settings import Setting


class ConfigurationServicer:
    """The part of AdminService about settings."""

    def __init__(self, server: str, settings: Sequence[Setting]) -> None:
        self._server = server
        self._settings = settings

    async def GetConfiguration(self, _operator: Operator, _request: Any) -> Any:
        settings = [
            admin_pb2.Setting(
                name=each.name,
                value=each.value,
                changed=each.changed,
                secret=each.secret,
                description=each.description,
            )
            for each in self._settings
        ]
        return admin_pb2.GetConfigurationResponse(version=version("tmc-center"), server=self._server, settings=settings)
