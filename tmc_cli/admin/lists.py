"""Admin commands that list messages and deliveries."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from tmc_cli import say
from tmc_cli.admin.calling import AsJson, ask, enum_value, show, show_parts
from tmc_cli.admin.text import age, duration_ms, table, when
from tmc_common.enums import name_of
from tmc_common.protocol import admin_pb2, types_pb2
from tmc_server.printable import escaped

_Topic = Annotated[str, typer.Argument(help="Without it: all topics.")]
_From = Annotated[int, typer.Option(help="Messages made at this time or later.")]
_To = Annotated[int, typer.Option(help="Messages made before this time.")]
_OlderThan = Annotated[str, typer.Option(help="Only messages of at least this age: 90s, 10m, 2h, 1d.")]
_NewestFirst = Annotated[bool, typer.Option("--newest-first", help="Instead of the oldest first.")]


def list_messages(
    context: typer.Context,
    topic: _Topic = "",
    state: str = "",
    from_ms: _From = 0,
    to_ms: _To = 0,
    older_than: _OlderThan = "",
    newest_first: _NewestFirst = False,
    page_size: int = 100,
    page_token: str = "",
    as_json: AsJson = False,
) -> None:
    """List messages. --state: PREPARED, COMMITTED, ROLLED_BACK, CHECK_FAILED."""
    request = admin_pb2.ListMessagesRequest(
        topic=topic,
        state=enum_value(types_pb2.MessageState, "MESSAGE_STATE_", state),
        from_ms=from_ms,
        to_ms=to_ms,
        older_than_ms=duration_ms(older_than),
        newest_first=newest_first,
        page_size=page_size,
        page_token=page_token,
    )
    answer: Any = ask(context, "ListMessages", request, admin_pb2.ListMessagesResponse)
    if as_json:
        show(answer)
    else:
        print_messages(answer)


def print_messages(answer: Any) -> None:
    """answer: a page with messages and the token of the next one."""
    rows = [
        (
            each.message_id,
            name_of(types_pb2.MessageState.DESCRIPTOR, each.state, "MESSAGE_STATE_"),
            when(each.created_ms),
            _age(each.created_ms),
            each.topic,
            each.key,
        )
        for each in answer.messages
    ]
    _print(("MESSAGE", "STATE", "PREPARED", "AGE", "TOPIC", "KEY"), rows, answer.next_page_token)


def stuck(
    context: typer.Context,
    topic: _Topic = "",
    older_than: Annotated[str, typer.Option(help="Messages undecided for at least this long.")] = "10m",
    most: Annotated[int, typer.Option(min=1, max=1_000, help="Rows of each kind.")] = 20,
    as_json: AsJson = False,
) -> None:
    """List what needs an operator, the oldest first: failed deliveries, failed checks, messages that stay undecided."""
    failed: Any = ask(
        context,
        "ListConsumptions",
        admin_pb2.ListConsumptionsRequest(topic=topic, state=types_pb2.CONSUMPTION_STATE_FAILED, page_size=most),
        admin_pb2.ListConsumptionsResponse,
    )
    undecided = [
        ask(context, "ListMessages", request, admin_pb2.ListMessagesResponse)
        for request in (
            admin_pb2.ListMessagesRequest(topic=topic, state=types_pb2.MESSAGE_STATE_CHECK_FAILED, page_size=most),
            admin_pb2.ListMessagesRequest(
                topic=topic,
                state=types_pb2.MESSAGE_STATE_PREPARED,
                older_than_ms=duration_ms(older_than),
                page_size=most,
            ),
        )
    ]
    if as_json:
        show_parts({"failed": failed, "check_failed": undecided[0], "undecided": undecided[1]})
        return
    rows = [
        (
            _age(each.created_ms),
            "FAILED",
            each.topic,
            each.key,
            f"{each.app} ({each.tag})",
            each.message_id,
            each.last_error,
        )
        for each in failed.consumptions
    ]
    for state, page in zip(("CHECK_FAILED", "UNDECIDED"), undecided, strict=True):
        rows += [
            (_age(each.created_ms), state, each.topic, each.key, "", each.message_id, "") for each in page.messages
        ]
    more = failed.next_page_token or any(page.next_page_token for page in undecided)
    for line in (
        table(("AGE", "STATE", "TOPIC", "KEY", "SUBSCRIBER", "MESSAGE", "LAST ERROR"), rows) if rows else ["Nothing."]
    ):
        typer.echo(escaped(line))
    if more:
        say("There is more: name a topic, or raise --most.")


def list_consumptions(
    context: typer.Context,
    topic: _Topic = "",
    app: str = "",
    tag: str = "",
    state: str = "",
    fingerprint: Annotated[str, typer.Option(help="FAILED with this error.")] = "",
    from_ms: _From = 0,
    to_ms: _To = 0,
    older_than: _OlderThan = "",
    newest_first: _NewestFirst = False,
    page_size: int = 100,
    page_token: str = "",
    as_json: AsJson = False,
) -> None:
    """List deliveries. --state: SCHEDULED, WAITING, ACKED, FAILED, CANCELLED."""
    request = admin_pb2.ListConsumptionsRequest(
        topic=topic,
        app=app,
        tag=tag,
        state=enum_value(types_pb2.ConsumptionState, "CONSUMPTION_STATE_", state),
        fingerprint=fingerprint,
        from_ms=from_ms,
        to_ms=to_ms,
        older_than_ms=duration_ms(older_than),
        newest_first=newest_first,
        page_size=page_size,
        page_token=page_token,
    )
    answer: Any = ask(context, "ListConsumptions", request, admin_pb2.ListConsumptionsResponse)
    if as_json:
        show(answer)
        return
    rows = [
        (
            each.message_id,
            f"{each.app} ({each.tag})",
            name_of(types_pb2.ConsumptionState.DESCRIPTOR, each.state, "CONSUMPTION_STATE_"),
            str(each.attempt),
            when(each.created_ms),
            _age(each.created_ms),
            when(each.due_ms),
            each.topic,
            each.key,
            each.fingerprint,
            each.last_error,
        )
        for each in answer.consumptions
    ]
    titles = ("MESSAGE", "SUBSCRIBER", "STATE", "ATTEMPTS", "SUBMITTED", "AGE", "DUE", "TOPIC", "KEY")
    _print((*titles, "FINGERPRINT", "LAST ERROR"), rows, answer.next_page_token)


def list_audit(
    context: typer.Context,
    actor: Annotated[str, typer.Option(help="Done by this operator.")] = "",
    action: Annotated[str, typer.Option(help='As the trail has it, for example "pause topic".')] = "",
    subject: Annotated[str, typer.Option(help="What it was done to, or its first words.")] = "",
    message: Annotated[str, typer.Option(help="Id of a message: what was done to it and its deliveries.")] = "",
    since: Annotated[str, typer.Option(help="Done in this time: 90s, 10m, 2h, 1d.")] = "",
    page_size: int = 100,
    page_token: str = "",
    as_json: AsJson = False,
) -> None:
    """List what was changed, by whom, when and why, the newest first."""
    since_ms = duration_ms(since)
    request = admin_pb2.ListAuditRequest(
        actor=actor,
        action=action,
        subject=subject,
        message_id=message,
        from_ms=int(time.time() * 1000) - since_ms if since_ms else 0,
        page_size=page_size,
        page_token=page_token,
    )
    answer: Any = ask(context, "ListAudit", request, admin_pb2.ListAuditResponse)
    if as_json:
        show(answer)
        return
    rows = [
        (
            when(each.at_ms),
            each.actor,
            each.origin,
            each.action,
            each.subject,
            each.reason,
            each.change.replace("\n", "; "),
        )
        for each in answer.entries
    ]
    titles = ("TIME", "OPERATOR", "FROM", "ACTION", "SUBJECT", "REASON", "CHANGE")
    _print(titles, rows, answer.next_page_token)


def _age(created_ms: int) -> str:
    return age(int(time.time() * 1000) - created_ms)


def _print(titles: Sequence[str], rows: Sequence[Sequence[str]], next_page_token: str) -> None:
    if not rows:
        say("None.")
        return
    for line in table(titles, [[escaped(cell) for cell in row] for row in rows]):
        typer.echo(line)
    if next_page_token:
        say(f"There are more: repeat the command with --page-token {next_page_token}")
