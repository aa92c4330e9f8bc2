"""Start and watch a bulk job."""

from __future__ import annotations

import shlex
from typing import Annotated, Any

import typer

from tmc_cli import say
from tmc_cli.admin.calling import Watch, ask, enum_value, for_people, show, watched
from tmc_cli.admin.text import bar
from tmc_common.enums import name_of
from tmc_common.printable import escaped
from tmc_common.protocol import admin_pb2, types_pb2


def bulk(
    context: typer.Context,
    action: Annotated[str, typer.Argument(help="REACTIVATE, DELIVER_NOW, CANCEL or REPLAY.")],
    topic: str = "",
    app: str = "",
    tag: str = "",
    state: Annotated[str, typer.Option(help="FAILED, or for CANCEL also SCHEDULED or WAITING.")] = "",
    from_ms: Annotated[int, typer.Option(help="Messages made at this time or later.")] = 0,
    to_ms: Annotated[int, typer.Option(help="Messages made before this time.")] = 0,
    fingerprint: Annotated[str, typer.Option(help="FAILED with this error.")] = "",
    dry_run: Annotated[str, typer.Option(help="Start the job: the id that the dry run printed.")] = "",
    count: Annotated[int, typer.Option(help="The count that the dry run printed.")] = 0,
    reason: Annotated[str, typer.Option(help="For the audit trail; to start the job.")] = "",
    rate: Annotated[int | None, typer.Option(help="Deliveries per second at most; by default 2,000.")] = None,
    hold_ms: Annotated[int | None, typer.Option(help="Wait before the first delivery; by default 5,000.")] = None,
) -> None:
    """Reactivate, deliver now, cancel or replay many deliveries. Without --dry-run: only count them, and print how to start."""
    wanted = admin_pb2.BulkFilter(
        action=enum_value(admin_pb2.BulkAction.DESCRIPTOR, action),
        topic=topic,
        app=app,
        tag=tag,
        state=enum_value(types_pb2.ConsumptionState.DESCRIPTOR, state),
        from_ms=from_ms,
        to_ms=to_ms,
        fingerprint=fingerprint,
    )
    if dry_run:
        given: dict[str, Any] = {"dry_run": dry_run, "count": count, "reason": reason, "rate": rate, "hold_ms": hold_ms}
        job = ask(context, "StartBulkJob", filter=wanted, **given)
        show(job)
        if job.stopped_ms or job.finished_ms:
            ended = "stopped" if job.stopped_ms else "finished"
            say(f"Job {job.job} was started from this dry run before, and has {ended}: make another dry run.")
        else:
            say(f"Watch it: tmc admin get-bulk {job.job}. Stop it: tmc admin stop-bulk {job.job} --reason ...")
        return
    found = ask(context, "DryRunBulkJob", timeout_s=120, filter=wanted)
    show(found)
    if not found.count:
        say("Nothing matches.")
        return
    options = {
        "--topic": topic,
        "--app": app,
        "--tag": tag,
        "--state": state,
        "--from-ms": from_ms or None,
        "--to-ms": to_ms or None,
        "--fingerprint": fingerprint,
        "--rate": rate,
        "--hold-ms": hold_ms,
    }
    repeated = " ".join(
        f"{name} {shlex.quote(str(value))}" for name, value in options.items() if value not in ("", None)
    )
    say(f"Nothing was changed: this was a dry run. {found.count} deliveries match. To start the job:")
    say(escaped(f"tmc admin bulk {action} {repeated} --dry-run {found.dry_run} --count {found.count} --reason '...'"))


def get_bulk(context: typer.Context, job: int, watch: Watch = 0) -> None:
    """Show a bulk job and how far it has come; with --watch on a terminal, as a bar until it has ended."""

    def show_progress() -> bool:
        found = ask(context, "GetBulkJob", job=job)
        if not (watch and for_people()):
            show(found)
            return False
        state = name_of(admin_pb2.BulkState.DESCRIPTOR, found.state).lower()
        outcomes = f"{found.done} done, {found.unchanged} unchanged, {found.refused} refused"
        typer.echo(escaped(f"Job {found.job}, {state}: {found.selection}"))
        typer.echo(f"{bar(found.done + found.unchanged + found.refused, found.count)} {outcomes}")
        return bool(found.finished_ms or found.stopped_ms)

    watched(watch, show_progress)
