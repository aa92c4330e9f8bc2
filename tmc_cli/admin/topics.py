"""Admin commands about topics."""

from __future__ import annotations

from typing import Annotated

import typer

from tmc_cli.admin.calling import Reason, all_pages, call, change, list_all
from tmc_common.protocol import admin_pb2, types_pb2


def register_topic(
    context: typer.Context,
    name: str,
    owner: Annotated[str, typer.Option()],
    default_tag: str = "",
    table_index: int | None = None,
    spread: int | None = None,
    transaction_time_ms: int | None = None,
    open_limit: int | None = None,
    single_queue: bool = False,
    unsigned: bool = False,
    ordered: bool = False,
) -> None:
    """Register a topic of the app that produces it. --single-queue: subscribers read all such topics from one queue.

    --unsigned: its copies in queues are not signed (docs/signatures.md).
    --ordered: each message has an order key, and messages of one key are delivered one after another (docs/order.md).
    """
    request = admin_pb2.RegisterTopicRequest(
        name=name,
        owner=owner,
        default_tag=default_tag,
        table_index=table_index,
        spread=spread,
        transaction_time_ms=transaction_time_ms,
        open_limit=open_limit,
        queue_mode=types_pb2.QUEUE_MODE_SINGLE if single_queue else types_pb2.QUEUE_MODE_MULTI,
        unsigned_copies=unsigned,
        ordered=ordered,
    )
    call(context, "RegisterTopic", request, admin_pb2.Topic)


def update_topic(
    context: typer.Context, name: str, transaction_time_ms: int | None = None, open_limit: int | None = None
) -> None:
    """Change the named settings of a topic. Tag, shards and queue mode cannot be changed."""
    topics = all_pages(context, "ListTopics", admin_pb2.ListTopicsRequest(), admin_pb2.ListTopicsResponse).topics
    before = next((each for each in topics if each.name == name), None)
    request = admin_pb2.UpdateTopicRequest(name=name, transaction_time_ms=transaction_time_ms, open_limit=open_limit)
    change(context, "UpdateTopic", request, before, admin_pb2.Topic)


def pause_topic(context: typer.Context, name: str, reason: Reason) -> None:
    """Deliver nothing of a topic until it is resumed. Producers notice nothing; no attempt is counted."""
    call(context, "PauseTopic", admin_pb2.PauseTopicRequest(name=name, reason=reason), admin_pb2.Topic)


def resume_topic(context: typer.Context, name: str, reason: Reason) -> None:
    """Deliver a paused topic again."""
    call(context, "ResumeTopic", admin_pb2.ResumeTopicRequest(name=name, reason=reason), admin_pb2.Topic)


def list_topics(context: typer.Context) -> None:
    """List topics."""
    list_all(context, "ListTopics", admin_pb2.ListTopicsRequest(), admin_pb2.ListTopicsResponse)
