"""The composition root: the only package that names concrete adapters."""

from tmc_server.app.form import DEV, SERVER, Form, in_one_process
from tmc_server.app.maintenance import CannotStart, diagnose, initialize, open_shards
from tmc_server.app.server import Server, serve

__all__ = [
    "CannotStart",
    "DEV",
    "Form",
    "SERVER",
    "Server",
    "diagnose",
    "in_one_process",
    "initialize",
    "open_shards",
    "serve",
]
