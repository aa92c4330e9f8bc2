"""Reads the submit queues of RabbitMQ: one connection, one thread, one channel per queue.

A letter is acknowledged when it is stored, or when the broker has confirmed its answer, or its copy in the queue of what
was refused. Until then the broker keeps it: whatever breaks, it comes again, and every step is idempotent.

The queue has a single active consumer, so that while one server hands over to another the order is kept.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from pika import BasicProperties
from pika.adapters.select_connection import IOLoop
from pika.exceptions import AMQPError
from pika.spec import Basic

from tmc_common import submission as wire
from tmc_common.amqp import (
    DAMAGED,
    CorkedConnection,
    NeverOpened,
    Nodes,
    close_with_consumers,
    give_up,
    hang_up,
    run_connection,
)
from tmc_common.eventlog import EventLog
from tmc_common.headers import from_wire, to_wire
from tmc_server.submission.answers import JSON, OpenIntake, Settled
from tmc_server.submission.intake import WINDOW
from tmc_server.submission.letters import Letter, Place

log = EventLog("tmc.submission")

_RECONNECT_S = (0.2, 1.0, 2.0, 5.0)
_AGAIN_S = 1.0  # before a queue whose channel was closed is opened again
_CLOSE_S = 5.0
_DIFFERS = 406  # it was declared otherwise by somebody else
_PERSISTENT = 2
_SHORT = 255  # bytes of a property, and of a header's name
_PROPERTIES = 60_000  # bytes of all of them, which are one frame
_ANY_TIMES = 1_000_000
"""A quorum queue of RabbitMQ 4 gives a message up that came 20 times, as it may while the database is away."""


class RabbitReader:
    """kind: of the queues that it declares, quorum or classic."""

    def __init__(self, url: str, kind: str, loop: asyncio.AbstractEventLoop, open_intake: OpenIntake) -> None:
        self._nodes = Nodes(
            url,
            heartbeat=10,
            socket_timeout=5,
            stack_timeout=5,
            client_properties={"connection_name": "tmc submission"},
        )
        self.kind = kind
        self.loop = loop
        self.open_intake = open_intake
        self._wanted: frozenset[Place] = frozenset()
        self._queues: dict[Place, _Queue] = {}
        self._replies: list[_DirectReplies] = []  # of this connection's queues
        self.in_trouble: set[Place] = set()  # said already
        self.as_they_are: set[str] = set()  # queues that somebody else declared otherwise
        self._connection: Any = None
        self._failures = 0
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tmc-submission-rabbitmq", daemon=True)

    def want(self, places: Collection[Place]) -> None:
        """Read these queues and no others. From any thread."""
        wanted = frozenset(places)
        with self._lock:
            if wanted == self._wanted:
                return
            self._wanted = wanted
            if self._connection is not None:
                self._connection.ioloop.add_callback_threadsafe(self._follow)
        if not self._thread.is_alive() and not self._stopping.is_set():
            self._thread.start()

    def stop(self) -> None:
        """Finish what is under way, then close the connection. Blocks; not on the loop."""
        self._stopping.set()
        with self._lock:
            if self._connection is not None:
                self._connection.ioloop.add_callback_threadsafe(self._leave)
        if self._thread.is_alive():
            self._thread.join(2 * _CLOSE_S)

    # -- on its thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping.is_set():
            ioloop: Any = None
            try:
                ioloop = IOLoop()  # fails where no file descriptor is left
                run_connection(
                    self._nodes.next(),
                    ioloop,
                    on_open=self._on_open,
                    on_open_error=self._on_end,
                    on_close=self._on_end,
                )
            except NeverOpened as exc:
                self._note_failure(exc)
            except Exception:  # a fault of ours; a new connection starts from nothing
                log.exception("submission_failed", "reading submit queues failed, and begins again")
                self._failures += 1
            with self._lock:
                self._connection = None
            for queue in self._queues.values():
                queue.lost()
            self._queues.clear()
            for replies in self._replies:
                replies.drop()
            self._replies.clear()
            if ioloop is not None:
                ioloop.close()
            self._stopping.wait(_RECONNECT_S[min(self._failures, len(_RECONNECT_S) - 1)])

    def _on_open(self, connection: Any) -> None:
        if self._stopping.is_set():
            connection.close()
            return
        with self._lock:
            self._connection = connection
        if self._failures:
            log.info("submission_connected", "the broker is back: submit queues are read again")
            self._failures = 0
        self._follow()

    def _on_end(self, connection: Any, reason: object) -> None:
        if not self._stopping.is_set():
            self._note_failure(reason)
        connection.ioloop.stop()

    def _note_failure(self, reason: object) -> None:
        self._failures += 1
        if self._failures == 1:
            log.warning("submission_lost", "the broker is away, submit queues are not read: %r", reason)

    def _follow(self) -> None:
        """Open and close queues as wanted."""
        if self._connection is None or not self._connection.is_open or self._stopping.is_set():
            return
        for place in set(self._queues) - self._wanted:
            self._queues.pop(place).leave()
        for place in sorted(self._wanted - set(self._queues), key=lambda place: place.queue):
            queue = self._queues[place] = _Queue(self, self._connection, place)
            queue.open()

    def replies(self) -> _DirectReplies:
        """Return a way to answer those who wait for direct replies of one queue."""
        made = _DirectReplies(self._nodes.next(), self._connection.ioloop)
        self._replies = [*(each for each in self._replies if each.is_connected), made]
        return made

    def again(self, queue: _Queue, seconds: float) -> None:
        """Open a queue anew after that time: its channel was closed."""
        if self._queues.get(queue.place) is queue:
            del self._queues[queue.place]
            self._connection.ioloop.call_later(seconds, self._follow)

    def _leave(self) -> None:
        """Let go of all queues, and of the connection when their work is done."""
        queues = list(self._queues.values())
        left = [queue.leave() for queue in queues]
        self._queues.clear()
        connection = self._connection
        if connection is not None:

            def part() -> None:
                for queue in queues:
                    queue.close()  # or the connection would close it, and end its consumer first
                give_up(connection, _CLOSE_S)

            waited = Future[None]()
            threading.Thread(target=_wait_for, args=(left, waited), daemon=True).start()
            waited.add_done_callback(lambda _: connection.ioloop.add_callback_threadsafe(part))


def _wait_for(left: Sequence[Future[None]], waited: Future[None]) -> None:
    unfinished = wait(left, _CLOSE_S).not_done
    if unfinished:
        log.debug("submission_cut", "%d submit queues are left unfinished", len(unfinished))
    waited.set_result(None)


class _DirectReplies:
    """Answers to those who wait for direct replies, of one queue: over a connection of its own, opened for the first one.

    The broker ends the connection that publishes to such a name if it cannot decode it, and it is the app that chooses it.
    So an app ends the answers of its own queue, and nothing else. What is on its way then is lost, as if nobody waited.
    """

    def __init__(self, parameters: Any, ioloop: Any) -> None:
        self._parameters = parameters
        self._ioloop = ioloop
        self._connection: Any = None
        self._channel: Any = None
        self._is_dropped = False
        self._is_blocked = False  # the broker takes nothing for now
        self._rests_until = 0.0  # monotonic seconds: a connection could not be opened
        self._waiting: list[tuple[str, bytes, BasicProperties]] = []  # for the channel

    def publish(self, name: str, body: bytes, properties: BasicProperties) -> None:
        rests = self._connection is None and time.monotonic() < self._rests_until
        if self._is_blocked or rests or len(self._waiting) >= WINDOW:
            return  # as if nobody waited
        self._waiting.append((name, body, properties))
        if self._channel is not None:
            self._send()
        elif self._connection is None:
            self._rests_until = time.monotonic() + _AGAIN_S  # unless it opens
            self._connection = CorkedConnection(
                self._parameters,
                on_open_callback=lambda connection: connection.channel(on_open_callback=self._on_channel),
                on_open_error_callback=self._on_end,
                on_close_callback=self._on_end,
                custom_ioloop=self._ioloop,
            )

    def _on_channel(self, channel: Any) -> None:
        self._channel, self._rests_until = channel, 0.0
        self._connection.add_on_connection_blocked_callback(lambda *_: self._set_blocked(True))
        self._connection.add_on_connection_unblocked_callback(lambda *_: self._set_blocked(False))
        channel.add_on_close_callback(self._on_channel_closed)
        self._send()

    def _set_blocked(self, is_blocked: bool) -> None:
        self._is_blocked = is_blocked

    def _on_channel_closed(self, *_: object) -> None:
        self._channel = None
        self.close()

    def _send(self) -> None:
        with self._connection.corked():
            for name, body, properties in self._waiting:
                self._channel.basic_publish("", name, body, properties)
        self._waiting.clear()

    def _on_end(self, _connection: Any, reason: object) -> None:
        log.debug("submission_cut", "direct replies are lost: %r", reason)
        self._connection = self._channel = None
        self._is_blocked = False
        self._waiting.clear()
        if self._is_dropped:
            self._ioloop.stop()

    @property
    def is_connected(self) -> bool:
        return self._connection is not None

    def close(self) -> None:
        connection = self._connection
        if connection is not None and not (connection.is_closed or connection.is_closing):
            give_up(connection, _CLOSE_S)

    def drop(self) -> None:
        """Close it without waiting for the broker: the loop has ended, and runs until this connection has, too."""
        if self._connection is not None:
            self._is_dropped = True
            with suppress(Exception):  # of whatever else the loop still has
                hang_up(self._connection)
                self._ioloop.start()


class _Queue:
    """One queue, over one channel. On the reader's thread, but for `_done` and `_ended`."""

    def __init__(self, reader: RabbitReader, connection: Any, place: Place) -> None:
        self.place = place
        self._reader = reader
        self._connection = connection
        self._channel: Any = None
        self._declaring = ""
        self._left = False
        self._arrived: list[Letter] = []
        self._open: dict[int, None] = {}  # delivery tags that are not acknowledged, in ascending order
        self._publishing: dict[int, _Published] = {}  # by the tag of their confirm
        self._returned: set[str] = set()
        self._tags = itertools.count(1)
        self._direct = reader.replies()
        self._intake = reader.open_intake(place, self._done)
        self._work: Future[None] = asyncio.run_coroutine_threadsafe(self._intake.run(), reader.loop)
        self._work.add_done_callback(self._ended)

    def open(self) -> None:
        self._connection.channel(on_open_callback=self._on_channel)

    def _on_channel(self, channel: Any) -> None:
        if self._left:
            channel.close()
            return
        self._channel = channel
        channel.add_on_close_callback(self._on_close)
        channel.add_on_return_callback(lambda _channel, _method, properties, _body: self._on_return(properties))
        channel.confirm_delivery(self._on_confirm)
        self._declare(wire.dead_queue_of(self.place.app), {}, self._on_dead_declared)

    def _declare(self, name: str, arguments: Mapping[str, object], then: Callable[[object], None]) -> None:
        self._declaring = name
        if name in self._reader.as_they_are:
            self._channel.queue_declare(name, passive=True, callback=then)
        else:
            limit = {"x-delivery-limit": _ANY_TIMES} if self._reader.kind == "quorum" else {}
            whole = {"x-queue-type": self._reader.kind, **limit, **arguments}
            self._channel.queue_declare(name, durable=True, arguments=whole, callback=then)

    def _on_dead_declared(self, _frame: object) -> None:
        """Declare the queue so that policies lose nothing: what they take out is kept, what is too much is refused."""
        arguments = {
            "x-single-active-consumer": True,
            "x-dead-letter-exchange": "",
            "x-dead-letter-routing-key": wire.dead_queue_of(self.place.app),
            "x-overflow": "reject-publish",
        }
        self._declare(self.place.queue, arguments, self._on_queue_declared)

    def _on_queue_declared(self, _frame: object) -> None:
        self._declaring = wire.EXCHANGE
        is_there = wire.EXCHANGE in self._reader.as_they_are
        self._channel.exchange_declare(
            wire.EXCHANGE, "topic", durable=True, passive=is_there, callback=self._on_exchange_declared
        )

    def _on_exchange_declared(self, _frame: object) -> None:
        key = wire.routing_key_of(self.place.app, self.place.tag)
        self._channel.queue_bind(self.place.queue, wire.EXCHANGE, key, callback=self._on_declared)

    def _on_declared(self, _frame: object) -> None:
        self._declaring = ""
        self._channel.add_on_cancel_callback(lambda _frame: self.close())  # it was deleted
        self._channel.basic_qos(prefetch_count=WINDOW, callback=self._on_qos)

    def _on_qos(self, _frame: object) -> None:
        self._channel.basic_consume(self.place.queue, self._on_message, callback=self._on_consuming)

    def _on_consuming(self, _frame: object) -> None:
        self._reader.in_trouble.discard(self.place)

    def _on_message(self, _channel: Any, method: Any, properties: BasicProperties, body: bytes) -> None:
        if not self._arrived:
            self._connection.ioloop.call_later(0, self._hand_over)  # with all that the socket has brought
        self._open[method.delivery_tag] = None
        self._arrived.append(letter_of(method.delivery_tag, properties, body))

    def _hand_over(self) -> None:
        arrived, self._arrived = self._arrived, []
        self._reader.loop.call_soon_threadsafe(self._intake.arrived, arrived)

    def _done(self, settled: Sequence[Settled]) -> None:
        """Take what is done, on the loop."""
        try:
            self._connection.ioloop.add_callback_threadsafe(partial(self._finish, settled))
        except Exception as exc:  # noqa: BLE001 - the library's, of a connection that is closed: all of it comes again
            log.debug("submission_cut", "the connection was lost: %r", exc)

    def _finish(self, settled: Sequence[Settled]) -> None:
        if self._channel is None or not self._channel.is_open:
            return
        with self._connection.corked():
            self._acknowledge([each.letter.number for each in settled if not self._answer(each)])

    def _answer(self, settled: Settled) -> bool:
        """Publish what is to be published. Returns False: nothing is, and nothing is waited for."""
        if settled.reply and settled.letter.reply_to.startswith(wire.DIRECT_REPLIES):
            self._direct.publish(settled.letter.reply_to, settled.reply, _reply(settled))
            return False
        if settled.reply:
            self._publish(_Published(settled), settled.letter.reply_to, _reply(settled), settled.reply)
        elif settled.refusal is not None:
            self._bury(settled)
        else:
            return False
        return True

    def _bury(self, settled: Settled) -> None:
        dead = wire.dead_queue_of(self.place.app)
        self._publish(_Published(settled, is_buried=True), dead, _dead(settled), settled.letter.body)

    def _publish(self, published: _Published, queue: str, properties: BasicProperties, body: bytes) -> None:
        tag = next(self._tags)
        properties.message_id = str(tag)
        self._publishing[tag] = published
        self._channel.basic_publish("", queue, body, properties, mandatory=published.settled.refusal is not None)

    def _on_return(self, properties: BasicProperties) -> None:
        """Note that no queue took it; its confirm follows."""
        self._returned.add(properties.message_id)

    def _on_confirm(self, frame: Any) -> None:
        if self._channel is None or not self._channel.is_open:
            return  # it is being closed, and all of it comes again
        method = frame.method
        confirmed = [method.delivery_tag]
        if method.multiple:
            confirmed = list(itertools.takewhile(lambda tag: tag <= method.delivery_tag, self._publishing))
        done: list[int] = []
        for tag in confirmed:
            published = self._publishing.pop(tag, None)
            if published is None:
                continue
            if isinstance(method, Basic.Nack):
                if self._is_news():
                    log.warning("submission_not_kept", "a queue refuses answers, or what %s refused", self.place.queue)
                self._connection.ioloop.call_later(_AGAIN_S, partial(self._finish, [published.settled]))
            elif str(tag) not in self._returned:
                done.append(published.settled.letter.number)
            elif published.is_buried:
                self.close()  # the queue of what was refused is gone: it is declared again, and this comes again
                return
            else:
                self._returned.discard(str(tag))
                self._bury(published.settled)
        self._acknowledge(done)

    def _acknowledge(self, numbers: Collection[int]) -> None:
        for number in numbers:
            self._open.pop(number, None)
        first_open = next(iter(self._open), None)
        below = [number for number in numbers if first_open is None or number < first_open]
        if below:
            self._channel.basic_ack(max(below), multiple=True)
        for number in numbers:
            if first_open is not None and number > first_open:
                self._channel.basic_ack(number)

    def _on_close(self, _channel: Any, reason: Any) -> None:
        self._channel = None
        self._direct.close()
        self.lost()
        if self._left or not self._connection.is_open:
            return
        is_new = self._declaring != "" and self._declaring not in self._reader.as_they_are
        differs = is_new and getattr(reason, "reply_code", 0) == _DIFFERS
        if differs:
            log.warning("submit_queue_differs", "%s is used as it is: %s", self._declaring, reason)
            self._reader.as_they_are.add(self._declaring)
        else:
            if self._is_news():
                log.warning("submit_queue_closed", "%s is opened again and again: %s", self.place.queue, reason)
            self._reader.as_they_are.clear()  # or they are there no more
        self._reader.again(self, 0 if differs else _AGAIN_S)

    def _ended(self, work: Future[None]) -> None:
        """Begin again if the intake failed, which it never should."""
        if work.exception() is not None:
            log.error("submission_failed", "%s is opened again", self.place.queue, exc_info=work.exception())
            with suppress(Exception):  # the connection may be gone, and everything begins again
                self._connection.ioloop.add_callback_threadsafe(self.close)

    def _is_news(self) -> bool:
        """Return whether its trouble begins now: it ends when the queue is opened again."""
        is_news = self.place not in self._reader.in_trouble
        self._reader.in_trouble.add(self.place)
        return is_news

    def close(self) -> None:
        self._direct.close()
        if self._channel is not None and self._channel.is_open:
            close_with_consumers(self._channel)

    def _close_when_confirmed(self, looks: int = 40) -> None:
        """Close it when what was published is confirmed and acknowledged, or after a while."""
        if self._publishing and looks:
            self._connection.ioloop.call_later(0.05, partial(self._close_when_confirmed, looks - 1))
        else:
            self.close()

    def lost(self) -> None:
        """Work on nothing more: what is not acknowledged comes again."""
        self._reader.loop.call_soon_threadsafe(self._intake.close)

    def leave(self) -> Future[None]:
        """Begin nothing more, finish what is under way, and give the rest back to the broker. Returns: done then."""
        self._left = True
        self.lost()
        ioloop = self._connection.ioloop
        self._work.add_done_callback(lambda _: ioloop.add_callback_threadsafe(self._close_when_confirmed))
        return self._work


@dataclass(frozen=True, slots=True)
class _Published:
    """An answer on its way, or a letter that is_buried: on its way to the queue of what was refused."""

    settled: Settled
    is_buried: bool = False


def letter_of(number: int, properties: BasicProperties, body: bytes) -> Letter:
    attributes: dict[str, str] = {}
    headers: dict[str, str] = {}
    is_damaged = False
    for name, value in _texts(properties.headers or {}):
        if value is None or name == DAMAGED:
            is_damaged = True
        elif attribute := wire.attribute_of(name):
            attributes[attribute] = value
        else:
            headers[name] = value
    return Letter(
        number=number,
        attributes=attributes,
        headers=from_wire(headers),
        content_type=properties.content_type or attributes.get(wire.CONTENT_TYPE, ""),
        body=body,
        reply_to=properties.reply_to or "",
        correlation_id=_short(properties.correlation_id or attributes.get(wire.ID, "")),
        is_damaged=is_damaged,
    )


def _texts(headers: Mapping[str, Any]) -> Iterator[tuple[str, str | None]]:
    """Return the headers as texts. None: it is none. The broker's own are none of the sender's."""
    for name, value in headers.items():
        if name.startswith("x-"):
            continue
        if isinstance(value, bytes):
            yield name, _decoded(value)
        elif isinstance(value, bool | int | str):
            yield name, str(value)
        else:
            yield name, None


def _decoded(value: bytes) -> str | None:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return None


def _reply(settled: Settled) -> BasicProperties:
    return BasicProperties(content_type=JSON, correlation_id=settled.letter.correlation_id)


def _dead(settled: Settled) -> BasicProperties:
    letter = settled.letter
    attributes = {f"{wire.AMQP_PREFIX}{name}": value for name, value in letter.attributes.items()}
    whole = BasicProperties(
        content_type=_short(letter.content_type) or None,
        correlation_id=letter.correlation_id or None,
        headers={**to_wire(letter.headers), **attributes, **settled.notes},
        delivery_mode=_PERSISTENT,
    )
    return whole if _fits(whole) else BasicProperties(headers=settled.notes, delivery_mode=_PERSISTENT)


def _fits(properties: BasicProperties) -> bool:
    """Return whether they can be sent: names have grown by their prefix."""
    try:
        return sum(map(len, properties.encode())) <= _PROPERTIES
    except (AMQPError, ValueError):
        return False


def _short(text: str) -> str:
    return text if len(text.encode()) <= _SHORT else ""
