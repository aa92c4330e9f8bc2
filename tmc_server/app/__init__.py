"""The composition root: the only room that names concrete adapters."""

from tmc_server.app.maintenance import CannotStart, diagnose, initialise, open_shards
from tmc_server.app.server import Server, serve

__all__ = ["CannotStart", "Server", "diagnose", "initialise", "open_shards", "serve"]
