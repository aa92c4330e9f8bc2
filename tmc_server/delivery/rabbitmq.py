"""Publish copies to RabbitMQ on one connection and thread, pipelined, with publisher confirms.

A copy is handed to the thread after its row is committed with the attempt counted. A confirm needs no further write.
After a return (which comes before its own ack), a nack, a closed channel or a lost connection, the copy is given back
and the attempt does not count. A copy that is not confirmed in time stays unconfirmed: it may still arrive, as in a queue
without a leader, so no other copy of its message is made. For copies forwarded to an exchange, the confirm is the ack,
and a refusal counts as a failed attempt.

Each producer has its own channel for each exchange it sends to (see rabbitmq_lane), so a missing exchange, or a
message that the broker rejects, affects no other producer.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Protocol

from pika.adapters.select_connection import IOLoop
from pika.exceptions import NoFreeChannels

from tmc_common.amqp import NeverOpened, Nodes, give_up, is_login_refused, run_connection, text_of
from tmc_common.eventlog import EventLog
from tmc_common.headers import FORWARD_KEY
from tmc_server.delivery.rabbitmq_lane import Lane, Sent
from tmc_server.delivery.rabbitmq_properties import Digests, properties_of, sign_copy
from tmc_server.delivery.spans import PublishSpans
from tmc_server.delivery.window import ALERT_AFTER, CONFIRM_TIMEOUT_S, Destination, Failure, Window
from tmc_server.domain.catalog import Catalog
from tmc_server.domain.consumption import QueueLook
from tmc_server.domain.numbers import MessageNumber, Shard, SubscriptionNumber
from tmc_server.domain.ports.catalog import CatalogSource
from tmc_server.domain.ports.delivery import Copy, ForwardAnswers, SharedProgress
from tmc_server.domain.queue_names import queue_of
from tmc_server.errors import Retryable
from tmc_server.metrics import METRICS

log = EventLog("tmc.rabbitmq")

_RECONNECT_S = (0.2, 1.0, 2.0, 5.0)
PATIENCE_S = 15.0
_WINDOW_BYTES = 64 << 20  # of unconfirmed copies' bodies, approximately
_LANES = 200  # channels per exchange at most; beyond that producers share them
_REFUSALS = (403, 404)  # not allowed, no such exchange: about what was published, not about the broker


class Queues(Protocol):
    """Declares and inspects queues, on a connection of its own. See delivery.rabbitmq_queues."""

    def look(self, queue: str) -> tuple[int, int] | None:
        """(consumers, ready messages). None: the broker does not answer. Blocks."""

    def is_known(self, queue: str) -> bool:
        """Return whether it was declared; until then nothing is published to it. Does not block."""

    def heal(self, queue: str, silent: bool = False, missing: bool = False) -> None:
        """Declare it again soon. missing: it was deleted.  silent: it exists but does not answer. Does not block."""


RaiseAlert = Callable[[str, SubscriptionNumber, str], None]
"""(kind, subscription, detail): tell the owner of a subscription."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Route:
    """exchange, key: where copies of a subscription go; key "": the copy's own.  producer: number of the topic's owner."""

    exchange: str
    producer: int
    key: str
    destination: Destination
    forwards: bool


_LaneName = tuple[str, int]


class RabbitOutlet:
    """domain.ports.delivery.Outlet over one connection. url: amqp:// or amqps://.  wake: called on new room.

    signatures: sign copies with their subscription's key, if it has one.
    """

    def __init__(
        self,
        url: str,
        catalog: CatalogSource,
        queues: Queues,
        answers: ForwardAnswers,
        wake: Callable[[], None],
        raise_alert: RaiseAlert,
        progress: SharedProgress,
        window: int = 2000,
        signatures: bool = True,
    ) -> None:
        self._signatures = signatures
        self._nodes = Nodes(
            url, heartbeat=10, socket_timeout=5, stack_timeout=5, client_properties={"connection_name": "tmc publisher"}
        )
        self._catalog = catalog
        self._spans = PublishSpans(catalog)
        self._queues = queues
        self._answers = answers
        self._wake = wake
        self._raise_alert = raise_alert
        self._progress = progress
        self._window = Window(window, _WINDOW_BYTES, wake)
        self._routes: dict[SubscriptionNumber, _Route] = {}
        self._destinations: dict[str, Destination] = {}
        self._lock = threading.Lock()
        self._incoming: deque[Copy] = deque()
        self._draining = False
        self._connection: Any = None
        self._lanes: dict[_LaneName, Lane] = {}
        self._lanes_per_exchange = _LANES
        self._blocked = False
        self._answered = False  # on this connection
        self._stopping = threading.Event()
        self._failures = 0
        self._is_refused = False
        self._thread = threading.Thread(target=self._run, name="tmc-publisher", daemon=True)

    # -- domain.ports.delivery.Outlet, from any thread ---------------------------------------------------------------------

    def reserve(self, subscription: SubscriptionNumber, wanted: int) -> int:
        if self._blocked or self._connection is None or self._stopping.is_set():
            return 0
        route = self._route(subscription)
        name = self._lane_name(route)
        lane = self._lanes.get(name)
        if lane is None:
            self._open_lane(name)
            return 0
        if not (lane.ready and (route.forwards or self._queues.is_known(route.key))):
            return 0
        return self._window.reserve(route.destination, wanted)

    def release(self, subscription: SubscriptionNumber, count: int) -> None:
        self._window.release(self._route(subscription).destination, count)

    def deliver(self, copies: Sequence[Copy]) -> None:
        for copy in copies:
            self._route(copy.subscription).destination.unconfirmed.add((copy.shard, copy.number))
        with self._lock:
            connected = self._connection is not None
            if connected:
                self._incoming.extend(copies)
                if not self._draining:
                    self._draining = True
                    self._connection.ioloop.add_callback_threadsafe(self._drain)
        if not connected:
            for copy in copies:
                self._not_sent(copy)
            self._answers.give_back(copies, after_ms=1000)

    def drained_until(self, subscription: SubscriptionNumber, tried_ms: int) -> None:
        self._window.passed(self._route(subscription).destination, tried_ms)

    def look(self, subscription: SubscriptionNumber) -> QueueLook | None:
        if self._connection is None or self._blocked:
            return None
        route = self._route(subscription)
        unwritten = self.unconfirmed(subscription)
        if route.forwards:
            return QueueLook(consumers=1, unwritten=unwritten)
        found = self._queues.look(route.key)
        if found is None:
            return None
        METRICS.queue_depth.labels(route.key).set(found[1])
        try:
            self._window.hear(route.destination, self._progress.of(route.key))
        except Retryable:
            return None  # what the other servers saw is not known: a copy that seems lost may still wait
        still_ms = self._window.looked(route.destination, found[0])
        return QueueLook(
            consumers=found[0],
            messages=found[1],
            passed_ms=route.destination.passed_ms,
            still_ms=still_ms,
            unwritten=unwritten,
        )

    def unconfirmed(self, subscription: SubscriptionNumber) -> Set[tuple[Shard, MessageNumber]]:
        """Messages whose copies are on their way to this subscription's destination, or may be."""
        return frozenset(self._route(subscription).destination.unconfirmed)

    def share_progress(self) -> bool:
        """Publish this server's queue progress to the other servers. Returns False: nothing is left to do. Blocks."""
        seen = self._window.unshared(list(self._destinations.values()))
        if seen and self._progress.share(seen):
            self._window.was_shared(self._destinations, seen)
        return False

    # -- life -----------------------------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        return self._connection is not None

    def start(self) -> None:
        self._thread.start()

    def stop(self, grace_s: float = CONFIRM_TIMEOUT_S) -> bool:
        """Accept no more copies and wait for open confirms. Returns: whether all copies were answered. Blocks."""
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
            loop: Any = None
            try:
                loop = IOLoop()  # fails where no file descriptor is left
                run_connection(
                    self._nodes.next(),
                    loop,
                    on_open=self._on_open,
                    on_open_error=self._on_open_error,
                    on_close=self._on_close,
                )
            except NeverOpened as exc:
                self._note_failure(exc)
            except Exception:  # a fault of ours; a new connection starts from nothing
                log.exception("publisher_failed", "the publisher failed and connects again")
                self._failures += 1
            self._lose_everything()
            if loop is not None:
                loop.close()
            pause = _RECONNECT_S[min(self._failures, len(_RECONNECT_S) - 1)]
            self._stopping.wait(pause)

    def _on_open(self, connection: Any) -> None:
        if self._stopping.is_set():
            connection.close()
            return
        connection.add_on_connection_blocked_callback(lambda *_: self._set_blocked(True))
        connection.add_on_connection_unblocked_callback(lambda *_: self._set_blocked(False))
        self._answered = False
        self._lanes = {}
        most = connection.params.channel_max or _LANES  # as the broker allows; 0: as many as there are
        self._lanes_per_exchange = max(1, min(_LANES, most // 2))
        for name in self._usual_lanes():
            self._do_open_lane(connection, name)
        with self._lock:
            self._connection = connection
        connection.ioloop.call_later(PATIENCE_S, lambda: self._give_up_waiting(connection))
        self._tick()

    def _usual_lanes(self) -> set[_LaneName]:
        """One for each producer with subscribers; lanes of exchanges open with the first copy."""
        catalog = self._catalog.current
        routes = (self._route(s.number) for s in catalog.subscriptions.values() if s.removed_ms is None)
        return {self._lane_name(route) for route in routes if not route.forwards} or {("", 0)}

    def _lane_name(self, route: _Route) -> _LaneName:
        return route.exchange, route.producer % self._lanes_per_exchange

    def _give_up_waiting(self, connection: Any) -> None:
        """Give up a connection that the broker accepted but never answered on, as it may while starting."""
        if connection is self._connection and not self._answered and not self._stopping.is_set():
            self._note_failure(f"no answer in {PATIENCE_S:g} s")
            give_up(connection, PATIENCE_S / 3)

    def _on_open_error(self, connection: Any, error: object) -> None:
        self._note_failure(error)
        connection.ioloop.stop()

    def _on_close(self, connection: Any, reason: object) -> None:
        if not self._stopping.is_set():
            self._note_failure(reason)
        connection.ioloop.stop()

    def _note_failure(self, reason: object) -> None:
        self._failures += 1
        was_refused, self._is_refused = self._is_refused, is_login_refused(reason)
        if self._is_refused and not was_refused:  # also after it was away: somebody changed the password meanwhile
            log.error(
                "broker_refuses_login",
                "RabbitMQ does not let this server in, which delivers nothing: check user, password and virtual host in "
                "[rabbitmq] url, and the user's rights (%s)",
                text_of(reason),
            )
        elif self._failures == 1:
            log.warning("broker_lost", "the broker is away, what is due waits uncounted: %s", text_of(reason))

    def _set_blocked(self, blocked: bool) -> None:
        self._blocked = blocked
        METRICS.publisher_blocked.set(int(blocked))
        if blocked:
            log.warning(
                "broker_blocked", "the broker blocks publishers (memory or disk alarm): what is due waits uncounted"
            )
        else:
            now = time.monotonic()
            for lane in self._lanes.values():
                lane.restart_clock(now)
            log.info("broker_unblocked", "the broker takes messages again")
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
            self._not_sent(copy)
        for lane in self._lanes.values():
            for sent in lane.lose_everything():
                self._forget(sent)
                copies.append(sent.copy)
        if copies:
            METRICS.given_back.labels("connection lost").inc(len(copies))
            self._answers.give_back(copies, after_ms=500)

    # -- on the publisher's thread --------------------------------------------------------------------------------

    def _open_lane(self, name: _LaneName) -> None:
        """Open a lane the first time a producer sends to this exchange. From any thread."""
        with self._lock:
            connection = self._connection
            if connection is not None:
                connection.ioloop.add_callback_threadsafe(lambda: self._open_once(connection, name))

    def _open_once(self, connection: Any, name: _LaneName) -> None:
        if connection is self._connection and name not in self._lanes:
            self._do_open_lane(connection, name)

    def _do_open_lane(self, connection: Any, name: _LaneName) -> None:
        lane = Lane(self, name[0])
        try:
            lane.open(connection)
        except NoFreeChannels:
            shared = [each for (exchange, _), each in self._lanes.items() if exchange == name[0]]
            if not shared:
                log.warning(
                    "channels_exhausted",
                    "no channel is left for exchange %r: what goes there waits; raise channel_max",
                    name[0],
                )
                return
            lane = shared[name[1] % len(shared)]
        self._lanes = self._lanes | {name: lane}

    def lane_ready(self, lane: Lane) -> None:
        self._answered = True
        METRICS.publisher_connected.set(1)
        if self._failures and lane.exchange == "":
            log.info("broker_connected", "the broker is back")
            self._failures = 0
            self._is_refused = False
        self._wake()

    def lane_closed(self, lane: Lane, lost: list[Sent], reason: Any, pause_s: float) -> None:
        connection = self._connection
        for sent in lost:
            self._forget(sent)
        copies = [sent.copy for sent in lost]
        if connection is None or not connection.is_open:
            if lost:
                METRICS.given_back.labels("connection lost").inc(len(lost))
                self._answers.give_back(copies, after_ms=500)
            return
        log.warning("channel_closed", "the broker closed a channel of exchange %r: %s", lane.exchange, reason)
        if lost and lane.exchange and getattr(reason, "reply_code", 0) in _REFUSALS:
            self._answers.refuse(copies, f"exchange {lane.exchange!r}: {reason}")
        elif lost:
            METRICS.given_back.labels("channel closed").inc(len(lost))
            self._answers.give_back(copies, after_ms=round(pause_s * 1000))
        connection.ioloop.call_later(pause_s, lambda: self._reopen(connection, lane))

    def unsendable(self, lane: Lane, sent: Sent, reason: object) -> None:
        self._forget(sent)
        METRICS.unsendable.inc()
        log.warning("message_unsendable", "a message for %s cannot be published: %s", sent.destination.name, reason)
        self._spans.published([sent.copy], time.monotonic() - sent.at, sent.destination.name, str(reason))
        self._answers.refuse([sent.copy], f"cannot be published to {sent.destination.name}: {reason}")

    def stranded(self, lane: Lane, sent: Sent) -> None:
        self._forget(sent)
        METRICS.given_back.labels("channel closed").inc()
        self._answers.give_back([sent.copy], after_ms=1000)

    @staticmethod
    def _reopen(connection: Any, lane: Lane) -> None:
        if connection.is_open:
            lane.open(connection)

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
        digests: Digests = {}
        for copy in copies:
            route = self._route(copy.subscription)
            lane = self._lanes.get(self._lane_name(route))
            if lane is None or not lane.accepts:
                self._not_sent(copy)
                stranded.append(copy)
                continue
            try:
                sent = self._as_sent(copy, route, catalog, now, digests)
            except Exception as exc:  # only this copy is affected: its attempt counts, the others are still sent
                log.exception("message_unsendable", "a message for %s cannot be published", route.destination.name)
                self._not_sent(copy)
                self._answers.refuse([copy], f"cannot be published: {exc!r}")
                continue
            self._window.add_bytes(sent.size)
            lane.publish(sent)
        return stranded

    def _as_sent(self, copy: Copy, route: _Route, catalog: Catalog, now: float, digests: Digests) -> Sent:
        properties = properties_of(copy, catalog)
        keys = catalog.subscriptions[copy.subscription].keys
        if keys is not None and self._signatures:
            sign_copy(copy, properties, keys.signing, digests)
        return Sent(
            copy=copy,
            key=route.key if not route.forwards else copy.headers.get(FORWARD_KEY) or route.key or copy.key,
            properties=properties,
            destination=route.destination,
            size=len(copy.body),
            at=now,
        )

    def answered(self, lane: Lane, done: list[Sent], nacked: bool) -> None:
        try:
            self._sort_answers(lane, done, nacked)
        finally:
            for sent in done:
                self._forget(sent)

    def _sort_answers(self, lane: Lane, done: list[Sent], nacked: bool) -> None:
        now = time.monotonic()
        good: list[Copy] = []
        bad: dict[Destination, list[Sent]] = {}
        for sent in done:
            if nacked or sent.returned:
                bad.setdefault(sent.destination, []).append(sent)
            else:
                METRICS.confirm_seconds.observe(now - sent.at)
                if self._window.succeeded(sent.destination):
                    log.info("queue_recovered", "%s takes messages again", sent.destination.name)
                good.append(sent.copy)
                self._spans.published([sent.copy], now - sent.at, sent.destination.name)
        for destination, refused in bad.items():
            self._failed(lane, destination, refused, refused[0].returned or "refused", silent=False)
        if good and lane.exchange:
            self._answers.acknowledge(good)

    def _failed(self, lane: Lane, destination: Destination, lost: list[Sent], why: str, silent: bool) -> None:
        """Handle copies that were not accepted. silent: the broker did not answer, so they may still arrive: they stay
        unconfirmed, and nothing more goes there for a while.
        """
        if silent:
            self._pause(lane, destination, lost, why)
            return
        METRICS.returned.inc(len(lost))
        for sent in lost:
            self._spans.published([sent.copy], time.monotonic() - sent.at, destination.name, why)
        failure = self._window.failed(destination)
        copies = [sent.copy for sent in lost]
        if lane.exchange:
            self._answers.refuse(copies, f"{destination.name}: {why}")
            return
        METRICS.given_back.labels("returned").inc(len(copies))
        self._answers.give_back(copies, after_ms=round(failure.pause_s * 1000))
        if failure.begins_a_pause:
            missing = any(sent.unroutable for sent in lost)
            self._heal(destination, copies[0].subscription, failure, why, silent=False, missing=missing)

    def _pause(self, lane: Lane, destination: Destination, late: list[Sent], why: str) -> None:
        METRICS.returned.inc(len(late))
        failure = self._window.failed(destination)
        subscription = late[0].copy.subscription
        if not failure.begins_a_pause:
            return
        if not lane.exchange:
            self._heal(destination, subscription, failure, why, silent=True, missing=False)
        elif failure.pauses >= ALERT_AFTER:
            self._raise_alert("queue refuses", subscription, f"{destination.name}: {why}")

    def _heal(
        self,
        destination: Destination,
        subscription: SubscriptionNumber,
        failure: Failure,
        why: str,
        silent: bool,
        missing: bool,
    ) -> None:
        """Declare the queue again, once per pause, if it is missing or still refuses after ALERT_AFTER pauses."""
        persists = failure.pauses >= ALERT_AFTER
        if missing or persists:
            self._queues.heal(destination.name, silent=silent, missing=missing)
        if failure.pauses == ALERT_AFTER:
            log.warning("queue_refusing", "%s refuses messages (%s), declaring it again", destination.name, why)
        if persists:
            self._raise_alert("queue refuses", subscription, f"{destination.name}: {why}")

    def _forget(self, sent: Sent) -> None:
        sent.destination.unconfirmed.discard((sent.copy.shard, sent.copy.number))
        if not sent.overdue:
            self._leave_window(sent)

    def _leave_window(self, sent: Sent) -> None:
        self._window.add_bytes(-sent.size)
        self._window.release(sent.destination, 1)

    def _not_sent(self, copy: Copy) -> None:
        """It was reserved and never reached the broker."""
        destination = self._route(copy.subscription).destination
        destination.unconfirmed.discard((copy.shard, copy.number))
        self._window.release(destination, 1)

    def _tick(self) -> None:
        """Look, once a second, for copies that were not confirmed in time."""
        connection = self._connection
        if connection is None or not connection.is_open:
            return
        connection.ioloop.call_later(1.0, self._tick)
        METRICS.in_flight.set(self._window.in_flight)
        if self._blocked:
            return
        before = time.monotonic() - CONFIRM_TIMEOUT_S
        for lane in self._lanes.values():
            self._give_up_on(lane, lane.expire(before))

    def _give_up_on(self, lane: Lane, late: list[Sent]) -> None:
        """Let copies that were not confirmed in time leave the window."""
        groups: dict[Destination, list[Sent]] = {}
        for sent in late:
            groups.setdefault(sent.destination, []).append(sent)
        try:
            for destination, lost in groups.items():
                self._failed(lane, destination, lost, "no confirm in time", silent=True)
        finally:
            for sent in late:
                self._leave_window(sent)

    @property
    def in_flight(self) -> int:
        """Copies that are reserved, or published and not confirmed yet."""
        return self._window.in_flight

    @property
    def bytes_in_flight(self) -> int:
        return self._window.bytes

    @property
    def lanes(self) -> Mapping[_LaneName, Lane]:
        """Return all lanes, those that are being reopened too."""
        return self._lanes

    @property
    def is_blocked(self) -> bool:
        """Return whether the broker takes no copies now."""
        return self._blocked

    def _route(self, subscription: SubscriptionNumber) -> _Route:
        route = self._routes.get(subscription)
        if route is None:
            catalog = self._catalog.current
            known = catalog.subscriptions[subscription]
            if known.forward is None:
                exchange, key, name = "", queue_of(known, catalog), queue_of(known, catalog)
            else:
                exchange, key = known.forward.target, known.forward.key
                name = f"{known.forward.target} for subscription {subscription}"
            route = _Route(
                exchange=exchange,
                producer=catalog.topics[known.topic].owner,
                key=key,
                destination=self._destination(name),
                forwards=known.forward is not None,
            )
            self._routes[subscription] = route
        return route

    def _destination(self, name: str) -> Destination:
        with self._lock:
            return self._destinations.setdefault(name, Destination(name))
