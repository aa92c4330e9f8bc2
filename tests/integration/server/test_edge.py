"""The server's edge over real connections: who is refused before the request is read, who is slowed, what ends with a key."""

from __future__ import annotations

import gc
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.integration.server.test_api import BAD, STREAMS, Api, a_connection, a_message, a_publish, refusal
from tests.support.center import RunningCenter
from tests.support.dose import LONG
from tmc_common.protocol import admin_pb2, consumption_pb2, message_pb2
from tmc_server.domain.rights import RIGHTS
from tmc_storm.eventually import eventually

WRONG_KEY = [("tmc-app", "orders"), ("authorization", "Bearer wrong")]


@pytest.fixture(scope="module")
def center(tmp_path_factory) -> Iterator[RunningCenter]:
    folder = tmp_path_factory.mktemp("edge")
    with RunningCenter(f"sqlite:///{folder}/c.db", limits={"streams": 2}) as running:
        yield running


@pytest.fixture
def channel(center: RunningCenter) -> Iterator[grpc.Channel]:
    """Of its own: a connection that has failed often is answered late."""
    with grpc.insecure_channel(center.address, [("grpc.use_local_subchannel_pool", 1)]) as opened:
        yield opened


@contextmanager
def _never_sent() -> Iterator[Iterator[bytes]]:
    """A request that is not sent before the answer is there."""
    answered = threading.Event()

    def requests() -> Iterator[bytes]:
        answered.wait(30)
        yield b""

    try:
        yield requests()
    finally:
        answered.set()


class TestBeforeTheRequestIsRead:
    @pytest.mark.parametrize("service", ["MessageService", "ConsumptionService", "AdminService"])
    def test_a_caller_without_a_key_is_refused_before_it_has_sent_a_request(
        self, center: RunningCenter, service: str
    ) -> None:
        paths = [path for path in RIGHTS if f".{service}/" in path]
        for path in paths:
            with grpc.insecure_channel(center.address, [("tests.own", path)]) as own, _never_sent() as requests:
                kind = own.stream_stream if path in STREAMS else own.stream_unary
                with pytest.raises(grpc.RpcError) as caught:
                    list(kind(f"/{path}")(requests, metadata=WRONG_KEY, timeout=20) or ())
                assert caught.value.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)

    def test_the_key_is_looked_at_before_any_other_metadata(self, center: RunningCenter, channel: grpc.Channel) -> None:
        answer = Api(center, channel)("MessageService/Prepare", b"", [*WRONG_KEY, ("tmc-tag", "a b")])
        assert answer[:2] == ("UNAUTHENTICATED", "CREDENTIALS_INVALID")

    def test_a_refused_request_leaves_nothing_to_the_garbage_collector(
        self, center: RunningCenter, channel: grpc.Channel
    ) -> None:
        def kept() -> int:
            return sum(
                type(each) is grpc.aio.AbortError and each.__traceback__ is not None for each in gc.get_objects()
            )

        api = Api(center, channel)
        gc.collect()
        gc.disable()
        try:
            for metadata in (WRONG_KEY, center.as_app("orders")):
                for _ in range(10):
                    assert api("MessageService/Prepare", a_message(key=""), metadata)[0] != "OK"
            eventually(lambda: kept() <= 1)  # of twenty; gRPC keeps the newest for a while
        finally:
            gc.enable()

    def test_health_and_reflection_take_short_requests_only(self, channel: grpc.Channel) -> None:
        with pytest.raises(grpc.RpcError) as caught:
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="x" * 5000), timeout=20)
        assert refusal(caught.value)[:2] == ("INVALID_ARGUMENT", "MALFORMED_REQUEST")
        with pytest.raises(grpc.RpcError) as caught:
            list(
                channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")(
                    iter([b"\x0a" + b"\x88\x27" + b"x" * 5000]), timeout=20
                )
            )
        assert refusal(caught.value)[:2] == ("INVALID_ARGUMENT", "MALFORMED_REQUEST")

    @pytest.mark.parametrize("knows_key", [False, True])
    def test_compressed_requests_are_refused_unread(self, center: RunningCenter, knows_key: bool) -> None:
        """A few kilobytes could swell to the limit of a message."""
        own = [("tests.own", f"gzip {knows_key}")]
        with grpc.insecure_channel(center.address, own, compression=grpc.Compression.Gzip) as channel:
            for path in ("/tmc.v1.MessageService/Publish", "/grpc.health.v1.Health/Check"):
                call = channel.unary_unary(path)
                with pytest.raises(grpc.RpcError) as caught:
                    call(b"\0" * 100_000, metadata=center.as_app("orders") if knows_key else WRONG_KEY, timeout=20)
                assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
                assert "ompress" in caught.value.details()

    def test_a_method_that_is_not_there_is_unimplemented(self, channel: grpc.Channel) -> None:
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary("/tmc.v1.MessageService/NoSuchMethod")(b"", timeout=20)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


class TestBudgets:
    def test_invalid_single_calls_are_counted_like_valid_ones(self, tmp_path) -> None:
        with (
            RunningCenter(f"sqlite:///{tmp_path}/c.db", limits={"items_per_second": 5}) as limited,
            grpc.insecure_channel(limited.address) as channel,
        ):
            api = Api(limited, channel)
            answers = [api("MessageService/Prepare", a_message(key=""))[1] for _ in range(20)]
            assert set(answers) == {"FIELD_INVALID", "RATE_LIMITED"}
            assert api("MessageService/Prepare", a_message(), limited.as_app("stranger"))[1] == "TOPIC_UNKNOWN"

    @pytest.mark.parametrize(
        ("path", "app"),
        [
            ("MessageService/GetMessage", "orders"),
            ("MessageService/DescribeChecks", "orders"),
            ("ConsumptionService/DescribeSubscriptions", "coupons"),
        ],
    )
    def test_calls_that_carry_no_items_have_a_rate_too(self, tmp_path, path: str, app: str) -> None:
        with (
            RunningCenter(f"sqlite:///{tmp_path}/c.db", limits={"calls_per_second": 3}) as limited,
            grpc.insecure_channel(limited.address) as channel,
        ):
            api = Api(limited, channel)
            answers = [api(path, b"", limited.as_app(app)) for _ in range(20)]
            refused = [answer[:2] for answer in answers if isinstance(answer, tuple) and answer[1] == "RATE_LIMITED"]
            assert ("RESOURCE_EXHAUSTED", "RATE_LIMITED") in refused
            assert len(refused) <= 10  # each was held back until the next one may be answered
            assert not isinstance(api(path, b"", limited.as_app("stranger")), tuple) or path.endswith("GetMessage")

    def test_a_batch_of_more_fields_than_any_valid_one_is_not_decoded(
        self, center: RunningCenter, channel: grpc.Channel
    ) -> None:
        answer = Api(center, channel)("MessageService/PrepareMany", b"\x0a\x00" * 500_000)
        assert answer[:2] == ("INVALID_ARGUMENT", "MALFORMED_REQUEST")


class _Consumer:
    """A Subscribe stream. ended: its status."""

    def __init__(self, center: RunningCenter, channel: grpc.Channel, app: str) -> None:
        self._over = threading.Event()
        self.ended: Any = None
        self.keys: list[str] = []
        self._call = channel.stream_stream(
            "/tmc.v1.ConsumptionService/Subscribe",
            request_serializer=lambda request: request.SerializeToString(),
            response_deserializer=consumption_pb2.SubscribeResponse.FromString,
        )(self._requests(), metadata=center.as_app(app), timeout=60)
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _requests(self) -> Iterator[Any]:
        yield consumption_pb2.SubscribeRequest(topics=["order.paid"], credit=1000)
        self._over.wait(60)

    def _read(self) -> None:
        try:
            for response in self._call:
                self.keys += [delivery.key for delivery in response.deliveries]
        except grpc.RpcError as exc:
            self.ended = refusal(exc)[:2]

    def close(self) -> None:
        self._over.set()
        self._call.cancel()
        self._thread.join(20)


class TestStreams:
    def test_a_stream_ends_when_its_key_is_dropped_and_others_go_on(
        self, center: RunningCenter, channel: grpc.Channel
    ) -> None:
        api, old = Api(center, channel), center.keys["coupons"]
        first = _Consumer(center, channel, "coupons")
        new = api("AdminService/AddAppKey", admin_pb2.AddAppKeyRequest(id="coupons")).key
        center.keys["coupons"] = new
        eventually(lambda: not isinstance(_described(api, center), tuple))
        second = _Consumer(center, channel, "coupons")
        try:
            api("AdminService/DropOldAppKey", admin_pb2.DropOldAppKeyRequest(id="coupons"))
            eventually(lambda: first.ended)
            assert first.ended == ("UNAUTHENTICATED", "CREDENTIALS_INVALID")
            api("MessageService/Publish", a_publish(key="after the drop"))
            eventually(lambda: "after the drop" in second.keys)
            assert second.ended is None
            assert "after the drop" not in first.keys
            assert old != new
        finally:
            first.close()
            second.close()

    def test_a_disabled_app_is_refused_and_its_streams_end_until_it_is_enabled(
        self, center: RunningCenter, channel: grpc.Channel
    ) -> None:
        api = Api(center, channel)
        request = {"id": "coupons", "reason": "its key is public"}
        consumer = _Consumer(center, channel, "coupons")
        try:
            assert api("AdminService/DisableApp", admin_pb2.DisableAppRequest(**request)).effective_ms > 0
            eventually(lambda: consumer.ended)
            assert consumer.ended == ("PERMISSION_DENIED", "APP_DISABLED")
        finally:
            consumer.close()
        assert _described(api, center) == ("PERMISSION_DENIED", "APP_DISABLED", "")
        stranger = [("tmc-app", "coupons"), ("authorization", "Bearer wrong")]
        refused = api("ConsumptionService/DescribeSubscriptions", b"", stranger)
        assert refused == ("UNAUTHENTICATED", "CREDENTIALS_INVALID", "")
        assert _disabled(api) == ["coupons"]
        api("MessageService/Publish", a_publish(key="while it is disabled"))
        api("AdminService/EnableApp", admin_pb2.EnableAppRequest(**request))
        again = _Consumer(center, channel, "coupons")
        try:
            eventually(lambda: "while it is disabled" in again.keys)
        finally:
            again.close()
        assert _disabled(api) == []

    def test_disabling_takes_a_reason_and_an_app_that_is_there(
        self, center: RunningCenter, channel: grpc.Channel
    ) -> None:
        api = Api(center, channel)
        for method, kind in (("DisableApp", admin_pb2.DisableAppRequest), ("EnableApp", admin_pb2.EnableAppRequest)):
            path = f"AdminService/{method}"
            assert api(path, kind(id="orders")) == ("INVALID_ARGUMENT", "FIELD_INVALID", "reason")
            assert api(path, kind(id="nobody", reason="why")) == ("NOT_FOUND", "APP_UNKNOWN", "")

    def test_the_number_of_streams_of_an_app_is_limited(self, center: RunningCenter, channel: grpc.Channel) -> None:
        consumers = [_Consumer(center, channel, "coupons") for _ in range(3)]
        try:
            eventually(lambda: any(each.ended for each in consumers))
            ended = [each.ended for each in consumers]
            assert sorted(ended, key=str) == [("RESOURCE_EXHAUSTED", "RATE_LIMITED"), None, None]
        finally:
            for each in consumers:
                each.close()


def _disabled(api: Api) -> list[str]:
    return [app.id for app in api("AdminService/ListApps", b"").apps if app.disabled]


def _described(api: Api, center: RunningCenter) -> Any:
    return api("ConsumptionService/DescribeSubscriptions", b"", center.as_app("coupons"))


def _rss_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def test_generated_hostile_calls_end_in_documented_statuses_and_change_no_row_of_a_victim(
    center: RunningCenter, channel: grpc.Channel, note: Callable[[str], None]
) -> None:
    """Every RPC, with no key, a wrong one, a stranger's own, and an app's with bytes that are no request."""
    api, dice = Api(center, channel), random.Random(11)
    victim = api("MessageService/Publish", a_publish(key="victim"))
    prepared = api("MessageService/Prepare", a_message(key="victim-prepared"))
    ids = [victim.message_id, prepared.message_id]

    def rows() -> list[str]:
        return [
            str(api("AdminService/GetMessageDetail", admin_pb2.GetMessageDetailRequest(message_id=message_id)).message)
            for message_id in ids
        ]

    before, calls = rows(), 0
    wanted = 100_000 if LONG else 600
    methods = sorted(set(RIGHTS) - STREAMS)
    connection, warm_mb = a_connection(center), 0.0
    while calls < wanted:
        if not warm_mb and calls >= wanted // 5:
            warm_mb = _rss_mb()
        for path in methods:
            if calls % 5 == 4:
                connection.close()
                connection = a_connection(center)
            own = Api(center, connection)
            who = dice.choice(
                [
                    [],
                    WRONG_KEY,
                    [("tmc-app", "~ !"), ("authorization", "Bearer  x")],
                    [("authorization", "basic x"), ("tmc-app", "orders"), ("tmc-bin", b"\xff\x00")],
                    center.as_app("stranger"),
                    center.as_app("stranger", tag="staging"),
                ]
                + ([center.as_app("orders")] if RIGHTS[path].role is not None else [])
            )
            data = dice.choice(
                [
                    dice.randbytes(dice.randrange(200)),
                    b"\x0a\xff" + dice.randbytes(9),
                    b"\x9b\x06" * dice.randrange(300),
                    message_pb2.SubmitRequest(message_id=dice.choice(ids)).SerializeToString(),
                    message_pb2.RollbackManyRequest(
                        items=[message_pb2.RollbackRequest(topic="order.paid", key="victim-prepared")] * 3
                    ).SerializeToString(),
                    consumption_pb2.NackRequest(message_id=ids[0], attempt=1, reject=True).SerializeToString(),
                    a_message(key="victim").SerializeToString(),
                ]
            )
            answer = own(path.removeprefix("tmc.v1."), data, who, 30)
            calls += 1
            if isinstance(answer, tuple):
                assert answer[0] not in {code.name for code in BAD}, (path, who, data)
                assert answer[1], (path, who, data, answer)
            else:
                for result in getattr(answer, "results", ()):
                    assert result.HasField("error"), (path, who, data)
    connection.close()
    assert rows() == before
    grown_mb = _rss_mb() - warm_mb
    note(f"{calls} hostile calls, {warm_mb:.0f} MB after a fifth of them, {grown_mb:+.0f} MB at the end")
    assert grown_mb < 48  # for --long; a few hundred calls say little
