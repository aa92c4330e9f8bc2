"""Admin commands about messages and their deliveries."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tmc_cli import say
from tmc_cli.admin.calling import AsJson, Reason, Watch, ask, call, show, watched
from tmc_cli.admin.lists import print_messages
from tmc_cli.admin.text import age, when
from tmc_common.protocol import admin_pb2, message_pb2
from tmc_server.printable import escaped


def get_message(
    context: typer.Context,
    id: Annotated[str, typer.Argument()] = "",
    topic: str = "",
    key: str = "",
    body: Annotated[bool, typer.Option("--body/--no-body", help="Reading bodies is a right, and audited.")] = True,
) -> None:
    """Show a message with its deliveries and failed attempts, by id or by --topic and --key."""
    request = admin_pb2.GetMessageDetailRequest(message_id=id, topic=topic, key=key, without_body=not body)
    call(context, "GetMessageDetail", request, admin_pb2.MessageDetail)


def search(
    context: typer.Context,
    text: Annotated[str, typer.Argument(help="An id, a key, or the beginning of a key with * behind it.")],
    topic: Annotated[str, typer.Option(help="Of this topic only.")] = "",
    page_size: int = 100,
    page_token: str = "",
    as_json: AsJson = False,
) -> None:
    """Find messages by id or key."""
    request = admin_pb2.SearchMessagesRequest(text=text, topic=topic, page_size=page_size, page_token=page_token)
    answer: Any = ask(context, "SearchMessages", request, admin_pb2.SearchMessagesResponse)
    if as_json:
        show(answer)
    else:
        print_messages(answer)


def failures(
    context: typer.Context,
    topic: Annotated[str, typer.Argument(help="Without it: all topics.")] = "",
    app: str = "",
    tag: str = "",
    limit: int = 100,
    as_json: AsJson = False,
) -> None:
    """Show what fails for the same reason, the largest group first, with the command that tries it again."""
    request = admin_pb2.ListFailureGroupsRequest(topic=topic, app=app, tag=tag, limit=limit)
    answer: Any = ask(context, "ListFailureGroups", request, admin_pb2.ListFailureGroupsResponse)
    if as_json:
        show(answer)
        return
    for group in answer.groups:
        whom = f"{group.app} ({group.tag})" if group.app else "checks"
        span = f"{age(answer.now_ms - group.first_ms)} to {age(answer.now_ms - group.last_ms)} ago"
        typer.echo(escaped(f"{group.count}  {group.topic}, {whom}: {span}, {sum(group.per_minute)} in the last hour"))
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


def overview(context: typer.Context, as_json: AsJson = False, watch: Watch = 0) -> None:
    """Show what stands where: undecided messages, and deliveries under way and failed, with the age of the oldest."""
    watched(watch, lambda: _overview(context, as_json))


def _overview(context: typer.Context, as_json: bool) -> None:
    found: Any = ask(context, "GetOverview", admin_pb2.GetOverviewRequest(), admin_pb2.GetOverviewResponse)
    if as_json:
        show(found)
        return
    for topic in found.topics:
        counts = {
            "prepared": (topic.prepared, 0),
            "undecided": (topic.undecided, topic.oldest_undecided_ms),
            "check failed": (topic.check_failed, topic.oldest_check_failed_ms),
        }
        typer.echo(
            escaped(f"{topic.topic}{_marks(topic)}: {_counted(counts, found.now_ms)}{_rate(topic.submitted_per_s)}")
        )
        for each in topic.subscriptions:
            counts = {
                "scheduled": (each.scheduled, 0),
                "backlog": (each.backlog, each.oldest_backlog_ms),
                "waiting": (each.waiting, 0),
                "failed": (each.failed, each.oldest_failed_ms),
            }
            counted = f"{_counted(counts, found.now_ms)}{_rate(each.acked_per_s)}"
            typer.echo(escaped(f"    {each.app} ({each.tag}){_marks(each)}: {counted}"))


def _marks(overview: Any) -> str:
    marks = [mark for mark in ("paused", "removed") if getattr(overview, mark, False)]
    return f" [{', '.join(marks)}]" if marks else ""


def _rate(per_s: float) -> str:
    """Of submits or acks; "": there are none."""
    return f"; {per_s:.0f}/s" if per_s >= 1 else f"; {per_s * 60:.0f}/min" if per_s else ""


def _counted(counts: dict[str, tuple[int, int]], now_ms: int) -> str:
    """counts: by name, how many and since when, milliseconds since the epoch; 0: no age is shown."""
    return ", ".join(
        f"{count} {name}" + (f" (oldest {age(now_ms - since)})" if since else "")
        for name, (count, since) in counts.items()
    )


def why(
    context: typer.Context,
    id: Annotated[str, typer.Argument()] = "",
    topic: str = "",
    key: str = "",
    as_json: AsJson = False,
) -> None:
    """Say why a message is where it is and what to do about it, by id or by --topic and --key."""
    _check_named(id, topic, key)
    request = admin_pb2.ExplainMessageRequest(message_id=id, topic=topic, key=key)
    answer: Any = ask(context, "ExplainMessage", request, admin_pb2.ExplainMessageResponse)
    if as_json:
        show(answer)
        return
    typer.echo(f"message {answer.message_id}")
    for each in answer.explanations:
        who = f"{each.app} ({each.tag}): " if each.app else ""
        typer.echo(escaped(f"{who}{each.sentence}"))
        typer.echo(escaped(f"    {each.remedy}"))
        for command in each.commands:
            typer.echo(escaped(f"    $ {command}"))


def timeline(
    context: typer.Context,
    id: Annotated[str, typer.Argument()] = "",
    topic: str = "",
    key: str = "",
    as_json: AsJson = False,
) -> None:
    """Show what happened to a message, in order, by id or by --topic and --key."""
    _check_named(id, topic, key)
    request = admin_pb2.GetTimelineRequest(message_id=id, topic=topic, key=key)
    answer: Any = ask(context, "GetTimeline", request, admin_pb2.GetTimelineResponse)
    if as_json:
        show(answer)
        return
    typer.echo(f"message {answer.message_id}")
    for each in answer.events:
        who = f"{each.app} ({each.tag}): " if each.app else ""
        typer.echo(escaped(f"{when(each.at_ms)}  {who}{each.sentence}"))


def _check_named(id: str, topic: str, key: str) -> None:
    if bool(id) == bool(topic or key) or bool(topic) != bool(key):
        raise typer.BadParameter("name a message: MESSAGE_ID, or --topic and --key")


def reactivate(context: typer.Context, message_id: str, app: str, reason: Reason, tag: str = "") -> None:
    """Retry a FAILED delivery with a fresh retry budget."""
    request = admin_pb2.ReactivateConsumptionRequest(message_id=message_id, app=app, tag=tag, reason=reason)
    call(context, "ReactivateConsumption", request, admin_pb2.Consumption)


def deliver_now(context: typer.Context, message_id: str, app: str, reason: Reason, tag: str = "") -> None:
    """Deliver a SCHEDULED delivery now instead of at its due time. Uses up no retry."""
    request = admin_pb2.DeliverNowRequest(message_id=message_id, app=app, tag=tag, reason=reason)
    call(context, "DeliverNow", request, admin_pb2.Consumption)


def replay(context: typer.Context, message_id: str, app: str, reason: Reason, tag: str = "") -> None:
    """Send an acked message again to one subscriber, as a new message; its handler runs again."""
    request = admin_pb2.ReplayDeliveryRequest(message_id=message_id, app=app, tag=tag, reason=reason)
    call(context, "ReplayDelivery", request, message_pb2.Message)


def cancel(context: typer.Context, message_id: str, app: str, reason: Reason, tag: str = "") -> None:
    """Give a delivery up for good. The next message of its order key is delivered."""
    request = admin_pb2.CancelConsumptionRequest(message_id=message_id, app=app, tag=tag, reason=reason)
    call(context, "CancelConsumption", request, admin_pb2.Consumption)
