"""The composition root: the only package that names concrete adapters."""

from tmc_server.app.maintenance import CannotStart, diagnose, initialize, open_shards
from tmc_server.app.server import Server, serve

__all__ = ["CannotStart", "Server", "diagnose", "initialize", "open_shards", "serve"]
