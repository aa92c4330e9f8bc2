"""`tmc init`, `tmc doctor` and `tmc move-shard`."""

from __future__ import annotations

from typing import Annotated

import typer

from tmc_cli import fail
from tmc_cli.options import ConfigFile, command, loaded
from tmc_common.printable import escaped
from tmc_server.app import CannotStart, diagnose, initialize
from tmc_server.app.moves import confirm_moves, move_shards, undo_moves
from tmc_server.app.reaching import require_databases

init_app, doctor_app, move_app = command(), command(), command()


@init_app.command()
def init(
    config: ConfigFile = None,
    new_admin_token: Annotated[
        bool, typer.Option(help="Create a new admin token; the old one becomes invalid.")
    ] = False,
) -> None:
    """Create or upgrade the tables. Repeatable; prints the admin token the first time."""
    settings = loaded(config)
    try:
        require_databases(settings, created=True)
        token = initialize(settings, new_admin_token)
    except CannotStart as exc:
        fail(exc)
    if token is None:
        typer.echo("The tables are up to date. The admin token was printed when they were made.")
    else:
        typer.echo("The tables are ready. This admin token is shown once and stored nowhere else:", err=True)
        typer.echo(token)


@doctor_app.command()
def doctor(config: ConfigFile = None) -> None:
    """Check databases, brokers, certificate, and all else that is configured; exit code 1 when something is wrong."""
    settings = loaded(config)
    try:
        require_databases(settings)
        lines, well = diagnose(settings)
    except CannotStart as exc:
        fail(exc)
    typer.echo(escaped("\n".join(lines), keep="\n"))
    raise typer.Exit(0 if well else 1)


@move_app.command()
def move_shard(
    shards: Annotated[str, typer.Argument(help="Which shards, such as 7 or 0-3,7.")],
    config: ConfigFile = None,
    to: Annotated[str, typer.Option(help="The database that gets them: part of its address, or of its identity.")] = "",
    undo: Annotated[
        bool, typer.Option("--undo", help="Leave them where they are, and forget what was copied.")
    ] = False,
    confirm: Annotated[bool, typer.Option("--confirm", help="Drop what was kept where they were.")] = False,
) -> None:
    """Move shards to another database while servers run. Repeat it to continue what was cut short."""
    settings = loaded(config)
    if (bool(to), undo, confirm).count(True) != 1:
        raise typer.BadParameter("give one of --to, --undo and --confirm")
    try:
        require_databases(settings)
        if undo:
            undo_moves(settings, shards, typer.echo)
        elif confirm:
            confirm_moves(settings, shards, typer.echo)
        else:
            move_shards(settings, shards, to, typer.echo)
    except CannotStart as exc:
        fail(exc)
