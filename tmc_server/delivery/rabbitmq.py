"""Copies into RabbitMQ: one connection and thread of our own, pipelined, every publish confirmed.

A copy is handed to the thread after its row was committed as tried. A confirm needs no further write. A return (it comes
before its own ack), a nack, no confirm in time, a closed channel, a lost connection: the copy is given back, uncounted. What
is forwarded to an exchange is acked by the confirm, and a refusal is a failed try of the subscription's policy.

Each exchange has a channel of its own: one that is missing or forbidden closes only its own channel.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Protocol

import pika
from pika.adapters.select_connection import IOLoop
from pika.exceptions import ShortStringTooLong, UnsupportedAMQPFieldException
from pika.spec import Basic, BasicProperties

from tmc_client.transports.corked import CorkedConnection, hang_up
from tmc_server.delivery.window import CONFIRM_TIMEOUT_S, Destination, Window
from tmc_server.domain.catalog import FORWARD_KEY
from tmc_server.domain.consumption import QueueLook
from tmc_server.domain.ids import MessageId
from tmc_server.domain.ports import CatalogSource, Copy, ForwardAnswers
from tmc_server.domain.queue_names import queue_of
from tmc_server.metrics import METRICS

log = logging.getLogger("tmc.rabbitmq")

_RECONNECT_S = (0.2, 1.0, 2.0, 5.0)
PATIENCE_S = 15.0
_CHANNEL_PAUSES_S = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_REFUSALS = (403, 404)  # not allowed, no such exchange: about what was published, not about the broker


class Queues(Protocol):
    """Declares and inspects queues, on a connection of its own. See delivery.rabbitmq_queues."""

    def look(self, queue: str) -> tuple[int, int] | None:
        """(consumers, ready messages). None: the broker does not answer. Blocks."""

    def heal(self, queue: str, silent: bool = False) -> None:
        """It seems to be missing, or, silent, to be there and to answer nothing: declare it again soon. Does not block."""


Alarm = Callable[[str, int, str], None]
"""(kind, subscription, detail): tell the owner of a subscription."""


@dataclass(slots=True)
class _Sent:
    copy: Copy
    destination: Destination
    size: int
    at: float
    returned: str = ""


@dataclass(frozen=True, slots=True)
class _Route:
    """exchange, key: where copies of a subscription go; key "": the copy's own."""

    exchange: str
    key: str
    destination: Destination
    forwards: bool


class _Channel:
    """One confirmed channel, for one exchange. On the publisher's thread only, but for `ready`."""

    def __init__(self, publisher: RabbitOutlet, exchange: str) -> None:
        self._publisher = publisher
        self.exchange = exchange
        self.ready = False
        self.sent: dict[int, _Sent] = {}  # by delivery tag, in ascending order
        self._tags: dict[tuple[object, ...], int] = {}  # by what a return brings back
        self._last_tag = 0
        self._closings = 0
        self._channel: Any = None

    def open(self, connection: Any) -> None:
        connection.channel(on_open_callback=self._on_open)

    def _on_open(self, channel: Any) -> None:
        self._channel = channel
        self._last_tag = 0
        channel.add_on_close_callback(self._on_close)
        channel.add_on_return_callback(self._on_return)
        channel.confirm_delivery(self._on_confirm, callback=self._on_confirming)

    def _on_confirming(self, _frame: object) -> None:
        self.ready = True
        self._publisher.channel_ready(self)

    def publish(self, sent: _Sent, key: str, properties: BasicProperties) -> None:
        self._channel.basic_publish(self.exchange, key, sent.copy.body, properties, mandatory=True)
        self._last_tag += 1
        self.sent[self._last_tag] = sent
        self._tags[_name_of(key, properties)] = self._last_tag

    def _on_return(self, _channel: Any, method: Any, properties: BasicProperties, _body: bytes) -> None:
        tag = self._tags.get(_name_of(method.routing_key, properties))
        if tag is not None and tag in self.sent:
            self.sent[tag].returned = method.reply_text

    def _on_confirm(self, frame: Any) -> None:
        method = frame.method
        if method.multiple:
            tags = list(takewhile(lambda tag: tag <= method.delivery_tag, self.sent))
        else:
            tags = [method.delivery_tag] if method.delivery_tag in self.sent else []
        done = [self.sent.pop(tag) for tag in tags]
        if not self.sent:
            self._tags.clear()
        elif len(self._tags) > 4 * len(self.sent) + 1000:
            self._tags = {name: tag for name, tag in self._tags.items() if tag in self.sent}
        self._closings = 0
        self._publisher.answered(self, done, nacked=isinstance(method, Basic.Nack))

    def expire(self, before: float) -> list[_Sent]:
        """Take out what was sent before that moment and never answered."""
        late = []
        for tag, sent in list(self.sent.items()):
            if sent.at > before:
                break
            late.append(self.sent.pop(tag))
        return late

    def _on_close(self, _channel: Any, reason: Any) -> None:
        self.ready = False
        lost = list(self.sent.values())
        self.sent.clear()
        self._tags.clear()
        pause = _CHANNEL_PAUSES_S[min(self._closings, len(_CHANNEL_PAUSES_S) - 1)]
        self._closings += 1
        self._publisher.channel_closed(self, lost, reason, pause)


class RabbitOutlet:
    """domain.ports.Outlet over one connection. url: amqp:// or amqps://.  wake: there is room again for what is due."""

    def __init__(
        self,
        url: str,
        catalog: CatalogSource,
        queues: Queues,
        answers: ForwardAnswers,
        wake: Callable[[], None],
        alarm: Alarm,
        window: int = 2000,
        window_bytes: int = 64 << 20,
    ) -> None:
        self._parameters = pika.URLParameters(url)
        self._parameters.heartbeat = 10
        self._parameters.socket_timeout = self._parameters.stack_timeout = 5
        self._parameters.client_properties = {"connection_name": "tmc publisher"}
        self._catalog = catalog
        self._queues = queues
        self._answers = answers
        self._wake = wake
        self._alarm = alarm
        self._window = Window(window, window_bytes, wake)
        self._routes: dict[int, _Route] = {}
        self._destinations: dict[str, Destination] = {}
        self._lock = threading.Lock()
        self._incoming: deque[Copy] = deque()
        self._draining = False
        self._connection: Any = None
        self._channels: dict[str, _Channel] = {}
        self._blocked = False
        self._answered = False  # on this connection
        self._stopping = threading.Event()
        self._failures = 0
        self._thread = threading.Thread(target=self._run, name="tmc-publisher", daemon=True)

    # -- domain.ports.Outlet, from any thread ---------------------------------------------------------------------

    def reserve(self, subscription: int, wanted: int) -> int:
        if self._blocked or self._connection is None or self._stopping.is_set():
            return 0
        route = self._route(subscription)
        channel = self._channels.get(route.exchange)
        if channel is None:
            self._open_channel(route.exchange)
            return 0
        return self._window.reserve(route.destination, wanted) if channel.ready else 0

    def release(self, subscription: int, count: int) -> None:
        self._window.release(self._route(subscription).destination, count)

    def deliver(self, copies: Sequence[Copy]) -> None:
        with self._lock:
            connected = self._connection is not None
            if connected:
                self._incoming.extend(copies)
                if not self._draining:
                    self._draining = True
                    self._connection.ioloop.add_callback_threadsafe(self._drain)
        if not connected:
            for copy in copies:
                self.release(copy.subscription, 1)
            self._answers.give_back(copies, after_ms=1000)

    def came_out(self, subscription: int, tried_ms: int) -> None:
        self._window.passed(self._route(subscription).destination, tried_ms)

    def look(self, subscription: int) -> QueueLook | None:
        if self._connection is None or self._blocked:
            return None
        route = self._route(subscription)
        if route.forwards:
            return QueueLook()
        found = self._queues.look(route.key)
        if found is None:
            return None
        METRICS.queue_depth.labels(route.key).set(found[1])
        still_ms = self._window.looked(route.destination, found[0])
        return QueueLook(found[0], found[1], route.destination.passed_ms, still_ms)

    # -- life -----------------------------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        return self._connection is not None

    def start(self) -> None:
        self._thread.start()

    def stop(self, grace_s: float = CONFIRM_TIMEOUT_S) -> bool:
        """Take nothing more, wait for the confirms of what is on its way. Returns: nothing is uncertain. Blocks."""
        self._stopping.set()
        clean = self._window.drained(grace_s)
        with self._lock:
            if self._connection is not None:
                self._connection.ioloop.add_callback_threadsafe(self._connection.close)
        if self._thread.is_alive():
            self._thread.join(10)
        return clean

    def _run(self) -> None:
        while not self._stopping.is_set():
            loop = IOLoop()
            try:
                self._connect_once(loop)
            except Exception:  # a fault of ours; a new connection starts from nothing
                log.exception("the publisher failed and begins anew")
                self._failures += 1
            self._lose_everything()
            loop.close()
            pause = _RECONNECT_S[min(self._failures, len(_RECONNECT_S) - 1)]
            self._stopping.wait(pause)

    def _connect_once(self, loop: Any) -> None:
        CorkedConnection(
            self._parameters,
            on_open_callback=self._on_open,
            on_open_error_callback=self._on_open_error,
            on_close_callback=self._on_close,
            custom_ioloop=loop,
        )
        loop.start()

    def _on_open(self, connection: Any) -> None:
        if self._stopping.is_set():
            connection.close()
            return
        connection.add_on_connection_blocked_callback(lambda *_: self._set_blocked(True))
        connection.add_on_connection_unblocked_callback(lambda *_: self._set_blocked(False))
        self._answered = False
        self._channels = {"": _Channel(self, "")}
        self._channels[""].open(connection)
        with self._lock:
            self._connection = connection
        connection.ioloop.call_later(PATIENCE_S, lambda: self._give_up_waiting(connection))
        self._tick()

    def _give_up_waiting(self, connection: Any) -> None:
        """A broker that just started may take our connection and never answer on it."""
        if connection is self._connection and not self._answered and not self._stopping.is_set():
            self._note_failure(f"no answer in {PATIENCE_S:g} s")
            if connection.is_open:
                connection.close()
            connection.ioloop.call_later(PATIENCE_S / 3, lambda: hang_up(connection))  # nor may it answer that

    def _on_open_error(self, connection: Any, error: object) -> None:
        self._note_failure(error)
        connection.ioloop.stop()

    def _on_close(self, connection: Any, reason: object) -> None:
        if not self._stopping.is_set():
            self._note_failure(reason)
        connection.ioloop.stop()

    def _note_failure(self, reason: object) -> None:
        self._failures += 1
        if self._failures == 1:
            log.warning("the broker is away, what is due waits uncounted: %r", reason)

    def _set_blocked(self, blocked: bool) -> None:
        self._blocked = blocked
        METRICS.publisher_blocked.set(int(blocked))
        if blocked:
            log.warning("the broker blocks publishers (memory or disk alarm): what is due waits uncounted")
        else:
            now = time.monotonic()
            for channel in self._channels.values():
                for sent in channel.sent.values():
                    sent.at = now  # the time they stood still is not theirs
            log.info("the broker takes messages again")
            self._wake()

    def _lose_everything(self) -> None:
        """The connection is gone: whether unconfirmed copies arrived is unknown, so all come again."""
        with self._lock:
            self._connection = None
            copies = list(self._incoming)
            self._incoming.clear()
            self._draining = False
        METRICS.publisher_connected.set(0)
        self._blocked = False
        for copy in copies:
            self.release(copy.subscription, 1)
        for channel in self._channels.values():
            channel.ready = False
            for sent in channel.sent.values():
                self._settle(sent)
                copies.append(sent.copy)
            channel.sent.clear()
        if copies:
            METRICS.given_back.labels("connection lost").inc(len(copies))
            self._answers.give_back(copies, after_ms=500)

    # -- on the publisher's thread --------------------------------------------------------------------------------

    def _open_channel(self, exchange: str) -> None:
        """From any thread: the first time something goes to this exchange."""
        with self._lock:
            connection = self._connection
            if connection is not None:
                connection.ioloop.add_callback_threadsafe(lambda: self._do_open_channel(connection, exchange))

    def _do_open_channel(self, connection: Any, exchange: str) -> None:
        if connection is self._connection and exchange not in self._channels:
            channel = _Channel(self, exchange)
            channel.open(connection)
            self._channels = self._channels | {exchange: channel}

    def channel_ready(self, channel: _Channel) -> None:
        self._answered = True
        METRICS.publisher_connected.set(1)
        if self._failures and channel.exchange == "":
            log.info("the broker is back")
            self._failures = 0
        self._wake()

    def channel_closed(self, channel: _Channel, lost: list[_Sent], reason: Any, pause_s: float) -> None:
        connection = self._connection
        for sent in lost:
            self._settle(sent)
        if connection is None or not connection.is_open:
            if lost:
                METRICS.given_back.labels("connection lost").inc(len(lost))
                self._answers.give_back([sent.copy for sent in lost], after_ms=500)
            return
        log.warning("the broker closed the channel of exchange %r: %s", channel.exchange, reason)
        if lost and channel.exchange and getattr(reason, "reply_code", 0) in _REFUSALS:
            self._answers.refuse([sent.copy for sent in lost], f"exchange {channel.exchange!r}: {reason}")
        elif lost:
            METRICS.given_back.labels("channel closed").inc(len(lost))
            self._answers.give_back([sent.copy for sent in lost], after_ms=round(pause_s * 1000))
        connection.ioloop.call_later(pause_s, lambda: self._reopen(connection, channel))

    @staticmethod
    def _reopen(connection: Any, channel: _Channel) -> None:
        if connection.is_open:
            channel.open(connection)

    def _drain(self) -> None:
        with self._lock:
            connection = self._connection
            if connection is None:
                return  # it was lost meanwhile, and what waited here was given back
            copies = list(self._incoming)
            self._incoming.clear()
            self._draining = False
        with connection.corked():
            stranded = self._publish(copies)
        METRICS.published.inc(len(copies) - len(stranded))
        if stranded:
            METRICS.given_back.labels("channel closed").inc(len(stranded))
            self._answers.give_back(stranded, after_ms=1000)

    def _publish(self, copies: Sequence[Copy]) -> list[Copy]:
        """Returns: those that cannot go out now."""
        catalog = self._catalog.current
        now = time.monotonic()
        stranded: list[Copy] = []
        for copy in copies:
            route = self._route(copy.subscription)
            channel = self._channels.get(route.exchange)
            if channel is None or not channel.ready:
                self._window.release(route.destination, 1)
                stranded.append(copy)
                continue
            sent = _Sent(copy, route.destination, len(copy.body), now)
            self._window.add_bytes(sent.size)
            key = route.key if not route.forwards else copy.headers.get(FORWARD_KEY) or route.key or copy.key
            try:
                channel.publish(sent, key, _properties(copy, catalog))
            except (ShortStringTooLong, UnsupportedAMQPFieldException, ValueError) as exc:
                self._settle(sent)  # this one cannot be put into a frame; its neighbours can
                self._answers.refuse([copy], f"cannot be published: {exc!r}")
        return stranded

    def answered(self, channel: _Channel, done: list[_Sent], nacked: bool) -> None:
        """The broker confirmed or refused these."""
        now = time.monotonic()
        good: list[Copy] = []
        bad: dict[Destination, tuple[str, list[Copy]]] = {}
        for sent in done:
            if nacked or sent.returned:
                bad.setdefault(sent.destination, (sent.returned or "refused", []))[1].append(sent.copy)
            else:
                METRICS.confirm_seconds.observe(now - sent.at)
                if self._window.succeeded(sent.destination):
                    log.info("%s takes messages again", sent.destination.name)
                good.append(sent.copy)
        for destination, (why, copies) in bad.items():
            self._failed(channel, destination, copies, why, refused=True)
        for sent in done:
            self._settle(sent)
        if good and channel.exchange:
            self._answers.acknowledge(good)

    def _failed(self, channel: _Channel, destination: Destination, copies: list[Copy], why: str, refused: bool) -> None:
        """refused: the broker said no; otherwise it said nothing, which is nobody's try."""
        METRICS.returned.inc(len(copies))
        pause_s, alert = self._window.failed(destination)
        if channel.exchange and refused:
            self._answers.refuse(copies, f"{destination.name}: {why}")
            return
        METRICS.given_back.labels("returned").inc(len(copies))
        self._answers.give_back(copies, after_ms=round(pause_s * 1000))
        if alert and not channel.exchange:
            log.warning("%s refuses messages (%s), declaring it again", destination.name, why)
            self._queues.heal(destination.name, silent=not refused)
            self._alarm("queue refuses", copies[0].subscription, f"{destination.name}: {why}")

    def _settle(self, sent: _Sent) -> None:
        self._window.add_bytes(-sent.size)
        self._window.release(sent.destination, 1)

    def _tick(self) -> None:
        """Once a second: what got no answer in time."""
        connection = self._connection
        if connection is None or not connection.is_open:
            return
        connection.ioloop.call_later(1.0, self._tick)
        METRICS.in_flight.set(self._window.in_flight)
        if self._blocked:
            return
        before = time.monotonic() - CONFIRM_TIMEOUT_S
        for channel in self._channels.values():
            late = channel.expire(before)
            groups: dict[Destination, list[Copy]] = {}
            for sent in late:
                groups.setdefault(sent.destination, []).append(sent.copy)
            for destination, copies in groups.items():
                self._failed(channel, destination, copies, "no confirm in time", refused=False)
            for sent in late:
                self._settle(sent)

    def _route(self, subscription: int) -> _Route:
        route = self._routes.get(subscription)
        if route is None:
            catalog = self._catalog.current
            known = catalog.subscriptions[subscription]
            if known.forward is None:
                queue = queue_of(known, catalog)
                route = _Route("", queue, self._destination(queue), forwards=False)
            else:
                destination = self._destination(f"{known.forward.target} for subscription {subscription}")
                route = _Route(known.forward.target, known.forward.key, destination, forwards=True)
            self._routes[subscription] = route
        return route

    def _destination(self, name: str) -> Destination:
        with self._lock:
            return self._destinations.setdefault(name, Destination(name))


def _name_of(key: str, properties: BasicProperties) -> tuple[object, ...]:
    """One copy among those in flight: subscriptions may forward one message to the same place."""
    return key, properties.message_id, properties.headers["tmc-subscriber"], properties.headers["tmc-attempt"]


def _properties(copy: Copy, catalog: Any) -> BasicProperties:
    subscription = catalog.subscriptions[copy.subscription]
    return BasicProperties(
        content_type=copy.content_type,
        headers={
            **copy.headers,
            "tmc-key": copy.key,
            "tmc-attempt": copy.attempt,
            "tmc-subscriber": f"{catalog.apps[subscription.app].id}.{subscription.tag}",
        },
        delivery_mode=2,
        message_id=str(MessageId(copy.topic, copy.producer, copy.shard, copy.number)),
        type=catalog.topics[copy.topic].name,
        app_id=catalog.apps[copy.producer].id,
    )
