"""Admin commands about subscriptions."""

from __future__ import annotations

from typing import Annotated

import typer

from tmc_cli import say
from tmc_cli.admin.calling import (
    Growth,
    Jitter,
    MaxAge,
    Reason,
    all_pages,
    ask,
    call,
    change,
    change_policy,
    enum_value,
    list_all,
    show,
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
    forward: str = "",
    forward_key: str = "",
    untried: Annotated[bool, typer.Option(help="Store --forward without checking that the exchange exists.")] = False,
) -> None:
    """Subscribe an app, or change the named fields of its retry policy. --forward rabbitmq:EXCHANGE delivers to an exchange."""
    before = _subscription(context, topic, app, tag)
    request = admin_pb2.RegisterSubscriptionRequest(
        topic=topic,
        app=app,
        tag=tag,
        order=enum_value(types_pb2.OrderMode, "ORDER_MODE_", order),
        untried=untried,
    )
    if before is not None:
        request.retry.CopyFrom(before.retry)
        if before.HasField("forward"):
            request.forward.CopyFrom(before.forward)
    named = change_policy(
        request.retry,
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
        to, _, target = forward.partition(":")
        request.forward.CopyFrom(types_pb2.Forward(kind=to, target=target, key=forward_key))
    if before is not None:
        request.update_mask.paths.extend(named)
    change(context, "RegisterSubscription", request, before, admin_pb2.Subscription)


def _subscription(context: typer.Context, topic: str, app: str, tag: str) -> admin_pb2.Subscription | None:
    """The existing subscription, or None. tag "": the topic's default, as the center interprets it."""
    topics = all_pages(context, "ListTopics", admin_pb2.ListTopicsRequest(), admin_pb2.ListTopicsResponse).topics
    known = next((each for each in topics if each.name == topic), None)
    if known is None:
        return None
    wanted = (app, tag or known.default_tag)
    request = admin_pb2.ListSubscriptionsRequest(topic=topic)
    found = all_pages(context, "ListSubscriptions", request, admin_pb2.ListSubscriptionsResponse).subscriptions
    return next((each for each in found if (each.app, each.tag) == wanted and not each.removed_ms), None)


def unsubscribe(context: typer.Context, topic: str, app: str, tag: str = "") -> None:
    """Remove a subscription and cancel its open deliveries."""
    request = admin_pb2.RemoveSubscriptionRequest(topic=topic, app=app, tag=tag)
    call(context, "RemoveSubscription", request, admin_pb2.Subscription)


def pause_subscription(context: typer.Context, topic: str, app: str, reason: Reason, tag: str = "") -> None:
    """Deliver nothing to a subscription until it is resumed. No attempt is counted."""
    request = admin_pb2.PauseSubscriptionRequest(topic=topic, app=app, tag=tag, reason=reason)
    call(context, "PauseSubscription", request, admin_pb2.Subscription)


def resume_subscription(context: typer.Context, topic: str, app: str, reason: Reason, tag: str = "") -> None:
    """Deliver to a paused subscription again."""
    request = admin_pb2.ResumeSubscriptionRequest(topic=topic, app=app, tag=tag, reason=reason)
    call(context, "ResumeSubscription", request, admin_pb2.Subscription)


def repair_order(context: typer.Context, topic: str, app: str, reason: Reason, tag: str = "") -> None:
    """Examine all order keys of a subscription now, and repair what is wrong. Servers do this by themselves, slowly."""
    request = admin_pb2.RepairOrderRequest(topic=topic, app=app, tag=tag, reason=reason)
    answer = ask(context, "RepairOrder", request, admin_pb2.RepairOrderResponse, timeout=150)
    if answer == admin_pb2.RepairOrderResponse():
        say("Nothing had to be repaired.")
    show(answer)


def list_subscriptions(context: typer.Context, topic: str = "") -> None:
    """List the subscriptions of one topic, or all."""
    request = admin_pb2.ListSubscriptionsRequest(topic=topic)
    list_all(context, "ListSubscriptions", request, admin_pb2.ListSubscriptionsResponse)


def delivery_keys(context: typer.Context, topic: str, app: str, tag: str = "") -> None:
    """Show the keys that sign a subscription's copies, for consumers in other languages. Audited."""
    request = admin_pb2.GetDeliveryKeysRequest(topic=topic, app=app, tag=tag)
    call(context, "GetDeliveryKeys", request, admin_pb2.DeliveryKeys)


def rotate_delivery_key(
    context: typer.Context,
    topic: str,
    app: str,
    tag: str = "",
    drop_previous: Annotated[bool, typer.Option(help="Reject copies signed with the previous key.")] = False,
) -> None:
    """Sign a subscription's copies with a new key. Copies already in queues stay valid."""
    request = admin_pb2.RotateDeliveryKeyRequest(topic=topic, app=app, tag=tag, drop_previous=drop_previous)
    call(context, "RotateDeliveryKey", request, admin_pb2.DeliveryKeys, timeout=20)
