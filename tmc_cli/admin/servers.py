"""The configuration of a server."""

from __future__ import annotations

from typing import Annotated

import typer

from tmc_cli.admin.calling import ask, show


def get_configuration(
    context: typer.Context,
    changed: Annotated[bool, typer.Option("--changed", help="Only what differs from the defaults.")] = False,
) -> None:
    """Show the configuration that the server runs with, without its secrets."""
    answer = ask(context, "GetConfiguration")
    if changed:
        kept = [each for each in answer.settings if each.changed]
        answer = type(answer)(version=answer.version, server=answer.server, settings=kept)
    show(answer)
