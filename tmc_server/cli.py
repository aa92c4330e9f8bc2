"""The `tmc` command: serve, consume, dev, init, doctor, health, admin."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tmc_client.consume import run as run_consumer
from tmc_client.supervisor import Supervisor
from tmc_pipeline import cli as pipeline
from tmc_server import admin_cli
from tmc_server.app import CannotStart, diagnose, initialise, serve
from tmc_server.config import Config, ConfigError, load
from tmc_server.telemetry import configure_logging
from tmc_server.workers import worker_commands

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="Transaction message center."
)
app.add_typer(pipeline.app, name="pipeline")
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
def serve_command(
    config: ConfigFile = None,
    workers: Annotated[int | None, typer.Option(help="Server processes; each takes the next port.")] = None,
) -> None:
    """Run a server. Prepare its database with `tmc init` first."""
    loaded = _load(config)
    configure_logging(loaded.log)
    count = workers or loaded.server.workers
    if count > 1:
        try:
            raise typer.Exit(Supervisor(worker_commands(loaded, config, count)).run())
        except ConfigError as exc:
            raise _fail(exc) from exc
    try:
        serve(loaded)
    except CannotStart as exc:
        raise _fail(exc) from exc


@app.command()
def consume(
    consumer: Annotated[str, typer.Argument(help="MODULE:NAME of a tmc_client.Consumer.")],
    processes: Annotated[int, typer.Option(min=1, help="So many processes.")] = 1,
) -> None:
    """Run a consumer until told to stop."""
    configure_logging(_load(None).log)
    try:
        raise typer.Exit(run_consumer(consumer, processes))
    except ValueError as exc:
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
            # Producers on this machine say where they answer checks.
            "discovery": Config.model_validate({"discovery": {"kind": "recorded"}}).discovery,
            "checks": loaded.checks.model_copy(update={"allow": (*loaded.checks.allow, "127.0.0.0/8:*", "::1/128:*")}),
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
def health(
    address: Annotated[str, typer.Argument(envvar="TMC_ADDRESS", help="host:port of a server.")] = "127.0.0.1:50051",
    authority: Annotated[str, typer.Option(envvar="TMC_CA", help="PEM file: use TLS and trust this authority.")] = "",
) -> None:
    """Ask a server whether it serves; exit code 1 when it does not. For health checks of containers."""
    state = admin_cli.health(address, authority)
    typer.echo(state)
    raise typer.Exit(0 if state == "SERVING" else 1)


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


if __name__ == "__main__":
    main()
