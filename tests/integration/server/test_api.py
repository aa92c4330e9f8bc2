"""The server over gRPC, as any client sees it: identities, bad input, batches, reflection. No UNKNOWN, no INTERNAL."""

from __future__ import annotations

import json
import os
import random
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from typer.testing import CliRunner

from tests.support.center import RunningCenter
from tests.support.dose import LONG
from tmc_cli.admin import app as admin_app
from tmc_common.protocol import admin_pb2, consumption_pb2, message_pb2, message_pb2_grpc, types_pb2
from tmc_server.domain.rights import RIGHTS
from tmc_server.rpc.server import SERVICES
from tmc_storm.eventually import eventually

pytestmark = pytest.mark.usefixtures("center")
BAD = {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL}


@pytest.fixture(scope="module")
def center(tmp_path_factory) -> Iterator[RunningCenter]:
    folder = tmp_path_factory.mktemp("api")
    with RunningCenter(f"sqlite:///{folder}/c.db", limits={"body_bytes": 10_000, "items_per_second": 0}) as running:
        yield running


@pytest.fixture(scope="module")
def channel(center: RunningCenter) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(center.address) as opened:
        yield opened


def a_connection(center: RunningCenter) -> grpc.Channel:
    """Shared with nobody: one whose calls are refused is answered late."""
    return grpc.insecure_channel(center.address, [("grpc.use_local_subchannel_pool", 1)])


class Api:
    """Calls by method name; answers the response or (code, reason, field)."""

    def __init__(self, center: RunningCenter, channel: grpc.Channel) -> None:
        self.center = center
        self.channel = channel

    def __call__(self, path: str, request: Any, metadata: Any = None, timeout: float = 10) -> Any:
        service, _, name = path.partition("/")
        method = SERVICES[f"tmc.v1.{service}"].methods_by_name[name]
        response_class = message_factory.GetMessageClass(method.output_type)
        if metadata is None:
            metadata = self.center.operator if service == "AdminService" else self.center.as_app("orders")
        rpc = self.channel.unary_unary(
            f"/tmc.v1.{path}",
            request_serializer=lambda m: m if isinstance(m, bytes) else m.SerializeToString(),
            response_deserializer=response_class.FromString,
        )
        try:
            return rpc(request, metadata=metadata, timeout=timeout)
        except grpc.RpcError as exc:
            return refusal(exc)


STREAMS = {
    f"{name}/{method.name}"
    for name, service in SERVICES.items()
    for method in service.methods
    if method.server_streaming
}


def refusal(exc: Any) -> tuple[str, str, str]:
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    for name, value in exc.trailing_metadata() or ():
        if name == "grpc-status-details-bin":
            for detail in status_pb2.Status.FromString(value).details:
                for known in (info, bad):
                    if detail.Is(known.DESCRIPTOR):
                        detail.Unpack(known)
    return exc.code().name, info.reason, bad.field_violations[0].field if bad.field_violations else ""


@pytest.fixture
def api(center: RunningCenter, channel: grpc.Channel) -> Api:
    return Api(center, channel)


def a_message(**changes: Any) -> message_pb2.PrepareRequest:
    values = {"topic": "order.paid", "key": os.urandom(8).hex(), "body": b"x", "attempt_id": os.urandom(16)}
    return message_pb2.PrepareRequest(**(values | changes))


def a_publish(**changes: Any) -> message_pb2.PublishRequest:
    values = {"topic": "order.paid", "key": os.urandom(8).hex(), "body": b"x", "attempt_id": os.urandom(16)}
    return message_pb2.PublishRequest(**(values | changes))


def decide(api: Api, method: str, message_id: str, metadata: Any = None) -> Any:
    """method: Submit or Rollback."""
    kind = {"Submit": message_pb2.SubmitRequest, "Rollback": message_pb2.RollbackRequest}[method]
    return api(f"MessageService/{method}", kind(message_id=message_id), metadata)


PREPARE = "MessageService/Prepare"
FIELD = ("INVALID_ARGUMENT", "FIELD_INVALID")


class TestBadInput:
    @pytest.mark.parametrize(
        ("changes", "expected"),
        [
            ({"topic": ""}, (*FIELD, "topic")),
            ({"topic": "a b"}, (*FIELD, "topic")),
            ({"topic": "x" * 129}, (*FIELD, "topic")),
            ({"topic": "no.such"}, ("NOT_FOUND", "TOPIC_UNKNOWN", "")),
            ({"key": ""}, (*FIELD, "key")),
            ({"key": " outer"}, (*FIELD, "key")),
            ({"key": "a\nb"}, (*FIELD, "key")),
            ({"key": "x" * 129}, (*FIELD, "key")),
            ({"body": b"x" * 10_001}, (*FIELD, "body")),
            ({"content_type": "x" * 101}, (*FIELD, "content_type")),
            ({"headers": {"a b": ""}}, (*FIELD, "headers")),
            ({"headers": {"": "x"}}, (*FIELD, "headers")),
            ({"headers": {"a": "\r\n"}}, (*FIELD, "headers")),
            ({"headers": {f"h{i}": "" for i in range(65)}}, (*FIELD, "headers")),
            ({"headers": {"a": "x" * 8192}}, (*FIELD, "headers")),
            ({"attempt_id": b""}, (*FIELD, "attempt_id")),
            ({"attempt_id": b"x" * 17}, (*FIELD, "attempt_id")),
            ({"delay_ms": -1}, (*FIELD, "delay_ms")),
            ({"delay_ms": 2**62}, (*FIELD, "delay_ms")),
        ],
    )
    def test_a_bad_field_of_a_message_is_named(self, api: Api, changes: Any, expected: Any) -> None:
        assert api(PREPARE, a_message(**changes)) == expected
        assert api("MessageService/Publish", a_publish(**changes)) == expected
        prepared = message_pb2.PrepareManyRequest(items=[a_message(), a_message(**changes)])
        published = message_pb2.PublishManyRequest(items=[a_publish(), a_publish(**changes)])
        for many in (api("MessageService/PrepareMany", prepared), api("MessageService/PublishMany", published)):
            assert many.results[0].message_id
            error = many.results[1].error
            assert (types_pb2.Reason.Name(error.reason), error.field) == expected[1:]

    def test_a_ledger_id_has_16_bytes(self, api: Api) -> None:
        assert api(PREPARE, a_message(ledger_id=b"short")) == (*FIELD, "ledger_id")

    @pytest.mark.parametrize("time_ms", [-1, 86_400_001])
    def test_a_local_transaction_takes_no_longer_than_a_day(self, api: Api, time_ms: int) -> None:
        assert api(PREPARE, a_message(transaction_time_ms=time_ms)) == (*FIELD, "transaction_time_ms")

    def test_a_foreign_topic_looks_like_a_missing_one(self, api: Api, center: RunningCenter) -> None:
        assert api(PREPARE, a_message(), center.as_app("stranger"))[:2] == ("NOT_FOUND", "TOPIC_UNKNOWN")

    def test_the_same_attempt_with_another_content(self, api: Api) -> None:
        first = a_message()
        assert api(PREPARE, first).message_id == api(PREPARE, first).message_id
        first.body = b"other"
        assert api(PREPARE, first)[:2] == ("ALREADY_EXISTS", "CONTENT_DIFFERS")

    def test_another_attempt_with_the_key(self, api: Api) -> None:
        first = a_message()
        message_id = api(PREPARE, first).message_id
        assert api(PREPARE, a_message(key=first.key))[:2] == ("ABORTED", "KEY_IN_PROGRESS")
        api("MessageService/Submit", message_pb2.SubmitRequest(message_id=message_id))
        assert api(PREPARE, a_message(key=first.key))[:2] == ("ALREADY_EXISTS", "KEY_COMMITTED")

    def test_decisions_in_the_wrong_order(self, api: Api) -> None:
        one, two = (api(PREPARE, a_message()).message_id for _ in range(2))
        assert decide(api, "Submit", one).state == types_pb2.MESSAGE_STATE_COMMITTED
        assert decide(api, "Rollback", two).state == types_pb2.MESSAGE_STATE_ROLLED_BACK
        for _ in range(2):
            assert decide(api, "Rollback", one)[:2] == ("FAILED_PRECONDITION", "ALREADY_COMMITTED")
            assert decide(api, "Submit", two)[:2] == ("FAILED_PRECONDITION", "ALREADY_ROLLED_BACK")

    @pytest.mark.parametrize("message_id", ["1-1-00-5", "99-1-00-5"])
    def test_unknown_messages(self, api: Api, center: RunningCenter, message_id: str) -> None:
        assert decide(api, "Submit", message_id)[0] == "NOT_FOUND"
        assert decide(api, "Rollback", message_id)[0] == "NOT_FOUND"
        assert api("MessageService/GetMessage", message_pb2.GetMessageRequest(message_id=message_id))[0] == "NOT_FOUND"
        ack = consumption_pb2.AckRequest(message_id=message_id)
        assert api("ConsumptionService/Ack", ack, center.as_app("coupons"))[0] == "NOT_FOUND"

    @pytest.mark.parametrize("message_id", ["nonsense", "1-1-99-5", "1-1-00-5 ", "'; DROP TABLE tmc_app; --"])
    def test_what_is_no_message_id(self, api: Api, center: RunningCenter, message_id: str) -> None:
        refused = (*FIELD, "message_id")
        assert decide(api, "Submit", message_id) == decide(api, "Rollback", message_id) == refused
        assert api("MessageService/GetMessage", message_pb2.GetMessageRequest(message_id=message_id)) == refused
        ack = consumption_pb2.AckRequest(message_id=message_id)
        assert api("ConsumptionService/Ack", ack, center.as_app("coupons")) == refused
        for method, request in (
            ("GetMessageDetail", admin_pb2.GetMessageDetailRequest(message_id=message_id)),
            ("CheckNow", admin_pb2.CheckNowRequest(message_id=message_id)),
        ):
            assert api(f"AdminService/{method}", request) == refused

    def test_acks_of_strangers_and_of_the_wrong_tag(self, api: Api, center: RunningCenter) -> None:
        message_id = api("MessageService/Publish", a_publish()).message_id
        ack = consumption_pb2.AckRequest(message_id=message_id)
        for metadata in (center.as_app("stranger"), center.as_app("orders"), center.as_app("coupons", tag="staging")):
            assert api("ConsumptionService/Ack", ack, metadata)[:2] == ("NOT_FOUND", "SUBSCRIPTION_UNKNOWN")
        assert api("ConsumptionService/Ack", ack, center.as_app("coupons")) == consumption_pb2.AckResponse()

    @pytest.mark.parametrize(
        ("path", "request_", "field"),
        [
            ("Nack", consumption_pb2.NackRequest(attempt=0), "attempt"),
            ("Nack", consumption_pb2.NackRequest(attempt=1, retry_after_ms=-1), "retry_after_ms"),
            ("Extend", consumption_pb2.ExtendRequest(attempt=1, extend_ms=0), "extend_ms"),
            ("Extend", consumption_pb2.ExtendRequest(attempt=1, extend_ms=2**62), "extend_ms"),
        ],
    )
    def test_bad_fields_about_a_consumption(
        self, api: Api, center: RunningCenter, path: str, request_: Any, field: str
    ) -> None:
        request_.message_id = api("MessageService/Publish", a_publish()).message_id
        assert api(f"ConsumptionService/{path}", request_, center.as_app("coupons")) == (*FIELD, field)

    @pytest.mark.parametrize("count", [0, 1001])
    def test_batches_have_1_to_1000_items(self, api: Api, count: int) -> None:
        items = [message_pb2.SubmitRequest()] * count
        assert api("MessageService/SubmitMany", message_pb2.SubmitManyRequest(items=items)) == (*FIELD, "items")

    def test_a_request_larger_than_the_server_takes(self, api: Api) -> None:
        assert api(PREPARE, a_message(body=b"x" * (18 << 20)))[0] == "RESOURCE_EXHAUSTED"

    def test_fifty_parallel_copies_are_one_message(self, api: Api) -> None:
        request, answers = a_message(), []
        threads = [threading.Thread(target=lambda: answers.append(api(PREPARE, request))) for _ in range(50)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({answer.message_id for answer in answers}) == 1

    def test_of_fifty_clicks_one_wins_and_the_others_are_refused(self, api: Api) -> None:
        key, answers = os.urandom(8).hex(), []

        def attempt() -> None:
            answers.append(api(PREPARE, a_message(key=key)))

        threads = [threading.Thread(target=attempt) for _ in range(50)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        won = [answer for answer in answers if not isinstance(answer, tuple)]
        assert len(won) == 1
        assert all(answer[:2] == ("ABORTED", "KEY_IN_PROGRESS") for answer in answers if isinstance(answer, tuple))

    def test_one_millisecond_deadlines_leave_nothing_half_done(self, api: Api) -> None:
        requests = [a_message() for _ in range(100)]
        for request in requests:
            answer = api(PREPARE, request, timeout=0.001)
            assert not isinstance(answer, tuple) or answer[0] == "DEADLINE_EXCEEDED"
        for request in requests:
            assert api(PREPARE, request).state == types_pb2.MESSAGE_STATE_PREPARED
            found = api("MessageService/GetMessage", message_pb2.GetMessageRequest(topic="order.paid", key=request.key))
            assert found.body == request.body

    def test_cancelled_calls_leave_the_others_alone(
        self, api: Api, channel: grpc.Channel, center: RunningCenter
    ) -> None:
        stub = message_pb2_grpc.MessageServiceStub(channel)
        metadata = center.as_app("orders")
        calls = [stub.Prepare.future(a_message(), metadata=metadata, timeout=10) for _ in range(40)]
        for call in calls[::2]:
            call.cancel()
        assert all(call.result().message_id for call in calls[1::2])

    def test_open_messages_are_limited(self, api: Api, center: RunningCenter) -> None:
        topic = admin_pb2.RegisterTopicRequest(name="small", owner="orders", open_limit=3)
        api("AdminService/RegisterTopic", topic)

        def prepare() -> Any:
            answer = api(PREPARE, a_message(topic="small"))
            return None if isinstance(answer, tuple) else answer

        # Until the next count of the table, a message may count twice: in the table, and as made since.
        ids = [eventually(prepare).message_id for _ in range(3)]
        assert api(PREPARE, a_message(topic="small"))[:2] == ("RESOURCE_EXHAUSTED", "OPEN_LIMIT")
        api("MessageService/Rollback", message_pb2.RollbackRequest(message_id=ids[0]))
        # A count of the table that began before the rollback holds until the next one.
        eventually(prepare)


class TestIdentity:
    @pytest.mark.parametrize("path", sorted(RIGHTS))
    @pytest.mark.parametrize("who", ["nobody", "wrong key", "unknown app", "the other kind"])
    def test_no_rpc_without_its_right(self, center: RunningCenter, path: str, who: str) -> None:
        right = RIGHTS[path]
        metadata = {
            "nobody": [],
            "wrong key": [("tmc-app", "orders"), ("authorization", "Bearer wrong")],
            "unknown app": [("tmc-app", "nobody"), ("authorization", f"Bearer {center.keys['orders']}")],
            "the other kind": center.operator if right.role is None else center.as_app("orders"),
        }[who]
        with a_connection(center) as channel, pytest.raises(grpc.RpcError) as caught:
            call = channel.stream_stream(f"/{path}") if path in STREAMS else channel.unary_unary(f"/{path}")
            answer = call(iter([b""]) if path in STREAMS else b"", metadata=metadata, timeout=10)
            list(answer)
        assert caught.value.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)

    def test_two_keys_work_during_a_rotation(self, api: Api, center: RunningCenter) -> None:
        old = center.keys["stranger"]
        new = api("AdminService/AddAppKey", admin_pb2.AddAppKeyRequest(id="stranger")).key

        def works(key: str) -> bool:
            metadata = [("tmc-app", "stranger"), ("authorization", f"Bearer {key}")]
            answer = api(
                "ConsumptionService/DescribeSubscriptions", consumption_pb2.DescribeSubscriptionsRequest(), metadata
            )
            return not isinstance(answer, tuple)

        assert works(old)
        assert works(new)
        api("AdminService/DropOldAppKey", admin_pb2.DropOldAppKeyRequest(id="stranger"))
        assert (works(old), works(new)) == (False, True)
        center.keys["stranger"] = new

    def test_a_key_of_one_environment_reaches_nothing_of_another(self, api: Api, center: RunningCenter) -> None:
        made = api("AdminService/AddAppKey", admin_pb2.AddAppKeyRequest(id="orders", tag="staging"))
        bound = [("tmc-app", "orders"), ("authorization", f"Bearer {made.key}")]
        elsewhere = api(PREPARE, a_message())  # in the topic's default environment
        named, other = api(PREPARE, a_message(), [*bound, ("tmc-tag", "staging")]), [*bound, ("tmc-tag", "default")]
        refused = ("PERMISSION_DENIED", "KEY_OF_ANOTHER_TAG", "")
        assert [api(PREPARE, a_message(), other), api("MessageService/DescribeChecks", b"", other)] == [refused] * 2
        unnamed = api(PREPARE, a_message(), bound)
        for mine in (named, unnamed):
            seen = api("MessageService/GetMessage", message_pb2.GetMessageRequest(message_id=mine.message_id), bound)
            assert seen.producer_tag == "staging"
        unknown = ("NOT_FOUND", "MESSAGE_UNKNOWN", "")
        by_id = message_pb2.GetMessageRequest(message_id=elsewhere.message_id)
        assert api("MessageService/GetMessage", by_id, bound) == unknown
        for method in ("Submit", "Rollback"):
            assert decide(api, method, elsewhere.message_id, bound) == unknown
        assert api("MessageService/GetMessage", by_id).state == types_pb2.MESSAGE_STATE_PREPARED
        assert api("MessageService/Submit", message_pb2.SubmitRequest(message_id=named.message_id), bound).message_id
        (orders,) = [app for app in api("AdminService/ListApps", b"").apps if app.id == "orders"]
        assert (orders.keys, [(each.tag, each.keys) for each in orders.tag_keys]) == (1, [("staging", 1)])

    @pytest.mark.parametrize("method", ["Prepare", "Publish"])
    def test_only_an_operator_sends_a_replay_and_only_as_a_whole(
        self, api: Api, center: RunningCenter, method: str
    ) -> None:
        ours, path = center.as_app("orders"), f"MessageService/{method}"
        make = {"Prepare": a_message, "Publish": a_publish}[method]
        for name in ("tmc-replay-of", "Tmc-Replay-Of", "TMC-id"):
            assert api(path, make(headers={name: "1-1-04-5"}), ours) == (*FIELD, "headers")
        replayed = {"tmc-replay-of": "1-1-04-5"}
        for wrong in ("", "Bearer wrong", f"Bearer {center.keys['orders']}"):
            refused = api(path, make(headers=replayed), [*ours, ("tmc-operator", wrong)])
            assert refused == ("UNAUTHENTICATED", "ADMIN_ONLY", "")
        operator = [*ours, ("tmc-operator", f"Bearer {center.token}")]
        answer = api(path, make(headers=replayed), operator)
        if method == "Prepare":
            assert answer == (*FIELD, "headers")
        else:
            assert answer.state == types_pb2.MESSAGE_STATE_COMMITTED

    @pytest.mark.parametrize(
        ("method", "request_class", "field"),
        [
            ("ListApps", admin_pb2.ListAppsRequest, "apps"),
            ("ListTopics", admin_pb2.ListTopicsRequest, "topics"),
            ("ListSubscriptions", admin_pb2.ListSubscriptionsRequest, "subscriptions"),
            ("ListServers", admin_pb2.ListServersRequest, "servers"),
        ],
    )
    def test_lists_have_pages(self, api: Api, method: str, request_class: Any, field: str) -> None:
        whole = getattr(api(f"AdminService/{method}", request_class(page_size=1000)), field)
        found, token = [], ""
        while True:
            page = api(f"AdminService/{method}", request_class(page_size=1, page_token=token))
            found += getattr(page, field)
            token = page.next_page_token
            if not token:
                break
        assert whole
        assert len(found) == len(whole)
        if field != "servers":  # whose heartbeats go on
            assert found == list(whole)
        assert api(f"AdminService/{method}", request_class(page_token="junk")) == (*FIELD, "page_token")

    def test_the_command_line_shows_all_pages_as_one(self, api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tmc_cli.admin.calling.PAGE_SIZE", 1)
        settings = {"TMC_ADDRESS": api.center.address, "TMC_ADMIN_TOKEN": api.center.token}
        shown = json.loads(CliRunner().invoke(admin_app, ["list-apps"], env=settings).stdout)
        assert list(shown) == ["apps"]
        assert (
            len(shown["apps"]) == len(api("AdminService/ListApps", admin_pb2.ListAppsRequest(page_size=1000)).apps) > 1
        )

    def test_the_shard_map_is_whole(self, api: Api) -> None:
        shards = api("AdminService/GetShardMap", admin_pb2.GetShardMapRequest()).shards
        assert [place.shard for place in shards] == list(range(32))

    def test_subscriptions_are_described_for_app_and_tag(self, api: Api, center: RunningCenter) -> None:
        def topics(app: str, tag: str = "") -> list[str]:
            request = consumption_pb2.DescribeSubscriptionsRequest()
            answer = api("ConsumptionService/DescribeSubscriptions", request, center.as_app(app, tag))
            return [subscription.topic for subscription in answer.subscriptions]

        assert topics("coupons") == topics("coupons", "default") == ["order.paid"]
        assert topics("coupons", "staging") == topics("stranger") == []

    def test_one_batch_over_two_databases(self, tmp_path) -> None:
        """Each database has its own lanes; a batch whose keys spread over both is answered item by item, in order."""
        halves = [(f"sqlite:///{tmp_path}/a.db", 0, 15), (f"sqlite:///{tmp_path}/b.db", 16, 31)]
        ranges = [{"url": url, "first": first, "last": last} for url, first, last in halves]
        with (
            RunningCenter(halves[0][0], store={"shards": ranges}) as split,
            grpc.insecure_channel(split.address) as channel,
        ):
            api = Api(split, channel)
            api("AdminService/RegisterTopic", admin_pb2.RegisterTopicRequest(name="wide", owner="orders", spread=32))
            items = [a_message(topic="wide", key=f"k{i}") for i in range(100)]
            prepared = api("MessageService/PrepareMany", message_pb2.PrepareManyRequest(items=items))
            ids = [result.message_id for result in prepared.results]
            shards = {int(message_id.split("-")[2]) for message_id in ids}
            assert min(shards) < 16 <= max(shards)
            submits = [message_pb2.SubmitRequest(message_id=message_id) for message_id in ids]
            submitted = api("MessageService/SubmitMany", message_pb2.SubmitManyRequest(items=submits))
            assert [result.message_id for result in submitted.results] == ids
            for key, message_id in (("k0", ids[0]), ("k99", ids[99])):
                found = api("MessageService/GetMessage", message_pb2.GetMessageRequest(topic="wide", key=key))
                assert (found.message_id, found.state) == (message_id, types_pb2.MESSAGE_STATE_COMMITTED)

    def test_an_app_over_its_rate_is_refused_and_others_are_not(self, tmp_path) -> None:
        with RunningCenter(f"sqlite:///{tmp_path}/c.db", limits={"items_per_second": 5}) as limited:
            with grpc.insecure_channel(limited.address) as channel:
                api = Api(limited, channel)
                answers = [api(PREPARE, a_message()) for _ in range(20)]
                refused = [answer[:2] for answer in answers if isinstance(answer, tuple)]
                assert refused
                assert set(refused) == {("RESOURCE_EXHAUSTED", "RATE_LIMITED")}
                ack = consumption_pb2.AckRequest(message_id="1-1-00-1")
                assert api("ConsumptionService/Ack", ack, limited.as_app("coupons"))[0] == "NOT_FOUND"

    def test_a_bad_tag_is_named(self, api: Api, center: RunningCenter) -> None:
        assert api(PREPARE, a_message(), center.as_app("orders", tag="a b")) == (*FIELD, "tmc-tag")


class TestAdmin:
    def test_registering_again_is_the_same_and_other_settings_are_refused(self, api: Api) -> None:
        request = admin_pb2.RegisterAppRequest(id="twice", alert_email="a@example.org")
        assert api("AdminService/RegisterApp", request).key
        assert not api("AdminService/RegisterApp", request).key
        request.alert_email = "b@example.org"
        assert api("AdminService/RegisterApp", request)[:2] == ("ALREADY_EXISTS", "NAME_TAKEN")
        topic = admin_pb2.RegisterTopicRequest(name="t.twice", owner="twice", spread=2)
        assert api("AdminService/RegisterTopic", topic) == api("AdminService/RegisterTopic", topic)
        topic.spread = 3
        assert api("AdminService/RegisterTopic", topic)[:2] == ("ALREADY_EXISTS", "NAME_TAKEN")

    def test_subscriptions_of_what_is_not_there(self, api: Api) -> None:
        missing_app = admin_pb2.RegisterSubscriptionRequest(topic="order.paid", app="nobody")
        missing_topic = admin_pb2.RegisterSubscriptionRequest(topic="nothing", app="coupons")
        assert api("AdminService/RegisterSubscription", missing_app)[:2] == ("NOT_FOUND", "APP_UNKNOWN")
        assert api("AdminService/RegisterSubscription", missing_topic)[:2] == ("NOT_FOUND", "TOPIC_UNKNOWN")
        gone = admin_pb2.RemoveSubscriptionRequest(topic="order.paid", app="orders")
        assert api("AdminService/RemoveSubscription", gone)[:2] == ("NOT_FOUND", "SUBSCRIPTION_UNKNOWN")

    def test_pages_show_every_message_once(self, api: Api) -> None:
        api("AdminService/RegisterTopic", admin_pb2.RegisterTopicRequest(name="paged", owner="orders", spread=5))
        keys = {f"k{i}" for i in range(57)}
        for key in keys:
            api("MessageService/Publish", a_publish(topic="paged", key=key))
        seen, token = [], ""
        while True:
            page = api(
                "AdminService/ListMessages",
                admin_pb2.ListMessagesRequest(topic="paged", page_size=10, page_token=token),
            )
            seen += [message.key for message in page.messages]
            token = page.next_page_token
            if not token:
                break
        assert sorted(seen) == sorted(keys)

    def test_a_failed_delivery_is_looked_at_and_reactivated(self, api: Api, center: RunningCenter) -> None:
        channel, requests = api.channel, iter([consumption_pb2.SubscribeRequest(topics=["order.paid"], credit=1000)])
        stream = channel.stream_stream(
            "/tmc.v1.ConsumptionService/Subscribe",
            request_serializer=lambda m: m.SerializeToString(),
            response_deserializer=consumption_pb2.SubscribeResponse.FromString,
        )(_staying(requests), metadata=center.as_app("coupons"), timeout=30)
        message_id = api("MessageService/Publish", a_publish(key="to-fail")).message_id
        delivery = next(d for response in stream for d in response.deliveries if d.message_id == message_id)
        nack = consumption_pb2.NackRequest(
            message_id=message_id, attempt=delivery.attempt, error="no stock", reject=True
        )
        api("ConsumptionService/Nack", nack, center.as_app("coupons"))
        detail = api(
            "AdminService/GetMessageDetail", admin_pb2.GetMessageDetailRequest(topic="order.paid", key="to-fail")
        )
        assert [c.state for c in detail.consumptions] == [types_pb2.CONSUMPTION_STATE_FAILED]
        assert [a.error for a in detail.failed_attempts] == ["no stock"]
        listed = api(
            "AdminService/ListConsumptions",
            admin_pb2.ListConsumptionsRequest(
                topic="order.paid", app="coupons", state=types_pb2.CONSUMPTION_STATE_FAILED
            ),
        )
        assert [c.message_id for c in listed.consumptions] == [message_id]
        again = admin_pb2.ReactivateConsumptionRequest(message_id=message_id, app="coupons", reason="stock is back")
        assert api("AdminService/ReactivateConsumption", again).state == types_pb2.CONSUMPTION_STATE_SCHEDULED
        assert api("AdminService/ReactivateConsumption", again)[:2] == ("FAILED_PRECONDITION", "CONSUMPTION_CLOSED")
        second = next(d for response in stream for d in response.deliveries if d.message_id == message_id)
        assert second.attempt == delivery.attempt + 1
        now = admin_pb2.DeliverNowRequest(message_id=message_id, app="coupons", reason="stock is back")
        closed = ("FAILED_PRECONDITION", "CONSUMPTION_CLOSED")
        assert api("AdminService/DeliverNow", now)[:2] == closed, "it is with its consumer"
        later = consumption_pb2.NackRequest(
            message_id=message_id, attempt=second.attempt, error="not yet", retry_after_ms=3_600_000
        )
        api("ConsumptionService/Nack", later, center.as_app("coupons"))
        assert api("AdminService/DeliverNow", now).state == types_pb2.CONSUMPTION_STATE_SCHEDULED
        third = next(d for response in stream for d in response.deliveries if d.message_id == message_id)
        assert third.attempt == second.attempt + 1
        stream.cancel()


def _staying(requests: Iterator[Any]) -> Iterator[Any]:
    """A request stream that stays open."""
    yield from requests
    threading.Event().wait(30)


class TestProtocol:
    def test_health_speaks_for_every_service(self, channel: grpc.Channel) -> None:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in (*SERVICES, ""):
            assert stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5).status == 1

    @pytest.mark.parametrize("version", ["v1", "v1alpha"])
    def test_reflection_lists_and_describes(self, channel: grpc.Channel, version: str) -> None:
        call = channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        asked = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol="tmc.v1.MessageService"),
        ]
        listed, described = call(iter(asked), timeout=5)
        names = {service.name for service in listed.list_services_response.service}
        assert names >= {*SERVICES, "grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection"}
        assert described.file_descriptor_response.file_descriptor_proto

    def test_bytes_that_are_no_request(self, api: Api, center: RunningCenter) -> None:
        noise = random.Random(1)
        for path in RIGHTS:
            if path in STREAMS:
                continue
            for _ in range(20):
                answer = api(path.removeprefix("tmc.v1."), b"\x0a\xff" + noise.randbytes(noise.randrange(40)))
                assert answer[0] == "INVALID_ARGUMENT"

    def test_generated_calls_end_in_documented_statuses(self, api: Api, center: RunningCenter) -> None:
        """Calls over every RPC and field, with values that others stumbled over.

        No call may lock the callers out, or all later ones would test the login only.
        """
        dice, calls, locked_out, documented = random.Random(7), 0, 0, set(types_pb2.Reason.keys())
        known = [api("MessageService/Publish", a_publish()).message_id for _ in range(3)]
        methods = [m for service in SERVICES.values() for m in service.methods if not m.server_streaming]
        for round_ in range(180 if LONG else 60):
            for method in methods:
                request = _nonsense(method, dice, known)
                if method.name in ("DisableApp", "DropOldAppKey") and request.id in ("orders", "coupons"):
                    request.id = "stranger"
                if method.name == "RotateOperatorToken":
                    request.name = request.name or "nobody"  # or it takes the token that this test shows
                path = f"{method.containing_service.name}/{method.name}"
                of_app = RIGHTS[f"tmc.v1.{path}"].role is None
                metadata = center.as_app("orders") if of_app else center.operator
                if method.containing_service.name == "ConsumptionService" and round_ % 2:
                    metadata = center.as_app("coupons")
                answer = api(path, request, metadata)
                calls += 1
                if isinstance(answer, tuple):
                    locked_out += answer[0] == "UNAUTHENTICATED"
                    assert answer[0] not in ("UNKNOWN", "INTERNAL"), (path, request)
                    assert answer[1] in documented, (path, request, answer)
                for result in getattr(answer, "results", ()):
                    assert result.error.code not in (2, 13), (path, request)
        assert calls >= (5000 if LONG else 1500)
        assert locked_out == 0


_TEXTS = [
    "",
    "order.paid",
    "orders",
    "coupons",
    "x" * 5000,
    "a b",
    "\x00",
    "\r\n",
    "'; DROP TABLE tmc_app; --",
    "é",
    "\u202e",
    "%s%n",
    "../..",
    "0-0",
    "-1",
    "default",
    "k",
    " ",
    "\U0001f600" * 60,
    "*",
    "#",
]
_INTS = [0, 1, -1, 2, 31, 32, 1000, 1001, 2**31 - 1, -(2**31)]
_LONGS = [*_INTS, 2**53, 2**63 - 1, -(2**63), 86_400_000, 10_000]
_BYTES = [b"", b"x" * 16, b"\xff" * 16, b"x" * 15, b"\x00" * 20_000]


def _nonsense(method: MethodDescriptor, dice: random.Random, known: list[str]) -> Any:
    return _fill(message_factory.GetMessageClass(method.input_type)(), dice, known)


def _fill(message: Any, dice: random.Random, known: list[str]) -> Any:
    for field in message.DESCRIPTOR.fields:
        if dice.random() < 0.25:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            for _ in range(dice.randrange(3)):
                getattr(message, field.name)[dice.choice(_TEXTS)] = dice.choice(_TEXTS)
        elif field.is_repeated:
            for _ in range(dice.choice([0, 1, 2, 7])):
                if field.message_type is not None:
                    _fill(getattr(message, field.name).add(), dice, known)
                else:
                    getattr(message, field.name).append(_value(field, dice, known))
        elif field.message_type is not None:
            _fill(getattr(message, field.name), dice, known)
        else:
            setattr(message, field.name, _value(field, dice, known))
    return message


def _value(field: FieldDescriptor, dice: random.Random, known: list[str]) -> Any:
    kinds = FieldDescriptor
    if field.cpp_type == kinds.CPPTYPE_STRING:
        if field.type == kinds.TYPE_BYTES:
            return dice.choice(_BYTES)
        return dice.choice([*_TEXTS, *known])
    if field.cpp_type == kinds.CPPTYPE_BOOL:
        return dice.random() < 0.5
    if field.cpp_type == kinds.CPPTYPE_INT64:
        return dice.choice(_LONGS)
    if field.cpp_type == kinds.CPPTYPE_ENUM:
        return dice.choice([0, 1, 2, 3, 4, 99])
    return dice.choice(_INTS)


def test_the_command_line_changes_single_limits_of_a_retry_policy(api: Api) -> None:
    api.center.subscribe("limited", "coupons")
    settings = {"TMC_ADDRESS": api.center.address, "TMC_ADMIN_TOKEN": api.center.token}

    def subscribe(*options: str) -> dict[str, Any]:
        made = CliRunner().invoke(admin_app, ["subscribe", "limited", "coupons", *options], env=settings)
        assert made.exit_code == 0, made.output
        retry: dict[str, Any] = json.loads(made.stdout)["retry"]
        return retry

    before = subscribe("--max-retry", "5")
    aged = subscribe("--max-age-ms", "86400000", "--jitter-percent", "20")
    assert aged == {**before, "max_age_ms": "86400000", "jitter_percent": 20}
    unlimited = subscribe("--max-age-ms", "0")
    assert unlimited == {**before, "jitter_percent": 20}
    refused = CliRunner().invoke(
        admin_app, ["subscribe", "limited", "coupons", "--jitter-percent", "101"], env=settings
    )
    assert refused.exit_code == 1
    assert "retry.jitter_percent must be 0 to 100, not 101" in refused.stderr
