"""The RPC about the configuration of the server that is called."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from tmc_common.protocol import admin_pb2
from tmc_server.domain.operators import Operator
from tmc_server.rpc.admin_parts import AdminParts
from tmc_server.rpc.filling import filled


class ConfigurationServicer(AdminParts):
    """The part of AdminService about settings."""

    async def GetConfiguration(self, _operator: Operator, _request: Any) -> Any:
        settings = [filled(admin_pb2.Setting, each) for each in self.settings]
        return admin_pb2.GetConfigurationResponse(version=version("tmc-center"), server=self.server, settings=settings)
