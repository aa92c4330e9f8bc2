"""The composition root: the only package that names concrete adapters."""

from tmc_server.app.doctor import diagnose
from tmc_server.app.maintenance import CannotStart, initialize, open_shards
from tmc_server.app.run_mode import DEV, SERVER, RunMode, in_one_process
from tmc_server.app.server import Server, serve

__all__ = [
    "CannotStart",
    "DEV",
    "RunMode",
    "SERVER",
    "Server",
    "diagnose",
    "in_one_process",
    "initialize",
    "open_shards",
    "serve",
]
