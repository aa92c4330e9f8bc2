"""`tmc admin`: every command is one admin RPC, its answer printed as JSON."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Annotated, Any

import grpc
import typer
from google.protobuf import json_format
from google.protobuf.message import Message

from tmc_cli import fail, say
from tmc_cli.target import DEFAULT_ADDRESS, Target
from tmc_common.addresses import is_loopback
from tmc_common.protocol import admin_pb2, message_pb2, types_pb2
from tmc_server.printable import escaped

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Register apps, topics and subscriptions; inspect messages.",
)
Reason = Annotated[str, typer.Option(help="For the audit trail.")]
Growth = Annotated[bool | None, typer.Option("--exponential/--linear", help="How the delays between attempts grow.")]
PAGE_SIZE = 1_000
SERVICE = admin_pb2.DESCRIPTOR.services_by_name["AdminService"]


@app.callback()
def connect(
    context: typer.Context,
    address: Annotated[str, typer.Option(envvar="TMC_ADDRESS", help="host:port of a server.")] = DEFAULT_ADDRESS,
    token: Annotated[
        str, typer.Option(envvar="TMC_ADMIN_TOKEN", help="The token that `tmc init` printed.", show_default=False)
    ] = "",
    authority: Annotated[str, typer.Option(envvar="TMC_CA", help="PEM file: use TLS and trust this authority.")] = "",
    certificate: Annotated[str, typer.Option(envvar="TMC_CERTIFICATE", help="PEM file: client certificate.")] = "",
    key: Annotated[str, typer.Option(envvar="TMC_KEY", help="PEM file: the certificate's private key.")] = "",
    server_name: Annotated[
        str, typer.Option(envvar="TMC_SERVER_NAME", help="The name in the server's certificate, if not the host.")
    ] = "",
    insecure: Annotated[
        bool, typer.Option("--insecure", envvar="TMC_INSECURE", help="Send the token in the clear to other machines.")
    ] = False,
) -> None:
    """Administer a running center."""
    target = Target(address=address, authority=authority, certificate=certificate, key=key, server_name=server_name)
    target.check()
    if token and not (target.is_tls or is_loopback(address) or insecure):
        fail(
            f"The admin token would travel in the clear to {address}: give --authority CA.pem (TMC_CA), or --insecure "
            "(TMC_INSECURE=1) in a network that you trust."
        )
    context.obj = (target, token)


def _ask(
    context: typer.Context, method: str, request: Message, response_class: type[Message], timeout: float = 10
) -> Any:
    target, token = context.obj
    metadata = [("authorization", f"Bearer {token}")] if token else []
    with target.channel() as channel:
        rpc: Callable[..., Any] = channel.unary_unary(
            f"/{SERVICE.full_name}/{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=response_class.FromString,
        )
        try:
            return rpc(request, metadata=metadata, timeout=timeout)
        except grpc.RpcError as exc:
            fail(target.explain(exc), code=1)


def _call(
    context: typer.Context, method: str, request: Message, response_class: type[Message], timeout: float = 10
) -> None:
    _show(_ask(context, method, request, response_class, timeout))


def _all_pages(context: typer.Context, method: str, request: Any, response_class: type[Message]) -> Any:
    """A whole listing in one answer. request: of the first page."""
    request.page_size = PAGE_SIZE
    whole = _ask(context, method, request, response_class)
    while whole.next_page_token:
        request.page_token = whole.next_page_token
        whole.ClearField("next_page_token")
        whole.MergeFrom(_ask(context, method, request, response_class))
    return whole


def _list(context: typer.Context, method: str, request: Any, response_class: type[Message]) -> None:
    _show(_all_pages(context, method, request, response_class))


def _show(answer: Message) -> None:
    shown = _as_dict(answer)
    if "body" in shown.get("message", {}):
        _add_text(shown["message"])
    typer.echo(escaped(json.dumps(shown, indent=2, ensure_ascii=False), keep="\n"))


def _as_dict(message: Message) -> dict[str, Any]:
    return json_format.MessageToDict(message, preserving_proto_field_name=True)


def _add_text(message: dict[str, Any]) -> None:
    """Add the body as text, if it is text, to the base64 of the wire."""
    try:
        message["body_text"] = base64.b64decode(message["body"]).decode()
    except UnicodeDecodeError:
        message["body_text"] = None


@app.command()
def register_app(
    context: typer.Context,
    id: str,
    service_name: str = "",
    biz_id: str = "",
    alert_email: str = "",
    alert_phone: str = "",
) -> None:
    """Register a service; its key is in the answer, once."""
    request = admin_pb2.RegisterAppRequest(
        id=id, service_name=service_name, biz_id=biz_id, alert_email=alert_email, alert_phone=alert_phone
    )
    _call(context, "RegisterApp", request, admin_pb2.RegisterAppResponse)


@app.command()
def add_app_key(context: typer.Context, id: str, replace_newest: bool = False, tag: str = "") -> None:
    """Create a second key for a rotation; both are valid. --tag: valid in one environment only.

    --replace-newest: replace the newest key, whose answer was lost.
    """
    request = admin_pb2.AddAppKeyRequest(id=id, replace_newest=replace_newest, tag=tag)
    _call(context, "AddAppKey", request, admin_pb2.AddAppKeyResponse)


@app.command()
def drop_old_app_key(context: typer.Context, id: str, tag: str = "", drop_newest: bool = False) -> None:
    """End a rotation: only the newest key stays valid. --tag: one environment's keys; --drop-newest: drop all."""
    request = admin_pb2.DropOldAppKeyRequest(id=id, tag=tag, drop_newest=drop_newest)
    _call(context, "DropOldAppKey", request, admin_pb2.DropOldAppKeyResponse)


@app.command()
def rotate_check_token(context: typer.Context, id: str, reason: Reason) -> None:
    """Replace the token that checks of an app's messages carry; services with the SDK learn the new one by themselves."""
    request = admin_pb2.RotateCheckTokenRequest(id=id, reason=reason)
    _call(context, "RotateCheckToken", request, admin_pb2.RotateCheckTokenResponse)


@app.command()
def disable_app(context: typer.Context, id: str, reason: Reason) -> None:
    """Refuse all calls of an app and end its streams. Its messages are still checked, its deliveries are kept."""
    request = admin_pb2.DisableAppRequest(id=id, reason=reason)
    _call(context, "DisableApp", request, admin_pb2.DisableAppResponse)


@app.command()
def enable_app(context: typer.Context, id: str, reason: Reason) -> None:
    """Accept calls of a disabled app again."""
    _call(context, "EnableApp", admin_pb2.EnableAppRequest(id=id, reason=reason), admin_pb2.EnableAppResponse)


@app.command()
def list_apps(context: typer.Context) -> None:
    """List apps."""
    _list(context, "ListApps", admin_pb2.ListAppsRequest(), admin_pb2.ListAppsResponse)


@app.command()
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
    _call(context, "RegisterTopic", request, admin_pb2.Topic)


@app.command()
def update_topic(
    context: typer.Context, name: str, transaction_time_ms: int | None = None, open_limit: int | None = None
) -> None:
    """Change the named settings of a topic. Tag, shards and queue mode cannot be changed."""
    topics = _all_pages(context, "ListTopics", admin_pb2.ListTopicsRequest(), admin_pb2.ListTopicsResponse).topics
    before = next((each for each in topics if each.name == name), None)
    request = admin_pb2.UpdateTopicRequest(name=name, transaction_time_ms=transaction_time_ms, open_limit=open_limit)
    _change(context, "UpdateTopic", request, before, admin_pb2.Topic)


@app.command()
def pause_topic(context: typer.Context, name: str, reason: Reason) -> None:
    """Deliver nothing of a topic until it is resumed. Producers notice nothing; no attempt is counted."""
    _call(context, "PauseTopic", admin_pb2.PauseTopicRequest(name=name, reason=reason), admin_pb2.Topic)


@app.command()
def resume_topic(context: typer.Context, name: str, reason: Reason) -> None:
    """Deliver a paused topic again."""
    _call(context, "ResumeTopic", admin_pb2.ResumeTopicRequest(name=name, reason=reason), admin_pb2.Topic)


@app.command()
def list_topics(context: typer.Context) -> None:
    """List topics."""
    _list(context, "ListTopics", admin_pb2.ListTopicsRequest(), admin_pb2.ListTopicsResponse)


@app.command()
def subscribe(
    context: typer.Context,
    topic: str,
    app: str,
    tag: str = "",
    interval_ms: int | None = None,
    max_retry: int | None = None,
    cap_ms: int | None = None,
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
        order=_state(types_pb2.OrderMode, "ORDER_MODE_", order),
        untried=untried,
    )
    if before is not None:
        request.retry.CopyFrom(before.retry)
        if before.HasField("forward"):
            request.forward.CopyFrom(before.forward)
    named = _change_policy(request.retry, interval_ms, max_retry, cap_ms, exponential)
    if order:
        named.append("order")
    if forward:
        to, _, target = forward.partition(":")
        request.forward.CopyFrom(types_pb2.Forward(kind=to, target=target, key=forward_key))
    if before is not None:
        request.update_mask.paths.extend(named)
    _change(context, "RegisterSubscription", request, before, admin_pb2.Subscription)


def _subscription(context: typer.Context, topic: str, app: str, tag: str) -> admin_pb2.Subscription | None:
    """The existing subscription, or None. tag "": the topic's default, as the center interprets it."""
    topics = _all_pages(context, "ListTopics", admin_pb2.ListTopicsRequest(), admin_pb2.ListTopicsResponse).topics
    known = next((each for each in topics if each.name == topic), None)
    if known is None:
        return None
    wanted = (app, tag or known.default_tag)
    request = admin_pb2.ListSubscriptionsRequest(topic=topic)
    found = _all_pages(context, "ListSubscriptions", request, admin_pb2.ListSubscriptionsResponse).subscriptions
    return next((each for each in found if (each.app, each.tag) == wanted and not each.removed_ms), None)


def _change_policy(
    policy: types_pb2.RetryPolicy,
    interval_ms: int | None,
    max_retry: int | None,
    cap_ms: int | None,
    exponential: bool | None,
) -> list[str]:
    """Set what was named. Returns: paths for an update mask."""
    kinds = {None: None, True: types_pb2.RETRY_KIND_EXPONENTIAL, False: types_pb2.RETRY_KIND_LINEAR}
    values = {"kind": kinds[exponential], "interval_ms": interval_ms, "max_retry": max_retry, "cap_ms": cap_ms}
    named = {name: value for name, value in values.items() if value is not None}
    for name, value in named.items():
        setattr(policy, name, value)
    return [f"retry.{name}" for name in named]


def _change(
    context: typer.Context, method: str, request: Message, before: Message | None, response_class: type[Message]
) -> None:
    """Show the answer, and what has changed on standard error."""
    after = _ask(context, method, request, response_class)
    if before is not None:
        for line in _differences(_flat(_as_dict(before)), _flat(_as_dict(after))) or ["Nothing changed."]:
            say(escaped(line))
    _show(after)


def _differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    names = [name for name in {**before, **after} if before.get(name) != after.get(name) and name != "effective_ms"]
    return [f"{name}: {before.get(name, 'unset')} -> {after.get(name, 'unset')}" for name in names]


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """Paths and values of an answer; the elements of a list go by their names."""
    if isinstance(value, list):
        value = {each.get("name", "") or "(unnamed)": each for each in value}
    if not isinstance(value, dict):
        return {name: value}
    parts = [_flat(inner, f"{name}.{key}" if name else str(key)) for key, inner in value.items()]
    return {path: inner for part in parts for path, inner in part.items()}


@app.command()
def unsubscribe(context: typer.Context, topic: str, app: str, tag: str = "") -> None:
    """Remove a subscription and cancel its open deliveries."""
    request = admin_pb2.RemoveSubscriptionRequest(topic=topic, app=app, tag=tag)
    _call(context, "RemoveSubscription", request, admin_pb2.Subscription)


@app.command()
def pause_subscription(context: typer.Context, topic: str, app: str, reason: Reason, tag: str = "") -> None:
    """Deliver nothing to a subscription until it is resumed. No attempt is counted."""
    request = admin_pb2.PauseSubscriptionRequest(topic=topic, app=app, tag=tag, reason=reason)
    _call(context, "PauseSubscription", request, admin_pb2.Subscription)


@app.command()
def resume_subscription(context: typer.Context, topic: str, app: str, reason: Reason, tag: str = "") -> None:
    """Deliver to a paused subscription again."""
    request = admin_pb2.ResumeSubscriptionRequest(topic=topic, app=app, tag=tag, reason=reason)
    _call(context, "ResumeSubscription", request, admin_pb2.Subscription)


@app.command()
def repair_order(context: typer.Context, topic: str, app: str, reason: Reason, tag: str = "") -> None:
    """Examine all order keys of a subscription now, and repair what is wrong. Servers do this by themselves, slowly."""
    request = admin_pb2.RepairOrderRequest(topic=topic, app=app, tag=tag, reason=reason)
    answer = _ask(context, "RepairOrder", request, admin_pb2.RepairOrderResponse, timeout=150)
    if answer == admin_pb2.RepairOrderResponse():
        say("Nothing had to be repaired.")
    _show(answer)


@app.command()
def list_subscriptions(context: typer.Context, topic: str = "") -> None:
    """List the subscriptions of one topic, or all."""
    request = admin_pb2.ListSubscriptionsRequest(topic=topic)
    _list(context, "ListSubscriptions", request, admin_pb2.ListSubscriptionsResponse)


@app.command()
def delivery_keys(context: typer.Context, topic: str, app: str, tag: str = "") -> None:
    """Show the keys that sign a subscription's copies, for consumers in other languages. Audited."""
    request = admin_pb2.GetDeliveryKeysRequest(topic=topic, app=app, tag=tag)
    _call(context, "GetDeliveryKeys", request, admin_pb2.DeliveryKeys)


@app.command()
def rotate_delivery_key(
    context: typer.Context,
    topic: str,
    app: str,
    tag: str = "",
    drop_previous: Annotated[bool, typer.Option(help="Reject copies signed with the previous key.")] = False,
) -> None:
    """Sign a subscription's copies with a new key. Copies already in queues stay valid."""
    request = admin_pb2.RotateDeliveryKeyRequest(topic=topic, app=app, tag=tag, drop_previous=drop_previous)
    _call(context, "RotateDeliveryKey", request, admin_pb2.DeliveryKeys, timeout=20)


@app.command()
def get_message(
    context: typer.Context, id: Annotated[str, typer.Argument()] = "", topic: str = "", key: str = ""
) -> None:
    """Show a message with its deliveries and failed attempts, by id or by --topic and --key."""
    request = admin_pb2.GetMessageDetailRequest(message_id=id, topic=topic, key=key)
    _call(context, "GetMessageDetail", request, admin_pb2.MessageDetail)


@app.command()
def overview(
    context: typer.Context, as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False
) -> None:
    """Show what stands where: undecided messages, and deliveries under way and failed, with the age of the oldest."""
    found: Any = _ask(context, "GetOverview", admin_pb2.GetOverviewRequest(), admin_pb2.GetOverviewResponse)
    if as_json:
        _show(found)
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


@app.command()
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
    answer: Any = _ask(context, "ExplainMessage", request, admin_pb2.ExplainMessageResponse)
    if as_json:
        _show(answer)
        return
    typer.echo(f"message {answer.message_id}")
    for each in answer.explanations:
        who = f"{each.app} ({each.tag}): " if each.app else ""
        typer.echo(escaped(f"{who}{each.sentence}"))
        typer.echo(escaped(f"    {each.remedy}"))


@app.command()
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
        state=_state(types_pb2.MessageState, "MESSAGE_STATE_", state),
        from_ms=from_ms,
        to_ms=to_ms,
        page_size=page_size,
        page_token=page_token,
    )
    _call(context, "ListMessages", request, admin_pb2.ListMessagesResponse)


@app.command()
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
        state=_state(types_pb2.ConsumptionState, "CONSUMPTION_STATE_", state),
        page_size=page_size,
        page_token=page_token,
    )
    _call(context, "ListConsumptions", request, admin_pb2.ListConsumptionsResponse)


@app.command()
def reactivate(context: typer.Context, message_id: str, app: str, reason: Reason, tag: str = "") -> None:
    """Retry a FAILED delivery with a fresh retry budget."""
    request = admin_pb2.ReactivateConsumptionRequest(message_id=message_id, app=app, tag=tag, reason=reason)
    _call(context, "ReactivateConsumption", request, admin_pb2.Consumption)


@app.command()
def cancel(context: typer.Context, message_id: str, app: str, reason: Reason, tag: str = "") -> None:
    """Give a delivery up for good. The next message of its order key is delivered."""
    request = admin_pb2.CancelConsumptionRequest(message_id=message_id, app=app, tag=tag, reason=reason)
    _call(context, "CancelConsumption", request, admin_pb2.Consumption)


@app.command()
def list_servers(context: typer.Context) -> None:
    """List servers, alive and gone, and the shards each one holds."""
    _list(context, "ListServers", admin_pb2.ListServersRequest(), admin_pb2.ListServersResponse)


@app.command()
def shard_map(context: typer.Context) -> None:
    """Show which database holds which shard."""
    _call(context, "GetShardMap", admin_pb2.GetShardMapRequest(), admin_pb2.GetShardMapResponse)


@app.command()
def list_instances(context: typer.Context, app: str, tag: str = "default") -> None:
    """List the addresses at which a producer's service would be checked now."""
    request = admin_pb2.ListInstancesRequest(app=app, tag=tag)
    _list(context, "ListInstances", request, admin_pb2.ListInstancesResponse)


@app.command()
def set_check(
    context: typer.Context,
    topic: str,
    kind: str = "",
    name: str = "",
    address: str | None = None,
    option: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE, repeatable: path, batch, method, ...; NAME= removes it.")
    ] = None,
    deadline_ms: int | None = None,
    concurrency: int | None = None,
    batch: int | None = None,
    tls: bool | None = None,
    interval_ms: int | None = None,
    max_retry: int | None = None,
    cap_ms: int | None = None,
    exponential: Growth = None,
    untried: Annotated[bool, typer.Option(help="Store it without trying it.")] = False,
    remove: Annotated[list[str] | None, typer.Option(help="Name of a target to remove, repeatable.")] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Remove the topic's other targets.")] = False,
    keep: Annotated[bool, typer.Option("--keep", hidden=True, help="No effect: this is the default.")] = False,
) -> None:
    """Configure how undecided messages of a topic are checked; what is not named stays. Tried before it is stored."""
    del keep
    before = _ask(context, "GetTopicCheck", admin_pb2.GetTopicCheckRequest(topic=topic), admin_pb2.TopicCheck)
    targets = {target.name: target for target in before.targets}
    settings = {
        "address": address,
        "deadline_ms": deadline_ms,
        "concurrency": concurrency,
        "batch": batch,
        "tls": tls,
    }
    named = {field: value for field, value in settings.items() if value is not None}
    request = admin_pb2.SetTopicCheckRequest(topic=topic, untried=untried)
    if kind or named or option:
        targets[name] = _changed_target(
            targets.get(name), name, kind, named, dict(_pair(text) for text in option or ())
        )
        request.update_mask.paths.append("targets")
    gone = set(remove or ()) | ({each for each in targets if each != name} if replace else set())
    unknown = gone - set(targets)
    if unknown:
        fail(f"The topic has no target {sorted(unknown)[0]!r}: its targets are {sorted(targets)}.")
    if "targets" in request.update_mask.paths:
        request.targets.append(targets[name])
    request.removed_targets.extend(sorted(gone))
    request.retry.CopyFrom(before.retry)
    request.update_mask.paths.extend(_change_policy(request.retry, interval_ms, max_retry, cap_ms, exponential))
    _change(context, "SetTopicCheck", request, before, admin_pb2.TopicCheck)


def _changed_target(
    before: admin_pb2.CheckTarget | None, name: str, kind: str, named: dict[str, Any], options: dict[str, str]
) -> admin_pb2.CheckTarget:
    target = admin_pb2.CheckTarget(name=name)
    if before is not None:
        target.CopyFrom(before)
    elif not kind:
        fail(f"The topic has no target {name!r} yet: give --kind, see docs/checks.md.")
    if kind and kind != target.kind:
        target.kind = kind
        target.options.clear()  # each kind has options of its own
    for field, value in named.items():
        setattr(target, field, value)
    for option, value in options.items():
        if value:
            target.options[option] = value
        else:
            target.options.pop(option, None)
    return target


@app.command()
def get_check(context: typer.Context, topic: str) -> None:
    """Show how undecided messages of a topic are checked."""
    _call(context, "GetTopicCheck", admin_pb2.GetTopicCheckRequest(topic=topic), admin_pb2.TopicCheck)


@app.command()
def check_now(context: typer.Context, message_id: str) -> None:
    """Check one undecided message now; shows the target, the request, the answer, the verdict and the duration."""
    _call(
        context, "CheckNow", admin_pb2.CheckNowRequest(message_id=message_id), admin_pb2.CheckNowResponse, timeout=150
    )


@app.command()
def reactivate_check(context: typer.Context, message_id: str, reason: Reason) -> None:
    """Check a CHECK_FAILED message again."""
    request = admin_pb2.ReactivateCheckRequest(message_id=message_id, reason=reason)
    _call(context, "ReactivateCheck", request, message_pb2.Message)


@app.command()
def reactivate_checks(
    context: typer.Context,
    topic: str,
    reason: Reason,
    from_ms: int = 0,
    to_ms: int = 0,
    limit: int | None = None,
    dry_run: bool = False,
) -> None:
    """Check all CHECK_FAILED messages of a topic again. --dry-run only counts them."""
    request = admin_pb2.ReactivateChecksRequest(
        topic=topic, from_ms=from_ms, to_ms=to_ms, limit=limit, dry_run=dry_run, reason=reason
    )
    _call(context, "ReactivateChecks", request, admin_pb2.ReactivateChecksResponse, timeout=150)


@app.command()
def decide(
    context: typer.Context,
    message_id: str,
    verdict: Annotated[str, typer.Argument(help="COMMIT or ROLLBACK.")],
    reason: Reason,
) -> None:
    """Decide an undecided message by hand."""
    request = admin_pb2.DecideMessageRequest(
        message_id=message_id, verdict=_state(types_pb2.Verdict, "VERDICT_", verdict), reason=reason
    )
    _call(context, "DecideMessage", request, message_pb2.Message)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise typer.BadParameter(f"{text!r} is not NAME=VALUE")
    return name, value


def _state(enum: Any, prefix: str, name: str) -> str:
    known = {key.removeprefix(prefix): key for key in enum.keys()}  # noqa: SIM118 - a protobuf enum is no dictionary
    full: str | None = known.get(name.upper() or "UNSPECIFIED")
    if full is None:
        raise typer.BadParameter(f"{name!r} is none of {', '.join(sorted(set(known) - {'UNSPECIFIED'}))}")
    return full
