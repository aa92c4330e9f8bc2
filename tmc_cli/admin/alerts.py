"""Admin commands about alerts."""

from __future__ import annotations

import re
import shlex
from typing import Annotated, Any

import typer

from tmc_cli import say
from tmc_cli.admin.calling import AsJson, Reason, all_pages, call, list_all
from tmc_cli.admin.text import duration_ms, when
from tmc_common.protocol import admin_pb2
from tmc_server.printable import escaped


def list_alerts(
    context: typer.Context,
    resolved: Annotated[bool, typer.Option("--resolved", help="Also those whose cause is gone.")] = False,
    as_json: AsJson = False,
) -> None:
    """List alerts, newest first; those of one kind, topic, subscriber and error are one."""
    request = admin_pb2.ListAlertsRequest(resolved=resolved)
    if as_json:
        list_all(context, "ListAlerts", request, admin_pb2.ListAlertsResponse)
        return
    found: Any = all_pages(context, "ListAlerts", request, admin_pb2.ListAlertsResponse)
    if not found.alerts:
        say("None.")
    for each in found.alerts:
        where = f"{each.topic} for {each.app} ({each.tag})" if each.app else each.topic
        typer.echo(escaped(f"{each.alert_id}  {each.kind}: {where}{_marks(each)}"))
        typer.echo(escaped(f"    {each.detail}"))
        count = f"{each.count} since {when(each.first_ms)}, the last one at {when(each.last_ms)}"
        typer.echo(f"    {count}{f'; fingerprint {each.fingerprint}' if each.fingerprint else ''}")
        if each.message_ids:
            typer.echo(f"    {' '.join(each.message_ids)}")
        if (command := still_failed(each)) and not each.resolved_ms:
            typer.echo(f"    still failed: {command}")


def still_failed(alert: Any) -> str:
    """The command that lists them; "": this kind of alert is not about failed messages."""
    if alert.kind == "check failed" and alert.topic:
        words = ["list-messages", alert.topic, "--state", "check_failed"]
    elif alert.kind == "delivery failed" and alert.topic and alert.app:
        words = ["list-consumptions", alert.topic, "--app", alert.app, "--tag", alert.tag]
        exact = re.fullmatch(r"[0-9a-f]{12}", alert.fingerprint)  # many different errors share an alert without one
        words += ["--fingerprint", alert.fingerprint] if exact else ["--state", "failed"]
    else:
        return ""
    return f"tmc admin {' '.join(map(shlex.quote, words))}"


def _marks(alert: Any) -> str:
    marks = []
    if alert.resolved_ms:
        marks.append(f"resolved {when(alert.resolved_ms)}")
    if alert.acknowledged_ms:
        marks.append(f"acknowledged by {alert.acknowledged_by}")
    if alert.silenced_until_ms:
        marks.append(f"silenced until {when(alert.silenced_until_ms)}")
    return f" [{', '.join(marks)}]" if marks else ""


def acknowledge_alert(context: typer.Context, alert_id: str, reason: Reason) -> None:
    """Get no further reminders of an alert. That it is resolved is still sent."""
    request = admin_pb2.AcknowledgeAlertRequest(alert_id=alert_id, reason=reason)
    call(context, "AcknowledgeAlert", request, admin_pb2.Alert)


def silence_alerts(
    context: typer.Context,
    time: Annotated[str, typer.Option("--for", help="How long: 90s, 10m, 2h, 1d; at most 30d.")],
    reason: Reason,
    topic: Annotated[str, typer.Option(help="Without it: all topics.")] = "",
    app: Annotated[str, typer.Option(help="Only its subscription to the topic.")] = "",
    tag: str = "",
    kind: Annotated[str, typer.Option(help="Such as 'delivery failed'; without it: all kinds.")] = "",
) -> None:
    """Send no notices of some alerts for a while. Alerts that are still open then are sent afterward."""
    request = admin_pb2.SilenceAlertsRequest(
        topic=topic, app=app, tag=tag, kind=kind, for_ms=duration_ms(time), reason=reason
    )
    call(context, "SilenceAlerts", request, admin_pb2.Silence)


def end_silence(context: typer.Context, silence: int, reason: Reason) -> None:
    """End a silence before its time."""
    request = admin_pb2.EndSilenceRequest(silence=silence, reason=reason)
    call(context, "EndSilence", request, admin_pb2.Silence)


def list_silences(context: typer.Context) -> None:
    """List the silences that are in effect."""
    list_all(context, "ListSilences", admin_pb2.ListSilencesRequest(), admin_pb2.ListSilencesResponse)
