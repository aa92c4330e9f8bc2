"""One trace from a message's prepare to its ack, across services and hours, as OpenTelemetry records it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from wsgiref.simple_server import make_server

import grpc
import pytest
import sqlalchemy as sa
from opentelemetry import baggage, context, propagate, trace
from opentelemetry.propagators.textmap import TextMapPropagator, default_getter, default_setter
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.trace import SpanKind, StatusCode

import tmc_client as tmc
from tests.support.center import RunningCenter
from tests.support.spans import Spans, id_of, parent_of, recorded, trace_of
from tmc_client.testing import ManualCenter
from tmc_common.protocol import admin_pb2, message_pb2, message_pb2_grpc
from tmc_storm.eventually import eventually
from tmc_storm.services.mariadb import MariaDB
from tmc_storm.services.rabbitmq import RabbitMQ

TOPIC = "trace.topic"
W3C = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
HOURS = timedelta(hours=3)


@pytest.fixture
def spans() -> Iterator[Spans]:
    with recorded() as found:
        yield found


@pytest.fixture
def manual() -> Iterator[ManualCenter]:
    with ManualCenter() as center:
        yield center


class Listening:
    """A consumer; messages: as its handler saw them, with the trace and the baggage that were current."""

    def __init__(self, center: tmc.Center) -> None:
        self.consumer = tmc.Consumer(center)
        self.seen: list[tuple[tmc.Message, int, dict[str, Any]]] = []

        @self.consumer.listener(TOPIC)
        def handle(_body: bytes, message: tmc.Message) -> None:
            trace_id = trace.get_current_span().get_span_context().trace_id
            self.seen.append((message, trace_id, dict(baggage.get_all())))


@contextmanager
def serving(checks: Any, kind: str) -> Iterator[admin_pb2.CheckTarget]:
    """Answers to checks, and the target that leads there."""
    if kind == "grpc":
        server = checks.serve("127.0.0.1:0")
        try:
            yield admin_pb2.CheckTarget(kind="grpc", address=server.address)
        finally:
            server.stop()
        return
    with make_server("127.0.0.1", 0, checks.wsgi()) as web:
        thread = threading.Thread(target=web.serve_forever)
        thread.start()
        options = {"path": "/tmc/checks", "batch": "true" if kind == "batch" else "false"}
        yield admin_pb2.CheckTarget(kind="http", address=f"127.0.0.1:{web.server_port}", options=options)
        web.shutdown()
        thread.join()


def _attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def _is_copy(span: ReadableSpan) -> bool:
    """Made by the center for a copy, and not by the SDK for a call?"""
    return "tmc.attempt" in _attributes(span)


def test_a_message_is_one_trace_from_prepare_to_ack_hours_later(manual: ManualCenter, spans: Spans) -> None:
    orders, listening = manual.connect("orders"), Listening(manual.connect("coupons"))
    manual.consume(listening.consumer)
    prepared = orders.prepare(TOPIC, b"x", key="1", delay=HOURS)
    orders.submit(prepared)
    manual.advance(HOURS + timedelta(minutes=1))
    manual.assert_nothing_open()
    prepare, ack = spans.only(f"prepare {TOPIC}"), spans.only("ack")
    names = spans.names(trace_of(prepare))
    ours = [name for name in names if not name.startswith("tmc.v1.")]
    assert sorted(ours) == sorted(
        [
            f"prepare {TOPIC}",
            "submit",
            f"publish {TOPIC}",
            f"receive {TOPIC}",
            f"process {TOPIC}",
            "ack",
        ]
    )
    methods = [
        f"tmc.v1.{name}Many" for name in ("MessageService/Prepare", "MessageService/Submit", "ConsumptionService/Ack")
    ]
    assert sorted(set(names) - set(ours)) == sorted(methods)
    kinds = {
        f"prepare {TOPIC}": (SpanKind.PRODUCER, "create"),
        "submit": (SpanKind.CLIENT, "send"),
        f"publish {TOPIC}": (SpanKind.PRODUCER, "send"),
        f"receive {TOPIC}": (SpanKind.CONSUMER, "receive"),
        f"process {TOPIC}": (SpanKind.CONSUMER, "process"),
        "ack": (SpanKind.CLIENT, "settle"),
    }
    for name, (kind, operation) in kinds.items():
        (span,) = spans.named(name)
        assert span.kind is kind
        assert _attributes(span)["messaging.operation.type"] == operation
        assert _attributes(span)["messaging.message.id"] == prepared.message_id
        assert _attributes(span)["messaging.system"] == "tmc"
        assert parent_of(span) == (None if name.startswith("prepare") else id_of(prepare))
    assert _attributes(ack)["messaging.message.id"] == listening.seen[0][0].id


def _prepared_twice(orders: tmc.Center) -> tuple[tmc.Prepared, trace.SpanContext]:
    """In a span, and the same attempt again from another one. Returns: the message, and the first span."""
    attempt = tmc.new_attempt_id()
    tracer = trace.get_tracer("test")
    with tracer.start_as_current_span("order") as order:
        prepared = orders.prepare(TOPIC, b"x", key="1", attempt_id=attempt)
    with tracer.start_as_current_span("a repeat from elsewhere"):
        assert orders.prepare(TOPIC, b"x", key="1", attempt_id=attempt).message_id == prepared.message_id
    return prepared, order.get_span_context()


def test_the_span_of_the_program_is_the_parent(manual: ManualCenter, spans: Spans) -> None:
    orders, listening = manual.connect("orders"), Listening(manual.connect("coupons"))
    manual.consume(listening.consumer)
    prepared, wanted = _prepared_twice(orders)
    with trace.get_tracer("test").start_as_current_span("later") as later:
        orders.submit(prepared)
    manual.settle()
    ((message, seen, _),) = listening.seen
    assert seen == wanted.trace_id
    assert message.headers["traceparent"].split("-")[1] == f"{wanted.trace_id:032x}"
    assert parent_of(spans.only(f"process {TOPIC}")) == wanted.span_id
    assert parent_of(spans.only("submit")) == later.get_span_context().span_id


def test_a_context_that_the_program_set_is_kept(manual: ManualCenter, spans: Spans) -> None:
    listening = Listening(manual.connect("coupons"))
    manual.consume(listening.consumer)
    with trace.get_tracer("test").start_as_current_span("another"):
        manual.connect("orders").publish(TOPIC, b"x", key="1", headers={"traceparent": W3C, "color": "red"})
    manual.settle()
    ((message, seen, _),) = listening.seen
    assert (message.headers["traceparent"], message.headers["color"]) == (W3C, "red")
    assert f"{seen:032x}" == W3C.split("-")[1]
    assert f"{trace_of(spans.only(f'publish {TOPIC}', _is_copy)):032x}" == W3C.split("-")[1]


def test_baggage_travels_as_far_as_it_fits(manual: ManualCenter) -> None:
    listening = Listening(manual.connect("coupons"))
    manual.consume(listening.consumer)
    orders = manual.connect("orders")
    token = context.attach(baggage.set_baggage("tenant", "acme"))
    try:
        with recorded():
            orders.publish(TOPIC, b"x", key="1")
            orders.publish(TOPIC, b"x", key="2", headers={"notes": "n" * 8_050})
            orders.publish(TOPIC, b"x", key="3", headers={"notes": "n" * 8_180})
    finally:
        context.detach(token)
    manual.settle()
    seen = {message.key: (found, set(message.headers)) for message, _, found in listening.seen}
    assert seen["1"] == ({"tenant": "acme"}, {"traceparent", "baggage"})
    assert seen["2"][1] == {"notes", "traceparent", "baggage"}
    assert seen["3"] == ({}, {"notes"})


class XRay(TextMapPropagator):
    """As AWS's: its header is not in lower case."""

    def inject(self, carrier: Any, context: Any = None, setter: Any = default_setter) -> None:
        span = trace.get_current_span(context).get_span_context()
        if span.is_valid:
            setter.set(carrier, "X-Amzn-Trace-Id", f"{span.trace_id:032x}:{span.span_id:016x}")

    def extract(self, carrier: Any, context: Any = None, getter: Any = default_getter) -> Any:
        found = getter.get(carrier, "X-Amzn-Trace-Id")
        if not found:
            return context
        trace_id, span_id = (int(part, 16) for part in found[0].split(":"))
        remote = trace.SpanContext(trace_id, span_id, is_remote=True, trace_flags=trace.TraceFlags(1))
        return trace.set_span_in_context(trace.NonRecordingSpan(remote), context)

    @property
    def fields(self) -> set[str]:
        return {"X-Amzn-Trace-Id"}


@pytest.fixture
def x_ray() -> Iterator[None]:
    before = propagate.get_global_textmap()
    propagate.set_global_textmap(XRay())
    yield
    propagate.set_global_textmap(before)


@pytest.mark.usefixtures("x_ray")
def test_configured_propagators_are_kept_whatever_the_case_of_their_names(manual: ManualCenter, spans: Spans) -> None:
    orders, listening = manual.connect("orders"), Listening(manual.connect("coupons"))
    manual.consume(listening.consumer)
    prepared, wanted = _prepared_twice(orders)
    orders.submit(prepared)
    manual.settle()
    ((message, seen, _),) = listening.seen
    assert set(message.headers) == {"X-Amzn-Trace-Id"}
    assert seen == wanted.trace_id == trace_of(spans.only("submit"))
    server = spans.only("tmc.v1.MessageService/SubmitMany", lambda span: span.kind is SpanKind.SERVER)
    assert trace_of(server) == seen


class Faulty(SpanProcessor):
    def on_start(self, span: Any, parent_context: Any = None) -> None:
        raise RuntimeError("the exporter is broken")

    def on_end(self, span: Any) -> None:
        raise RuntimeError("the exporter is broken")


def test_a_fault_of_telemetry_is_no_fault_of_a_message(manual: ManualCenter, monkeypatch: pytest.MonkeyPatch) -> None:
    listening = Listening(manual.connect("coupons"))
    manual.consume(listening.consumer)
    broken = TracerProvider()
    broken.add_span_processor(Faulty())
    monkeypatch.setattr(trace, "get_tracer", broken.get_tracer)
    orders = manual.connect("orders")
    orders.submit(orders.prepare(TOPIC, b"x", key="1"))
    manual.settle()
    manual.assert_nothing_open()
    assert [message.attempt for message, _, _ in listening.seen] == [1]


def test_large_baggage_does_not_make_calls_too_large(manual: ManualCenter, spans: Spans) -> None:
    token = context.attach(baggage.set_baggage("b", "b" * 4_000, baggage.set_baggage("a", "a" * 4_000)))
    try:
        orders = manual.connect("orders")
        for number in range(150):  # gRPC refuses at random what is not much too large
            orders.publish(TOPIC, b"x", key=str(number))
    finally:
        context.detach(token)
    assert len(spans.named(f"publish {TOPIC}")) >= 150


def test_a_batch_links_to_the_traces_of_all_its_messages(manual: ManualCenter, spans: Spans) -> None:
    consumer = tmc.Consumer(manual.connect("coupons"))

    @consumer.batch_listener(TOPIC, max_messages=3, max_wait=HOURS)
    def handle(_bodies: list[bytes]) -> None:
        pass

    manual.consume(consumer)
    orders = manual.connect("orders")
    for key in ("1", "2", "3"):
        orders.publish(TOPIC, b"x", key=key)
    manual.settle()
    process = spans.only(f"process {TOPIC}")
    published = [span for span in spans.named(f"publish {TOPIC}") if not _is_copy(span)]
    assert _attributes(process)["messaging.batch.message_count"] == 3
    traces = {trace_of(process), *(link.context.trace_id for link in process.links)}
    assert traces == {trace_of(span) for span in published}
    assert len(traces) == 3


def test_a_failure_is_an_error_of_its_span(manual: ManualCenter, spans: Spans) -> None:
    consumer = tmc.Consumer(manual.connect("coupons"))

    @consumer.listener(TOPIC)
    def handle(_body: bytes) -> None:
        raise tmc.Reject("no such order")

    manual.consume(consumer)
    orders = manual.connect("orders")
    orders.publish(TOPIC, b"x", key="1")
    manual.settle()
    with pytest.raises(tmc.NotFound):
        orders.submit("1-1-01-1")
    process, submit = spans.only(f"process {TOPIC}"), spans.only("submit")
    assert (process.status.status_code, process.events[0].name) == (StatusCode.ERROR, "exception")
    assert submit.status.status_code is StatusCode.ERROR
    assert spans.only("nack").status.status_code is not StatusCode.ERROR


def _instance(center: RunningCenter, target: admin_pb2.CheckTarget) -> None:
    request = admin_pb2.SetTopicCheckRequest(topic="order.paid", targets=[target], untried=True)
    with grpc.insecure_channel(center.address) as channel:
        center.admin(channel).SetTopicCheck(request, metadata=center.operator, timeout=20)


@pytest.mark.parametrize("kind", ["grpc", "http", "batch"])
def test_a_check_belongs_to_the_trace_of_its_message_on_both_sides(kind: str, spans: Spans, tmp_path: Path) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path}/business.db")
    tmc.create_tables(engine)
    allowed = {"allow": ["127.0.0.0/8:*"]}
    with RunningCenter(f"sqlite:///{tmp_path}/c.db", checks=allowed) as center:
        with tmc.connect(center.address, app="orders", key=center.keys["orders"]) as orders:
            checks = orders.checks(engine)
            with serving(checks, kind) as target:
                _instance(center, target)
                prepared = orders.prepare("order.paid", b"x", key="1")
                with grpc.insecure_channel(center.address) as channel:
                    request = admin_pb2.CheckNowRequest(message_id=prepared.message_id)
                    center.admin(channel).CheckNow(request, metadata=center.operator, timeout=30)
                answered = spans.only("check order.paid", lambda span: span.kind is SpanKind.SERVER)
    engine.dispose()
    prepare = spans.only("prepare order.paid")
    asked = spans.only("check order.paid", lambda span: span.kind is SpanKind.CLIENT)
    assert trace_of(asked) == trace_of(answered) == trace_of(prepare)
    assert (parent_of(asked), parent_of(answered)) == (id_of(prepare), id_of(asked))
    assert _attributes(answered)["messaging.message.id"] == prepared.message_id


def _call(center: RunningCenter, metadata: dict[str, str], headers: dict[str, str]) -> None:
    with grpc.insecure_channel(center.address) as channel:
        request = message_pb2.PublishRequest(
            topic=TOPIC, key="1", body=b"x", attempt_id=tmc.new_attempt_id(), headers=headers
        )
        named = [("tmc-app", "orders"), *metadata.items()]
        message_pb2_grpc.MessageServiceStub(channel).Publish(request, metadata=named, timeout=30)


@pytest.mark.parametrize(
    ("metadata", "headers", "kept"),
    [
        ({"traceparent": W3C, "baggage": "tenant=acme"}, {}, {"traceparent": W3C, "baggage": "tenant=acme"}),
        (
            {"traceparent": W3C},
            {"traceparent": W3C.replace("0af7", "1bf8")},
            {"traceparent": W3C.replace("0af7", "1bf8")},
        ),
        ({"traceparent": W3C, "baggage": "b=" + "x" * 600}, {}, {"traceparent": W3C}),
        ({"traceparent": "00-xyz", "baggage": "tenant=acme"}, {}, {}),
        ({"baggage": "tenant=acme"}, {}, {}),
        ({"traceparent": W3C}, {"notes": "n" * 8_180}, {}),
    ],
    ids=["kept", "the message's own", "too large", "malformed", "no trace", "no room"],
)
def test_metadata_of_other_grpc_clients_is_honored(
    tmp_path: Path, metadata: dict[str, str], headers: dict[str, str], kept: dict[str, str]
) -> None:
    with RunningCenter(f"sqlite:///{tmp_path}/c.db", open_to_all=True) as center:
        with tmc.connect(center.address, app="coupons") as coupons:
            listening = Listening(coupons)
            with listening.consumer:
                center.subscribed()
                _call(center, metadata, headers)
                eventually(lambda: listening.seen)
    ((message, seen, found),) = listening.seen
    assert {name: text for name, text in message.headers.items() if name != "notes"} == kept
    if "traceparent" in kept:
        assert f"{seen:032x}" == kept["traceparent"].split("-")[1]
    assert ("tenant" in found) is ("baggage" in kept)


@pytest.mark.mariadb
@pytest.mark.services
def test_a_copy_through_rabbitmq_has_a_span_until_its_confirm(
    mariadb: MariaDB, rabbitmq: RabbitMQ, spans: Spans
) -> None:
    with RunningCenter(
        mariadb.url("tmc_tracing"), delivery={"kind": "rabbitmq"}, rabbitmq={"url": rabbitmq.url}
    ) as center:
        with tmc.connect(center.address, app="orders", key=center.keys["orders"]) as orders:
            message_id = orders.publish("order.paid", b"x", key="1")
            sent = spans.only("publish order.paid", _is_copy)
    assert _attributes(sent)["messaging.message.id"] == message_id
    assert _attributes(sent)["messaging.destination.subscription.name"].startswith("tmc.")
    assert trace_of(sent) == trace_of(spans.only("publish order.paid", lambda span: not _is_copy(span)))


def test_a_program_without_opentelemetry_does_not_load_it() -> None:
    program = "import sys, tmc_server.app.server, tmc_client.consuming.consumer; print('opentelemetry' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"
