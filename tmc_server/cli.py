"""The `tmc` command: serve, dev, init, doctor, admin."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tmc_server import admin_cli
from tmc_server.app import CannotStart, diagnose, initialise, serve
from tmc_server.config import Config, ConfigError, load
from tmc_server.telemetry import configure_logging

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="Transaction message center."
)
app.add_typer(admin_cli.app, name="admin", help="Register apps, topics, subscriptions; look at messages.")

ConfigFile = Annotated[str | None, typer.Option("--config", "-c", help="TOML file; TMC_ environment variables win.")]


def _fail(text: object) -> typer.Exit:
    typer.echo(str(text), err=True)
    return typer.Exit(2)


def _load(path: str | None) -> Config:
    try:
        return load(path)
    except ConfigError as exc:
        raise _fail(exc) from exc


@app.command("serve")
def serve_command(config: ConfigFile = None) -> None:
    """Run a server. Prepare its database with `tmc init` first."""
    loaded = _load(config)
    configure_logging(loaded.log)
    try:
        serve(loaded)
    except CannotStart as exc:
        raise _fail(exc) from exc


@app.command()
def dev(
    port: Annotated[int, typer.Option(help="Port on loopback; 0 takes a free one.")] = 50051,
    data: Annotated[str, typer.Option(help="SQLite file; made when missing.")] = "tmc-dev.db",
    config: ConfigFile = None,
) -> None:
    """Run the whole center in one process: SQLite, built-in delivery, no credentials, loopback only."""
    loaded = _load(config)
    Path(data).parent.mkdir(parents=True, exist_ok=True)
    changed = loaded.model_copy(
        update={
            "server": loaded.server.model_copy(update={"listen": f"127.0.0.1:{port}"}),
            "store": Config.model_validate({"store": {"catalog": f"sqlite:///{data}"}}).store,
        }
    )
    configure_logging(loaded.log)
    typer.echo(
        f"tmc dev on 127.0.0.1:{port}, messages in {data}.\n"
        "Open to everybody on this machine: apps and topics are made when they are first named.",
        err=True,
    )
    try:
        serve(changed, dev=True)
    except CannotStart as exc:
        raise _fail(exc) from exc


@app.command()
def init(
    config: ConfigFile = None,
    new_admin_token: Annotated[bool, typer.Option(help="The token was lost: make another, the old one ends.")] = False,
) -> None:
    """Create or upgrade the tables. Repeatable; prints the admin token the first time."""
    try:
        token = initialise(_load(config), new_admin_token)
    except CannotStart as exc:
        raise _fail(exc) from exc
    if token is None:
        typer.echo("The tables are up to date. The admin token was printed when they were made.")
    else:
        typer.echo("The tables are ready. This admin token is shown once and stored nowhere else:", err=True)
        typer.echo(token)


@app.command()
def doctor(config: ConfigFile = None) -> None:
    """Check that the databases are set up safely; exit code 1 when they are not."""
    try:
        lines, well = diagnose(_load(config))
    except CannotStart as exc:
        raise _fail(exc) from exc
    typer.echo("\n".join(lines))
    raise typer.Exit(0 if well else 1)


def main() -> None:
    """The console script."""
    app()
