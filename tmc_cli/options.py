"""What the commands of a server have in common."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from tmc_cli import fail
from tmc_server.config import Config, ConfigError, load

ConfigFile = Annotated[
    str | None, typer.Option("--config", "-c", help="TOML file; TMC_ environment variables take precedence.")
]


def command() -> typer.Typer:
    """A Typer app for one command, with plain text output so that rich is not imported."""
    return typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def loaded(path: str | None) -> Config:
    """Load the configuration, or end the command. From here on, files of this process are private to its user."""
    os.umask(0o077)
    try:
        return load(path)
    except ConfigError as exc:
        fail(exc)
