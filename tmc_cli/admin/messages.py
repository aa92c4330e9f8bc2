"""Admin commands about messages and their deliveries."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tmc_cli.admin.calling import Reason, ask, call, enum_value, show
from tmc_common.protocol import admin_pb2, message_pb2, types_pb2
from tmc_server.printable import escaped


def get_message(
    context: typer.Context, id: Annotated[str, typer.Argument()] = "", topic: str = "", key: str = ""
) -> None:
    """Show a message with its deliveries and failed attempts, by id or by --topic and --key."""
    request = admin_pb2.GetMessageDetailRequest(message_id=id, topic=topic, key=key)
    call(context, "GetMessageDetail", request, admin_pb2.MessageDetail)


def overview(
    context: typer.Context, as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False
) -> None:
    """Show what stands where: undecided messages, and deliveries under way and failed, with the age of the oldest."""
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
        typer.echo(escaped(f"{topic.topic}{_marks(topic)}: {_counted(counts, found.now_ms)}"))
        for each in topic.subscriptions:
            counts = {
                "scheduled": (each.scheduled, 0),
                "backlog": (each.backlog, each.oldest_backlog_ms),
                "waiting": (each.waiting, 0),
                "failed": (each.failed, each.oldest_failed_ms),
            }
            typer.echo(escaped(f"    {each.app} ({each.tag}){_marks(each)}: {_counted(counts, found.now_ms)}"))


def _marks(overview: Any) -> str:
    marks = [mark for mark in ("paused", "removed") if getattr(overview, mark, False)]
    return f" [{', '.join(marks)}]" if marks else ""


def _counted(counts: dict[str, tuple[int, int]], now_ms: int) -> str:
    """counts: by name, how many and since when, milliseconds since the epoch; 0: no age is shown."""
    return ", ".join(
        f"{count} {name}" + (f" (oldest {age(now_ms - since)})" if since else "")
        for name, (count, since) in counts.items()
    )


def age(ms: int) -> str:
    """In the largest unit that fits."""
    for size, unit in ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min")):
        if ms >= size:
            return f"{ms // size} {unit}"
    return f"{max(0, ms) // 1_000} s"


def why(
    context: typer.Context,
    id: Annotated[str, typer.Argument()] = "",
    topic: str = "",
    key: str = "",
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Say why a message is where it is and what to do about it, by id or by --topic and --key."""
    if bool(id) == bool(topic or key) or bool(topic) != bool(key):
        raise typer.BadParameter("name a message: MESSAGE_ID, or --topic and --key")
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


def list_messages(
    context: typer.Context,
    topic: str,
    state: str = "",
    from_ms: int = 0,
    to_ms: int = 0,
    page_size: int = 100,
    page_token: str = "",
) -> None:
    """List the messages of a topic. --state: PREPARED, COMMITTED, ROLLED_BACK, CHECK_FAILED."""
    request = admin_pb2.ListMessagesRequest(
        topic=topic,
        state=enum_value(types_pb2.MessageState, "MESSAGE_STATE_", state),
        from_ms=from_ms,
        to_ms=to_ms,
        page_size=page_size,
        page_token=page_token,
    )
    call(context, "ListMessages", request, admin_pb2.ListMessagesResponse)


def list_consumptions(
    context: typer.Context,
    topic: str,
    app: str = "",
    state: str = "",
    page_size: int = 100,
    page_token: str = "",
) -> None:
    """List the deliveries of a topic. --state: SCHEDULED, WAITING, ACKED, FAILED, CANCELLED."""
    request = admin_pb2.ListConsumptionsRequest(
        topic=topic,
        app=app,
        state=enum_value(types_pb2.ConsumptionState, "CONSUMPTION_STATE_", state),
        page_size=page_size,
        page_token=page_token,
    )
    call(context, "ListConsumptions", request, admin_pb2.ListConsumptionsResponse)


def reactivate(context: typer.Context, message_id: str, app: str, reason: Reason, tag: str = "") -> None:
    """Retry a FAILED delivery with a fresh retry budget."""
    request = admin_pb2.ReactivateConsumptionRequest(message_id=message_id, app=app, tag=tag, reason=reason)
    call(context, "ReactivateConsumption", request, admin_pb2.Consumption)


def replay(context: typer.Context, message_id: str, app: str, reason: Reason, tag: str = "") -> None:
    """Send an acked message again to one subscriber, as a new message; its handler runs again."""
    request = admin_pb2.ReplayDeliveryRequest(message_id=message_id, app=app, tag=tag, reason=reason)
    call(context, "ReplayDelivery", request, message_pb2.Message)


def cancel(context: typer.Context, message_id: str, app: str, reason: Reason, tag: str = "") -> None:
    """Give a delivery up for good. The next message of its order key is delivered."""
    request = admin_pb2.CancelConsumptionRequest(message_id=message_id, app=app, tag=tag, reason=reason)
    call(context, "CancelConsumption", request, admin_pb2.Consumption)
