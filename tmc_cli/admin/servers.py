"""Admin commands about servers, shards, and services."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tmc_cli.admin.calling import Reason, ask, call, list_all, show
from tmc_common.protocol import admin_pb2


def list_servers(context: typer.Context) -> None:
    """List servers, alive and gone, and the shards each one holds."""
    list_all(context, "ListServers", admin_pb2.ListServersRequest(), admin_pb2.ListServersResponse)


def drain_server(context: typer.Context, server: str, reason: Reason) -> None:
    """Let a server look after no shards, without stopping it; others take over. It still serves calls."""
    request = admin_pb2.DrainServerRequest(server=server, reason=reason)
    call(context, "DrainServer", request, admin_pb2.Server)


def undrain_server(context: typer.Context, server: str, reason: Reason) -> None:
    """Let a drained server look after its share of the shards again."""
    request = admin_pb2.UndrainServerRequest(server=server, reason=reason)
    call(context, "UndrainServer", request, admin_pb2.Server)


def get_configuration(
    context: typer.Context,
    changed: Annotated[bool, typer.Option("--changed", help="Only what differs from the defaults.")] = False,
) -> None:
    """Show the configuration that the server runs with, without its secrets."""
    request, response = admin_pb2.GetConfigurationRequest(), admin_pb2.GetConfigurationResponse
    answer: Any = ask(context, "GetConfiguration", request, response)
    if changed:
        kept = [each for each in answer.settings if each.changed]
        answer = response(version=answer.version, server=answer.server, settings=kept)
    show(answer)


def shard_map(context: typer.Context) -> None:
    """Show which database holds which shard."""
    call(context, "GetShardMap", admin_pb2.GetShardMapRequest(), admin_pb2.GetShardMapResponse)


def list_instances(context: typer.Context, app: str, tag: str = "default") -> None:
    """List the addresses at which a producer's service would be checked now."""
    request = admin_pb2.ListInstancesRequest(app=app, tag=tag)
    list_all(context, "ListInstances", request, admin_pb2.ListInstancesResponse)
