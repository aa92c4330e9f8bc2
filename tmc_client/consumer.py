"""Consumers: a decorator on a function, and a loop that calls it.

A handler that returns is acked to the center (in batches, repeated until stored); one that raises is nacked, and the
subscription's retry policy decides; `Reject` and `Later` say otherwise. Without an inbox a handler runs at least once per
message; with one, its effect happens exactly once.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, get_type_hints

import grpc

from tmc_client import codecs, errors, sender, tracing, wire
from tmc_client.codecs import Topic
from tmc_client.keeping import Keeper
from tmc_client.protocol import consumption_pb2
from tmc_client.received import Message, Receipt, Transport
from tmc_client.transports.stream import StreamTransport
from tmc_client.workers import Workers

if TYPE_CHECKING:
    from tmc_client.center import Center
    from tmc_client.inbox import SqlInbox
    from tmc_client.transports.rabbitmq import Broker

log = logging.getLogger("tmc_client.consumer")

Handler = TypeVar("Handler", bound=Callable[..., Any])
_ACK_TIMEOUT_S = 120.0
_SAME_SIGNAL_S = 1.0  # a terminal and a supervisor may both pass on one wish to stop
_LATEST_MS = 86_400_000  # the center takes a day at most


@dataclass(frozen=True)
class _Listener:
    topic: Topic[Any]
    handler: Callable[..., Any]
    body_type: Any
    wants_message: str | None
    wants_session: str | None
    inbox: SqlInbox | None


class MessageConsumer(Protocol):
    """One object for everything that an app is subscribed to: the form for a single queue."""

    def consume(self, message: Message) -> None:
        """Returns: done. Raises: tried again by the retry policy; `Reject` and `Later` as in listeners."""


_PLAN = "/tmc.v1.ConsumptionService/DescribeSubscriptions"
_PLAN_PAUSES_S = (0.1, 0.5, 1.0, 2.0)
_USUAL_INTERVAL_MS = 10_000


class Consumer:
    """concurrency: handlers at once.  prefetch: copies fetched ahead; by default four times the concurrency.

    broker_user, broker_password: who we are at RabbitMQ, when the center delivers through it; by default the environment's
    TMC_BROKER_USER and TMC_BROKER_PASSWORD, or guest. Where it is, the center says.
    """

    def __init__(
        self,
        center: Center,
        *,
        concurrency: int = 8,
        prefetch: int | None = None,
        broker_user: str | None = None,
        broker_password: str | None = None,
    ) -> None:
        self._center = center
        self._concurrency = concurrency
        self._prefetch = prefetch or concurrency * 4
        self._credentials = (
            broker_user or os.environ.get("TMC_BROKER_USER", "guest"),
            broker_password or os.environ.get("TMC_BROKER_PASSWORD", "guest"),
        )
        self._listeners: dict[str, _Listener] = {}
        self._everything: MessageConsumer | None = None
        self._transport: Transport | None = None
        self._transport_lock = threading.Lock()
        self._starter: threading.Thread | None = None
        self._workers: Workers | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread: threading.Thread | None = None
        self._keeper = Keeper(center.sender)
        self._running = 0
        self._idle = threading.Condition()
        self._stop_requested = threading.Event()
        self._stopping_since = 0.0

    def listener(self, topic: Topic[Any] | str, *, inbox: SqlInbox | None = None) -> Callable[[Handler], Handler]:
        """Handle a topic's messages with the decorated function, `def` or `async def`.

        Its first parameter is the body, read as annotated. A parameter annotated `Message` gets the message, one named
        `session` the inbox's session. Without `inbox` the handler may run more than once per message: make it
        idempotent.
        """
        declared = topic if isinstance(topic, Topic) else Topic(topic)

        def register(handler: Handler) -> Handler:
            if declared.name in self._listeners:
                raise ValueError(f"topic {declared.name} has a listener already: one function handles one topic")
            self._listeners[declared.name] = _inspect(declared, handler, inbox)
            return handler

        return register

    def attach(self, consumer: MessageConsumer) -> None:
        """Give every message that no listener handles to one object; every subscription of this app and tag is read."""
        if self._everything is not None:
            raise ValueError("a MessageConsumer is attached already: one object takes everything")
        self._everything = consumer

    def start(self) -> None:
        """Begin to receive; returns at once. Raises ValueError without listeners."""
        if not self._listeners and self._everything is None:
            raise ValueError("nothing to consume: decorate a function with @consumer.listener(topic) first")
        self._workers = Workers(self._concurrency)
        if any(inspect.iscoroutinefunction(listener.handler) for listener in self._listeners.values()):
            self._loop = asyncio.new_event_loop()
            self._loop_thread = threading.Thread(target=self._run_loop, name="tmc-handlers", daemon=True)
            self._loop_thread.start()
        self._keeper.start()
        self._starter = threading.Thread(target=self._start_transport, name="tmc-consumer", daemon=True)
        self._starter.start()

    def _start_transport(self) -> None:
        """Ask the center how copies come, then begin."""
        failures = 0
        while not self._stop_requested.is_set():
            try:
                transport = self._make_transport()
            except errors.TmcError as exc:
                if failures in (0, 10):
                    log.warning("the center does not say how copies come, asking again and again: %s", exc)
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
            topics = list(self._listeners)
            if self._everything is not None:
                topics = sorted({*topics, *(found.topic for found in plan.subscriptions)})
            if not topics:
                raise errors.NotFound("this app has no subscription yet")
            return StreamTransport(self._center.connection, topics, self._prefetch, self._on_message)
        try:
            from tmc_client.transports import rabbitmq
        except ModuleNotFoundError as exc:
            raise errors.InvalidRequest(f"this center delivers through RabbitMQ: install {exc.name}") from exc
        credentials = rabbitmq.Credentials(*self._credentials)
        return rabbitmq.RabbitTransport(self._queues, credentials, self._prefetch, self._on_message)

    def _describe(self) -> consumption_pb2.DescribeSubscriptionsResponse:
        """What we are subscribed to. Raises TmcError."""
        method = self._center.connection.unary(_PLAN, consumption_pb2.DescribeSubscriptionsResponse)
        try:
            plan: consumption_pb2.DescribeSubscriptionsResponse = method(
                consumption_pb2.DescribeSubscriptionsRequest(), timeout=5
            )
        except grpc.RpcError as exc:
            raise wire.from_rpc(exc) from exc
        for found in plan.subscriptions:
            self._keeper.expect(found.topic, found.retry.interval_ms or _USUAL_INTERVAL_MS)
        return plan

    def _queues(self) -> tuple[Broker, Sequence[str]]:
        """The queues of the topics that are handled here. Raises TmcError: one of them has none yet."""
        from tmc_client.transports.rabbitmq import Broker

        plan = self._describe()
        queues = {found.topic: found.queue for found in plan.subscriptions}
        wanted = list(queues) if self._everything is not None else list(self._listeners)
        missing = sorted(set(self._listeners) - set(queues))
        if missing or not wanted:
            raise errors.NotFound(
                f"no subscription to {', '.join(missing) or 'anything'} yet: subscribe this app first"
            )
        broker = plan.broker
        where = Broker(broker.host, broker.port, broker.virtual_host, broker.tls)
        return where, sorted({queues[topic] for topic in wanted})

    def stop(self, grace: timedelta = timedelta(seconds=30)) -> None:
        """Take nothing more, let running handlers end, store their acks. What was not begun comes again."""
        self._stop_requested.set()
        with self._transport_lock:
            transport = self._transport
        if transport is not None:
            transport.stop()
        with self._idle:
            self._idle.wait_for(lambda: self._running == 0, grace.total_seconds())
        if self._workers is not None:
            self._workers.stop()
        if self._loop is not None and self._loop_thread is not None:
            asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop)
            self._loop_thread.join(5)
        self._keeper.stop()
        self._center.sender.flush(grace.total_seconds())
        if transport is not None:
            transport.close()

    def _run_loop(self) -> None:
        assert self._loop is not None
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def run(self) -> None:
        """Receive until SIGTERM or SIGINT; a second signal ends at once. Call it in the main thread."""
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        self.start()
        try:
            while not self._stop_requested.wait(1):
                continue
        finally:
            self.stop()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if not self._stop_requested.is_set():
            self._stopping_since = time.monotonic()
            self._stop_requested.set()
        elif time.monotonic() - self._stopping_since > _SAME_SIGNAL_S:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def __enter__(self) -> Consumer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _on_message(self, message: Message, receipt: Receipt) -> None:
        assert self._workers is not None
        with self._idle:
            self._running += 1
        self._keeper.begin(message)
        self._workers.submit(partial(self._work, message, receipt))

    def _work(self, message: Message, receipt: Receipt) -> None:
        """In a worker thread: one copy from its handler to its answer."""
        try:
            answer = self._handle(message)
        except BaseException as exc:  # noqa: BLE001 - SystemExit in a handler is no reason to lose a thread
            log.error("a copy could not be answered: %r", exc)
            receipt.answered()
        else:
            if answer is not None:
                # Stored or given up: either way this copy has had its turn, and the center sends another one when it has to.
                answer.add_done_callback(lambda _stored: receipt.answered())
        self._keeper.end(message)
        receipt.handled()
        with self._idle:
            self._running -= 1
            if not self._running:
                self._idle.notify_all()

    def _handle(self, message: Message) -> Future[Any] | None:
        """Returns: the answer on its way to the center; None: not begun, the center delivers it again."""
        if self._stop_requested.is_set():
            return None
        try:
            with tracing.handling(message):
                self._dispatch(message)
        except errors.Reject as exc:
            return self._nack(message, str(exc), reject=True)
        except errors.Later as exc:
            return self._nack(message, str(exc), retry_after=exc.after)
        except errors.CodecError as exc:
            log.error("message %s: %s", message.id, exc)
            return self._nack(message, str(exc))
        except Exception as exc:
            log.warning("the handler of %s failed on %s", message.topic, message.id, exc_info=True)
            return self._nack(message, f"{type(exc).__name__}: {exc}")
        return self._send(sender.ACK, consumption_pb2.AckRequest(message_id=message.id, attempt=message.attempt))

    def _dispatch(self, message: Message) -> None:
        listener = self._listeners.get(message.topic)
        if listener is not None:
            self._call_handler(listener, message)
        elif self._everything is not None:
            self._everything.consume(message)
        else:  # a single queue brings all topics of its app
            raise errors.NotFound(
                f"nothing here listens to {message.topic}: add a listener or attach a MessageConsumer"
            )

    def _call_handler(self, listener: _Listener, message: Message) -> None:
        body = codecs.decode(message.body, message.content_type, listener.body_type)
        extra: dict[str, Any] = {}
        if listener.wants_message:
            extra[listener.wants_message] = message
        if listener.inbox is None:
            self._run_handler(listener.handler, body, extra)
            return
        with listener.inbox.once(message.subscriber, message.id) as session:
            if session is None:
                return  # the effect happened before
            if listener.wants_session:
                extra[listener.wants_session] = session
            self._run_handler(listener.handler, body, extra)

    def _run_handler(self, handler: Callable[..., Any], body: Any, extra: dict[str, Any]) -> None:
        if inspect.iscoroutinefunction(handler):
            assert self._loop is not None
            asyncio.run_coroutine_threadsafe(handler(body, **extra), self._loop).result()
        else:
            handler(body, **extra)

    def _nack(
        self, message: Message, error: str, reject: bool = False, retry_after: timedelta | None = None
    ) -> Future[Any]:
        request = consumption_pb2.NackRequest(
            message_id=message.id, attempt=message.attempt, error=error[:500], reject=reject
        )
        if retry_after is not None:
            request.retry_after_ms = min(max(0, round(retry_after.total_seconds() * 1000)), _LATEST_MS)
        return self._send(sender.NACK, request)

    def _send(self, kind: sender.Kind, request: Any) -> Future[Any]:
        answer = self._center.sender.send(kind, request, _ACK_TIMEOUT_S)
        answer.add_done_callback(_report)
        return answer


async def _cancel_others() -> None:
    """End what is still running on this loop, then the loop: a handler that hangs must not keep the process alive."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    asyncio.get_running_loop().stop()


def _report(done: Future[Any]) -> None:
    exc = done.exception()
    if isinstance(exc, errors.Decided):
        log.debug("answered too late: %s", exc)
    elif exc is not None:
        log.error("an answer was not stored, the message comes again: %s", exc)


def _inspect(topic: Topic[Any], handler: Callable[..., Any], inbox: SqlInbox | None) -> _Listener:
    hints = get_type_hints(handler)
    names = list(inspect.signature(handler).parameters)
    if not names:
        raise TypeError(f"{handler.__name__}() must take the body as its first parameter")
    body_type = hints.get(names[0], topic.type)
    wants_message = next((name for name in names[1:] if hints.get(name) is Message), None)
    wants_session = "session" if "session" in names[1:] else None
    unknown = [name for name in names[1:] if name not in (wants_message, wants_session)]
    if unknown:
        raise TypeError(f"{handler.__name__}(): nobody fills {unknown}; known are the body, session and a tmc.Message")
    if wants_session and inbox is None:
        raise TypeError(f"{handler.__name__}() wants a session: give the listener inbox=SqlInbox(sessionmaker)")
    return _Listener(topic, handler, body_type, wants_message, wants_session, inbox)
