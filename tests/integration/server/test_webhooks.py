"""Deliveries by webhook, posted to a receiver that answers in every way it can."""

from __future__ import annotations

import base64
import json
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import standardwebhooks

import tmc_client as tmc
from tests.integration.server.test_api import refusal
from tests.support.center import RunningCenter
from tests.support.receiver import Posted, Receiver, Reply, receiver
from tests.support.rogue import proxy_without_anybody_behind
from tmc_common.protocol import message_pb2, message_pb2_grpc, types_pb2
from tmc_server.delivery import webhook
from tmc_server.domain.catalog import WEBHOOK, WEBHOOK_BATCH, Forward
from tmc_server.domain.egress import Egress
from tmc_storm.eventually import eventually
from tmc_storm.services.ports import free_port

ALLOW = {"webhooks": {"allow": ["127.0.0.0/8:*"]}}
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
FAST = types_pb2.RetryPolicy(interval_ms=100, max_retry=2)
# For tests that count copies: on a busy machine a second one may be due before the first is handed over.
PATIENT = types_pb2.RetryPolicy(interval_ms=60_000, max_retry=2)


@pytest.fixture(scope="module")
def center(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCenter]:
    folder = tmp_path_factory.mktemp("webhooks")
    with RunningCenter(f"sqlite:///{folder}/c.db", delivery={"scan_seconds": 0.05}, **ALLOW) as made:
        yield made


@pytest.fixture
def orders(center: RunningCenter) -> Iterator[tmc.Center]:
    with tmc.connect(center.address, app="orders", key=center.keys["orders"]) as made:
        yield made


@pytest.fixture
def shop() -> Iterator[Receiver]:
    with receiver() as made:
        yield made


@pytest.fixture
def slow_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait longer for a proxy that closes connections: on a busy machine it takes its time."""
    monkeypatch.setattr("tmc_server.outgoing._HANG_UP_S", 5.0)


_TOPICS = iter(f"hook.{number}" for number in range(1000))


def _subscribe(center: RunningCenter, target: str, kind: str = WEBHOOK, **settings: Any) -> str:
    """Returns: a topic of its own whose messages are posted there."""
    topic = next(_TOPICS)
    forward = types_pb2.Forward(kind=kind, target=target)
    center.subscribe(topic, "coupons", **{"forward": forward, "retry": FAST, **settings})
    return topic


def _state(center: RunningCenter, topic: str, key: str) -> tuple[str, int]:
    """State of the only consumption, and how many attempts counted."""
    (row,) = center.detail(topic, key).consumptions
    return types_pb2.ConsumptionState.Name(row.state).removeprefix("CONSUMPTION_STATE_"), row.tried


def _becomes(center: RunningCenter, topic: str, key: str, state: str) -> tuple[str, int]:
    return eventually(lambda: found if (found := _state(center, topic, key))[0] == state else None)


def _publish(center: RunningCenter, topic: str, body: bytes, key: str, content_type: str, **headers: str) -> str:
    """As a client does that chooses the content type. Returns: message id."""
    request = message_pb2.PublishRequest(
        topic=topic, key=key, body=body, content_type=content_type, headers=headers, attempt_id=os.urandom(16)
    )
    with grpc.insecure_channel(center.address) as channel:
        stub = message_pb2_grpc.MessageServiceStub(channel)
        return str(stub.Publish(request, metadata=center.as_app("orders"), timeout=60).message_id)


def _once(ended: threading.Event) -> Callable[[Posted], Reply]:
    """Returns: what answers when this has happened."""

    def answer(_: Posted) -> Reply:
        ended.wait(60)
        return Reply()

    return answer


def _wait_ms(center: RunningCenter, topic: str) -> int:
    (row,) = center.detail(topic, "k").consumptions
    return int(row.due_ms) - round(time.time() * 1000)


def _unanswered(center: RunningCenter, topic: str) -> int:
    """How many messages of a topic are on their way to its webhook."""
    catalog = center.server.store.watch.current
    (number,) = (each.number for each in catalog.subscriptions_of[catalog.topic_by_name[topic].number])
    look = center.server.parts.outlets.outlet.look_only(number)
    assert look is not None
    return len(look.unwritten)


class TestEvent:
    def test_a_message_is_a_cloud_event_with_its_json_in_it(
        self, center: RunningCenter, orders: tmc.Center, shop: Receiver
    ) -> None:
        topic = _subscribe(center, shop.url)
        message_id = _publish(center, topic, b'{"total": 5.00}', "Schlüssel 1", "application/json", shop="1")
        assert _becomes(center, topic, "Schlüssel 1", "ACKED") == ("ACKED", 1)
        (posted,) = shop.got
        assert posted.path == "/hooks?from=center"
        assert posted.headers["content-type"] == "application/cloudevents+json"
        assert b'"data":{"total": 5.00}' in posted.body
        (event,) = posted.events
        assert json.loads(event.pop("tmcheaders")) == {"shop": "1"}
        assert event == {
            "specversion": "1.0",
            "id": message_id,
            "source": "/tmc/orders",
            "type": topic,
            "subject": "Schlüssel 1",
            "datacontenttype": "application/json",
            "tmcattempt": 1,
            "tmcsubscriber": "coupons.default",
            "data": {"total": 5.0},
        }

    @pytest.mark.parametrize("body", [b"\x00\xff", b"{", b"[" * 5000, b'"\xff"', b""])
    def test_what_is_no_json_is_base64(
        self, center: RunningCenter, orders: tmc.Center, shop: Receiver, body: bytes
    ) -> None:
        topic = _subscribe(center, shop.url)
        _publish(center, topic, body, "k", "application/problem+json; charset=utf-8")
        _becomes(center, topic, "k", "ACKED")
        (event,) = shop.got[0].events
        assert "data" not in event
        assert base64.b64decode(event["data_base64"]) == body

    def test_a_library_of_standard_webhooks_verifies_it(
        self, center: RunningCenter, orders: tmc.Center, shop: Receiver
    ) -> None:
        topic = _subscribe(center, shop.url)
        keys = json.loads(center.run_admin("delivery-keys", topic, "coupons").stdout)
        orders.publish(topic, b"x", key="k")
        _becomes(center, topic, "k", "ACKED")
        (posted,) = shop.got
        verifier = standardwebhooks.Webhook(bytes.fromhex(keys["key"]))
        assert verifier.verify(posted.body, dict(posted.headers)) == posted.events[0]
        message = tmc.Message.from_event(posted.events[0])
        assert (message.topic, message.key, message.body, message.producer) == (topic, "k", b"x", "orders")
        with pytest.raises(standardwebhooks.WebhookVerificationError):
            verifier.verify(posted.body + b" ", dict(posted.headers))
        assert posted.headers["webhook-id"] == posted.events[0]["id"]

    def test_during_a_rotation_it_is_signed_with_both_keys(
        self, center: RunningCenter, orders: tmc.Center, shop: Receiver
    ) -> None:
        topic = _subscribe(center, shop.url)
        center.run_admin("rotate-delivery-key", topic, "coupons").check_returncode()
        keys = json.loads(center.run_admin("delivery-keys", topic, "coupons").stdout)
        orders.publish(topic, b"x", key="k")
        _becomes(center, topic, "k", "ACKED")
        (posted,) = shop.got
        for key in (keys["key"], keys["previous"]):
            standardwebhooks.Webhook(bytes.fromhex(key)).verify(posted.body, dict(posted.headers))

    def test_its_trace_is_an_attribute(self, center: RunningCenter, shop: Receiver) -> None:
        topic = _subscribe(center, shop.url)
        _publish(center, topic, b"x", "k", "text/plain", traceparent=TRACE, shop="1")
        _becomes(center, topic, "k", "ACKED")
        (posted,) = shop.got
        assert (posted.events[0]["traceparent"], posted.headers["traceparent"]) == (TRACE, TRACE)
        assert json.loads(posted.events[0]["tmcheaders"]) == {"shop": "1"}


class TestAnswers:
    @pytest.mark.parametrize(
        ("status", "said"),
        [(500, "out of stock"), (404, ""), (301, "redirects are not followed"), (410, ""), (0, "RemoteProtocolError")],
    )
    def test_a_failure_is_retried_by_the_policy_until_its_limit(
        self, center: RunningCenter, orders: tmc.Center, shop: Receiver, status: int, said: str
    ) -> None:
        shop.answer = lambda _: Reply(status, {"Location": shop.url}, b"out of stock")
        topic = _subscribe(center, shop.url)
        orders.publish(topic, b"x", key="k")
        assert _becomes(center, topic, "k", "FAILED") == ("FAILED", 3)
        assert [posted.events[0]["tmcattempt"] for posted in shop.got] == [1, 2, 3]
        assert {said in attempt.error for attempt in center.detail(topic, "k").failed_attempts} == {True}

    @pytest.mark.parametrize("status", [429, 502, 503, 504])
    def test_a_target_that_is_away_or_busy_costs_no_retry(
        self, center: RunningCenter, orders: tmc.Center, shop: Receiver, status: int
    ) -> None:
        shop.answer = lambda _: Reply(status) if len(shop.got) < 2 else Reply(200)
        topic = _subscribe(center, shop.url)
        orders.publish(topic, b"x", key="k")
        assert _becomes(center, topic, "k", "ACKED") == ("ACKED", 1)
        assert len(shop.got) == 2

    def test_what_waits_behind_a_refusal_is_not_posted(
        self, center: RunningCenter, orders: tmc.Center, shop: Receiver
    ) -> None:
        topic = _subscribe(center, shop.url)
        shop.answer = lambda _: Reply(503, {"Retry-After": "300"})
        center.run_admin("pause-topic", topic, "--reason", "test").check_returncode()
        for number in range(100):
            orders.publish(topic, b"x", key="k" if number == 0 else f"k{number}")
        center.run_admin("resume-topic", topic, "--reason", "test").check_returncode()
        eventually(lambda: _wait_ms(center, topic) > 200_000)
        assert len(shop.got) <= 16  # eight at once, and probes

    def test_it_comes_again_after_the_time_that_the_target_asks_for(
        self, center: RunningCenter, orders: tmc.Center, shop: Receiver
    ) -> None:
        shop.answer = lambda _: Reply(429, {"Retry-After": "300"})
        topic = _subscribe(center, shop.url)
        orders.publish(topic, b"x", key="k")
        eventually(lambda: shop.got)
        eventually(lambda: _wait_ms(center, topic) > 200_000)
        assert 200_000 < _wait_ms(center, topic) <= 300_000
        eventually(lambda: _state(center, topic, "k") == ("SCHEDULED", 0))

    def test_an_odd_time_to_come_again_is_no_fault(
        self, center: RunningCenter, orders: tmc.Center, shop: Receiver, caplog: pytest.LogCaptureFixture
    ) -> None:
        odd = iter(["Fri, 31 Dec 9999 23:59:59 -2359", "-5"])
        topic = _subscribe(center, shop.url)
        shop.answer = lambda _: Reply(503, {"Retry-After": next(odd)}) if len(shop.got) < 2 else Reply()
        orders.publish(topic, b"x", key="k")
        assert _becomes(center, topic, "k", "ACKED") == ("ACKED", 1)
        assert "a fault while posting" not in caplog.text

    def test_a_fault_of_the_center_costs_nothing(
        self, center: RunningCenter, orders: tmc.Center, shop: Receiver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        signatures, faults = webhook.signatures, iter([KeyError("a fault")])

        def faulty(*given: Any) -> Any:
            for fault in faults:
                raise fault
            return signatures(*given)

        monkeypatch.setattr(webhook, "signatures", faulty)
        topic = _subscribe(center, shop.url)
        orders.publish(topic, b"x", key="k")
        assert _becomes(center, topic, "k", "ACKED") == ("ACKED", 1)

    def test_the_status_decides_whatever_the_body_does(self, center: RunningCenter, orders: tmc.Center) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as pool:

            def dribble() -> None:
                connection, _ = listening.accept()
                with connection:
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
                    while connection.recv(1 << 16):  # until the center has enough of it
                        pass

            topic = _subscribe(center, f"http://127.0.0.1:{listening.getsockname()[1]}/", untried=True)
            ended = pool.submit(dribble)
            orders.publish(topic, b"x", key="k")
            assert _becomes(center, topic, "k", "ACKED") == ("ACKED", 1)
            ended.result(60)

    def test_a_paused_subscription_is_not_posted_what_waits_here(
        self, center: RunningCenter, orders: tmc.Center, shop: Receiver
    ) -> None:
        ended = threading.Event()
        shop.answer = _once(ended)
        topic = _subscribe(center, shop.url, retry=PATIENT)
        for number in range(30):
            orders.publish(topic, b"x", key=f"k{number}")
        eventually(lambda: len(shop.got) == 8)
        center.run_admin("pause-topic", topic, "--reason", "test").check_returncode()
        eventually(lambda: center.server.store.watch.current.topic_by_name[topic].paused)
        ended.set()
        eventually(lambda: [_state(center, topic, f"k{number}")[0] for number in range(30)].count("ACKED") == 8)
        assert len(shop.got) == 8
        center.run_admin("resume-topic", topic, "--reason", "test").check_returncode()
        for number in range(30):
            assert _becomes(center, topic, f"k{number}", "ACKED") == ("ACKED", 1)
        assert len(shop.got) == 30

    def test_a_target_that_nobody_listens_at_costs_no_retry(
        self, center: RunningCenter, orders: tmc.Center, caplog: pytest.LogCaptureFixture
    ) -> None:
        port = free_port()
        topic = _subscribe(center, f"http://127.0.0.1:{port}/", untried=True, retry=PATIENT)
        for number in range(3):
            orders.publish(topic, b"x", key=f"k{number}")
        eventually(lambda: "cannot be reached" in caplog.text)
        with receiver(port) as shop:
            for number in range(3):
                assert _becomes(center, topic, f"k{number}", "ACKED") == ("ACKED", 1)
            assert Counter(shop.keys) == Counter(["k0", "k1", "k2"])

    def test_a_target_that_takes_no_connection_costs_no_retry(
        self,
        center: RunningCenter,
        orders: tmc.Center,
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Its queue of connections is full: a new one hangs, as behind a firewall that drops packets."""
        monkeypatch.setattr(webhook, "_CONNECT_S", 0.2)
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            listening.listen(0)
            place = listening.getsockname()
            with socket.create_connection(place):
                topic = _subscribe(center, f"http://127.0.0.1:{place[1]}/", untried=True)
                orders.publish(topic, b"x", key="k")
                eventually(lambda: "no connection within" in caplog.text)
                eventually(lambda: _state(center, topic, "k") == ("SCHEDULED", 0))

    @pytest.mark.usefixtures("slow_proxies")
    def test_a_proxy_without_anybody_behind_it_costs_one_try(
        self, center: RunningCenter, orders: tmc.Center, caplog: pytest.LogCaptureFixture
    ) -> None:
        """It takes each connection, and closes it. The first time, the handler may have begun and died."""
        with proxy_without_anybody_behind() as (port, taken):
            topic = _subscribe(center, f"http://127.0.0.1:{port}/", untried=True)
            orders.publish(topic, b"x", key="k")
            eventually(lambda: "closes connections before anything is sent" in caplog.text)
            seen = len(taken)
            eventually(lambda: len(taken) > seen)
            assert _state(center, topic, "k") == ("SCHEDULED", 1)
        with receiver(port):
            assert _becomes(center, topic, "k", "ACKED") == ("ACKED", 2)

    def test_an_answer_that_does_not_come_is_a_failure(
        self, center: RunningCenter, orders: tmc.Center, shop: Receiver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(webhook, "_DEADLINE_S", 0.2)
        ended = threading.Event()
        shop.answer = _once(ended)
        topic = _subscribe(center, shop.url)
        orders.publish(topic, b"x", key="k")
        assert _becomes(center, topic, "k", "FAILED")[0] == "FAILED"
        ended.set()
        assert "no answer within" in center.detail(topic, "k").failed_attempts[0].error

    def test_one_that_hangs_does_not_hold_up_another(
        self, center: RunningCenter, orders: tmc.Center, shop: Receiver
    ) -> None:
        ended = threading.Event()
        with receiver() as hanging:
            hanging.answer = _once(ended)
            slow, quick = (_subscribe(center, url, retry=PATIENT) for url in (hanging.url, shop.url))
            for number in range(20):
                orders.publish(slow, b"x", key=f"k{number}")
            for number in range(20):
                orders.publish(quick, b"x", key=f"k{number}")
            for number in range(20):
                _becomes(center, quick, f"k{number}", "ACKED")
            assert len(hanging.got) <= 8
            ended.set()
            for number in range(20):
                assert _becomes(center, slow, f"k{number}", "ACKED")[0] == "ACKED"
            assert Counter(hanging.keys) == Counter(f"k{number}" for number in range(20))


class TestBatches:
    def test_several_messages_come_in_one_request(
        self, center: RunningCenter, orders: tmc.Center, shop: Receiver
    ) -> None:
        first = threading.Event()
        shop.answer = _once(first)
        topic = _subscribe(center, shop.url, WEBHOOK_BATCH, retry=PATIENT)
        for number in range(40):
            orders.publish(topic, {"number": number}, key=f"k{number}")
        first.set()
        for number in range(40):
            assert _becomes(center, topic, f"k{number}", "ACKED") == ("ACKED", 1)
        assert Counter(shop.keys) == Counter(f"k{number}" for number in range(40))
        assert len(shop.got) < 40
        keys = json.loads(center.run_admin("delivery-keys", topic, "coupons").stdout)
        for posted in shop.got:
            assert posted.headers["content-type"] == "application/cloudevents-batch+json"
            standardwebhooks.Webhook(bytes.fromhex(keys["key"])).verify(posted.body, dict(posted.headers))

    def test_a_message_that_kills_its_handler_fails_although_that_is_away_for_a_moment(
        self, center: RunningCenter, orders: tmc.Center, shop: Receiver
    ) -> None:
        """Its batch gets no answer, and the first single after that finds nobody: nothing would count, for ever."""
        all_there, is_down = threading.Event(), threading.Event()

        def answer(posted: Posted) -> Reply:
            all_there.wait(60)
            if is_down.is_set():
                is_down.clear()
                return Reply(503)
            if "k39" in posted.keys:
                is_down.set()
                return Reply(0)
            return Reply(headers={"Connection": "close"})  # else a request is sent again if a connection was kept

        shop.answer = answer
        topic = _subscribe(center, shop.url, WEBHOOK_BATCH, retry=types_pb2.RetryPolicy(interval_ms=100, max_retry=1))
        for number in range(40):
            orders.publish(topic, {}, key=f"k{number}")
        all_there.set()
        assert _becomes(center, topic, "k39", "FAILED") == ("FAILED", 2)
        for number in range(39):
            assert _becomes(center, topic, f"k{number}", "ACKED") == ("ACKED", 1)

    def test_a_message_that_nobody_can_handle_costs_no_other_a_retry(
        self, center: RunningCenter, orders: tmc.Center, shop: Receiver
    ) -> None:
        topic = _subscribe(center, shop.url, WEBHOOK_BATCH)
        shop.answer = lambda posted: Reply(500) if "bad" in posted.keys else Reply()
        keys = [f"k{number}" for number in range(30)] + ["bad"] + [f"l{number}" for number in range(30)]
        center.run_admin("pause-topic", topic, "--reason", "test").check_returncode()
        for key in keys:
            orders.publish(topic, b"x", key=key)
        center.run_admin("resume-topic", topic, "--reason", "test").check_returncode()
        assert _becomes(center, topic, "bad", "FAILED") == ("FAILED", 3)
        for key in keys:
            if key != "bad":
                assert _becomes(center, topic, key, "ACKED") == ("ACKED", 1)


class TestOrder:
    def test_messages_of_one_order_key_come_one_after_the_other(
        self, center: RunningCenter, orders: tmc.Center, shop: Receiver
    ) -> None:
        topic = _subscribe(center, shop.url, topic_settings={"ordered": True})
        seen: Counter[str] = Counter()

        def flaky(posted: Posted) -> Reply:
            (key,) = posted.keys
            seen[key] += 1
            return Reply(500) if seen[key] == 1 and key.endswith(("1", "4")) else Reply()

        shop.answer = flaky
        for number in range(8):
            for line in ("a", "b"):
                orders.publish(topic, b"x", key=f"{line}{number}", order_key=line)
        for line in ("a", "b"):
            _becomes(center, topic, f"{line}7", "ACKED")
            came = list(dict.fromkeys(key for key in shop.keys if key.startswith(line)))
            assert came == [f"{line}{number}" for number in range(8)]


class TestTarget:
    def test_it_may_move_and_takes_along_what_waits(
        self, center: RunningCenter, orders: tmc.Center, shop: Receiver
    ) -> None:
        with receiver() as old:
            topic = _subscribe(center, old.url)
            old.answer = lambda _: Reply(503)
            orders.publish(topic, b"x", key="k")
            eventually(lambda: old.got)
            for target in (f"webhook-batch:{shop.url}", f"webhook:{shop.url}"):
                center.run_admin("subscribe", topic, "coupons", "--forward", target).check_returncode()
            assert _becomes(center, topic, "k", "ACKED") == ("ACKED", 1)
            refused = center.run_admin("subscribe", topic, "coupons", "--forward", "rabbitmq:amq.topic")
            assert refused.returncode == 1
        catalog = center.server.store.watch.current
        (moved,) = catalog.subscriptions_of[catalog.topic_by_name[topic].number]
        assert moved.forward == Forward("webhook", shop.url, "")

    def test_one_whose_name_is_looked_up_for_ever_holds_up_no_other(
        self, center: RunningCenter, orders: tmc.Center, shop: Receiver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        permitted, ended = webhook.permitted, threading.Event()

        def slow(egress: Egress, place: str, setting: str) -> Any:
            if place.startswith("slow."):
                ended.wait(600)
            return permitted(egress, place, setting)

        monkeypatch.setattr(webhook, "permitted", slow)
        slow_topic = _subscribe(center, "http://slow.example/", untried=True)
        topics = [_subscribe(center, shop.url) for _ in range(3)]
        for number in range(20):
            orders.publish(slow_topic, b"x", key=f"k{number}")
        try:
            for topic in topics:
                orders.publish(topic, b"x", key="k")
                assert _becomes(center, topic, "k", "ACKED") == ("ACKED", 1)
            assert _state(center, slow_topic, "k0")[0] == "SCHEDULED"
        finally:
            ended.set()

    @pytest.mark.parametrize(
        "target",
        [
            "http://10.0.0.1/",
            "http://169.254.169.254/latest",
            "http://user:password@127.0.0.1/",
            "http://127.0.0.1/#part",
            "ftp://127.0.0.1/",
            "http:///hooks",
            "127.0.0.1:80",
            "http://[::1]:80/",
            "http://2130706433/",
        ],
    )
    def test_one_that_is_not_permitted_is_refused(self, center: RunningCenter, target: str) -> None:
        with pytest.raises(grpc.RpcError) as caught:
            _subscribe(center, target)
        assert refusal(caught.value)[1] == "FORWARD_REFUSED"

    def test_one_that_leads_elsewhere_by_now_is_not_asked_and_costs_no_retry(
        self, center: RunningCenter, orders: tmc.Center, caplog: pytest.LogCaptureFixture
    ) -> None:
        topic = _subscribe(center, "http://10.0.0.1/", untried=True)
        orders.publish(topic, b"x", key="k")
        eventually(lambda: "[webhooks] allow does not list it" in caplog.text)
        eventually(lambda: _state(center, topic, "k") == ("SCHEDULED", 0))

    def test_without_an_allow_list_there_are_no_webhooks(self, tmp_path: Path) -> None:
        with RunningCenter(f"sqlite:///{tmp_path}/c.db") as plain, pytest.raises(grpc.RpcError) as caught:
            _subscribe(plain, "http://127.0.0.1/")
        assert refusal(caught.value)[1] == "FIELD_INVALID"


class TestStop:
    def test_what_was_not_posted_comes_again_from_the_next_server(self, tmp_path: Path) -> None:
        url = f"sqlite:///{tmp_path}/c.db"
        ended = threading.Event()
        with receiver() as shop:
            shop.answer = _once(ended)
            first = RunningCenter(url, **ALLOW)
            topic = _subscribe(first, shop.url, retry=PATIENT)
            registered = first.keys, first.token
            with tmc.connect(first.address, app="orders", key=first.keys["orders"]) as orders:
                for number in range(30):
                    orders.publish(topic, b"x", key=f"k{number}")
            eventually(lambda: len(shop.got) == 8)
            stopping = threading.Thread(target=first.stop)
            stopping.start()
            eventually(lambda: _unanswered(first, topic) == 8)
            ended.set()
            stopping.join(60)
            assert len(shop.got) == 8
            with RunningCenter(url, registered=registered, **ALLOW) as second:
                for number in range(30):
                    assert _becomes(second, topic, f"k{number}", "ACKED") == ("ACKED", 1)
            assert Counter(shop.keys) == Counter(f"k{number}" for number in range(30))
