"""Options and settings that commands share."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from tmc_cli import fail

if TYPE_CHECKING:
    from tmc_server.config import Config

ConfigFile = Annotated[
    str | None, typer.Option("--config", "-c", help="TOML file; TMC_ environment variables take precedence.")
]


def command() -> typer.Typer:
    """A Typer app for one command, with plain text output so that rich is not imported."""
    return typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def loaded(path: str | None) -> Config:
    """Load the configuration, or end the command. From here on, files of this process are private to its user."""
    from tmc_server.config import ConfigError, load

    os.umask(0o077)
    try:
        return load(path)
    except ConfigError as exc:
        fail(exc)
