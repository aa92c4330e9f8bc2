"""Between protos and domain: the one place where both vocabularies meet."""

from __future__ import annotations

from typing import Any

from google.protobuf.field_mask_pb2 import FieldMask

from tmc_common.headers import ORDER_KEY
from tmc_common.protocol import admin_pb2, consumption_pb2, message_pb2, types_pb2
from tmc_common.submission import queue_of as submit_queue_name
from tmc_server.domain.catalog import App, Catalog, DeliveryKeys, Forward, NewTopic, SubmitQueue, Subscription, Topic
from tmc_server.domain.ids import MessageId
from tmc_server.domain.numbers import NO_SUBSCRIPTION, SubscriptionNumber
from tmc_server.domain.placement import table_index_for
from tmc_server.domain.ports.catalog import NewSubscription
from tmc_server.domain.ports.delivery import BrokerAddress, Copy
from tmc_server.domain.ports.reading import FailureGroup
from tmc_server.domain.ports.servers import ServerView, ShardPlace
from tmc_server.domain.queue_names import queue_of
from tmc_server.domain.retry import RetryPolicy
from tmc_server.domain.views import AttemptView, ConsumptionView, MessageDetail, MessageView
from tmc_server.errors import InvalidField
from tmc_server.requests import validation
from tmc_server.requests.deciding_by_hand import CheckReport
from tmc_server.requests.explanations import Explanation
from tmc_server.requests.overviewing import DeliveryOverview, TopicOverview
from tmc_server.requests.remedies import commands_for
from tmc_server.requests.timeline import Event
from tmc_server.rpc.filling import filled, record_from


def policy_fields(mask: FieldMask, *others: str) -> list[str]:
    """The fields of a retry policy that an update mask names. others: paths besides. Raises InvalidField."""
    known = {f"retry.{field.name}": field.name for field in types_pb2.RetryPolicy.DESCRIPTOR.fields}
    unknown = sorted(set(mask.paths) - set(known) - set(others))
    if unknown:
        raise InvalidField("update_mask", f"name only {', '.join([*known, *others])}, not {unknown[0]!r}")
    return [known[path] for path in mask.paths if path in known]


def policy_from(sent: types_pb2.RetryPolicy) -> RetryPolicy:
    """Raises InvalidField."""
    return validation.within_bounds(record_from(RetryPolicy, sent, "retry."), "retry.")


def policy_to(policy: RetryPolicy) -> types_pb2.RetryPolicy:
    return filled(types_pb2.RetryPolicy, policy)


def delivery_to(copy: Copy, catalog: Catalog) -> consumption_pb2.Delivery:
    subscription = catalog.subscriptions[copy.subscription]
    return consumption_pb2.Delivery(
        message_id=str(MessageId(copy.topic, copy.producer, copy.shard, copy.number)),
        topic=catalog.topics[copy.topic].name,
        key=copy.key,
        body=copy.body,
        content_type=copy.content_type,
        headers=copy.headers,
        attempt=copy.attempt,
        producer=app_name(catalog, copy.producer),
        subscriber=f"{app_name(catalog, subscription.app)}.{subscription.tag}",
        retry_interval_ms=subscription.policy.delay_after_ms(1),
        redelivered=copy.redelivered,
    )


def app_name(catalog: Catalog, number: int) -> str:
    app = catalog.apps.get(number)
    return app.id if app is not None else ""


def topic_name(catalog: Catalog, number: int) -> str:
    topic = catalog.topics.get(number)
    return topic.name if topic is not None else ""


def message_to(view: MessageView, catalog: Catalog, *, with_body: bool = False) -> message_pb2.Message:
    """with_body: for its producer, and for an operator who may read it."""
    return filled(
        message_pb2.Message,
        view,
        message_id=str(MessageId(view.topic, view.producer, view.shard, view.number)),
        topic=topic_name(catalog, view.topic),
        producer=app_name(catalog, view.producer),
        body=view.body if with_body else None,
        attempt_id=view.attempt_id.hex(),
        digest=view.digest.hex(),
        order_key=view.headers.get(ORDER_KEY, ""),
    )


def consumption_to(view: ConsumptionView, topic: int, producer: int, catalog: Catalog) -> admin_pb2.Consumption:
    app, tag = subscriber(catalog, view.subscription)
    return filled(
        admin_pb2.Consumption,
        view,
        message_id=str(MessageId(topic, producer, view.shard, view.number)),
        topic=topic_name(catalog, topic),
        app=app,
        tag=tag,
        waits_for=str(MessageId(topic, producer, view.shard, view.waits_for)) if view.waits_for else "",
        last_error=view.error,
    )


def detail_to(detail: MessageDetail, catalog: Catalog, *, with_body: bool) -> admin_pb2.MessageDetail:
    message = detail.message
    return admin_pb2.MessageDetail(
        message=message_to(message, catalog, with_body=with_body),
        consumptions=[consumption_to(view, message.topic, message.producer, catalog) for view in detail.consumptions],
        failed_attempts=[failed_attempt_to(view, catalog) for view in detail.failed_attempts],
        check=filled(admin_pb2.CheckProgress, message.check) if message.check.attempt or message.check.due_ms else None,
    )


def failure_group_to(group: FailureGroup, catalog: Catalog) -> admin_pb2.FailureGroup:
    topic = catalog.topics[group.topic]
    app, tag = subscriber(catalog, group.subscription)
    message_id = str(MessageId(group.topic, topic.owner, group.shard, group.number)) if group.number else ""
    return filled(admin_pb2.FailureGroup, group, topic=topic.name, app=app, tag=tag, message_id=message_id)


def topic_overview_to(overview: TopicOverview, catalog: Catalog) -> admin_pb2.TopicOverview:
    messages = overview.messages
    return admin_pb2.TopicOverview(
        topic=overview.topic.name,
        paused=overview.topic.paused,
        prepared=messages.open,
        undecided=messages.late,
        check_failed=messages.failed,
        oldest_undecided_ms=messages.oldest_late_ms,
        oldest_check_failed_ms=messages.oldest_failed_ms,
        submitted_per_s=overview.submitted_per_s,
        subscriptions=[_subscription_overview_to(each, catalog) for each in overview.deliveries],
    )


def _subscription_overview_to(overview: DeliveryOverview, catalog: Catalog) -> admin_pb2.SubscriptionOverview:
    subscription, deliveries = overview.subscription, overview.standing
    return filled(
        admin_pb2.SubscriptionOverview,
        deliveries,
        app=app_name(catalog, subscription.app),
        tag=subscription.tag,
        paused=subscription.paused,
        scheduled=deliveries.open,
        backlog=deliveries.late,
        oldest_backlog_ms=deliveries.oldest_late_ms,
        removed=subscription.is_removed,
        acked_per_s=overview.acked_per_s,
    )


def explanation_to(explanation: Explanation, message: MessageView, catalog: Catalog) -> admin_pb2.Explanation:
    delivery = explanation.delivery
    app, tag = subscriber(catalog, delivery.subscription if delivery is not None else NO_SUBSCRIPTION)
    message_id = str(MessageId(message.topic, message.producer, message.shard, message.number))
    topic = topic_name(catalog, message.topic)
    commands = commands_for(
        explanation.why, message=message_id, topic=topic, app=app, tag=tag, waits_for=explanation.waits_for
    )
    return filled(
        admin_pb2.Explanation,
        explanation,
        app=app,
        tag=tag,
        why=f"WHY_{explanation.why.name}",
        remedy=explanation.why.value,
        commands=commands,
    )


def event_to(event: Event, catalog: Catalog) -> admin_pb2.TimelineEvent:
    app, tag = subscriber(catalog, event.subscription)
    return filled(admin_pb2.TimelineEvent, event, app=app, tag=tag)


def subscriber(catalog: Catalog, number: SubscriptionNumber) -> tuple[str, str]:
    """Return its app and tag; "": there is none, or this server does not know it."""
    subscription = catalog.subscriptions.get(number)
    return (app_name(catalog, subscription.app), subscription.tag) if subscription is not None else ("", "")


def failed_attempt_to(view: AttemptView, catalog: Catalog) -> admin_pb2.FailedAttempt:
    app, tag = subscriber(catalog, view.subscription)
    return filled(admin_pb2.FailedAttempt, view, app=app, tag=tag)


def app_to(app: App) -> admin_pb2.App:
    tag_keys = [admin_pb2.TagKeys(tag=each.tag, keys=len(each.key_hashes)) for each in app.tag_keys]
    queues = [submit_queue_to(app.id, each) for each in app.submit_queues]
    return filled(admin_pb2.App, app, keys=len(app.key_hashes), tag_keys=tag_keys, submit_queues=queues)


def submit_queue_to(app: str, queue: SubmitQueue) -> admin_pb2.SubmitQueue:
    return filled(admin_pb2.SubmitQueue, queue, queue=submit_queue_name(app, queue.tag), secrets=len(queue.secrets))


def new_topic_from(request: admin_pb2.RegisterTopicRequest) -> NewTopic:
    """Raises InvalidField."""
    others: dict[str, Any] = {"default_tag": request.default_tag or "default", "signed": not request.unsigned_copies}
    if not request.HasField("table_index"):
        others["table_index"] = table_index_for(request.name)
    return record_from(NewTopic, request, **others)


def new_subscription_from(request: admin_pb2.RegisterSubscriptionRequest) -> NewSubscription:
    """Raises InvalidField."""
    forward = record_from(Forward, request.forward) if request.HasField("forward") else None
    return record_from(NewSubscription, request, policy=policy_from(request.retry), forward=forward)


def topic_to(topic: Topic, catalog: Catalog) -> admin_pb2.Topic:
    owner = app_name(catalog, topic.owner)
    return filled(admin_pb2.Topic, topic, owner=owner, unsigned_copies=not topic.signed)


def subscription_to(subscription: Subscription, catalog: Catalog) -> admin_pb2.Subscription:
    forward = subscription.forward
    return filled(
        admin_pb2.Subscription,
        subscription,
        topic=topic_name(catalog, subscription.topic),
        app=app_name(catalog, subscription.app),
        retry=policy_to(subscription.policy),
        forward=filled(types_pb2.Forward, forward) if forward is not None else None,
        queue="" if forward is not None else queue_of(subscription, catalog),
    )


def subscription_info_to(
    subscription: Subscription, catalog: Catalog, has_queue: bool, signed: bool
) -> consumption_pb2.SubscriptionInfo:
    """Describe it to its own app.

    signed: with the keys by which its copies are known; secrets, shown nowhere else but to operators.
    """
    keys = subscription.keys if signed else None
    return consumption_pb2.SubscriptionInfo(
        topic=topic_name(catalog, subscription.topic),
        tag=subscription.tag,
        retry=policy_to(subscription.policy),
        queue=queue_of(subscription, catalog) if has_queue else "",
        delivery_keys=_told(keys) if keys is not None else (),
    )


def delivery_keys_to(keys: DeliveryKeys) -> admin_pb2.DeliveryKeys:
    signing, *others = _told(keys)
    return admin_pb2.DeliveryKeys(key=signing, previous=others[0] if others else "")


def _told(keys: DeliveryKeys) -> list[str]:
    """Hexadecimal, the one that signs first."""
    return [secret.hex() for secret in (keys.signing, keys.other) if secret is not None]


def broker_to(broker: BrokerAddress | None) -> consumption_pb2.BrokerAddress | None:
    if broker is None:
        return None
    first, *others = broker.nodes
    return consumption_pb2.BrokerAddress(
        host=first.host,
        port=first.port,
        others=map(str, others),
        virtual_host=broker.virtual_host,
        tls=broker.tls,
    )


def server_to(view: ServerView) -> admin_pb2.Server:
    return filled(
        admin_pb2.Server, view.run, incarnation=str(view.run.incarnation), alive=view.alive, shards=view.shards
    )


def shard_place_to(place: ShardPlace) -> admin_pb2.ShardPlace:
    move = filled(admin_pb2.ShardMove, place.move) if place.move is not None else None
    return admin_pb2.ShardPlace(shard=place.shard, database=place.identity, address=place.place, move=move)


def checks_to(topic: Topic, effective_ms: int) -> admin_pb2.TopicCheck:
    targets = sorted(topic.checks.targets.values(), key=lambda target: target.name)
    return admin_pb2.TopicCheck(
        topic=topic.name,
        targets=[filled(admin_pb2.CheckTarget, target) for target in targets],
        retry=policy_to(topic.checks.retry),
        effective_ms=effective_ms,
    )


def report_to(report: CheckReport) -> admin_pb2.CheckNowResponse:
    answer = report.answer
    return admin_pb2.CheckNowResponse(
        target=report.target,
        request=report.request,
        answer=(answer.detail or answer.reason.value)[:2_000],
        verdict=types_pb2.Verdict.Name(answer.verdict),
        reason=answer.reason.name,
        elapsed_ms=report.elapsed_ms,
        state=types_pb2.MessageState.Name(report.state),
    )
