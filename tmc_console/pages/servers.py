"""Who looks after which shard, where it is stored, and how a server is configured."""

from __future__ import annotations

from starlette.responses import Response

from tmc_common.protocol import admin_pb2
from tmc_console.view import View

_COLORS = 8


async def page(view: View) -> Response:
    servers = (await view.ask("ListServers", admin_pb2.ListServersRequest(page_size=1_000))).servers
    places = (await view.ask("GetShardMap", admin_pb2.GetShardMapRequest())).shards
    alive = [server for server in servers if server.alive]
    holder = {shard: (server, number % _COLORS) for number, server in enumerate(alive) for shard in server.shards}
    cells = [(shard, *holder.get(shard, (None, 0)), place) for shard, place in _by_shard(places)]
    moving = [place for place in places if place.HasField("move")]
    return view.page("shards.html", servers=servers, cells=cells, moving=moving)


async def settings(view: View) -> Response:
    found = await view.ask("GetConfiguration", admin_pb2.GetConfigurationRequest())
    return view.page("settings.html", found=found, changed=view.query("all") != "1")


def _by_shard(places: list[admin_pb2.ShardPlace]) -> list[tuple[int, admin_pb2.ShardPlace | None]]:
    known = {place.shard: place for place in places}
    return [(shard, known.get(shard)) for shard in range(32)]
