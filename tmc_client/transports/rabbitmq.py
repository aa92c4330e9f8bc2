"""Copies from RabbitMQ: one connection in a thread of its own. Needs `tmc-center[rabbitmq]`.

A copy is acked to the broker once the center has stored its outcome. Anything that the center did not make is acked,
logged and counted: a foreign publisher can neither reach a handler nor break the connection. Anything that looks like
a copy goes through the screen, which verifies the center's signature. If the broker cancels our consumers (a queue
was deleted, its leader moved), closes the channel or becomes unreachable, we reconnect; unacked copies are
redelivered.
"""

from __future__ import annotations

import logging
import re
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pika
import pika.frame
from pika.adapters.select_connection import IOLoop, SelectConnection

from tmc_client.received import Message
from tmc_client.screening import Screen, Suspect
from tmc_common.amqp import give_up
from tmc_common.headers import from_wire
from tmc_common.signatures import HEADER

log = logging.getLogger("tmc_client.rabbitmq")

_PAUSES_S = (0.2, 0.5, 1.0, 2.0, 5.0)
_MESSAGE_ID = re.compile(r"\d+-\d+-\d+-\d+", re.ASCII)
_LARGEST = 2**31 - 1
_PATIENCE_S = 15.0  # a broker that just started may take our connection and never answer on it


@dataclass(frozen=True, kw_only=True)
class Broker:
    """The broker's address, as the center gives it."""

    host: str
    port: int
    virtual_host: str
    tls: bool


@dataclass(frozen=True)
class Credentials:
    """User and password for the broker."""

    user: str
    password: str = field(repr=False)


class _Receipt:
    __slots__ = ("_generation", "_tag", "_transport")

    def __init__(self, transport: RabbitTransport, generation: int, tag: int) -> None:
        self._transport = transport
        self._generation = generation
        self._tag = tag

    def handled(self) -> None:
        """Nothing to do: the broker itself counts the copies that are not acked."""

    def answered(self) -> None:
        self._transport.ack(self._generation, self._tag)


class _ConsumerConnection(SelectConnection):  # type: ignore[misc]  # the library has no types
    """A connection that survives properties that the library cannot decode: such a message gets empty ones."""

    def _read_frame(self) -> Any:
        """Override the library's frame reader, see pika.connection."""
        try:
            return super()._read_frame()
        except Exception:
            kind, channel, size = struct.unpack_from(">BHL", self._frame_buffer)
            if kind != pika.spec.FRAME_HEADER:
                raise
            (body_bytes,) = struct.unpack_from(">Q", self._frame_buffer, 7 + 4)
            return 7 + size + 1, pika.frame.Header(channel, body_bytes, pika.BasicProperties())


def _number(value: object) -> int:
    """Raises ValueError, TypeError."""
    if not isinstance(value, (int, str)) or isinstance(value, bool):
        raise TypeError(f"{value!r} is no number")
    number = int(value)
    if not 1 <= number <= _LARGEST:
        raise ValueError(f"{value!r} is out of range")
    return number


def message_of(properties: Any, body: bytes) -> Message:
    """Parse a copy made by the center. Raises ValueError, TypeError, LookupError for anything else."""
    headers = dict(properties.headers or {})
    headers.pop(HEADER, None)
    if not isinstance(properties.message_id, str) or not _MESSAGE_ID.fullmatch(properties.message_id):
        raise ValueError(f"its message id is {properties.message_id!r}")
    if not isinstance(properties.type, str) or not properties.type:
        raise ValueError(f"its topic is {properties.type!r}")
    if strange := set(map(type, headers)) - {str}:
        raise ValueError(f"a header is named by a {strange.pop().__name__}")
    return Message(
        id=properties.message_id,
        topic=properties.type,
        key=str(headers.pop("tmc-key")),
        body=body,
        content_type=str(properties.content_type),
        attempt=_number(headers.pop("tmc-attempt")),
        subscriber=str(headers.pop("tmc-subscriber")),
        interval_ms=_number(headers.pop("tmc-interval-ms")) if "tmc-interval-ms" in headers else 0,
        headers=from_wire(headers),
        producer=str(properties.app_id),
    )


class RabbitTransport:
    """received.Transport over RabbitMQ. prefetch: maximum number of unacked copies.

    plan: asks the center for broker and queues; blocks, raises TmcError.
    screen: passes on the copies that the center signed; `stop` it after this.
    """

    def __init__(
        self,
        plan: Callable[[], tuple[Broker, Sequence[str]]],
        credentials: Credentials,
        prefetch: int,
        screen: Screen,
    ) -> None:
        self._plan = plan
        self._credentials = credentials
        self._prefetch = prefetch
        self._screen = screen
        self._stopping = threading.Event()
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._acks: list[int] = []
        self._open: dict[int, None] = {}  # delivery tags without an ack, ascending; on the connection's thread
        self._generation = 0
        self._failures = 0
        self.malformed = 0
        self._queues: Sequence[str] = ()
        self._by_consumer: dict[str, str] = {}  # queues by consumer tag; on the connection's thread
        self._unanswered = 0  # queues of this connection that the broker has not begun to send from
        self._connection: Any = None
        self._channel: Any = None
        self._thread = threading.Thread(target=self._run, name="tmc-rabbitmq", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """See received.Transport: the connection stays open for the acks of copies already received."""
        self._stopping.set()
        self._in_loop(self._cancel)

    def close(self) -> None:
        self._stopping.set()
        self._closing.set()
        self._in_loop(lambda: self._connection.close() if self._connection.is_open else None)
        if self._thread.is_alive():
            self._thread.join(10)

    def ack(self, generation: int, tag: int) -> None:
        """From any thread; several at once become one frame."""
        with self._lock:
            if generation != self._generation:
                return  # its connection is closed: the broker redelivers that copy
            first = not self._acks
            self._acks.append(tag)
        if first:
            self._in_loop(self._send_acks)

    def _in_loop(self, work: Callable[[], None]) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.ioloop.add_callback_threadsafe(work)

    def _send_acks(self) -> None:
        with self._lock:
            tags, self._acks = self._acks, []
        if not tags or self._channel is None or not self._channel.is_open:
            return
        for tag in tags:
            self._open.pop(tag, None)
        newest = max(tags)
        if next(iter(self._open), newest + 1) > newest:
            self._channel.basic_ack(newest, multiple=True)
        else:
            for tag in tags:
                self._channel.basic_ack(tag)

    def _cancel(self) -> None:
        if self._channel is not None and self._channel.is_open:
            for consumer in list(self._channel.consumer_tags):
                self._channel.basic_cancel(consumer)

    def _run(self) -> None:
        while not self._stopping.is_set():
            loop = IOLoop()
            try:
                broker, self._queues = self._plan()
                self._connect(broker, loop)
            except Exception as exc:  # noqa: BLE001 - whatever it was, connect again
                self._note(exc)
            with self._lock:
                self._connection = self._channel = None
                self._generation += 1
                self._acks = []
            self._open.clear()
            loop.close()
            self._stopping.wait(_PAUSES_S[min(self._failures, len(_PAUSES_S) - 1)])

    def _note(self, reason: object) -> None:
        self._failures += 1
        if self._failures in (1, 10) and not self._stopping.is_set():
            log.warning("no copies from the broker, retrying: %s", reason)

    def _connect(self, broker: Broker, loop: Any) -> None:
        import ssl

        parameters = pika.ConnectionParameters(
            host=broker.host,
            port=broker.port,
            virtual_host=broker.virtual_host,
            credentials=pika.PlainCredentials(self._credentials.user, self._credentials.password),
            ssl_options=pika.SSLOptions(ssl.create_default_context(), broker.host) if broker.tls else None,
            heartbeat=10,
            client_properties={"connection_name": "tmc consumer"},
        )
        self._connection = _ConsumerConnection(
            parameters,
            on_open_callback=self._on_open,
            on_open_error_callback=self._on_end,
            on_close_callback=self._on_end,
            custom_ioloop=loop,
        )
        loop.start()

    def _on_end(self, connection: Any, reason: object) -> None:
        if not self._closing.is_set():
            self._note(reason)
        connection.ioloop.stop()

    def _on_open(self, connection: Any) -> None:
        if self._stopping.is_set():
            connection.close()
            return
        self._unanswered = len(self._queues)
        connection.ioloop.call_later(_PATIENCE_S, lambda: self._give_up_waiting(connection))
        connection.channel(on_open_callback=self._on_channel)

    def _give_up_waiting(self, connection: Any) -> None:
        if self._unanswered and connection is self._connection and not self._stopping.is_set():
            self._note(f"no answer in {_PATIENCE_S:g} s")
            give_up(connection, _PATIENCE_S / 3)

    def _on_channel(self, channel: Any) -> None:
        self._channel = channel
        channel.add_on_close_callback(self._on_channel_close)
        channel.add_on_cancel_callback(self._on_cancelled)
        each = max(1, self._prefetch // max(1, len(self._queues)))  # the broker counts per consumer, that is per queue
        channel.basic_qos(prefetch_count=each, callback=lambda _frame: self._consume(channel))

    def _consume(self, channel: Any) -> None:
        if self._stopping.is_set():
            return
        for queue in self._queues:
            tag = channel.basic_consume(queue, self._on_copy, callback=self._on_consuming)
            self._by_consumer[tag] = queue

    def _on_consuming(self, _frame: object) -> None:
        self._unanswered -= 1
        if self._failures:
            log.info("receiving copies again")
            self._failures = 0

    def _on_cancelled(self, frame: Any) -> None:
        """The queue was deleted or its leader moved: reconnect; the center declares the queue again."""
        log.warning("the broker ended our consumer: %s", frame.method)
        frame_channel = self._channel
        if frame_channel is not None and frame_channel.is_open:
            frame_channel.close()

    def _on_channel_close(self, _channel: Any, reason: object) -> None:
        self._note(reason)
        if self._connection is not None and self._connection.is_open:
            self._connection.close()

    def _on_copy(self, channel: Any, method: Any, properties: Any, body: bytes) -> None:
        try:
            message = message_of(properties, body)
        except (ValueError, TypeError, LookupError) as exc:
            self.malformed += 1
            log.error(
                "a message from queue %s was not made by the center and is dropped (%d so far): %s",
                self._by_consumer.get(method.consumer_tag, "?"),
                self.malformed,
                f"it has no header {exc}" if isinstance(exc, KeyError) else exc,
            )
            channel.basic_ack(method.delivery_tag)
            return
        self._open[method.delivery_tag] = None
        receipt = _Receipt(self, self._generation, method.delivery_tag)
        signature = properties.headers.get(HEADER)
        queue = self._by_consumer.get(method.consumer_tag, "")
        self._screen.arrive(Suspect(message=message, signature=signature, queue=queue, receipt=receipt))
