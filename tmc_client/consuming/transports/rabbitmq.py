"""Copies from RabbitMQ: one connection in a thread of its own, a channel per queue. Needs `tmc-client[rabbitmq]`.

A copy is acked to the broker once the center has stored its outcome. Anything that the center did not make is acked,
logged and counted: a foreign publisher can neither reach a handler nor break the connection. Anything that looks like
a copy goes through the screen, which verifies the center's signature. If the broker cancels a consumer (a queue was
deleted, its leader moved) or closes a channel, that queue alone is read again after a pause; if the connection breaks,
we reconnect. Either way unacked copies are redelivered.
"""

from __future__ import annotations

import logging
import random
import re
import ssl
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pika
import pika.frame
from pika.adapters.select_connection import IOLoop, SelectConnection
from pika.exceptions import NoFreeChannels

from tmc_client.consuming.received import Message
from tmc_client.consuming.screening import Screen, Suspect
from tmc_client.errors import TmcError
from tmc_common.addresses import HostPort
from tmc_common.amqp import give_up, text_of
from tmc_common.headers import from_wire
from tmc_common.signatures import HEADER

log = logging.getLogger("tmc_client.rabbitmq")

_PAUSES_S = (0.2, 0.5, 1.0, 2.0, 5.0)
_MESSAGE_ID = re.compile(r"\d+-\d+-\d+-\d+", re.ASCII)
_LARGEST = 2**31 - 1
_ASK_AGAIN_S = 5.0  # for the queues of topics that have none
_SETTLE_S = 0.25
_PATIENCE_S = 15.0  # a broker that just started may take our connection and never answer on it


@dataclass(frozen=True, kw_only=True)
class Broker:
    """The broker's address, as the center gives it. nodes: one or more; if one does not answer, the next one is tried."""

    nodes: Sequence[HostPort]
    virtual_host: str
    tls: bool


@dataclass(frozen=True, kw_only=True)
class Plan:
    """missing: topics of listeners for which there is no subscription, or no queue, yet."""

    broker: Broker
    queues: Sequence[str]
    missing: Sequence[str] = ()


@dataclass(frozen=True)
class Credentials:
    """User and password for the broker."""

    user: str
    password: str = field(repr=False)


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


def message_of(properties: Any, body: bytes, redelivered: bool = False) -> Message:
    """Parse a copy made by the center. Raises ValueError, TypeError, LookupError for anything else.

    redelivered: the broker gave it to a consumer before, which did not ack it.
    """
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
        redelivered=redelivered,
    )


class _Receipt:
    __slots__ = ("_generation", "_reader", "_tag")

    def __init__(self, reader: _Reader, generation: int, tag: int) -> None:
        self._reader = reader
        self._generation = generation
        self._tag = tag

    def handled(self) -> None:
        """Nothing to do: the broker itself counts the copies that are not acked."""

    def answered(self) -> None:
        self._reader.ack(self._generation, self._tag)

    @property
    def lost(self) -> bool:
        return self._reader.generation != self._generation


class _Reader:
    """One queue, read on a channel of its own: what is wrong with it affects no other. On the connection's thread.

    generation: number of the channel; acks for copies of an earlier one go nowhere.
    """

    def __init__(self, transport: RabbitTransport, queue: str) -> None:
        self._transport = transport
        self.queue = queue
        self.generation: int = 0
        self.reads: bool = False
        self.last_ack: float = 0.0  # monotonic seconds
        self._failures = 0
        self._complaint = ""
        self._lock = threading.Lock()
        self._acks: list[int] = []
        self._open: dict[int, None] = {}  # delivery tags without an ack, ascending
        self._channel: Any = None
        self._connection: Any = None

    def open(self, connection: Any) -> None:
        self._connection = connection
        if connection.is_open and not self._transport.is_stopping:
            try:
                connection.channel(on_open_callback=self._on_channel)
            except NoFreeChannels:
                log.error(
                    "queue %s is not read: the broker allows no further channel, raise its channel_max", self.queue
                )

    def _on_channel(self, channel: Any) -> None:
        self._channel = channel
        channel.add_on_close_callback(self._on_close)
        channel.add_on_cancel_callback(self._on_cancelled)
        channel.basic_qos(
            prefetch_count=self._transport.prefetch_of_a_queue, callback=lambda _frame: self._consume(channel)
        )

    def _consume(self, channel: Any) -> None:
        if not self._transport.is_stopping:
            channel.basic_consume(self.queue, self._on_copy, callback=self._on_consuming)

    def _on_consuming(self, _frame: object) -> None:
        self.reads = True
        if self._failures:
            log.info("queue %s is read again", self.queue)
        self._failures, self._complaint = 0, ""
        self._transport.reads(self)

    def _on_cancelled(self, _frame: Any) -> None:
        """The queue was deleted or its leader moved; the center declares a deleted one again."""
        if self._channel is not None and self._channel.is_open:
            self._channel.close(0, "the broker ended its consumer")

    def _on_close(self, _channel: Any, reason: object) -> None:
        self.lose()
        if self._transport.is_stopping or not self._connection.is_open:
            return
        pause_s = _PAUSES_S[min(self._failures, len(_PAUSES_S) - 1)]
        self._failures += 1
        complaint = getattr(reason, "reply_text", "") or text_of(reason)
        if complaint != self._complaint and self._failures > 1:
            self._complaint = complaint
            log.warning("queue %s cannot be read, retrying; the other queues are: %s", self.queue, complaint)
        connection = self._connection
        connection.ioloop.call_later(pause_s, lambda: self.open(connection))

    def lose(self) -> None:
        """The channel is gone: the broker gives its copies to any consumer."""
        with self._lock:
            self.generation += 1
            self._acks = []
        had_some = bool(self._open)
        self._open.clear()
        self._channel = None
        self.reads = False
        if had_some:
            self._transport.lost()

    def ack(self, generation: int, tag: int) -> None:
        """Ack a copy, from any thread; several at once become one frame."""
        with self._lock:
            if generation != self.generation:
                return
            first = not self._acks
            self._acks.append(tag)
        if first:
            self._transport.in_loop(self._send_acks)

    def _send_acks(self) -> None:
        with self._lock:
            tags, self._acks = self._acks, []
        if not tags or self._channel is None or not self._channel.is_open:
            return
        self.last_ack = time.monotonic()
        for tag in tags:
            self._open.pop(tag, None)
        newest = max(tags)
        if next(iter(self._open), newest + 1) > newest:
            self._channel.basic_ack(newest, multiple=True)
        else:
            for tag in tags:
                self._channel.basic_ack(tag)

    def cancel(self) -> None:
        """Receive nothing more; copies that came may still be acked."""
        if self._channel is not None and self._channel.is_open:
            for consumer in list(self._channel.consumer_tags):
                self._channel.basic_cancel(consumer)

    def _on_copy(self, channel: Any, method: Any, properties: Any, body: bytes) -> None:
        try:
            message = message_of(properties, body, method.redelivered)
        except (ValueError, TypeError, LookupError) as exc:
            self._transport.malformed += 1
            log.error(
                "a message from queue %s was not made by the center and is dropped (%d so far): %s",
                self.queue,
                self._transport.malformed,
                f"it has no header {exc}" if isinstance(exc, KeyError) else exc,
            )
            channel.basic_ack(method.delivery_tag)
            return
        self._open[method.delivery_tag] = None
        receipt = _Receipt(self, self.generation, method.delivery_tag)
        signature = properties.headers.get(HEADER)
        suspect = Suspect(message=message, signature=signature, queue=self.queue, receipt=receipt)
        self._transport.screen.arrive(suspect)


class RabbitTransport:
    """received.Transport over RabbitMQ.

    plan: asks the center for the broker, the queues, and topics that have none yet; blocks, raises TmcError.
    prefetch: maximum number of unacked copies of all queues together, but each queue may have `concurrency` of them.
    screen: passes on the copies that the center signed; `stop` it after this.
    tls: for brokers that speak TLS; None: the certificates that this machine trusts.
    on_lost: called when the broker may give copies that came here to other consumers.
    """

    def __init__(
        self,
        plan: Callable[[], Plan],
        credentials: Credentials,
        prefetch: int,
        screen: Screen,
        *,
        concurrency: int = 1,
        tls: ssl.SSLContext | None = None,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self._plan = plan
        self._credentials = credentials
        self._prefetch = prefetch
        self._concurrency = concurrency
        self.screen = screen
        self._tls = tls
        self.lost = on_lost
        self._stopping = threading.Event()
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._connects = random.randrange(1_000)  # of several nodes, not everybody takes the first one
        self._failures = 0
        self.malformed = 0
        self._readers: Mapping[str, _Reader] = {}
        self._missing: Sequence[str] = ()
        self._connection: Any = None
        self._thread = threading.Thread(target=self._run, name="tmc-rabbitmq", daemon=True)

    @property
    def is_stopping(self) -> bool:
        return self._stopping.is_set()

    @property
    def prefetch_of_a_queue(self) -> int:
        """The broker counts per consumer, that is per queue; a busy one keeps all handlers busy."""
        return max(1, self._concurrency, self._prefetch // max(1, len(self._readers)))

    @property
    def unread(self) -> Sequence[str]:
        """Queues that cannot be read now, and topics that have none."""
        return sorted([*(name for name, reader in self._readers.items() if not reader.reads), *self._missing])

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """See received.Transport: the connection stays open for the acks of copies already received."""
        self._stopping.set()
        for reader in self._readers.values():
            self.in_loop(reader.cancel)

    def close(self) -> None:
        """Close, a moment after the last ack: a quorum queue forgets those that are still on their way to its leader."""
        self._stopping.set()
        self._closing.set()
        self.in_loop(self._close_soon)
        if self._thread.is_alive():
            self._thread.join(10)

    def _close_soon(self) -> None:
        connection = self._connection
        last = max((reader.last_ack for reader in self._readers.values()), default=0.0)
        wait_s = max(0.0, last + _SETTLE_S - time.monotonic())
        connection.ioloop.call_later(wait_s, lambda: connection.close() if connection.is_open else None)

    def in_loop(self, work: Callable[[], None]) -> None:
        """Call it in the connection's thread, if there is one. From any thread."""
        with self._lock:
            if self._connection is not None:
                self._connection.ioloop.add_callback_threadsafe(work)

    def _run(self) -> None:
        while not self._stopping.is_set():
            loop: Any = None
            try:
                loop = IOLoop()  # fails where no file descriptor is left
                self._connect(self._planned(), loop)
            except Exception as exc:  # noqa: BLE001 - whatever it was, connect again
                self._note(exc)
            with self._lock:
                self._connection = None
            for reader in self._readers.values():
                reader.lose()
            if loop is not None:
                loop.close()
            self._stopping.wait(_PAUSES_S[min(self._failures, len(_PAUSES_S) - 1)])

    def _planned(self) -> Broker:
        plan = self._plan()
        self._readers = {name: self._readers.get(name) or _Reader(self, name) for name in plan.queues}
        self._expect(plan.missing)
        return plan.broker

    def _expect(self, missing: Sequence[str]) -> None:
        """Ask again from time to time for the queues of topics that have none yet, and read the others meanwhile."""
        begins = bool(missing) and not self._missing
        self._missing = missing
        if begins:
            threading.Thread(target=self._look_for_missing, name="tmc-rabbitmq-plan", daemon=True).start()

    def _look_for_missing(self) -> None:
        while self._missing and not self._stopping.wait(_ASK_AGAIN_S):
            try:
                plan = self._plan()
            except TmcError as exc:
                log.debug("the center does not say which queues there are: %s", exc)
                continue
            self._missing = plan.missing
            self.in_loop(partial(self._read_also, plan.queues))

    def _read_also(self, queues: Sequence[str]) -> None:
        new = {name: _Reader(self, name) for name in queues if name not in self._readers}
        self._readers = {**self._readers, **new}
        for reader in new.values():
            reader.open(self._connection)

    def _note(self, reason: object) -> None:
        self._failures += 1
        if self._failures in (1, 10) and not self._stopping.is_set():
            log.warning("no copies from the broker, retrying: %s", text_of(reason))

    def _connect(self, broker: Broker, loop: Any) -> None:
        tls = self._tls or ssl.create_default_context()
        host, port = broker.nodes[self._connects % len(broker.nodes)]
        self._connects += 1
        parameters = pika.ConnectionParameters(
            host=host,
            port=port,
            virtual_host=broker.virtual_host,
            credentials=pika.PlainCredentials(self._credentials.user, self._credentials.password),
            ssl_options=pika.SSLOptions(tls, host) if broker.tls else None,
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
        connection.ioloop.call_later(_PATIENCE_S, lambda: self._give_up_waiting(connection))
        for reader in self._readers.values():
            reader.open(connection)

    def _give_up_waiting(self, connection: Any) -> None:
        nothing = not any(reader.reads for reader in self._readers.values())
        if nothing and connection is self._connection and not self._stopping.is_set():
            self._note(f"no answer in {_PATIENCE_S:g} s")
            give_up(connection, _PATIENCE_S / 3)

    def reads(self, _reader: _Reader) -> None:
        """A reader receives copies."""
        if self._failures:
            log.info("receiving copies again")
            self._failures = 0
