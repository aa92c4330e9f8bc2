"""`tmc init` and `tmc doctor`."""

from __future__ import annotations

from typing import Annotated

import typer

from tmc_cli import fail
from tmc_cli.options import ConfigFile, command, loaded
from tmc_server.app import CannotStart, diagnose, initialize
from tmc_server.app.reaching import require_database, require_databases
from tmc_server.printable import escaped

init_app, doctor_app = command(), command()


@init_app.command()
def init(
    config: ConfigFile = None,
    new_admin_token: Annotated[
        bool, typer.Option(help="Create a new admin token; the old one becomes invalid.")
    ] = False,
    accept_shard_map: Annotated[
        bool,
        typer.Option(
            help="Shards were moved: store this configuration's shard map in the catalog. Stop all servers first."
        ),
    ] = False,
    copy_from: Annotated[
        str,
        typer.Option(
            help="URL of a database whose shards this configuration puts elsewhere: copy and compare them, then store the map."
            " Stop all servers first.",
            envvar="TMC_COPY_FROM",
        ),
    ] = "",
) -> None:
    """Create or upgrade the tables. Repeatable; prints the admin token the first time."""
    settings = loaded(config)
    try:
        require_databases(settings, created=True)
        if copy_from:
            require_database(copy_from, "--copy-from")
        token = initialize(settings, new_admin_token, accept_shard_map, copy_from, say=typer.echo)
    except CannotStart as exc:
        fail(exc)
    if token is None:
        typer.echo("The tables are up to date. The admin token was printed when they were made.")
    else:
        typer.echo("The tables are ready. This admin token is shown once and stored nowhere else:", err=True)
        typer.echo(token)


@doctor_app.command()
def doctor(config: ConfigFile = None) -> None:
    """Check that the databases are set up safely; exit code 1 when they are not."""
    settings = loaded(config)
    try:
        require_databases(settings)
        lines, well = diagnose(settings)
    except CannotStart as exc:
        fail(exc)
    typer.echo(escaped("\n".join(lines), keep="\n"))
    raise typer.Exit(0 if well else 1)
