"""Who looks after which shard, where it is stored, and how a server is configured."""

from __future__ import annotations

from starlette.responses import Response

from tmc_console.view import View

_COLORS = 8
_SHARDS = 32


async def page(view: View) -> Response:
    servers = (await view.ask("ListServers", page_size=1_000)).servers
    places = (await view.ask("GetShardMap")).shards
    alive = [server for server in servers if server.alive]
    holder = {shard: (server, number % _COLORS) for number, server in enumerate(alive) for shard in server.shards}
    known = {place.shard: place for place in places}
    cells = [(shard, *holder.get(shard, (None, 0)), known.get(shard)) for shard in range(_SHARDS)]
    moving = [place for place in places if place.HasField("move")]
    return view.page("shards.html", servers=servers, cells=cells, moving=moving)


async def settings(view: View) -> Response:
    found = await view.ask("GetConfiguration")
    return view.page("settings.html", found=found, changed=view.query("all") != "1")
