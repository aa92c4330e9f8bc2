"""Checks from end to end: a running center, the SDK's doors, operators."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

import grpc
import pytest
import sqlalchemy as sa

import tmc_client as tmc
from tests.support.center import RunningCenter
from tests.support.rogue import RogueGrpc
from tmc_client.checks.answers import CheckToken
from tmc_client.producing.ledger import ledger_id_of, rows_for
from tmc_client.producing.producer import prepare_request
from tmc_client.tables import ledger
from tmc_common.protocol import admin_pb2, check_pb2, check_pb2_grpc, types_pb2
from tmc_storm.eventually import eventually
from tmc_storm.services.ports import free_port

PREPARED, COMMITTED = types_pb2.MESSAGE_STATE_PREPARED, types_pb2.MESSAGE_STATE_COMMITTED
ROLLED_BACK, CHECK_FAILED = types_pb2.MESSAGE_STATE_ROLLED_BACK, types_pb2.MESSAGE_STATE_CHECK_FAILED


@pytest.fixture
def business(tmp_path) -> Iterator[sa.Engine]:
    engine = sa.create_engine(f"sqlite:///{tmp_path}/shop.db")
    tmc.create_tables(engine)
    yield engine
    engine.dispose()


def prepared_with(center: tmc.Center, engine: sa.Engine, topic: str, key: str, *, committed: bool) -> tmc.Prepared:
    """A service died after Prepare: with its local transaction committed, or without."""
    with engine.begin() as connection:
        ledger_id = ledger_id_of(connection.execute)
    request = prepare_request(topic, {}, key=key, ledger_id=ledger_id)
    result = center.producer.prepare(request, center.timeout).result(10)
    message = tmc.Prepared(message_id=result.message_id, topic=topic, key=key, attempt_id=request.attempt_id)
    if committed:
        with engine.begin() as connection:
            connection.execute(ledger.insert(), rows_for([message]))
    return message


def state_of(center: tmc.Center, message: tmc.Prepared) -> int:
    return center.get_message(message.message_id).state


@pytest.fixture(scope="module")
def embedded(tmp_path_factory) -> Iterator[RunningCenter]:
    with RunningCenter(
        f"sqlite:///{tmp_path_factory.mktemp('checks')}/c.db",
        open_to_all=True,
        dev={"transaction_time_ms": 200},
        discovery={"kind": "recorded"},
        checks={"allow": ["127.0.0.0/8:*"]},
        delivery={"scan_seconds": 0.05},
    ) as made:
        yield made


def instances_of(running: RunningCenter, app: str) -> list[str]:
    """Addresses that the center knows."""
    with grpc.insecure_channel(running.address) as channel:
        try:
            request = admin_pb2.ListInstancesRequest(app=app, tag="default")
            return list(running.admin(channel).ListInstances(request).addresses)
        except grpc.RpcError as exc:
            if exc.code() is not grpc.StatusCode.NOT_FOUND:
                raise
            return []  # the app comes into being with its first call


class TestEmbedded:
    """`tmc dev`: senders say where they answer, nothing has to be set up."""

    @pytest.fixture
    def center(self, embedded: RunningCenter) -> Iterator[tmc.Center]:
        with tmc.connect(embedded.address, app="orders") as made:
            yield made

    def test_the_ledger_settles_what_a_crash_left_behind(self, center: tmc.Center, business: sa.Engine) -> None:
        with center.checks(business).serve():
            paid = prepared_with(center, business, "shop.paid", "paid", committed=True)
            not_paid = prepared_with(center, business, "shop.paid", "not-paid", committed=False)
            eventually(lambda: state_of(center, paid) == COMMITTED)
            eventually(lambda: state_of(center, not_paid) == ROLLED_BACK)
        with business.connect() as connection:
            states = dict(connection.execute(sa.select(ledger.c.message_key, ledger.c.state)).all())
        assert states == {"paid": 1, "not-paid": 2}

    def test_a_function_answers_from_tables_of_its_own(self, center: tmc.Center) -> None:
        asked: list[tmc.Question] = []

        @center.check("shop.booked")
        def outcome(question: tmc.Question) -> tmc.Verdict:
            asked.append(question)
            if question.key == "broken":
                raise RuntimeError("no idea")
            return tmc.Verdict.COMMIT if question.key == "yes" else tmc.Verdict.ROLLBACK

        with center.checks().serve():
            yes, no = (center.prepare("shop.booked", {}, key=key) for key in ("yes", "no"))
            broken = center.prepare("shop.booked", {}, key="broken")
            eventually(lambda: (state_of(center, yes), state_of(center, no)) == (COMMITTED, ROLLED_BACK))
            eventually(lambda: any(question.key == "broken" for question in asked))
            assert state_of(center, broken) == PREPARED
        assert {question.topic for question in asked} == {"shop.booked"}

    def test_a_check_server_without_a_reference_runs_until_the_center_is_closed(
        self, embedded: RunningCenter, business: sa.Engine
    ) -> None:
        center = tmc.connect(embedded.address, app="orders")
        address = center.checks(business).serve().address
        gc.collect()
        with grpc.insecure_channel(address) as channel:
            grpc.channel_ready_future(channel).result(10)
        center.close()
        with grpc.insecure_channel(address) as channel, pytest.raises(grpc.FutureTimeoutError):
            grpc.channel_ready_future(channel).result(0.5)

    def test_a_service_is_known_before_it_sends_anything(self, embedded: RunningCenter, business: sa.Engine) -> None:
        """After a crash nobody may have a reason to send: its endpoint says by itself where it is."""
        with (
            tmc.connect(embedded.address, app="silent") as silent,
            silent.checks(business).serve() as server,
        ):
            eventually(lambda: server.advertised in instances_of(embedded, "silent"))

    def test_instances_that_are_gone_are_not_asked_before_one_that_is_there(
        self, embedded: RunningCenter, business: sa.Engine
    ) -> None:
        """Where ports change with each start, a morning's work leaves many addresses behind."""
        for _ in range(7):
            with tmc.connect(embedded.address, app="restarted") as center, center.checks(business).serve() as server:
                eventually(lambda server=server: server.advertised in instances_of(embedded, "restarted"))
        with tmc.connect(embedded.address, app="restarted") as center, center.checks(business).serve() as server:
            eventually(lambda: server.advertised in instances_of(embedded, "restarted"))
            message = prepared_with(center, business, "restarted.paid", "one", committed=True)
            eventually(lambda: state_of(center, message) == COMMITTED)
        assert embedded.detail("restarted.paid", "one").check.attempt == 1

    def test_a_stopped_service_is_asked_when_it_is_back(
        self, embedded: RunningCenter, center: tmc.Center, business: sa.Engine
    ) -> None:
        server = center.checks(business).serve(f"127.0.0.1:{free_port()}")
        address = server.address
        server.stop()
        message = prepared_with(center, business, "shop.paid", "later", committed=True)
        eventually(lambda: embedded.detail("shop.paid", "later").check.unreached_ms > 0)
        assert state_of(center, message) == PREPARED
        with center.checks(business).serve(address):
            eventually(lambda: state_of(center, message) == COMMITTED)


class _Quiet(WSGIRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Nothing on the screen of a test."""


@pytest.fixture(scope="module")
def running(tmp_path_factory) -> Iterator[RunningCenter]:
    """With credentials; the producer's instances are named in the configuration."""
    port = free_port()
    with RunningCenter(
        f"sqlite:///{tmp_path_factory.mktemp('checks')}/c.db",
        discovery={"kind": "static", "instances": {"orders": [f"127.0.0.1:{port}"]}},
        checks={"allow": ["127.0.0.0/8:*"]},
        delivery={"scan_seconds": 0.05},
    ) as made:
        made.subscribe("web.paid", "coupons", topic_settings={"transaction_time_ms": 1})
        yield made


@pytest.fixture
def orders(running: RunningCenter) -> Iterator[tmc.Center]:
    with tmc.connect(running.address, app="orders", key=running.keys["orders"]) as made:
        yield made


class Operator:
    """Admin calls by name."""

    def __init__(self, running: RunningCenter) -> None:
        self._channel = grpc.insecure_channel(running.address)
        self._admin, self._metadata = running.admin(self._channel), running.operator

    def __call__(self, method: str, request: Any) -> Any:
        return getattr(self._admin, method)(request, metadata=self._metadata, timeout=20)

    def refused(self, method: str, request: Any) -> str:
        with pytest.raises(grpc.RpcError) as caught:
            self(method, request)
        return f"{caught.value.code().name}: {caught.value.details()}"

    def set_check(self, *targets: admin_pb2.CheckTarget, topic: str = "web.paid", **values: Any) -> Any:
        request = admin_pb2.SetTopicCheckRequest(topic=topic, targets=targets, **values)
        made = self("SetTopicCheck", request)
        eventually(lambda: time.time() * 1000 >= made.effective_ms + 100)
        return made


@pytest.fixture(scope="module")
def operator(running: RunningCenter) -> Operator:
    return Operator(running)


def http_target(port: int, **options: str) -> admin_pb2.CheckTarget:
    return admin_pb2.CheckTarget(kind="http", address=f"127.0.0.1:{port}", options=options)


class TestDoors:
    @pytest.fixture
    def web(self, orders: tmc.Center, business: sa.Engine) -> Iterator[int]:
        """A WSGI application with checks beside it. Yields: its port."""

        def application(_environ: Any, start_response: Any) -> list[bytes]:
            start_response("200 OK", [("Content-Type", "text/plain")])
            return [b"the shop"]

        server = make_server("127.0.0.1", 0, orders.checks(business).beside(application), handler_class=_Quiet)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()
        server.server_close()

    def test_wsgi_in_batches_with_the_fence(
        self, orders: tmc.Center, operator: Operator, business: sa.Engine, web: int
    ) -> None:
        operator.set_check(http_target(web, path="/tmc/checks", batch="true"))
        yes = prepared_with(orders, business, "web.paid", "batch-yes", committed=True)
        no = prepared_with(orders, business, "web.paid", "batch-no", committed=False)
        eventually(lambda: (state_of(orders, yes), state_of(orders, no)) == (COMMITTED, ROLLED_BACK))

    def test_a_get_answers_and_never_fences(
        self, orders: tmc.Center, operator: Operator, business: sa.Engine, web: int
    ) -> None:
        operator.set_check(http_target(web, path="/tmc/checks"))
        yes = prepared_with(orders, business, "web.paid", "get-yes", committed=True)
        no = prepared_with(orders, business, "web.paid", "get-no", committed=False)
        eventually(lambda: state_of(orders, yes) == COMMITTED)
        report = operator("CheckNow", admin_pb2.CheckNowRequest(message_id=no.message_id))
        assert (report.verdict, report.reason) == (types_pb2.VERDICT_UNKNOWN, "ANSWERED")
        assert report.answer.startswith("NOT_THERE")
        assert report.target == f"http 127.0.0.1:{web}"
        assert report.request == "GET /tmc/checks?bizID=orders&messageKey=get-no"
        with business.connect() as connection:
            assert "get-no" not in connection.execute(sa.select(ledger.c.message_key)).scalars().all()

    def test_everything_else_is_the_applications(self, web: int) -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{web}/elsewhere") as answer:
            assert answer.read() == b"the shop"

    @pytest.mark.parametrize(
        ("method", "query", "headers", "body", "status"),
        [
            ("GET", "?messageKey=k", {}, None, 403),
            ("GET", "?messageKey=k", {"Tmc-Check-Token": "wrong"}, None, 403),
            (
                "POST",
                "",
                {"Tmc-Check-Token": "wrong"},
                b'{"items": [{"messageId": "1", "topic": "t", "messageKey": "k"}]}',
                403,
            ),
            ("GET", "?x=1", {}, None, 403),
            ("POST", "", {}, b"[" * 100_000, 403),
            ("PUT", "", {}, b"x", 403),
        ],
    )
    def test_strangers_are_turned_away_before_the_ledger_is_touched(
        self,
        web: int,
        business: sa.Engine,
        method: str,
        query: str,
        headers: dict[str, str],
        body: bytes | None,
        status: int,
    ) -> None:
        request = urllib.request.Request(
            f"http://127.0.0.1:{web}/tmc/checks{query}", data=body, headers=headers, method=method
        )
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request)
        with caught.value as answer:
            assert answer.code == status
            assert "error" in json.loads(answer.read())
        with business.connect() as connection:
            assert connection.execute(sa.select(ledger)).all() == []

    def test_asgi(self, running: RunningCenter, orders: tmc.Center, business: sa.Engine) -> None:
        application = orders.checks(business).asgi()
        token = running.server.store.watch.current.app_by_id["orders"].check_token

        def call(method: str, body: bytes, shown: str) -> tuple[int, Any]:
            sent: list[Any] = []
            parts = iter([{"body": body[:10], "more_body": True}, {"body": body[10:], "more_body": False}])

            async def receive() -> Any:
                return next(parts)

            async def send(event: Any) -> None:
                sent.append(event)

            scope = {
                "type": "http",
                "method": method,
                "query_string": b"messageKey=k",
                "headers": [(b"tmc-check-token", shown.encode()), (b"tmc-message-id", b"1-1-05-1")],
            }
            asyncio.run(application(scope, receive, send))
            return sent[0]["status"], json.loads(sent[1]["body"])

        assert call("GET", b"", "wrong")[0] == 403
        status, found = call("GET", b"", token)
        assert (status, found["status"], found["messageKey"]) == (200, "UNKNOWN", "k")
        body = json.dumps({"items": [{"messageId": "1-1-05-1", "topic": "web.paid", "messageKey": "k"}]}).encode()
        status, found = call("POST", body, token)
        assert (status, found["results"][0]["messageId"]) == (200, "1-1-05-1")

    def test_grpc_refuses_strangers(self, orders: tmc.Center, business: sa.Engine) -> None:
        with orders.checks(business).serve() as server, grpc.insecure_channel(server.address) as channel:
            stub = check_pb2_grpc.CheckServiceStub(channel)
            for metadata in ((), (("tmc-check-token", "wrong"),)):
                with pytest.raises(grpc.RpcError) as caught:
                    stub.Check(check_pb2.CheckRequest(message_id="1-1-05-1", key="k"), metadata=metadata)
                assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED

    def test_while_the_center_is_away_nothing_is_answered(self, business: sa.Engine) -> None:
        away = tmc.connect(f"127.0.0.1:{free_port()}", app="orders")
        with pytest.raises(tmc.Unavailable):
            away.checks(business).answer("any", [tmc.Question(message_id="1-1-05-1", topic="t", key="k")])


class TestOperators:
    @pytest.fixture(autouse=True)
    def unanswered(self, operator: Operator) -> None:
        operator.set_check(admin_pb2.CheckTarget(kind="grpc", deadline_ms=500), untried=True)

    def test_a_check_that_cannot_work_is_refused_with_the_reason(self, operator: Operator) -> None:
        rogue = RogueGrpc()
        method = "shop.v1.OrderService/GetOrder"
        shop = {
            "request": '{"order_id": "{key}"}',
            "verdict": "payment.status",
            "COMMIT": "STATUS_PAID",
            "ROLLBACK": "STATUS_CANCELLED",
            "method": method,
        }

        def refused(kind: str, address: str, **options: str) -> str:
            target = admin_pb2.CheckTarget(kind=kind, address=address, options=options)
            request = admin_pb2.SetTopicCheckRequest(topic="web.paid", targets=[target])
            return operator.refused("SetTopicCheck", request)

        streaming = {"method": "shop.v1.OrderService/Watch"}
        for kind, address, options, reason in (
            ("grpc", "", {}, "does not answer"),  # nobody serves at the instance that discovery gives
            ("grpc", "10.0.0.1:80", {}, "allow does not list"),
            ("http", f"127.0.0.1:{free_port()}", {"path": "/v"}, "start the service"),
            ("http", "", {}, "path"),
            ("reflection", rogue.address, shop | streaming, "streams"),
            ("reflection", rogue.address, shop | {"verdict": "payment.nothing"}, "no single field"),
            ("reflection", rogue.address, shop | {"method": "shop.v1.Other/Get"}, "no such symbol"),
            ("reflection", rogue.address, shop | {"COMMIT": "STATUS_NONE"}, "empty answer"),
            ("carrier-pigeon", "", {}, "no kind"),
        ):
            said = refused(kind, address, **options)
            assert said.startswith("FAILED_PRECONDITION: "), said
            assert reason in said
        rogue.stop()
        assert refused("", "").startswith("INVALID_ARGUMENT: targets.kind")
        assert "targets.deadline_ms" in operator.refused(
            "SetTopicCheck",
            admin_pb2.SetTopicCheckRequest(
                topic="web.paid", targets=[admin_pb2.CheckTarget(kind="grpc", deadline_ms=99)]
            ),
        )
        twice = [admin_pb2.CheckTarget(kind="grpc"), admin_pb2.CheckTarget(kind="grpc")]
        assert "each name once" in operator.refused(
            "SetTopicCheck", admin_pb2.SetTopicCheckRequest(topic="web.paid", targets=twice, untried=True)
        )

    def test_what_was_set_is_what_is_shown(self, operator: Operator) -> None:
        retry = types_pb2.RetryPolicy(
            kind=types_pb2.RETRY_KIND_EXPONENTIAL,
            interval_ms=500,
            max_retry=2,
            cap_ms=1000,
            max_age_ms=60_000,
            jitter_percent=10,
        )
        target = http_target(9, path="/v", batch="true")
        target.name, target.batch, target.concurrency, target.tls = "old", 7, 3, True
        made = operator.set_check(admin_pb2.CheckTarget(kind="grpc"), target, retry=retry, untried=True)
        shown = operator("GetTopicCheck", admin_pb2.GetTopicCheckRequest(topic="web.paid"))
        assert shown.targets == made.targets
        assert shown.retry == retry
        assert [(t.name, t.kind, t.batch, t.concurrency, t.tls) for t in shown.targets] == [
            ("", "grpc", 500, 16, False),
            ("old", "http", 7, 3, True),
        ]

    def test_to_the_limit_and_back(self, orders: tmc.Center, operator: Operator, business: sa.Engine) -> None:
        rogue = RogueGrpc()
        rogue.mode = "unknown"
        target = admin_pb2.CheckTarget(kind="grpc", address=rogue.address)
        retry = types_pb2.RetryPolicy(interval_ms=10, max_retry=2)
        operator.set_check(target, retry=retry)
        messages = [orders.prepare("web.paid", {}, key=f"limit-{number}") for number in range(3)]
        eventually(lambda: {state_of(orders, message) for message in messages} == {CHECK_FAILED})
        detail = operator("GetMessageDetail", admin_pb2.GetMessageDetailRequest(message_id=messages[0].message_id))
        assert (detail.check.attempt, detail.check.checked, detail.check.due_ms) == (3, 3, 0)
        assert len(detail.failed_attempts) == 3
        reactivate = admin_pb2.ReactivateChecksRequest(topic="web.paid", reason="mended", limit=2, dry_run=True)
        counted = operator("ReactivateChecks", reactivate)
        assert (counted.matched, counted.more) == (2, True)
        assert {state_of(orders, message) for message in messages} == {CHECK_FAILED}
        rogue.mode = "commit"
        reactivate.dry_run = False
        assert operator("ReactivateChecks", reactivate).matched == 2
        eventually(lambda: [state_of(orders, m) for m in messages].count(COMMITTED) == 2)
        [left] = [message for message in messages if state_of(orders, message) == CHECK_FAILED]
        one = admin_pb2.ReactivateCheckRequest(message_id=left.message_id, reason="this one too")
        operator("ReactivateCheck", one)
        eventually(lambda: state_of(orders, left) == COMMITTED)
        assert "FAILED_PRECONDITION: The message is COMMITTED" in operator.refused("ReactivateCheck", one)
        assert rogue.tokens[-1]
        rogue.stop()

    def test_another_target_is_tried_beside_the_stored_one(self, orders: tmc.Center, operator: Operator) -> None:
        stored, other = RogueGrpc(), RogueGrpc()
        stored.mode, other.mode = "unknown", "commit"
        retry = types_pb2.RetryPolicy(interval_ms=10, max_retry=0)
        operator.set_check(admin_pb2.CheckTarget(kind="grpc", address=stored.address), retry=retry)
        message = orders.prepare("web.paid", {}, key="tried")
        eventually(lambda: state_of(orders, message) == CHECK_FAILED)
        target = admin_pb2.CheckTarget(kind="grpc", address=other.address)
        wanted = admin_pb2.TryCheckRequest(message_id=message.message_id, target=target)
        answer = operator("TryCheck", wanted)
        assert (answer.tried.verdict, answer.stored.verdict) == (types_pb2.VERDICT_COMMIT, types_pb2.VERDICT_UNKNOWN)
        assert (answer.tried.target, answer.stored.target) == (f"grpc {other.address}", f"grpc {stored.address}")
        assert state_of(orders, message) == CHECK_FAILED
        shown = operator("GetTopicCheck", admin_pb2.GetTopicCheckRequest(topic="web.paid"))
        assert [each.address for each in shown.targets] == [stored.address]
        wanted.target.address = "192.0.2.1:80"
        assert "FAILED_PRECONDITION" in operator.refused("TryCheck", wanted)  # outside [checks] allow
        wanted.target.kind = "smoke signals"
        assert "There is no kind" in operator.refused("TryCheck", wanted)
        stored.stop()
        other.stop()

    def test_no_target_is_tried_while_the_transaction_may_run(self, orders: tmc.Center, operator: Operator) -> None:
        topic = admin_pb2.RegisterTopicRequest(name="slow.paid", owner="orders", transaction_time_ms=3_600_000)
        operator("RegisterTopic", topic)
        rogue = RogueGrpc()
        request = prepare_request("slow.paid", {}, key="running", ledger_id=bytes(range(16)))
        prepared = orders.producer.prepare(request, orders.timeout).result(60)
        message = tmc.Prepared(
            message_id=prepared.message_id, topic="slow.paid", key="running", attempt_id=request.attempt_id
        )
        target = admin_pb2.CheckTarget(kind="grpc", address=rogue.address)
        wanted = admin_pb2.TryCheckRequest(message_id=message.message_id, target=target)
        assert "transaction may still be running" in operator.refused("TryCheck", wanted)
        assert not rogue.tokens
        orders.submit(message)
        tried = operator("TryCheck", wanted).tried
        assert tried.target == f"grpc {rogue.address}"
        assert "ledger_id= " in tried.request  # not shown: with it, who knows the check token could fence
        assert rogue.tokens
        [row] = operator("ListAudit", admin_pb2.ListAuditRequest(action="try check")).entries[:1]
        assert row.reason == f"grpc {rogue.address}"
        rogue.stop()

    def test_a_human_decides_once(self, orders: tmc.Center, operator: Operator) -> None:
        message = orders.prepare("web.paid", {}, key="by-hand")

        def decide(verdict: int, reason: str = "seen in the books") -> admin_pb2.DecideMessageRequest:
            return admin_pb2.DecideMessageRequest(message_id=message.message_id, verdict=verdict, reason=reason)  # type: ignore[arg-type]

        assert "INVALID_ARGUMENT: verdict" in operator.refused("DecideMessage", decide(types_pb2.VERDICT_UNKNOWN))
        assert "INVALID_ARGUMENT: reason" in operator.refused("DecideMessage", decide(types_pb2.VERDICT_COMMIT, ""))
        assert operator("DecideMessage", decide(types_pb2.VERDICT_ROLLBACK)).state == ROLLED_BACK
        assert "FAILED_PRECONDITION" in operator.refused("DecideMessage", decide(types_pb2.VERDICT_COMMIT))
        with pytest.raises(tmc.Decided):
            orders.submit(message)

    def test_unknown_names(self, orders: tmc.Center, operator: Operator) -> None:
        assert "NOT_FOUND" in operator.refused("GetTopicCheck", admin_pb2.GetTopicCheckRequest(topic="no.such"))
        for method, request in (
            ("CheckNow", admin_pb2.CheckNowRequest(message_id="1-1-05-1")),
            ("TryCheck", admin_pb2.TryCheckRequest(message_id="1-1-05-1", target=admin_pb2.CheckTarget(kind="grpc"))),
            ("ReactivateCheck", admin_pb2.ReactivateCheckRequest(message_id="1-1-05-2", reason="r")),
            ("DecideMessage", admin_pb2.DecideMessageRequest(message_id="1-1-05-1", verdict=1, reason="r")),  # type: ignore[arg-type]
        ):
            assert operator.refused(method, request).startswith("NOT_FOUND")
        junk = admin_pb2.ReactivateCheckRequest(message_id="junk", reason="r")
        assert operator.refused("ReactivateCheck", junk).startswith("INVALID_ARGUMENT")
        with pytest.raises(tmc.InvalidRequest, match="check_target"):
            request = prepare_request("web.paid", {}, key="named")
            request.check_target = "nobody"
            orders.producer.prepare(request, orders.timeout).result(10)


def test_a_service_follows_a_rotation_of_its_check_token_and_takes_the_previous_one_for_a_minute(tmp_path) -> None:
    seconds = [100.0]
    with (
        RunningCenter(f"sqlite:///{tmp_path}/c.db") as center,
        tmc.connect(center.address, app="orders", key=center.keys["orders"]) as orders,
        grpc.insecure_channel(center.address) as channel,
    ):
        admin = center.admin(channel)

        def shown() -> str:
            token = center.server.store.watch.current.app_by_id["orders"].check_token
            assert token
            return token

        def rotate() -> None:
            request = admin_pb2.RotateCheckTokenRequest(id="orders", reason="seen in a log")
            assert admin.RotateCheckToken(request, metadata=center.operator).effective_ms > 0

        token = CheckToken(orders.connection, lambda: seconds[0])
        first = shown()
        assert token.is_right(first)
        rotate()
        second = shown()
        assert second != first
        seconds[0] += 5
        assert [token.is_right(each) for each in (second, first, "wrong")] == [True, True, False]
        seconds[0] += 60
        assert [token.is_right(each) for each in (second, first)] == [True, False]
        rotate()
        assert not token.is_right("wrong")  # it has asked a moment ago, for `first`
        seconds[0] += 5
        assert token.is_right(shown())
        with pytest.raises(grpc.RpcError) as caught:
            admin.RotateCheckToken(admin_pb2.RotateCheckTokenRequest(id="orders"), metadata=center.operator)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
