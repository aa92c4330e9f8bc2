"""Subscribe an app, or change its subscription."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from tmc_cli import say
from tmc_cli.admin.calling import (
    Growth,
    Jitter,
    MaxAge,
    all_pages,
    ask,
    change_policy,
    enum_value,
    show,
    show_changes,
)
from tmc_common.protocol import admin_pb2, types_pb2


def subscribe(
    context: typer.Context,
    topic: str,
    app: str,
    tag: str = "",
    interval_ms: int | None = None,
    max_retry: int | None = None,
    cap_ms: int | None = None,
    max_age_ms: MaxAge = None,
    jitter_percent: Jitter = None,
    exponential: Growth = None,
    order: Annotated[str, typer.Option(help="For ordered topics: STRICT, SKIP or OFF (docs/order.md).")] = "",
    forward: Annotated[
        str, typer.Option(help="rabbitmq:EXCHANGE, kafka:TOPIC, webhook:URL or webhook-batch:URL instead of consumers.")
    ] = "",
    forward_key: Annotated[str, typer.Option(help="Routing key of RabbitMQ, or key of Kafka's records.")] = "",
    untried: Annotated[bool, typer.Option(help="Store --forward without checking that its target exists.")] = False,
) -> None:
    """Subscribe an app, or change the named fields of its retry policy."""
    before = _subscription(context, topic, app, tag)
    request: dict[str, Any] = {"topic": topic, "app": app, "tag": tag, "untried": untried}
    request["order"] = enum_value(types_pb2.OrderMode.DESCRIPTOR, order)
    request["retry"] = retry = types_pb2.RetryPolicy()
    if before is not None:
        retry.CopyFrom(before.retry)
    named = change_policy(
        retry,
        exponential=exponential,
        interval_ms=interval_ms,
        max_retry=max_retry,
        cap_ms=cap_ms,
        max_age_ms=max_age_ms,
        jitter_percent=jitter_percent,
    )
    if order:
        named.append("order")
    if forward:
        kind, _, target = forward.partition(":")
        request["forward"] = types_pb2.Forward(kind=kind, target=target, key=forward_key)
    elif before is not None and before.HasField("forward"):
        request["forward"] = before.forward
    if before is None:
        show(ask(context, "RegisterSubscription", **request))
        return
    after = ask(context, "RegisterSubscription", update_mask={"paths": named}, **request)
    show_changes(before, after)
    show(after)


def _subscription(context: typer.Context, topic: str, app: str, tag: str) -> admin_pb2.Subscription | None:
    """The existing subscription, or None. tag "": the topic's default, as the center interprets it."""
    known = the_topic(context, {"name": topic})
    if known is None:
        return None
    wanted = (app, tag or known.default_tag)
    found = all_pages(context, "ListSubscriptions", topic=topic).subscriptions
    return next((each for each in found if (each.app, each.tag) == wanted and not each.removed_ms), None)


def the_topic(context: typer.Context, request: Mapping[str, Any]) -> admin_pb2.Topic | None:
    """The topic that a request names, or None."""
    topics = all_pages(context, "ListTopics").topics
    return next((each for each in topics if each.name == request["name"]), None)


def say_nothing_repaired(answer: Any, _request: Any) -> None:
    if not answer.ListFields():
        say("Nothing had to be repaired.")
