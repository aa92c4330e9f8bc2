"""Declares the queues of all subscriptions and looks at them, on a connection that publishes nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pika
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import AMQPError, ChannelClosedByBroker, ConnectionClosedByBroker

from tmc_common.amqp import Nodes, answered_within, connect
from tmc_common.eventlog import EventLog
from tmc_server.domain.numbers import SubscriptionNumber
from tmc_server.domain.ports.catalog import CatalogSource
from tmc_server.domain.queue_names import queue_of

log = EventLog("tmc.queues")

DELIVERY_LIMIT = 3
_LOOK_FOR_S = 1.0
_HEARTBEAT_S = 12
_ANSWER_S = 3.0  # a queue without a leader never answers, on a connection that is well
_FIRST_REST_S, _LONGEST_REST_S = 3.0, 60.0  # before a queue that did not answer is asked again
_NOT_FOUND = 404
_NOT_ALLOWED = 403
_INTERNAL_ERROR = 541
_LOOK_AGAIN_S = 60.0  # for queues that somebody deleted, although nothing is published to them
_LOOKS_AT_ONCE = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rest:
    """A queue is not asked until then, on the monotonic clock. seconds: how long this rest is."""

    until: float
    seconds: float


_NO_REST = _Rest(until=0.0, seconds=0.0)


class RabbitQueues:
    """The queues of this center. kind: quorum or classic.  raise_alert: (kind, subscription, detail). All methods block.

    single_node: the broker is one node, so that a quorum queue which accepts nothing has lost its leader for good.
    """

    def __init__(
        self,
        url: str,
        catalog: CatalogSource,
        kind: str,
        raise_alert: Callable[[str, SubscriptionNumber, str], None],
        on_declared: Callable[[], None] = lambda: None,
        single_node: bool = False,
    ) -> None:
        """on_declared: a queue is there that was not before."""
        self._nodes = Nodes(
            url,
            heartbeat=_HEARTBEAT_S,  # answered by run_once; a broker that is silent for so long is given up
            socket_timeout=5,
            stack_timeout=5,
            blocked_connection_timeout=5,
            client_properties={"connection_name": "tmc queues"},
        )
        self._catalog = catalog
        self._kind = kind
        self._raise_alert = raise_alert
        self._lock = threading.Lock()
        self._connection: pika.BlockingConnection | None = None
        self._channel: BlockingChannel | None = None
        self._on_declared = on_declared
        self._single_node = single_node
        self._declared: dict[str, float] = {}  # on this connection, and when they were last seen
        self._known: set[str] = set()  # declared at least once, and not missed since
        self._refused: set[str] = set()
        self._silent: set[str] = set()
        self._missing: set[str] = set()
        self._resting: dict[str, _Rest] = {}
        self._heard = 0.0
        self._looks: dict[str, tuple[float, tuple[int, int] | None]] = {}
        # Queues of removed subscriptions: not looked at before then; whether they were empty the last time.
        self._left_over: dict[str, tuple[float, bool]] = {}
        self._may_read = True

    def arguments(self) -> dict[str, str | int]:
        """Arguments of every queue. The limit stops endless redelivery of a message that crashes its consumers."""
        if self._kind == "classic":
            return {"x-queue-type": "classic"}
        return {"x-queue-type": "quorum", "x-delivery-limit": DELIVERY_LIMIT}

    def run_once(self) -> bool:
        """Declare what was not declared on this connection yet. Returns False: there is never more to do at once."""
        catalog = self._catalog.current
        wanted = {
            queue_of(subscription, catalog): subscription.number
            for subscription in catalog.subscriptions.values()
            if subscription.forward is None and subscription.removed_ms is None
        }
        with self._lock:
            self._keep_alive()
        self._look_for_deleted(wanted)
        removed = {
            queue_of(each, catalog)
            for each in catalog.subscriptions.values()
            if each.forward is None and each.removed_ms is not None
        }
        self._delete_left_over(removed - set(wanted))
        undeclared = [name for name in wanted if name not in self._declared]
        undeclared.sort(key=lambda name: self._resting.get(name, _NO_REST).until)  # those that did not answer come last
        unknown = len(self._known)
        try:
            for name in undeclared:
                with self._lock:
                    if not self._rests(name):
                        self._declare(name, wanted[name])
        finally:
            if len(self._known) > unknown:
                self._on_declared()
        return False

    def _look_for_deleted(self, wanted: Collection[str]) -> None:
        """Look at a few queues that were not looked at for a while: one that was deleted is declared again."""
        before = time.monotonic() - _LOOK_AGAIN_S
        old = [name for name, seen in list(self._declared.items()) if seen < before and name in wanted]
        for name in old[:_LOOKS_AT_ONCE]:
            with self._lock:
                if not self._rests(name) and self._declared.get(name, before) < before:
                    self._declared[name] = time.monotonic()
                    self._look(name)

    def _delete_left_over(self, names: Collection[str]) -> None:
        """Delete queues that no subscription has any more, when they are empty and nobody consumes them, twice in a row.

        Not in the first minute: their consumers ack what they have, and a subscription may be made again. In a cluster,
        an empty queue may be one without a leader; without the right to look inside, it is left alone.
        """
        now = time.monotonic()
        self._left_over = {name: self._left_over.get(name, (now + _LOOK_AGAIN_S, False)) for name in names}
        due = [name for name, (at, _) in self._left_over.items() if at <= now]
        for name in due[:_LOOKS_AT_ONCE]:
            with self._lock:
                if self._rests(name):
                    continue
                was_empty, again = self._left_over[name][1], now + _LOOK_AGAIN_S
                if not self._exists(name):
                    self._left_over[name] = (float("inf"), False)
                    continue
                is_empty = self._look(name) == (0, 0) and (self._may_read or self._single_node)
                self._left_over[name] = (again, is_empty)
                if is_empty and was_empty:
                    self._delete(name)
                    self._left_over[name] = (float("inf"), False)

    def _delete(self, name: str) -> None:
        try:
            with self._patience(name):
                self._open().queue_delete(name)
        except ChannelClosedByBroker as exc:
            self._channel = None
            log.warning("queue_not_deleted", "queue %s has no subscription and stays: %s", name, exc.reply_text)
        except AMQPError:
            self._drop()
            raise
        else:
            log.info("queue_deleted", "queue %s has no subscription, no messages and no consumers: it is deleted", name)
        for known in (self._known, self._missing):
            known.discard(name)
        self._declared.pop(name, None)

    def is_known(self, queue: str) -> bool:
        """Return whether it was declared, as far as anybody knows. Does not block."""
        return queue in self._known

    def _rests(self, name: str) -> bool:
        return time.monotonic() < self._resting.get(name, _NO_REST).until

    def _let_rest(self, name: str, seconds: float) -> None:
        self._resting[name] = _Rest(until=time.monotonic() + seconds, seconds=seconds)

    def _keep_alive(self) -> None:
        rested = time.monotonic() - self._heard >= _HEARTBEAT_S / 3
        if self._connection is not None and self._connection.is_open and rested:
            self._heard = time.monotonic()
            try:
                self._connection.process_data_events(0)
            except (AMQPError, OSError) as exc:
                self._drop()
                log.debug("broker_silent", "the broker does not answer: %r", exc)

    def _declare(self, name: str, subscription: SubscriptionNumber) -> None:
        channel = self._open()
        if name in self._missing:
            self._missing.discard(name)
            log.warning("queue_missing", "queue %s was deleted: it is declared again", name)
            self._raise_alert("queue missing", subscription, f"{name} was deleted; it is declared again")
        try:
            with self._patience(name):
                if name in self._silent:
                    self._silent.discard(name)
                    self._renew(channel, name)
                channel.queue_declare(name, durable=True, arguments=self.arguments())
        except ChannelClosedByBroker as exc:
            self._channel = None
            exists = self._exists(name)
            if name not in self._refused:
                self._refused.add(name)
                log.warning("queue_not_declared", "queue %s cannot be declared: %s", name, exc.reply_text)
                kind = "queue differs" if exists else "queue refuses"
                self._raise_alert(kind, subscription, f"{name} cannot be declared: {exc.reply_text}")
            if not exists:
                self._let_rest(name, _LONGEST_REST_S)
                return
        except AMQPError:
            self._drop()
            raise
        else:
            self._refused.discard(name)
        self._declared[name] = time.monotonic()
        self._known.add(name)

    def _exists(self, name: str) -> bool:
        """Return whether a queue that cannot be declared is there all the same, with other arguments."""
        try:
            with self._patience(name):
                self._open().queue_declare(name, passive=True)
        except ChannelClosedByBroker:
            self._channel = None
            return False
        except AMQPError:
            self._drop()
            raise
        return True

    @contextmanager
    def _patience(self, name: str) -> Iterator[None]:
        """Limit the wait for a queue, and skip one that did not answer: for seconds at first, then for up to a minute."""
        began = time.monotonic()
        try:
            with answered_within(self._connection, _ANSWER_S):
                yield
        except AMQPError:
            if time.monotonic() - began >= _ANSWER_S:
                seconds = min(max(_FIRST_REST_S, 2 * self._resting.get(name, _NO_REST).seconds), _LONGEST_REST_S)
                log.warning("queue_silent", "queue %s does not answer: it is left alone for %g s", name, seconds)
                self._let_rest(name, seconds)
            raise
        else:
            self._resting.pop(name, None)

    def heal(self, queue: str, silent: bool = False, missing: bool = False) -> None:
        """Declare it again at the next run. silent: it exists but does not answer.  missing: it was deleted."""
        if silent:
            self._silent.add(queue)
        if missing and queue in self._known:
            self._missing.add(queue)
        if missing:
            self._known.discard(queue)
        self._declared.pop(queue, None)

    def _renew(self, channel: BlockingChannel, name: str) -> None:
        """Delete a queue that accepts nothing, is empty and has no consumers, so that it is declared again.

        A quorum queue whose only broker was killed within half a second of its declaration never gets a leader, or has a name
        and nothing that runs it. If it held a copy after all, the center delivers that copy again. In a cluster it gets a
        leader with its majority: it is left alone.
        """
        if not self._single_node:
            return
        found = channel.queue_declare(name, passive=True).method
        if found.message_count == 0 and found.consumer_count == 0:
            log.warning(
                "queue_recreated", "queue %s accepts nothing and is empty: it is deleted and declared again", name
            )
            channel.queue_delete(name)

    def look(self, queue: str) -> tuple[int, int] | None:
        """(consumers, ready messages), at most a second old. None: the broker does not answer."""
        with self._lock:
            at, found = self._looks.get(queue, (float("-inf"), None))
            if time.monotonic() - at < _LOOK_FOR_S:
                return found
            found = None if self._rests(queue) else self._look(queue)
            self._looks[queue] = (time.monotonic(), found)
            return found

    def _look(self, queue: str) -> tuple[int, int] | None:
        try:
            channel = self._open()
            with self._patience(queue):
                answer = channel.queue_declare(queue, passive=True).method
                found = int(answer.consumer_count), int(answer.message_count)
                return found if any(found) or self._kind != "quorum" else self._look_inside(channel, queue)
        except ChannelClosedByBroker as exc:
            self._channel = None
            if exc.reply_code == _NOT_FOUND:
                self.heal(queue, missing=True)
                return 0, 0  # no queue, no copies
            log.warning("queue_not_inspected", "queue %s cannot be looked at: %s", queue, exc.reply_text)
        except (AMQPError, OSError) as exc:
            self._drop()
            if isinstance(exc, ConnectionClosedByBroker) and exc.reply_code == _INTERNAL_ERROR:
                self.heal(queue, silent=True)  # the broker knows of it, and nothing runs it: see _renew
            log.debug("broker_silent", "the broker does not answer: %r", exc)
        return None

    def _look_inside(self, channel: BlockingChannel, queue: str) -> tuple[int, int]:
        """A queue without a leader is said to have no messages and no consumers; only its members know. They are asked for
        a message: without a leader there is no answer. Without the right to read, the queue is taken as it looks.
        """
        try:
            method, _, _ = channel.basic_get(queue)
        except ChannelClosedByBroker as exc:
            if exc.reply_code != _NOT_ALLOWED:
                raise
            self._channel = None
            self._may_read = False
            return 0, 0
        if method is not None:
            channel.basic_nack(method.delivery_tag)
        return 0, int(method is not None)

    def _open(self) -> BlockingChannel:
        if self._connection is None or not self._connection.is_open:
            self._drop()
            self._connection = connect(self._nodes.next())
        if self._channel is None or not self._channel.is_open:
            self._channel = self._connection.channel()
        return self._channel

    def _drop(self) -> None:
        """Drop what is known: after a lost connection the broker may have lost its queues too, and all are declared again."""
        connection, self._connection, self._channel = self._connection, None, None
        self._declared = {}
        if connection is not None and connection.is_open:
            try:
                connection.close()
            except (AMQPError, OSError) as exc:
                log.debug("connection_close_failed", "closing a broken connection: %r", exc)

    def close(self) -> None:
        if self._lock.acquire(timeout=5):  # a thread that hangs while holding the lock ends with the process
            self._drop()
            self._lock.release()
