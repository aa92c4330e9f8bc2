"""Send to RabbitMQ without a center: persistent messages with publisher confirms, a page at a time.

A page that is not confirmed in time is sent again, so consumers may get a message twice: `message_id` is the same.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Any

import pika
from pika.exceptions import AMQPError, ChannelClosedByBroker, ConnectionClosedByBroker

from tmc_client.forks import watch_forks
from tmc_client.outbox.entries import Entry, Failure, Trouble
from tmc_common.amqp import CorkedConnection, Nodes, give_up
from tmc_common.headers import ORDER_KEY, to_wire

log = logging.getLogger("tmc_client.outbox")

_TIMEOUT_S = 10.0
_CLOSE_S = 2.0
_PERSISTENT = 2
_HALVING_S = 3.0  # below the lease of a relay
_INTERNAL_ERROR = "INTERNAL_ERROR"
_FORBIDDEN = re.compile(r"access to topic '([^']*)' in exchange")  # which the user may not write
KEY = "tmc-key"
"""The header with the message's key; the order key is in `tmc-order-key`."""


def _by_topic(entry: Entry) -> str:
    return entry.topic


class RabbitTarget:
    """entries.Target. url: amqp://..., also with several hosts.

    exchange: "" is the default one, which routes to the queue of that name.

    routing_key: of a message; by default its topic. Needs `tmc-client[rabbitmq]`.
    """

    delays = False

    def __init__(self, url: str, *, exchange: str = "", routing_key: Callable[[Entry], str] = _by_topic) -> None:
        self._nodes = Nodes(url)
        self._exchange = exchange
        self._routing_key = routing_key
        self.after_fork()
        watch_forks(self)

    def after_fork(self) -> None:
        """See forks.ForkAware: the connection is the parent's."""
        self._lock = threading.Lock()
        self._link: _Link | None = None

    def send(self, entries: Sequence[Entry]) -> Sequence[Failure | None]:
        """See entries.Target."""
        with self._lock:
            outcomes = self._sent([self._letter(entry) for entry in entries], time.monotonic() + _HALVING_S)
        if None in outcomes:
            return outcomes
        # The broker may have ended each connection for reasons of its own.
        return [
            Failure(trouble=Trouble.AWAY, error=each.error) if each and _INTERNAL_ERROR in each.error else each
            for each in outcomes
        ]

    def _sent(self, letters: Sequence[_Letter], until: float) -> list[Failure | None]:
        """Send a page. If the broker ends the connection for a message of it, send that in halves, until it is alone.

        until: what is not found by then (monotonic seconds) is sent with the next page.
        """
        page = _Page(letters)
        if page.places:
            self._publish(page)
        outcomes, left = page.outcomes(), page.unanswered
        if not (page.blamed and left) or time.monotonic() > until:
            return outcomes
        forbidden = _FORBIDDEN.search(page.blamed)
        guilty = [place for place in left if forbidden is not None and letters[place].routing_key == forbidden[1]]
        guilty = guilty or (left if len(left) == 1 else [])
        outcomes = [
            Failure(trouble=Trouble.REFUSED, error=page.blamed) if place in guilty else outcome
            for place, outcome in enumerate(outcomes)
        ]
        rest = [place for place in left if place not in guilty]
        for part in (rest,) if guilty else (rest[: len(rest) // 2], rest[len(rest) // 2 :]):
            for place, outcome in zip(part, self._sent([letters[place] for place in part], until), strict=True):
                outcomes[place] = outcome
        return outcomes

    def _publish(self, page: _Page) -> None:
        link = self._link
        try:
            if link is None or link.ended:
                link = self._link = _Link(self._nodes.next())  # fails where no file descriptor is left
            link.opened.result(_TIMEOUT_S)
            link.publish(page)
            page.done.result(_TIMEOUT_S)
        except (AMQPError, FutureTimeout, OSError) as exc:
            if link is not None:
                link.close()
            page.fail(f"RabbitMQ did not confirm: {exc or type(exc).__name__}")

    def _letter(self, entry: Entry) -> _Letter:
        properties, routing_key = _properties(entry), self._routing_key(entry)
        try:
            properties.encode()
            pika.spec.Basic.Publish(exchange=self._exchange, routing_key=routing_key).encode()
        except (AMQPError, ValueError) as exc:
            return _Letter(entry=entry, error=f"It cannot be sent to RabbitMQ: {exc!r}")
        return _Letter(entry=entry, exchange=self._exchange, routing_key=routing_key, properties=properties)

    def close(self) -> None:
        with self._lock:
            if self._link is not None:
                self._link.close()


@dataclass(frozen=True, kw_only=True)
class _Letter:
    """A message as it is published. error: why it cannot be; "": it can."""

    entry: Entry
    exchange: str = ""
    routing_key: str = ""
    properties: pika.BasicProperties | None = None
    error: str = ""


class _Page:
    """Messages on their way. done: all are answered.

    blamed: the broker's reason, if it ended the channel or connection because of one of them; "": it did not.
    """

    def __init__(self, letters: Sequence[_Letter]) -> None:
        self._letters = letters
        self.places = [place for place, letter in enumerate(letters) if not letter.error]
        self.done: Future[None] = Future()
        self._open: dict[int, int] = {}  # places by delivery tag
        self._returned: set[str] = set()
        self._answers: dict[int, Failure | None] = {
            place: Failure(trouble=Trouble.REFUSED, error=letter.error)
            for place, letter in enumerate(letters)
            if letter.error
        }
        self._error = ""
        self.blamed: str = ""
        self._lock = threading.RLock()  # the sender gives up in its thread, answers come in the connection's

    def letter(self, place: int) -> _Letter:
        return self._letters[place]

    def sent(self, place: int, tag: int) -> None:
        with self._lock:
            self._open[tag] = place

    def returned(self, message_id: str) -> None:
        """Note that no queue got it; its ack follows."""
        self._returned.add(message_id)

    def answered(self, tag: int, multiple: bool, taken: bool) -> None:
        with self._lock:
            for known in [each for each in self._open if each <= tag] if multiple else [tag]:
                place = self._open.pop(known, None)
                if place is not None:
                    self._answers[place] = self._answer(self._letters[place], taken)
            if len(self._answers) == len(self._letters):
                self._end()

    def _answer(self, letter: _Letter, taken: bool) -> Failure | None:
        if not taken:
            return Failure(trouble=Trouble.LATER, error="RabbitMQ did not take it: its queue is full.")
        if _message_id(letter.entry) in self._returned:
            error = f"No queue is bound to exchange {letter.exchange!r} for routing key {letter.routing_key!r}."
            return Failure(trouble=Trouble.REFUSED, error=error)
        return None

    def fail(self, error: str, *, blames: bool = False) -> None:
        """Fail those without an answer, published or not: they were not taken. blames: because of one of them."""
        with self._lock:
            if not self._error:
                self._error, self.blamed = error, error if blames else ""
            self._end()

    @property
    def unanswered(self) -> list[int]:
        """Return the places of those without an answer."""
        with self._lock:
            return [place for place in self.places if place not in self._answers]

    def _end(self) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def outcomes(self) -> list[Failure | None]:
        with self._lock:
            away = Failure(trouble=Trouble.AWAY, error=self._error)
            return [self._answers.get(place, away) for place in range(len(self._letters))]


class _Link:
    """One connection with one channel, in a thread of its own. opened: fails if it cannot be opened."""

    def __init__(self, parameters: pika.connection.Parameters) -> None:
        self.opened: Future[None] = Future()
        self.ended = False
        self._page: _Page | None = None
        self._tag = 0
        self._channel: Any = None
        self._connection = CorkedConnection(
            parameters,
            on_open_callback=lambda opened: opened.channel(on_open_callback=self._on_channel),
            on_open_error_callback=lambda _connection, error: self._end(error),
            on_close_callback=lambda _connection, reason: self._end(reason),
        )
        self._lock = threading.Lock()
        self._loop_ended = False
        self._thread = threading.Thread(target=self._run, name="tmc-outbox-rabbitmq", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._connection.ioloop.start()
        finally:
            with self._lock:
                self._loop_ended = True
            self._fail("its thread has ended")
            self._connection.ioloop.close()

    def _on_channel(self, channel: Any) -> None:
        self._channel = channel
        channel.add_on_return_callback(self._on_return)
        channel.add_on_close_callback(self._on_channel_closed)
        channel.confirm_delivery(self._on_confirm, callback=self._on_confirming)

    def _on_confirming(self, _frame: Any) -> None:
        if not self.opened.done():
            self.opened.set_result(None)

    def publish(self, page: _Page) -> None:
        """Publish, from any thread."""
        if not self._in_loop(lambda: self._publish(page)):
            page.fail("RabbitMQ closed the connection.")

    def _in_loop(self, work: Callable[[], None]) -> bool:
        """Run it in the connection's thread. Returns False: that has ended."""
        with self._lock:
            if not self._loop_ended:
                self._connection.ioloop.add_callback_threadsafe(work)
            return not self._loop_ended

    def _publish(self, page: _Page) -> None:
        self._page = page
        if self.ended:
            page.fail("RabbitMQ closed the connection.")
            return
        try:
            with self._connection.corked():
                for place in page.places:
                    self._tag += 1
                    page.sent(place, self._tag)
                    letter = page.letter(place)
                    self._channel.basic_publish(
                        letter.exchange, letter.routing_key, letter.entry.body, letter.properties, mandatory=True
                    )
        except Exception as exc:  # the tags are not the broker's any more
            log.warning("a page could not be published", exc_info=True)
            self._fail(exc)
            self._close()

    def _on_confirm(self, frame: Any) -> None:
        if self._page is not None:
            method = frame.method
            self._page.answered(method.delivery_tag, method.multiple, isinstance(method, pika.spec.Basic.Ack))

    def _on_return(self, _channel: Any, _method: Any, properties: Any, _body: bytes) -> None:
        if self._page is not None:
            self._page.returned(properties.message_id)

    def _on_channel_closed(self, _channel: Any, reason: Any) -> None:
        """Handle a channel that was closed by the broker, for what it does not accept, or because the connection is closing."""
        self._fail(reason)
        self._close()

    def _end(self, reason: Any) -> None:
        self._fail(reason)
        self._connection.ioloop.stop()

    def _fail(self, reason: Any) -> None:
        self.ended = True
        error = reason if isinstance(reason, AMQPError) else AMQPError(str(reason))
        if not self.opened.done():
            self.opened.set_exception(error)
        if self._page is not None:
            self._page.fail(f"RabbitMQ closed the connection: {reason}", blames=_blames_a_message(reason))

    def close(self) -> None:
        """Close, from any thread."""
        self._in_loop(self._close)
        self._thread.join(_CLOSE_S * 2)

    def _close(self) -> None:
        if not (self._connection.is_closed or self._connection.is_closing):
            give_up(self._connection, _CLOSE_S)


_OF_A_MESSAGE = {311, 406, 501, 502, 541}  # too large; not allowed by a policy; what the broker cannot read


def _blames_a_message(reason: object) -> bool:
    """Return whether the broker ended a channel or connection because of what was published, and not for all that is."""
    if not isinstance(reason, ChannelClosedByBroker | ConnectionClosedByBroker):
        return False
    return reason.reply_code in _OF_A_MESSAGE or _FORBIDDEN.search(str(reason)) is not None


def _message_id(entry: Entry) -> str:
    return entry.attempt_id.hex()


def _properties(entry: Entry) -> pika.BasicProperties:
    headers = {**to_wire(entry.headers), KEY: entry.key}
    if entry.order_key:
        headers[ORDER_KEY] = entry.order_key
    return pika.BasicProperties(
        content_type=entry.content_type,
        headers=headers,
        delivery_mode=_PERSISTENT,
        message_id=_message_id(entry),
        timestamp=entry.created_ms // 1_000,
        type=entry.topic,
    )
