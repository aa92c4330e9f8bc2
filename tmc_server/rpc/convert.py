"""Between protos and domain: the one place where both vocabularies meet."""

from __future__ import annotations

from google.protobuf.field_mask_pb2 import FieldMask

from tmc_common.headers import ORDER_KEY
from tmc_common.protocol import admin_pb2, consumption_pb2, message_pb2, types_pb2
from tmc_server.domain.catalog import App, Catalog, DeliveryKeys, Forward, Subscription, Topic
from tmc_server.domain.checks import CheckTarget
from tmc_server.domain.ids import MessageId
from tmc_server.domain.numbers import NO_SUBSCRIPTION, SubscriptionNumber
from tmc_server.domain.ports.catalog import NewApp, NewSubscription
from tmc_server.domain.ports.delivery import BrokerAddress, Copy
from tmc_server.domain.ports.reading import FailureGroup
from tmc_server.domain.ports.servers import ServerView, ShardPlace
from tmc_server.domain.queue_names import queue_of
from tmc_server.domain.retry import RetryPolicy
from tmc_server.domain.views import AttemptView, CheckView, ConsumptionView, MessageDetail, MessageView
from tmc_server.errors import InvalidField
from tmc_server.requests import validation
from tmc_server.requests.administering import TopicSettings
from tmc_server.requests.browsing import Wanted
from tmc_server.requests.deciding_by_hand import CheckReport
from tmc_server.requests.explanations import Explanation
from tmc_server.requests.overviewing import DeliveryOverview, TopicOverview
from tmc_server.requests.remedies import Names, commands_for
from tmc_server.requests.timeline import Event


def policy_fields(mask: FieldMask, *others: str) -> list[str]:
    """The fields of a retry policy that an update mask names. others: paths besides. Raises InvalidField."""
    known = {f"retry.{field.name}": field.name for field in types_pb2.RetryPolicy.DESCRIPTOR.fields}
    unknown = sorted(set(mask.paths) - set(known) - set(others))
    if unknown:
        raise InvalidField("update_mask", f"name only {', '.join([*known, *others])}, not {unknown[0]!r}")
    return [known[path] for path in mask.paths if path in known]


def policy_from(sent: types_pb2.RetryPolicy) -> RetryPolicy:
    return validation.policy(
        kind=sent.kind,
        interval_ms=sent.interval_ms if sent.HasField("interval_ms") else None,
        max_retry=sent.max_retry if sent.HasField("max_retry") else None,
        cap_ms=sent.cap_ms if sent.HasField("cap_ms") else None,
        max_age_ms=sent.max_age_ms,
        jitter_percent=sent.jitter_percent,
    )


def policy_to(policy: RetryPolicy) -> types_pb2.RetryPolicy:
    return types_pb2.RetryPolicy(
        kind=types_pb2.RetryKind.Name(policy.kind),
        interval_ms=policy.interval_ms,
        max_retry=policy.max_retry,
        cap_ms=policy.cap_ms,
        max_age_ms=policy.max_age_ms,
        jitter_percent=policy.jitter_percent,
    )


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
    return message_pb2.Message(
        message_id=str(MessageId(view.topic, view.producer, view.shard, view.number)),
        topic=topic_name(catalog, view.topic),
        key=view.key,
        producer=app_name(catalog, view.producer),
        producer_tag=view.producer_tag,
        state=types_pb2.MessageState.Name(view.state),
        body=view.body or b"" if with_body else b"",
        content_type=view.content_type,
        headers=view.headers,
        delay_ms=view.delay_ms,
        created_ms=view.created_ms,
        decided_ms=view.decided_ms or 0,
        attempt_id=view.attempt_id.hex(),
        digest=view.digest.hex(),
        order_key=view.headers.get(ORDER_KEY, ""),
    )


def consumption_to(view: ConsumptionView, topic: int, producer: int, catalog: Catalog) -> admin_pb2.Consumption:
    app, tag = subscriber(catalog, view.subscription)
    return admin_pb2.Consumption(
        message_id=str(MessageId(topic, producer, view.shard, view.number)),
        topic=topic_name(catalog, topic),
        app=app,
        tag=tag,
        state=types_pb2.ConsumptionState.Name(view.state),
        attempt=view.attempt,
        tried=view.tried,
        due_ms=view.due_ms or 0,
        created_ms=view.created_ms,
        closed_ms=view.closed_ms or 0,
        sequence=view.sequence or 0,
        extended=view.extended,
        waits_for=str(MessageId(topic, producer, view.shard, view.waits_for)) if view.waits_for else "",
        key=view.key,
        last_error=view.error,
        fingerprint=view.fingerprint,
    )


def detail_to(detail: MessageDetail, catalog: Catalog, *, with_body: bool) -> admin_pb2.MessageDetail:
    message = detail.message
    return admin_pb2.MessageDetail(
        message=message_to(message, catalog, with_body=with_body),
        consumptions=[consumption_to(view, message.topic, message.producer, catalog) for view in detail.consumptions],
        failed_attempts=[failed_attempt_to(view, catalog) for view in detail.failed_attempts],
        check=progress_to(message.check) if message.check.attempt or message.check.due_ms else None,
    )


def failure_group_to(group: FailureGroup, catalog: Catalog) -> admin_pb2.FailureGroup:
    topic = catalog.topics[group.topic]
    app, tag = subscriber(catalog, group.subscription)
    return admin_pb2.FailureGroup(
        topic=topic.name,
        app=app,
        tag=tag,
        fingerprint=group.fingerprint,
        count=group.count,
        first_ms=group.first_ms,
        last_ms=group.last_ms,
        per_minute=group.per_minute,
        error=group.error,
        message_id=str(MessageId(group.topic, topic.owner, group.shard, group.number)) if group.number else "",
    )


def topic_overview_to(overview: TopicOverview, catalog: Catalog) -> admin_pb2.TopicOverview:
    messages = overview.messages
    return admin_pb2.TopicOverview(
        topic=overview.topic.name,
        paused=overview.topic.paused,
        prepared=messages.open,
        undecided=messages.late,
        check_failed=messages.failed,
        oldest_undecided_ms=messages.oldest_late_ms or 0,
        oldest_check_failed_ms=messages.oldest_failed_ms or 0,
        submitted_per_s=overview.submitted_per_s,
        subscriptions=[_subscription_overview_to(each, catalog) for each in overview.deliveries],
    )


def _subscription_overview_to(overview: DeliveryOverview, catalog: Catalog) -> admin_pb2.SubscriptionOverview:
    subscription, deliveries = overview.subscription, overview.standing
    return admin_pb2.SubscriptionOverview(
        app=app_name(catalog, subscription.app),
        tag=subscription.tag,
        paused=subscription.paused,
        scheduled=deliveries.open,
        backlog=deliveries.late,
        waiting=deliveries.waiting,
        failed=deliveries.failed,
        oldest_backlog_ms=deliveries.oldest_late_ms or 0,
        oldest_failed_ms=deliveries.oldest_failed_ms or 0,
        removed=subscription.is_removed,
        acked_per_s=overview.acked_per_s,
    )


def explanation_to(explanation: Explanation, message: MessageView, catalog: Catalog) -> admin_pb2.Explanation:
    delivery = explanation.delivery
    app, tag = subscriber(catalog, delivery.subscription if delivery is not None else NO_SUBSCRIPTION)
    return admin_pb2.Explanation(
        app=app,
        tag=tag,
        why=f"WHY_{explanation.why.name}",
        sentence=explanation.sentence,
        remedy=explanation.why.value,
        next_ms=explanation.next_ms or 0,
        waits_for=explanation.waits_for,
        commands=commands_for(
            explanation.why,
            Names(
                message=str(MessageId(message.topic, message.producer, message.shard, message.number)),
                topic=topic_name(catalog, message.topic),
                app=app,
                tag=tag,
                waits_for=explanation.waits_for,
            ),
        ),
    )


def wanted_from(request: admin_pb2.ListMessagesRequest | admin_pb2.ListConsumptionsRequest) -> Wanted:
    return Wanted(
        from_ms=request.from_ms,
        to_ms=request.to_ms,
        older_than_ms=request.older_than_ms,
        newest_first=request.newest_first,
        page_size=request.page_size,
        page_token=request.page_token,
    )


def event_to(event: Event, catalog: Catalog) -> admin_pb2.TimelineEvent:
    app, tag = subscriber(catalog, event.subscription)
    return admin_pb2.TimelineEvent(
        at_ms=event.at_ms,
        kind=admin_pb2.EventKind.Name(event.kind),
        sentence=event.sentence,
        app=app,
        tag=tag,
        attempt=event.attempt,
    )


def subscriber(catalog: Catalog, number: SubscriptionNumber) -> tuple[str, str]:
    """Its app and tag; "": there is none, or this server does not know it."""
    subscription = catalog.subscriptions.get(number)
    return (app_name(catalog, subscription.app), subscription.tag) if subscription is not None else ("", "")


def failed_attempt_to(view: AttemptView, catalog: Catalog) -> admin_pb2.FailedAttempt:
    app, tag = subscriber(catalog, view.subscription)
    return admin_pb2.FailedAttempt(
        app=app,
        tag=tag,
        attempt=view.attempt,
        at_ms=view.at_ms,
        error=view.error,
        tried_ms=view.tried_ms or 0,
        unanswered=view.unanswered,
    )


def app_to(app: App) -> admin_pb2.App:
    return admin_pb2.App(
        id=app.id,
        number=app.number,
        service_name=app.service_name,
        biz_id=app.biz_id,
        alert_email=app.alert_email,
        alert_phone=app.alert_phone,
        keys=len(app.key_hashes),
        disabled=app.disabled,
        tag_keys=[admin_pb2.TagKeys(tag=each.tag, keys=len(each.key_hashes)) for each in app.tag_keys],
    )


def new_app_from(request: admin_pb2.RegisterAppRequest) -> NewApp:
    return NewApp(
        id=request.id,
        service_name=request.service_name,
        biz_id=request.biz_id,
        alert_email=request.alert_email,
        alert_phone=request.alert_phone,
    )


def topic_settings_from(request: admin_pb2.RegisterTopicRequest) -> TopicSettings:
    """Fields that are not set keep their defaults."""
    optional = ("table_index", "spread", "transaction_time_ms", "open_limit")
    return TopicSettings(
        name=request.name,
        owner=request.owner,
        default_tag=request.default_tag,
        queue_mode=request.queue_mode,
        unsigned=request.unsigned_copies,
        ordered=request.ordered,
        **{name: getattr(request, name) for name in optional if request.HasField(name)},
    )


def new_subscription_from(request: admin_pb2.RegisterSubscriptionRequest) -> NewSubscription:
    return NewSubscription(
        topic=request.topic,
        app=request.app,
        tag=request.tag,
        policy=policy_from(request.retry),
        forward=forward_from(request.forward) if request.HasField("forward") else None,
        order=validation.order_mode(request.order),
    )


def topic_to(topic: Topic, catalog: Catalog) -> admin_pb2.Topic:
    return admin_pb2.Topic(
        name=topic.name,
        number=topic.number,
        owner=app_name(catalog, topic.owner),
        default_tag=topic.default_tag,
        table_index=topic.table_index,
        spread=topic.spread,
        transaction_time_ms=topic.transaction_time_ms,
        open_limit=topic.open_limit,
        effective_ms=topic.effective_ms,
        queue_mode=types_pb2.QueueMode.Name(topic.queue_mode),
        unsigned_copies=not topic.signed,
        ordered=topic.ordered,
        paused=topic.paused,
    )


def subscription_to(subscription: Subscription, catalog: Catalog) -> admin_pb2.Subscription:
    return admin_pb2.Subscription(
        number=subscription.number,
        topic=topic_name(catalog, subscription.topic),
        app=app_name(catalog, subscription.app),
        tag=subscription.tag,
        retry=policy_to(subscription.policy),
        effective_ms=subscription.effective_ms,
        removed_ms=subscription.removed_ms or 0,
        forward=forward_to(subscription.forward),
        queue="" if subscription.forward else queue_of(subscription, catalog),
        order=types_pb2.OrderMode.Name(subscription.order),
        paused=subscription.paused,
    )


def subscription_info_to(
    subscription: Subscription, catalog: Catalog, has_queue: bool, signed: bool
) -> consumption_pb2.SubscriptionInfo:
    """For its own app. signed: with the keys by which its copies are known; secrets, shown nowhere else but to operators."""
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


def forward_from(sent: types_pb2.Forward) -> Forward:
    return Forward(sent.kind, sent.target, sent.key)


def forward_to(forward: Forward | None) -> types_pb2.Forward | None:
    return types_pb2.Forward(kind=forward.kind, target=forward.target, key=forward.key) if forward else None


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
    run = view.run
    return admin_pb2.Server(
        name=run.name,
        incarnation=str(run.incarnation),
        started_ms=run.started_ms,
        expires_ms=run.expires_ms,
        alive=view.alive,
        shards=view.shards,
        catalog_version=run.catalog_version,
        drained=run.drained,
    )


def shard_place_to(place: ShardPlace) -> admin_pb2.ShardPlace:
    return admin_pb2.ShardPlace(shard=place.shard, database=place.identity, address=place.place)


def progress_to(view: CheckView) -> admin_pb2.CheckProgress:
    return admin_pb2.CheckProgress(
        attempt=view.attempt,
        checked=view.checked,
        due_ms=view.due_ms or 0,
        unreached_ms=view.unreached_ms or 0,
        target=view.target,
        last_answer=view.last_answer,
    )


def target_from(sent: admin_pb2.CheckTarget) -> CheckTarget:
    usual = CheckTarget(name="", kind="")
    return CheckTarget(
        name=sent.name,
        kind=sent.kind,
        address=sent.address,
        options=dict(sent.options),
        deadline_ms=sent.deadline_ms if sent.HasField("deadline_ms") else usual.deadline_ms,
        concurrency=sent.concurrency if sent.HasField("concurrency") else usual.concurrency,
        batch=sent.batch if sent.HasField("batch") else usual.batch,
        tls=sent.tls,
    )


def target_to(target: CheckTarget) -> admin_pb2.CheckTarget:
    return admin_pb2.CheckTarget(
        name=target.name,
        kind=target.kind,
        address=target.address,
        options=target.options,
        deadline_ms=target.deadline_ms,
        concurrency=target.concurrency,
        batch=target.batch,
        tls=target.tls,
    )


def checks_to(topic: Topic, effective_ms: int) -> admin_pb2.TopicCheck:
    targets = sorted(topic.checks.targets.values(), key=lambda target: target.name)
    return admin_pb2.TopicCheck(
        topic=topic.name,
        targets=map(target_to, targets),
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
