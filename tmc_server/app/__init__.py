"""The composition root: the only room that names concrete adapters."""

from tmc_server.app.center import Center, serve
from tmc_server.app.maintenance import CannotStart, diagnose, initialise, open_shards

__all__ = ["CannotStart", "Center", "diagnose", "initialise", "open_shards", "serve"]
