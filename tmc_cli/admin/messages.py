"""Messages and their deliveries, as people read them."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tmc_cli import say
from tmc_cli.admin.calling import WANTS_JSON, ask, show_parts
from tmc_cli.admin.printing import Columns, enum, moment, print_table, printed, since, subscriber
from tmc_cli.admin.text import age, duration_ms, when
from tmc_common.printable import escaped
from tmc_common.protocol import types_pb2

print_messages = printed(
    "messages",
    {
        "MESSAGE": "message_id",
        "STATE": enum("state"),
        "PREPARED": moment("created_ms"),
        "AGE": since,
        "TOPIC": "topic",
        "KEY": "key",
    },
)
print_consumptions = printed(
    "consumptions",
    {
        "MESSAGE": "message_id",
        "SUBSCRIBER": subscriber,
        "STATE": enum("state"),
        "ATTEMPTS": "attempt",
        "SUBMITTED": moment("created_ms"),
        "AGE": since,
        "DUE": moment("due_ms"),
        "TOPIC": "topic",
        "KEY": "key",
        "FINGERPRINT": "fingerprint",
        "LAST ERROR": "last_error",
    },
)


def stuck(
    context: typer.Context,
    topic: Annotated[str, typer.Argument(help="Without it: all topics.")] = "",
    older_than: Annotated[str, typer.Option(help="Messages undecided for at least this long.")] = "10m",
    most: Annotated[int, typer.Option(min=1, max=1_000, help="Rows of each kind.")] = 20,
) -> None:
    """List what needs an operator, the oldest first: failed deliveries, failed checks, messages that stay undecided."""
    wanted: dict[str, Any] = {"topic": topic, "page_size": most}
    parts = {
        "failed": ask(context, "ListConsumptions", state=types_pb2.CONSUMPTION_STATE_FAILED, **wanted),
        "check_failed": ask(context, "ListMessages", state=types_pb2.MESSAGE_STATE_CHECK_FAILED, **wanted),
        "undecided": ask(
            context,
            "ListMessages",
            state=types_pb2.MESSAGE_STATE_PREPARED,
            older_than_ms=duration_ms(older_than),
            **wanted,
        ),
    }
    if WANTS_JSON.get():
        show_parts(parts)
        return
    states = {
        message.message_id: state.upper()
        for state in ("check_failed", "undecided")
        for message in parts[state].messages
    }
    columns: Columns = {
        "AGE": since,
        "STATE": lambda row: states.get(row.message_id, "FAILED"),
        "TOPIC": "topic",
        "KEY": "key",
        "SUBSCRIBER": lambda row: subscriber(row) if hasattr(row, "app") else "",
        "MESSAGE": "message_id",
        "LAST ERROR": lambda row: getattr(row, "last_error", ""),
    }
    rows = [*parts["failed"].consumptions, *parts["check_failed"].messages, *parts["undecided"].messages]
    print_table(columns, rows)
    if not parts["undecided"].messages:
        say(f"Messages that have been undecided for less than {older_than} are not listed (--older-than).")
    if any(page.next_page_token for page in parts.values()):
        say("There is more: name a topic, or raise --most.")


def print_failures(answer: Any) -> None:
    for group in answer.groups:
        span = f"{age(answer.now_ms - group.first_ms)} to {age(answer.now_ms - group.last_ms)} ago"
        recent = f"{span}, {sum(group.per_minute)} in the last hour"
        typer.echo(escaped(f"{group.count}  {group.topic}, {subscriber(group) or 'checks'}: {recent}"))
        typer.echo(escaped(f"    {group.error}"))
        typer.echo(escaped(f"    {_remedy(group)}"))
    if not answer.groups:
        say("Nothing has failed.")
    if answer.more:
        say(f"There are more than {len(answer.groups)} groups: name a topic, or raise --limit.")


def _remedy(group: Any) -> str:
    if not group.app:
        return f"tmc admin why {group.message_id}"
    whom = f"--topic {group.topic} --app {group.app} --tag {group.tag}"
    return f"tmc admin bulk reactivate {whom} --fingerprint {group.fingerprint}"


def print_overview(answer: Any) -> None:
    for topic in answer.topics:
        counts = {
            "prepared": (topic.prepared, 0),
            "undecided": (topic.undecided, topic.oldest_undecided_ms),
            "check failed": (topic.check_failed, topic.oldest_check_failed_ms),
        }
        counted = f"{_counted(counts, answer.now_ms)}{_rate(topic.submitted_per_s)}"
        typer.echo(escaped(f"{topic.topic}{_marks(topic)}: {counted}"))
        for each in topic.subscriptions:
            counts = {
                "scheduled": (each.scheduled, 0),
                "backlog": (each.backlog, each.oldest_backlog_ms),
                "waiting": (each.waiting, 0),
                "failed": (each.failed, each.oldest_failed_ms),
            }
            counted = f"{_counted(counts, answer.now_ms)}{_rate(each.acked_per_s)}"
            typer.echo(escaped(f"    {subscriber(each)}{_marks(each)}: {counted}"))


def _marks(overview: Any) -> str:
    marks = [mark for mark in ("paused", "removed") if getattr(overview, mark, False)]
    return f" [{', '.join(marks)}]" if marks else ""


def _rate(per_s: float) -> str:
    """Write the rate of submits or acks; "": there are none."""
    return f"; {per_s:.0f}/s" if per_s >= 1 else f"; {per_s * 60:.0f}/min" if per_s else ""


def _counted(counts: dict[str, tuple[int, int]], now_ms: int) -> str:
    """counts: by name, how many and since when, milliseconds since the epoch; 0: no age is shown."""
    return ", ".join(
        f"{count} {name}" + (f" (oldest {age(now_ms - since)})" if since else "")
        for name, (count, since) in counts.items()
    )


def print_explanations(answer: Any) -> None:
    typer.echo(f"message {answer.message_id}")
    for each in answer.explanations:
        typer.echo(escaped(f"{_to(each)}{each.sentence}"))
        typer.echo(escaped(f"    {each.remedy}"))
        for command in each.commands:
            typer.echo(escaped(f"    $ {command}"))


def print_timeline(answer: Any) -> None:
    typer.echo(f"message {answer.message_id}")
    for each in answer.events:
        typer.echo(escaped(f"{when(each.at_ms)}  {_to(each)}{each.sentence}"))


def _to(row: Any) -> str:
    return f"{subscriber(row)}: " if row.app else ""
