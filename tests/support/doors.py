"""The ways into the center, with one face: steps in, answers out. Written as a foreign client would, from the docs."""

from __future__ import annotations

import base64
import json
import os
import queue
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc
import httpx
import pika
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from tests.support.center import RunningCenter
from tmc_common.protocol import admin_pb2, admin_pb2_grpc, message_pb2, message_pb2_grpc, types_pb2
from tmc_common.signatures import sign
from tmc_common.submission import queue_of, signed
from tmc_storm.eventually import eventually


@dataclass(frozen=True, kw_only=True)
class Step:
    """op: prepare, submit, rollback or publish.  attempt: 16 bytes.  Others as in the protos."""

    op: str
    topic: str = "order.paid"
    key: str = "k"
    attempt: bytes = b""
    body: bytes = b"body"
    content_type: str = ""
    headers: Mapping[str, Any] = field(default_factory=dict)
    order_key: str = ""
    delay_ms: int = 0
    ledger: bytes = b""
    target: str = ""
    time_ms: int = 0


@dataclass(frozen=True)
class Answer:
    """outcome: the state of the message, or the reason why it was refused."""

    outcome: str
    message_id: str = ""
    field: str = ""
    text: str = ""


class Door(Protocol):
    def send(self, *steps: Step) -> list[Answer]:
        """Send them one behind another, without waiting in between; then return their answers."""

    def close(self) -> None: ...


def open_queue(center: RunningCenter, app: str, tag: str = "", unsigned: bool = False) -> str:
    """Open a submit queue. Returns: its secret."""
    with grpc.insecure_channel(center.address) as channel:
        request = admin_pb2.OpenSubmitQueueRequest(id=app, tag=tag, unsigned=unsigned)
        made = admin_pb2_grpc.AdminServiceStub(channel).OpenSubmitQueue(request, metadata=center.operator)
        return str(made.secret)


def has_queue(connection: pika.BlockingConnection, name: str) -> bool:
    """Return whether a queue was declared."""
    try:
        with connection.channel() as channel:
            channel.queue_declare(name, passive=True)
    except pika.exceptions.ChannelClosedByBroker:
        return False
    return True


class GrpcDoor:
    """One call after the other: the next one follows when the last is answered."""

    def __init__(self, center: RunningCenter) -> None:
        self._channel = grpc.insecure_channel(center.address)
        self._stub = message_pb2_grpc.MessageServiceStub(self._channel)
        self._metadata = center.as_app("orders")

    def send(self, *steps: Step) -> list[Answer]:
        return [self._one(step) for step in steps]

    def _one(self, step: Step) -> Answer:
        name = step.op.capitalize()
        many = getattr(message_pb2, f"{name}ManyRequest")(items=[_request_of(step)])
        (result,) = getattr(self._stub, f"{name}Many")(many, metadata=self._metadata).results
        return _answer_of(result)

    def close(self) -> None:
        self._channel.close()


class StreamDoor:
    """The same over one stream."""

    def __init__(self, center: RunningCenter) -> None:
        self._channel = grpc.insecure_channel(center.address)
        self._requests: queue.SimpleQueue[message_pb2.ProduceRequest | None] = queue.SimpleQueue()
        produce = message_pb2_grpc.MessageServiceStub(self._channel).Produce
        self._responses = produce(iter(self._requests.get, None), metadata=center.as_app("orders"))

    def send(self, *steps: Step) -> list[Answer]:
        return [self._one(step) for step in steps]

    def _one(self, step: Step) -> Answer:
        operation = message_pb2.Operation(**{step.op: _request_of(step)})
        self._requests.put(message_pb2.ProduceRequest(operations=[operation]))
        (result,) = next(self._responses).results
        return _answer_of(result)

    def close(self) -> None:
        self._requests.put(None)
        self._channel.close()


class HttpDoor:
    """The same as JSON, written as a client would that has only the OpenAPI document."""

    def __init__(self, center: RunningCenter) -> None:
        http = center.server.parts.http
        assert http is not None
        headers = dict(center.as_app("orders"))
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{http.port}", headers=headers, timeout=60)

    def send(self, *steps: Step) -> list[Answer]:
        return [self._one(step) for step in steps]

    def _one(self, step: Step) -> Answer:
        given: dict[str, object] = {"topic": step.topic, "key": step.key, "attemptId": _base64(step.attempt)}
        if step.op in ("prepare", "publish"):
            given |= {"body": _base64(step.body), "contentType": step.content_type, "orderKey": step.order_key}
            given |= {"delayMs": step.delay_ms, "headers": dict(step.headers)}
        if step.op == "prepare":
            given |= {"ledgerId": _base64(step.ledger), "checkTarget": step.target, "transactionTimeMs": step.time_ms}
        answer = self._client.post(f"/v1/messages:{step.op}", json=given)
        found = answer.json()
        if answer.is_success:
            return Answer(_state(found["state"]), found.get("messageId", ""))
        return Answer(found["reason"], found.get("messageId", ""), found.get("field", ""), found["detail"])

    def close(self) -> None:
        self._client.close()


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _request_of(step: Step) -> Any:
    kind = getattr(message_pb2, f"{step.op.capitalize()}Request")
    request: Any = kind(topic=step.topic, key=step.key, attempt_id=step.attempt)
    if step.op in ("prepare", "publish"):
        request.body, request.content_type, request.order_key = step.body, step.content_type, step.order_key
        request.delay_ms = step.delay_ms
        request.headers.update(step.headers)
    if step.op == "prepare":
        request.ledger_id, request.check_target = step.ledger, step.target
        request.transaction_time_ms = step.time_ms
    return request


def _answer_of(result: Any) -> Answer:
    if result.HasField("error"):
        error = result.error
        return Answer(types_pb2.Reason.Name(error.reason), error.message_id, error.field, error.message)
    return Answer(_state(types_pb2.MessageState.Name(result.state)), result.message_id)


def _state(name: str) -> str:
    return name.removeprefix("MESSAGE_STATE_")


def attributes_of(step: Step) -> dict[str, str]:
    """Return the attributes of a CloudEvent, without prefix."""
    given = {
        "specversion": "1.0",
        "id": step.attempt.hex(),
        "source": "/tests",
        "type": step.topic,
        "subject": step.key,
        "tmcop": step.op,
        "tmcorderkey": step.order_key,
        "tmcledger": step.ledger.hex(),
        "tmctarget": step.target,
        "tmcdelay": str(step.delay_ms) if step.delay_ms else "",
        "tmctime": str(step.time_ms) if step.time_ms else "",
    }
    return {name: text for name, text in given.items() if text}


def answer_of(body: bytes) -> Answer:
    found = json.loads(body)
    if "error" in found:
        error = found["error"]
        return Answer(error["reason"], error.get("messageId", ""), error.get("field", ""), error.get("message", ""))
    return Answer(_state(found["state"]), found["messageId"])


class RabbitDoor:
    """Answers come to the connection's own direct replies. exchange: through which it publishes; "": the default one."""

    def __init__(
        self,
        connection: pika.BlockingConnection,
        app: str,
        secret: str = "",
        tag: str = "default",
        exchange: str = "",
    ) -> None:
        self.queue = queue_of(app, tag)
        self._exchange = exchange
        self._key = f"{app}.{tag}" if exchange else self.queue
        self.secret = bytes.fromhex(secret)
        self._connection = connection
        self.channel = connection.channel()
        self.answers: dict[str, Answer] = {}
        self.channel.basic_consume("amq.rabbitmq.reply-to", self._on_answer, auto_ack=True)
        self.channel.confirm_delivery()

    def _on_answer(self, _channel: Any, _method: Any, properties: Any, body: bytes) -> None:
        self.answers[properties.correlation_id] = answer_of(body)

    def publish(self, step: Step, reply_to: str = "", correlation: str = "") -> None:
        """Publish one step, confirmed by the broker."""
        given = attributes_of(step)
        if self.secret:
            content = signed(self.queue, given, step.content_type, step.body, step.headers)
            given["tmcsignature"] = sign(self.secret, content)
        self.publish_raw(given, step, reply_to, correlation)

    def publish_raw(self, given: Mapping[str, str], step: Step, reply_to: str = "", correlation: str = "") -> None:
        headers = {**step.headers, **{f"cloudEvents:{name}": text for name, text in given.items()}}
        properties = pika.BasicProperties(
            headers=headers,
            content_type=step.content_type or None,
            reply_to=reply_to or None,
            correlation_id=correlation or None,
            delivery_mode=2,
        )

        def is_stored() -> bool:
            # The broker refuses what it cannot store, as while a queue is made: a publisher sends it again.
            with suppress(pika.exceptions.NackError):
                self.channel.basic_publish(self._exchange, self._key, step.body, properties, mandatory=True)
                return True
            return False

        eventually(is_stored)

    def send(self, *steps: Step) -> list[Answer]:
        names = [uuid.uuid4().hex for _ in steps]
        for step, name in zip(steps, names, strict=True):
            self.publish(step, "amq.rabbitmq.reply-to", name)
        return self.wait_for(names)

    def wait_for(self, names: Sequence[str]) -> list[Answer]:
        def all_there() -> bool:
            self._connection.process_data_events(0.01)
            return all(name in self.answers for name in names)

        eventually(all_there)
        return [self.answers.pop(name) for name in names]

    def dead(self) -> list[tuple[Any, bytes]]:
        """Take what was refused: properties and bodies."""
        name = f"{self.queue.rpartition('.')[0]}.dead"
        found = []
        while (got := self.channel.basic_get(name, auto_ack=True))[0] is not None:
            found.append((got[1], got[2]))
        return found

    def close(self) -> None:
        """Close the connection, also one that was lost: the library leaves its sockets open."""
        with suppress(pika.exceptions.AMQPError):
            self._connection.close()
        self._connection._impl.ioloop.close()


class KafkaDoor:
    """Answers come to a topic of the app; steps of one key go to one partition."""

    def __init__(self, bootstrap: str, app: str, secret: str = "", tag: str = "default") -> None:
        self.queue = queue_of(app, tag)
        self.secret = bytes.fromhex(secret)
        self._replies = f"tmc.reply.{app}.tests"
        admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
        admin.create_topics([NewTopic(self._replies, 1)])[self._replies].exception(30)
        self._producer = Producer(
            {"bootstrap.servers": bootstrap, "enable.idempotence": True, "linger.ms": 1, "log_level": 0}
        )
        self._consumer = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "log_level": 0,
                "group.id": os.urandom(8).hex(),
                "auto.offset.reset": "earliest",
            }
        )
        self._consumer.subscribe([self._replies])
        self.answers: dict[str, Answer] = {}

    def publish(self, step: Step, correlation: str = "") -> None:
        given = attributes_of(step)
        if correlation:
            given |= {"tmcreplyto": self._replies, "tmccorrelation": correlation}
        if self.secret:
            content = signed(self.queue, given, step.content_type, step.body, step.headers)
            given["tmcsignature"] = sign(self.secret, content)
        headers = [*step.headers.items(), *((f"ce_{name}", text) for name, text in given.items())]
        headers += [("content-type", step.content_type)] if step.content_type else []
        self._producer.produce(
            self.queue,
            step.body,
            (step.order_key or step.key).encode(),
            headers=[(name, text.encode()) for name, text in headers],
        )
        self._producer.poll(0)

    def flush(self) -> None:
        assert self._producer.flush(60) == 0

    def send(self, *steps: Step) -> list[Answer]:
        names = [uuid.uuid4().hex for _ in steps]
        for step, name in zip(steps, names, strict=True):
            self.publish(step, name)
        self.flush()

        def all_there() -> bool:
            for record in self._consumer.consume(100, 0.01):
                if record.error() is None:
                    headers = {name: value.decode() for name, value in record.headers() or ()}
                    self.answers[headers["tmccorrelation"]] = answer_of(record.value())
            return all(name in self.answers for name in names)

        eventually(all_there)
        return [self.answers.pop(name) for name in names]

    def close(self) -> None:
        self._consumer.close()
