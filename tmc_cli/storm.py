"""`tmc storm`: break everything, and see whether the books agree."""

from __future__ import annotations

import dataclasses
import itertools
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import grpc
import typer

from tmc_cli import fail, say
from tmc_cli.options import command
from tmc_cli.target import Target
from tmc_common.addresses import HostPort, is_loopback
from tmc_storm.plan import Strike, smaller
from tmc_storm.report import options_of, write
from tmc_storm.running import Kind, Options, Outcome, run
from tmc_storm.visit import CannotVisit, Host
from tmc_storm.world import Form, Store, missing

app = command()


@app.command()
def storm(
    minutes: Annotated[float, typer.Option(min=0.1, help="How long faults strike.")] = 2.0,
    seed: Annotated[
        int | None, typer.Option(help="Repeats the faults of an earlier run; default: by the clock.")
    ] = None,
    store: Annotated[
        Store | None,
        typer.Option(
            help="Database of the center. sqlite (default): one server; others: three, two databases, RabbitMQ, Consul."
        ),
    ] = None,
    replicas: Annotated[
        bool,
        typer.Option("--replicas", help="Each database of the center has a replica, and fails over; not for sqlite."),
    ] = False,
    consul: Annotated[bool, typer.Option(help="Find servers through Consul, not for sqlite.")] = True,
    faults: Annotated[float, typer.Option(min=0, help="Faults per minute; 0: a soak, which shows what grows.")] = 50.0,
    orders: Annotated[float, typer.Option(min=1, help="Messages per second.")] = 40.0,
    literal: Annotated[
        bool,
        typer.Option(
            "--literal",
            help="4 producers, 2 nodes of RabbitMQ, 4 consumers, all else: kill 1 to all at every interval.",
        ),
    ] = False,
    interval: Annotated[float, typer.Option(min=1, help="Seconds between the kills of --literal.")] = 180.0,
    survey: Annotated[
        bool, typer.Option("--survey", help="Each kind of fault once, alone: how long does it keep services waiting?")
    ] = False,
    repeat: Annotated[
        Path | None, typer.Option(help="The report.json of an earlier run: the same again, whatever else is given.")
    ] = None,
    minimize: Annotated[
        bool, typer.Option("--minimize", help="With --repeat: leave faults out as long as it still fails.")
    ] = False,
    address: Annotated[
        str,
        typer.Option(
            help="host:port of a center that runs already: be an app there, and strike only the storm's own processes."
        ),
    ] = "",
    check_address: Annotated[
        str,
        typer.Option(
            help="With --address: host:port of this machine where that center may ask; its [checks] allow lists it."
        ),
    ] = "",
    token: Annotated[
        str, typer.Option(envvar="TMC_TOKEN", help="With --address: of an administrator.", show_default=False)
    ] = "",
    authority: Annotated[
        str, typer.Option(envvar="TMC_CA", help="With --address: PEM file, for TLS.", show_default=False)
    ] = "",
    server_name: Annotated[
        str, typer.Option(envvar="TMC_SERVER_NAME", help="The name in the server's certificate, if not the host.")
    ] = "",
    report: Annotated[
        Path | None, typer.Option(help="New folder for the report, databases and logs; default: storm-SEED.")
    ] = None,
) -> None:
    """Break everything around a center while services trade, then compare their books.

    Processes are killed, stopped and suspended, connections cut, queues deleted, tables locked. All of it runs on this
    machine, in processes of its own. Exit code 0: nothing was found; 1: something was; 2: the storm could not be run.
    """
    if minimize and repeat is None:
        fail("--minimize needs --repeat REPORT.JSON of a run that failed.")
    if literal and survey:
        fail("--literal and --survey are two kinds of storms: choose one.")
    host = _host(address, token=token, authority=authority, server_name=server_name, check_address=check_address)
    if store is not None and host is not None:
        fail("--store is of a center of the storm's own: leave it out with --address.")
    if literal and (store in (None, Store.SQLITE) or host is not None):
        fail("--literal needs several nodes of its own: give --store mariadb or postgresql, and no --address.")
    if replicas and (store in (None, Store.SQLITE) or host is not None):
        fail("--replicas are of databases of its own: give --store mariadb or postgresql, and no --address.")
    if literal and minutes * 60 <= interval / 2:
        fail("No kill in this time: give --literal more --minutes than --interval.")
    chosen = time.time_ns() % 1_000_000 if seed is None else seed
    options = Options(
        form=_form(store, replicas=replicas, consul=consul, brokers=2 if literal else 1),
        kind=Kind.LITERAL if literal else Kind.SURVEY if survey else Kind.RANDOM,
        seconds=minutes * 60,
        seed=chosen,
        per_minute=faults,
        per_second=orders,
        producers=4 if literal else 2,
        consumers=4 if literal else 2,
        interval_s=interval,
        host=host,
    )
    if repeat is not None:
        options = _earlier(repeat, host)
    if host is None and (lacking := missing(options.form)):
        fail(f"Install first: {', '.join(lacking)}.")
    folder = report or Path(f"storm-{options.seed}{'-again' if repeat else ''}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        fail(f"{folder} is not an empty folder: name another one with --report.")
    for number in _INTERRUPTS:
        signal.signal(number, _interrupt)
    try:
        outcome = _minimized(options, folder) if minimize else _run(options, folder)
    except KeyboardInterrupt:
        fail("Interrupted; everything is stopped.", code=130)
    except _Failed as exc:
        fail(exc)
    if not outcome.is_clean:
        raise SystemExit(1)


_INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _interrupt(*_: object) -> None:
    """Stop everything, and let nothing interrupt that."""
    for number in _INTERRUPTS:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


class _Failed(Exception):
    """The storm could not be run, so it says nothing about the center."""


def _host(address: str, *, token: str, authority: str, server_name: str, check_address: str) -> Host | None:
    if not address:
        if check_address:
            fail("--check-address goes with --address.")
        return None
    Target(address=address, authority=authority, server_name=server_name).check()
    if not authority and not is_loopback(address):
        fail("Keys and the token would travel in the clear: give --authority CA.pem (TMC_CA).")
    try:
        HostPort.parse(check_address or address)
    except ValueError:
        fail(f"--check-address {check_address!r} is no address: give host:port.")
    return Host(address=address, token=token, authority=authority, server_name=server_name, check_address=check_address)


def _form(store: Store | None, *, replicas: bool, consul: bool, brokers: int) -> Form:
    if store is None or store is Store.SQLITE:
        return Form()
    return Form(
        store=store,
        delivery="rabbitmq",
        servers=3,
        databases=2,
        replicas=replicas,
        brokers=brokers,
        consul=consul,
    )


def _earlier(repeat: Path, host: Host | None) -> Options:
    try:
        options = options_of(repeat, host)
    except (OSError, ValueError) as exc:
        fail(f"--repeat: {exc}")
    if not options.strikes:
        fail(f"--repeat: there is no fault in {repeat}.")
    return options


def _run(options: Options, folder: Path) -> Outcome:
    """Run a storm, write its report, and say what came of it. Raises _Failed."""
    try:
        outcome = run(options, folder / "run", say)
    except CannotVisit as exc:
        raise _Failed(exc) from exc
    except Exception as exc:
        why = exc.details() if isinstance(exc, grpc.RpcError) else exc
        raise _Failed(
            f"The storm itself failed, which says nothing about the center: {type(exc).__name__}: {why}\n"
            f"Logs are in {folder}/run."
        ) from exc
    write(outcome, folder)
    say(_sentence(outcome, folder))
    return outcome


def _minimized(options: Options, folder: Path) -> Outcome:
    """Return the outcome of the smallest run that failed. The report of each run is in a folder of its own."""
    runs = itertools.count(1)
    failed = [_run(options, folder / "all")]
    if failed[0].is_clean:
        say("It did not fail again: nothing to leave out.")
        return failed[0]

    def fails(strikes: Sequence[Strike]) -> bool:
        try:
            outcome = _run(dataclasses.replace(options, strikes=strikes), folder / f"{next(runs)}-{len(strikes)}")
        except _Failed as exc:
            say(exc)
            return False
        if not outcome.is_clean:
            failed.append(outcome)
        return not outcome.is_clean

    smallest = smaller(options.strikes or (), fails)
    say(
        "It fails with: "
        + ("; ".join(f"{one.kind} ({one.part}) at {one.at_s} s" for one in smallest) or "no fault at all")
    )
    return failed[-1]


def _sentence(outcome: Outcome, folder: Path) -> str:
    arrived = (
        f"settled {outcome.settled_s:.0f} s after closing time"
        if outcome.settled_s is not None
        else "NOT everything arrived"
    )
    return (
        f"{'clean' if outcome.is_clean else 'NOT CLEAN'}: {len(outcome.struck)} faults of {len(outcome.kinds)} kinds, "
        f"{outcome.orders} messages, {outcome.effects} effects, {len(outcome.findings)} findings, {arrived}; "
        f"see {folder}/report.html"
    )
