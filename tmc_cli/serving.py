"""`tmc serve` and `tmc dev`."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from tmc_cli import fail
from tmc_cli.options import ConfigFile, command, loaded
from tmc_cli.workers import worker_commands
from tmc_common.supervisor import Supervisor
from tmc_server.app import DEV, SERVER, CannotStart, RunMode, in_one_process, serve
from tmc_server.app.reaching import run_when_possible
from tmc_server.config import Config, ConfigError
from tmc_server.telemetry import configure_logging

serve_app, dev_app = command(), command()


@serve_app.command()
def serve_command(
    config: ConfigFile = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Server processes; each takes the next port.")] = None,
) -> None:
    """Run a server. Prepare its database with `tmc init` first."""
    settings = loaded(config)
    configure_logging(settings.log)
    count = workers or settings.server.workers
    if count > 1:
        try:
            raise typer.Exit(Supervisor(worker_commands(settings, config, count)).run())
        except ConfigError as exc:
            fail(exc)
    _serve(settings)


@dev_app.command()
def dev(
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Port on loopback; 0 takes a free one.")] = 50051,
    data: Annotated[str, typer.Option(help="SQLite file; created when missing.")] = "tmc-dev.db",
    store: Annotated[
        str, typer.Option(help="Instead of a file: postgresql://USER:PASSWORD@HOST/DATABASE, or mysql://...")
    ] = "",
    console_port: Annotated[
        int, typer.Option(min=-1, max=65_535, help="Port of the web console; 0 takes a free one, -1: no console.")
    ] = 50052,
    http_port: Annotated[
        int | None, typer.Option(min=1, max=65_535, help="Also serve JSON over HTTP, on this port.")
    ] = None,
    config: ConfigFile = None,
) -> None:
    """Run the whole center in one process: SQLite, built-in delivery, no credentials, loopback only."""
    settings = loaded(config)
    try:
        if not store:
            Path(data).parent.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        fail(f"--data: cannot make the folder of {data}: {exc.strerror}.")
    try:
        changed = in_one_process(settings, store or f"sqlite:///{data}", port, http_port)
    except CannotStart as exc:
        fail(exc)
    configure_logging(settings.log)

    def say(port: int) -> None:
        typer.echo(
            f"tmc dev on 127.0.0.1:{port}, messages in {'the database of --store' if store else data}.\n"
            "Open to everybody on this machine: apps and topics are made when they are first named.",
            err=True,
        )
        if http_port:
            typer.echo(f"HTTP: http://127.0.0.1:{http_port}", err=True)
        if console_port >= 0:
            typer.echo(_console(port, console_port), err=True)

    _serve(changed, DEV, say)


def _console(center_port: int, port: int) -> str:
    """Run the console in a thread. Returns: what to say about it."""
    try:
        from tmc_console.running import ConsoleConfig, run_beside
    except ModuleNotFoundError:
        return "The web console needs more: install tmc-center[console]."
    config = ConsoleConfig(listen=f"127.0.0.1:{port}", center=f"127.0.0.1:{center_port}", open_token="")
    try:
        return f"Console: http://127.0.0.1:{run_beside(config)}"
    except OSError as exc:
        return f"No console: port {port} cannot be used ({exc.strerror}); --console-port takes another one."


def _serve(config: Config, mode: RunMode = SERVER, on_started: Callable[[int], None] = lambda _port: None) -> None:
    for name, path in config.files.items():
        if not os.access(path, os.R_OK):
            fail(f"{name}: cannot read {path}: {'no such file' if not Path(path).exists() else 'permission denied'}.")
    try:
        run_when_possible(config, partial(serve, config, mode, on_started))
    except CannotStart as exc:
        fail(exc)
