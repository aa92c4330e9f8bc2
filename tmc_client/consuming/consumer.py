"""Consumers: a decorator on a function, and a loop that calls it.

When a handler returns, its message is acked to the center (in batches, retried until stored). When it raises, the
message is nacked and the subscription's retry policy applies, unless it raises `Reject` or `Later`. Without an inbox
a handler runs at least once per message; with one, its effect happens exactly once.

A message is never handled twice at the same time: while its handler runs here, further copies share its outcome, and
the center is asked to send none (`Extend`). This guarantee ends after `max_handling`: the handler is given up, its
message nacked and the topic's owner alerted; see docs/sdk.md for what may happen then.
"""

from __future__ import annotations

import logging
import os
import signal
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from tmc_client import errors
from tmc_client.codecs import Topic
from tmc_client.connecting import wire
from tmc_client.connecting.connection import Identity
from tmc_client.consuming.handling import Handling
from tmc_client.consuming.listeners import Listeners, MessageConsumer
from tmc_client.consuming.received import Transport
from tmc_client.consuming.screening import Calls, Screen
from tmc_client.consuming.transports.stream import StreamTransport
from tmc_client.consuming.turns import BatchSize
from tmc_client.extras import needed_by
from tmc_client.forks import abandon, notice_fork, watch_forks
from tmc_common.addresses import HostPort
from tmc_common.protocol import consumption_pb2

if TYPE_CHECKING:
    from tmc_client.aio import AsyncCenter
    from tmc_client.center import Center
    from tmc_client.consuming.inbox import SqlInbox
    from tmc_client.consuming.transports.rabbitmq import Plan

log = logging.getLogger("tmc_client.consumer")

Handler = TypeVar("Handler", bound=Callable[..., Any])
_SAME_SIGNAL_S = 1.0  # a terminal and a supervisor may both forward the same stop signal


_CALL_S = 5.0
_PLAN = "/tmc.v1.ConsumptionService/DescribeSubscriptions"
_REPORT = "/tmc.v1.ConsumptionService/ReportForgedCopies"
_PLAN_PAUSES_S = (0.1, 0.5, 1.0, 2.0)
_USUAL_INTERVAL_MS = 10_000
_MAX_HANDLING = timedelta(hours=1)
_BATCH = 100


class Consumer:
    """Receives messages and calls their handlers.

    center: from `tmc_client.connect` or `tmc_client.aio.connect`.
    concurrency: handlers at once.  prefetch: copies fetched ahead; by default four times the concurrency.
    max_handling: how long a handler may run; one that runs longer is given up, its message nacked, the owner alerted.
    grace: how long `stop`, or `run` after a signal, waits for running handlers.
    broker_user, broker_password: credentials for RabbitMQ, if the center delivers through it; by default
    TMC_BROKER_USER and TMC_BROKER_PASSWORD of the environment, or guest. The center provides the broker's address.
    broker_tls: for a broker with certificates of a private authority, ssl.create_default_context(cafile="ca.pem").
    """

    def __init__(
        self,
        center: Center | AsyncCenter,
        *,
        concurrency: int = 8,
        prefetch: int | None = None,
        max_handling: timedelta = _MAX_HANDLING,
        broker_user: str | None = None,
        broker_password: str | None = None,
        broker_tls: ssl.SSLContext | None = None,
        grace: timedelta = timedelta(seconds=30),
    ) -> None:
        self._broker_tls = broker_tls
        self._grace = grace
        self._center = _blocking(center)
        self._concurrency = concurrency
        self._prefetch = prefetch or concurrency * 4
        self._credentials = (
            broker_user or os.environ.get("TMC_BROKER_USER", "guest"),
            broker_password or os.environ.get("TMC_BROKER_PASSWORD", "guest"),
        )
        self._listeners = Listeners(max_handling)
        self._reset()
        watch_forks(self)

    def _reset(self) -> None:
        """Set the state that the consumer has before `start`."""
        self._transport: Transport | None = None
        self._transport_lock = threading.Lock()
        self._starter: threading.Thread | None = None
        self._handling = Handling(
            self._center.sender, self._listeners, concurrency=self._concurrency, on_broken=self._on_broken
        )
        calls = Calls(describe=self._describe, report=self._report_forged)
        self._screen = Screen(calls, self._handling.arrive)
        self._complained: Sequence[str] = ()
        self._stop_requested = threading.Event()
        self._stopped = False
        self._stopping_since = 0.0

    def after_fork(self) -> None:
        """See forks.ForkAware: a forked child consumes nothing until it calls `start` itself."""
        self._handling.abandon()
        abandon(self._transport, self._screen)
        self._reset()

    @property
    def identity(self) -> Identity:
        """Return the identity of the app that consumes."""
        return self._center.identity

    @property
    def address(self) -> str:
        """Return the center's address, as it was connected to."""
        return self._center.connection.address

    @property
    def topics(self) -> list[str]:
        """Return those that have a listener."""
        return list(self._listeners.by_topic)

    @property
    def received_copies(self) -> int:
        """Number of copies that came, without malformed and forged ones."""
        return self._handling.arrived

    @property
    def is_idle(self) -> bool:
        """Return whether no handler runs or waits for a thread, except those that were given up."""
        return self._handling.wait_idle(0)

    @property
    def malformed_copies(self) -> int:
        """Number of copies that were dropped because the center did not make them."""
        return self._transport.malformed if self._transport is not None else 0

    @property
    def forged_copies(self) -> int:
        """Number of copies that were dropped because the center did not sign them."""
        return self._screen.forged

    def health(self) -> Sequence[str]:
        """List what keeps this consumer from handling messages, a sentence each; nothing if it is well.

        Its transport is down, a queue cannot be read, a listener waits for its inbox, or all handlers hang.
        """
        found = [self._handling.broken] if self._handling.broken else []
        if self._transport is None:
            found.append("the center has not said yet how copies are delivered")
        else:
            found += [f"{name} cannot be read" for name in self._transport.unread]
        return [*found, *(f"the listener of {topic} is paused: its inbox is down" for topic in self._handling.paused)]

    def listener(
        self,
        topic: Topic[Any] | str,
        *,
        inbox: SqlInbox | None = None,
        max_handling: timedelta | None = None,
        concurrency: int | None = None,
    ) -> Callable[[Handler], Handler]:
        """Handle a topic's messages with the decorated function, `def` or `async def`.

        Its first parameter is the body, read as annotated. A parameter annotated `Message` gets the message, one named
        `session` the inbox's session. Without `inbox` the handler may run more than once per message: make it
        idempotent. max_handling: for this topic instead of the consumer's.  concurrency: calls of this function at once,
        if less than the consumer's; topics take turns in any case.
        """
        _demand_topic(topic, "listener")
        return self._registering(topic, inbox, max_handling, None, concurrency)

    def batch_listener(
        self,
        topic: Topic[Any] | str,
        *,
        max_messages: int | None = None,
        max_wait: timedelta = timedelta(milliseconds=100),
        inbox: SqlInbox | None = None,
        max_handling: timedelta | None = None,
        concurrency: int | None = None,
    ) -> Callable[[Handler], Handler]:
        """Handle a topic's messages in batches: one call, and with an inbox one transaction, for many.

        The decorated function takes a list of bodies, for example `paid: list[OrderPaid]`, and, if declared, a session
        or connection and a `list[tmc.Message]`. It is called when there are max_messages (by default 100, or this
        consumer's prefetch if that is less), or max_wait after the first one came. If it raises, the batch is tried
        again in halves until the message that cannot be handled is alone; so without an inbox, make it idempotent.
        `Later` postpones the whole batch. Set `prefetch` to several times max_messages.
        """
        _demand_topic(topic, "batch_listener")
        max_messages = min(_BATCH, self._prefetch) if max_messages is None else max_messages
        if not isinstance(max_messages, int) or max_messages < 1:
            raise ValueError(f"max_messages={max_messages!r}: a batch has one message or more")
        if not isinstance(max_wait, timedelta):
            raise TypeError(f"max_wait must be a timedelta, for example timedelta(milliseconds=100), not {max_wait!r}")
        size = BatchSize(max_messages=max_messages, max_wait_s=max_wait.total_seconds())
        if self._prefetch < max_messages:
            raise ValueError(
                f"max_messages={max_messages} needs a prefetch of at least that, this consumer has {self._prefetch}: "
                f"give tmc.Consumer(center, prefetch={4 * max_messages})"
            )
        return self._registering(topic, inbox, max_handling, size, concurrency)

    def _registering(
        self,
        topic: Topic[Any] | str,
        inbox: SqlInbox | None,
        max_handling: timedelta | None,
        batch: BatchSize | None,
        concurrency: int | None,
    ) -> Callable[[Handler], Handler]:
        declared = topic if isinstance(topic, Topic) else Topic(topic)
        if concurrency is not None and not 1 <= concurrency <= self._concurrency:
            raise ValueError(
                f"concurrency={concurrency}: 1 to {self._concurrency}, what the consumer has; give it more there first"
            )

        def register(handler: Handler) -> Handler:
            self._listeners.add(declared, handler, inbox, max_handling, batch, concurrency)
            return handler

        return register

    def attach(self, consumer: MessageConsumer) -> None:
        """Pass all messages without a listener to one object; all subscriptions of this app and tag are consumed."""
        self._listeners.attach(consumer)

    def start(self) -> None:
        """Begin to receive; returns at once. Raises ValueError without listeners, InvalidRequest through a submit queue."""
        if not self._listeners:
            raise ValueError("nothing to consume: decorate a function with @consumer.listener(topic) first")
        self._center.connection.unary(_PLAN, consumption_pb2.DescribeSubscriptionsResponse)  # which has no such call
        notice_fork()
        self._handling.start()
        self._starter = threading.Thread(target=self._begin, name="tmc-consumer", daemon=True)
        self._starter.start()

    def _begin(self) -> None:
        self._start_transport()
        if self._stop_requested.is_set():
            return
        try:  # at the end: a database that hangs delays nobody
            self._handling.check_inboxes()
        except errors.TmcError as exc:  # until it is fixed, handlers fail and their messages are retried
            if not self._stop_requested.is_set():
                log.error(exc)

    def _start_transport(self) -> None:
        """Ask the center how copies are delivered, then start that transport."""
        failures = 0
        while not self._stop_requested.is_set():
            try:
                transport = self._make_transport()
            except errors.MissingExtra as exc:
                self._handling.break_off(str(exc))
                return
            except errors.TmcError as exc:
                if failures in (0, 10):
                    log.warning("the center does not say how copies are delivered, retrying: %s", exc)
                self._stop_requested.wait(_PLAN_PAUSES_S[min(failures, len(_PLAN_PAUSES_S) - 1)])
                failures += 1
                continue
            with self._transport_lock:
                if not self._stop_requested.is_set():
                    self._transport = transport
                    transport.start()
            return

    def _make_transport(self) -> Transport:
        plan = self._describe()
        if not plan.HasField("broker"):
            topics = list(self._listeners.by_topic)
            if self._listeners.everything is not None:
                topics = sorted({*topics, *(found.topic for found in plan.subscriptions)})
            if not topics:
                raise errors.NotFound(_not_subscribed(self._center.identity.app, []))
            return StreamTransport(self._center.connection, topics, self._prefetch, self._handling.arrive)
        with needed_by("A center that delivers through RabbitMQ"):
            from tmc_client.consuming.transports import rabbitmq
        credentials = rabbitmq.Credentials(*self._credentials)
        return rabbitmq.RabbitTransport(
            self._queues,
            credentials,
            self._prefetch,
            self._screen,
            concurrency=self._concurrency,
            tls=self._broker_tls,
            on_lost=self._handling.keeper.hurry,
        )

    def _describe(self) -> consumption_pb2.DescribeSubscriptionsResponse:
        """Ask the center for our subscriptions. Raises TmcError."""
        plan: consumption_pb2.DescribeSubscriptionsResponse = self._call(
            _PLAN, consumption_pb2.DescribeSubscriptionsRequest(), consumption_pb2.DescribeSubscriptionsResponse
        )
        for found in plan.subscriptions:
            self._handling.keeper.expect(found.topic, found.retry.interval_ms or _USUAL_INTERVAL_MS)
        self._screen.learn(plan)
        return plan

    def _report_forged(self, request: consumption_pb2.ReportForgedCopiesRequest) -> None:
        """Raises TmcError."""
        self._call(_REPORT, request, consumption_pb2.ReportForgedCopiesResponse)

    def _call(self, path: str, request: Any, response_class: Any) -> Any:
        """One call of the center. Blocks; raises TmcError."""
        try:
            return self._center.connection.unary(path, response_class)(request, timeout=_CALL_S)
        except grpc.RpcError as exc:
            raise wire.from_rpc(exc) from exc

    def _queues(self) -> Plan:
        """The broker and the queues of the topics handled here. Raises TmcError: none of them has a queue yet."""
        from tmc_client.consuming.transports.rabbitmq import Broker, Plan

        plan = self._describe()
        queues = {found.topic: found.queue for found in plan.subscriptions}
        handled = self._listeners.by_topic
        wanted = list(queues) if self._listeners.everything is not None else list(handled)
        missing = sorted(set(handled) - set(queues))
        if len(missing) == len(wanted):
            raise errors.NotFound(_not_subscribed(self._center.identity.app, missing))
        if missing and missing != self._complained:
            log.error("%s; the other topics are consumed", _not_subscribed(self._center.identity.app, missing))
        self._complained = missing
        broker = plan.broker
        nodes = [HostPort(broker.host, broker.port), *map(HostPort.parse, broker.others)]
        where = Broker(nodes=nodes, virtual_host=broker.virtual_host, tls=broker.tls)
        return Plan(
            broker=where, queues=sorted({queues[topic] for topic in wanted if topic in queues}), missing=missing
        )

    def stop(self, grace: timedelta | None = None) -> None:
        """Stop receiving, give back what no handler has begun, let running handlers finish, store their acks.

        grace: how long to wait for the handlers; by default the consumer's. A second call does nothing.
        """
        self._request_stop()
        with self._transport_lock:
            transport, done, self._stopped = self._transport, self._stopped, True
        if done:
            return
        grace = self._grace if grace is None else grace
        if transport is not None:
            transport.stop()
        self._handling.give_back_waiting()
        if not self._handling.wait_idle(grace.total_seconds()):
            log.warning(
                "stopped after a grace of %g s, before these messages were handled: %s; they are delivered again",
                grace.total_seconds(),
                ", ".join(self._handling.running) or "none",
            )
        self._handling.stop()
        self._center.sender.flush(grace.total_seconds())
        if transport is not None:
            transport.close()
        self._screen.stop()

    def run(self) -> None:
        """Receive until SIGTERM or SIGINT; a second signal ends the process at once. Call it in the main thread.

        Raises RuntimeError: as many handlers hang as may run at once, so a supervisor should restart the process; or what the
        center's delivery needs is not installed.
        """
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        self.start()
        try:
            while not self._stop_requested.wait(1):
                continue
        finally:
            self.stop()
            for number, handler in before.items():
                signal.signal(number, handler)
        if self._handling.broken:
            raise RuntimeError(self._handling.broken)

    def _on_broken(self) -> None:
        """Take nothing more and end the process, if it is ours."""
        self._stop_requested.set()
        with self._transport_lock:
            transport = self._transport
        if transport is not None:
            threading.Thread(target=transport.stop, name="tmc-stop", daemon=True).start()

    def _request_stop(self) -> None:
        self._stop_requested.set()
        self._handling.begin_no_more()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if not self._stop_requested.is_set():
            self._stopping_since = time.monotonic()
            self._request_stop()
        elif time.monotonic() - self._stopping_since > _SAME_SIGNAL_S:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def __enter__(self) -> Consumer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _blocking(center: Center | AsyncCenter) -> Center:
    """Raises TypeError."""
    found: Any = getattr(center, "blocking", center)
    if not hasattr(found, "sender"):
        raise TypeError(f"Consumer needs a center as tmc_client.connect() returns it, not {center!r}")
    blocking: Center = found
    return blocking


def _not_subscribed(app: str, topics: Sequence[str]) -> str:
    return (
        f"app {app} has no subscription to {', '.join(topics) or 'anything'}: subscribe this app first, "
        f"with: tmc admin subscribe {topics[0] if topics else 'TOPIC'} {app}"
    )


def _demand_topic(topic: object, decorator: str) -> None:
    """Raises TypeError: the decorator was used without its parentheses."""
    if not isinstance(topic, Topic | str):
        name = getattr(topic, "__name__", repr(topic))
        raise TypeError(f'a listener needs its topic: write @consumer.{decorator}("TOPIC") above {name}')
