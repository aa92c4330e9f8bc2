"""Alerts, as people read them."""

from __future__ import annotations

import re
import shlex
from typing import Any

import typer

from tmc_cli import say
from tmc_cli.admin.printing import subscriber
from tmc_cli.admin.text import when
from tmc_common.printable import escaped


def print_alerts(answer: Any) -> None:
    if not answer.alerts:
        say("None.")
    for each in answer.alerts:
        where = f"{each.topic} for {subscriber(each)}" if each.app else each.topic
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
