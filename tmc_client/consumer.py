"""Consumers: a decorator on a function, and a loop that calls it.

A handler that returns is acked to the center (in batches, repeated until stored); one that raises is nacked, and the
subscription's retry policy decides; `Reject` and `Later` say otherwise. Without an inbox a handler runs at least once per
message; with one, its effect happens exactly once.

One message never runs twice at once: while it runs here, further copies of it share its fate, and the center is asked
to send none (`Extend`). That promise ends after `max_handling`: the handler is given up, its message nacked and the
topic's owner alerted; see docs/sdk.md for what may happen then.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, get_type_hints

import grpc

from tmc_client import codecs, errors, sender, tracing, wire
from tmc_client.codecs import Topic
from tmc_client.connection import abandon, watch_forks
from tmc_client.keeping import Keeper
from tmc_client.received import Message, Receipt, Transport
from tmc_client.runs import Run, Runs
from tmc_client.screening import Calls, Screen
from tmc_client.transports.stream import StreamTransport
from tmc_client.workers import Workers
from tmc_common.protocol import consumption_pb2

if TYPE_CHECKING:
    from tmc_client.aio import AsyncCenter
    from tmc_client.center import Center
    from tmc_client.inbox import SqlInbox
    from tmc_client.transports.rabbitmq import Broker

log = logging.getLogger("tmc_client.consumer")

Handler = TypeVar("Handler", bound=Callable[..., Any])
_ACK_TIMEOUT_S = 120.0
_SAME_SIGNAL_S = 1.0  # a terminal and a supervisor may both pass on one wish to stop
_LATEST_MS = 86_400_000  # the center takes a day at most


@dataclass(frozen=True, kw_only=True)
class _Listener:
    topic: Topic[Any]
    handler: Callable[..., Any]
    body_type: Any
    wants_message: str | None
    wants_session: str | None
    inbox: SqlInbox | None
    is_async: bool
    limit_s: float


class MessageConsumer(Protocol):
    """One object for everything that an app is subscribed to: the form for a single queue."""

    def consume(self, message: Message) -> None:
        """Returns: done. Raises: tried again by the retry policy; `Reject` and `Later` as in listeners."""


_CALL_S = 5.0
_PLAN = "/tmc.v1.ConsumptionService/DescribeSubscriptions"
_REPORT = "/tmc.v1.ConsumptionService/ReportForgedCopies"
_PLAN_PAUSES_S = (0.1, 0.5, 1.0, 2.0)
_USUAL_INTERVAL_MS = 10_000
_MAX_HANDLING = timedelta(hours=1)


class Consumer:
    """concurrency: handlers at once.  prefetch: copies fetched ahead; by default four times the concurrency.

    center: of `tmc_client.connect` or `tmc_client.aio.connect`.
    max_handling: how long a handler may run; one that runs longer is given up, its message nacked, the owner alerted.
    broker_user, broker_password: who we are at RabbitMQ, when the center delivers through it; by default the environment's
    TMC_BROKER_USER and TMC_BROKER_PASSWORD, or guest. Where it is, the center says.
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
    ) -> None:
        self._center = _blocking(center)
        self._concurrency = concurrency
        self._prefetch = prefetch or concurrency * 4
        self._limit_s = _limit(max_handling)
        self._credentials = (
            broker_user or os.environ.get("TMC_BROKER_USER", "guest"),
            broker_password or os.environ.get("TMC_BROKER_PASSWORD", "guest"),
        )
        self._listeners: dict[str, _Listener] = {}
        self._everything: MessageConsumer | None = None
        self._reset()
        watch_forks(self)

    def _reset(self) -> None:
        """As before `start`."""
        self._transport: Transport | None = None
        self._transport_lock = threading.Lock()
        self._starter: threading.Thread | None = None
        self._workers: Workers | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread: threading.Thread | None = None
        self._keeper = Keeper(self._center.sender, watch=self._give_up_overdue)
        self._runs = Runs(self._keeper.begin, self._keeper.end)
        calls = Calls(describe=self._describe, report=self._report_forged, unsigned=self._ask_for_a_signed_one)
        self._screen = Screen(calls, self._on_message)
        self._stop_requested = threading.Event()
        self._stopping_since = 0.0
        self._broken = ""

    def after_fork(self) -> None:
        """See connection.ForkAware: a forked child consumes nothing until it calls `start` itself."""
        abandon(self._transport, self._workers, self._loop, self._screen)
        self._reset()

    @property
    def malformed_copies(self) -> int:
        """Number of copies that were dropped since the center did not make them."""
        return self._transport.malformed if self._transport is not None else 0

    @property
    def forged_copies(self) -> int:
        """Number of copies that were dropped since the center did not sign them."""
        return self._screen.forged

    def listener(
        self, topic: Topic[Any] | str, *, inbox: SqlInbox | None = None, max_handling: timedelta | None = None
    ) -> Callable[[Handler], Handler]:
        """Handle a topic's messages with the decorated function, `def` or `async def`.

        Its first parameter is the body, read as annotated. A parameter annotated `Message` gets the message, one named
        `session` the inbox's session. Without `inbox` the handler may run more than once per message: make it
        idempotent. max_handling: for this topic instead of the consumer's.
        """
        if not isinstance(topic, Topic | str):
            name = getattr(topic, "__name__", repr(topic))
            raise TypeError(f'a listener needs its topic: write @consumer.listener("TOPIC") above {name}')
        declared = topic if isinstance(topic, Topic) else Topic(topic)
        limit_s = self._limit_s if max_handling is None else _limit(max_handling)

        def register(handler: Handler) -> Handler:
            if declared.name in self._listeners:
                raise ValueError(f"topic {declared.name} has a listener already: one function handles one topic")
            self._listeners[declared.name] = _inspect(declared, handler, inbox, limit_s)
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
        if any(listener.is_async for listener in self._listeners.values()):
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
                raise errors.NotFound(_not_subscribed(self._center.identity.app, []))
            return StreamTransport(self._center.connection, topics, self._prefetch, self._on_message)
        try:
            from tmc_client.transports import rabbitmq
        except ModuleNotFoundError as exc:
            raise errors.InvalidRequest(f"this center delivers through RabbitMQ: install {exc.name}") from exc
        credentials = rabbitmq.Credentials(*self._credentials)
        return rabbitmq.RabbitTransport(self._queues, credentials, self._prefetch, self._screen)

    def _describe(self) -> consumption_pb2.DescribeSubscriptionsResponse:
        """What we are subscribed to. Raises TmcError."""
        request = consumption_pb2.DescribeSubscriptionsRequest(verifies=True)
        plan: consumption_pb2.DescribeSubscriptionsResponse = self._call(
            _PLAN, request, consumption_pb2.DescribeSubscriptionsResponse
        )
        for found in plan.subscriptions:
            self._keeper.expect(found.topic, found.retry.interval_ms or _USUAL_INTERVAL_MS)
        self._screen.learn(plan)
        return plan

    def _report_forged(self, request: consumption_pb2.ReportForgedCopiesRequest) -> None:
        """Raises TmcError."""
        self._call(_REPORT, request, consumption_pb2.ReportForgedCopiesResponse)

    def _ask_for_a_signed_one(self, message: Message) -> Future[Any]:
        request = consumption_pb2.NackRequest(message_id=message.id, attempt=message.attempt, unsigned=True)
        return self._center.sender.send(sender.NACK, request, _ACK_TIMEOUT_S)

    def _call(self, path: str, request: Any, response_class: Any) -> Any:
        """One call of the center. Blocks; raises TmcError."""
        try:
            return self._center.connection.unary(path, response_class)(request, timeout=_CALL_S)
        except grpc.RpcError as exc:
            raise wire.from_rpc(exc) from exc

    def _queues(self) -> tuple[Broker, Sequence[str]]:
        """The queues of the topics that are handled here. Raises TmcError: one of them has none yet."""
        from tmc_client.transports.rabbitmq import Broker

        plan = self._describe()
        queues = {found.topic: found.queue for found in plan.subscriptions}
        wanted = list(queues) if self._everything is not None else list(self._listeners)
        missing = sorted(set(self._listeners) - set(queues))
        if missing or not wanted:
            raise errors.NotFound(_not_subscribed(self._center.identity.app, missing))
        broker = plan.broker
        where = Broker(host=broker.host, port=broker.port, virtual_host=broker.virtual_host, tls=broker.tls)
        return where, sorted({queues[topic] for topic in wanted})

    def stop(self, grace: timedelta = timedelta(seconds=30)) -> None:
        """Take nothing more, let running handlers end, store their acks. What was not begun comes again."""
        self._stop_requested.set()
        with self._transport_lock:
            transport = self._transport
        if transport is not None:
            transport.stop()
        self._runs.wait_idle(grace.total_seconds())
        if self._workers is not None:
            self._workers.stop()
        if self._loop is not None and self._loop_thread is not None:
            asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop)
            self._loop_thread.join(5)
        self._keeper.stop()
        self._center.sender.flush(grace.total_seconds())
        if transport is not None:
            transport.close()
        self._screen.stop()

    def _run_loop(self) -> None:
        assert self._loop is not None
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def run(self) -> None:
        """Receive until SIGTERM or SIGINT; a second signal ends at once. Call it in the main thread.

        Raises RuntimeError: as many handlers hang as may run at once; a supervisor starts the process again.
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
        if self._broken:
            raise RuntimeError(self._broken)

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
        listener = self._listeners.get(message.topic)
        run = self._runs.arrive(message, receipt, listener.limit_s if listener is not None else self._limit_s)
        if run is not None:
            self._workers.submit(partial(self._work, run))

    def _work(self, run: Run) -> None:
        """In a worker thread: one message from its handler to its answer."""
        begun = not self._stop_requested.is_set()
        answer: _Answer | None = None
        if begun:
            self._runs.begin(run)
            try:
                answer = self._handle(run)
            except BaseException as exc:  # noqa: BLE001 - SystemExit in a handler is no reason to lose a thread
                log.error("message %s could not be answered: %r", run.message.id, exc)
        if not self._runs.end(run):
            self._came_back(run, answer)
            return
        stored = self._answer(run, answer)
        self._runs.answered(run)
        for receipt in run.receipts:
            receipt.handled()
        if not begun:
            self._runs.forget(run)  # the center delivers it again
        elif stored is None:
            self._forget(run, done=False)
        else:
            stored.add_done_callback(partial(self._on_stored, run, answer))

    def _on_stored(self, run: Run, answer: _Answer | None, stored: Future[Any]) -> None:
        self._forget(run, done=_is_stored(stored) and answer is _ack)

    def _answer(self, run: Run, answer: _Answer | None) -> Future[Any] | None:
        """Returns: the answer on its way to the center; None: there is nothing to say."""
        try:
            return None if answer is None else self._center.sender.send(*answer(run.message), _ACK_TIMEOUT_S)
        except errors.TmcError as exc:
            log.error("message %s could not be answered: %s", run.message.id, exc)
            return None

    def _forget(self, run: Run, done: bool) -> None:
        """Stored or given up: either way these copies have had their turn, and the center sends another when it has to."""
        for receipt in run.receipts:
            receipt.answered()
        for message, receipt in self._runs.forget(run):
            if done:
                receipt.handled()
                receipt.answered()
            else:
                self._on_message(message, receipt)

    def _handle(self, run: Run) -> _Answer:
        """Returns: what to tell the center."""
        message = run.message
        try:
            with tracing.handling(message):
                self._dispatch(message, run)
        except errors.Reject as exc:
            return _nack(str(exc), reject=True)
        except errors.Later as exc:
            return _nack(str(exc), retry_after=exc.after)
        except errors.CodecError as exc:
            log.error("message %s: %s", message.id, exc)
            return _nack(str(exc))
        except Exception as exc:
            if not run.given_up:
                log.warning("the handler of %s failed on %s", message.topic, message.id, exc_info=True)
            return _nack(f"{type(exc).__name__}: {exc}")
        return _ack

    def _give_up_overdue(self) -> None:
        """In the keeper's thread: handlers that run longer than they may."""
        for run in self._runs.overdue():
            self._give_up(run)
        if not self._broken and self._runs.hanging >= self._concurrency:
            self._break()

    def _give_up(self, run: Run) -> None:
        message = run.message
        handler = self._listeners[message.topic].handler if message.topic in self._listeners else self._everything
        name = getattr(handler, "__qualname__", type(handler).__name__)
        error = f"{name} has run longer than its max_handling of {run.limit_s:g} s and was given up"
        log.error("message %s of %s, try %d: %s", message.id, message.topic, message.attempt, error)
        assert self._workers is not None
        assert run.thread is not None
        if run.task is not None:
            assert self._loop is not None
            self._loop.call_soon_threadsafe(run.task.cancel)
        self._workers.replace(run.thread)
        stored = self._answer(run, _nack(error, hangs=True))
        for receipt in run.receipts:
            receipt.handled()
            if stored is None:
                receipt.answered()
        if stored is not None:
            stored.add_done_callback(partial(_on_given_up, run))

    def _came_back(self, run: Run, answer: _Answer | None) -> None:
        """A handler that was given up ended after all. Its effect, if it had one, is as good as any."""
        self._runs.came_back(run)
        if answer is _ack:
            log.warning("the handler of %s ended on %s after it was given up", run.message.topic, run.message.id)
            stored = self._answer(run, answer)
            if stored is not None:
                stored.add_done_callback(_is_stored)

    def _break(self) -> None:
        """No thread is left that could be trusted to come back: take nothing more and end the process, if it is ours."""
        self._broken = (
            f"{self._runs.hanging} handlers hang, as many as may run at once (concurrency): this consumer takes no more "
            "messages, its process must be started again"
        )
        log.critical(self._broken)
        self._stop_requested.set()
        with self._transport_lock:
            transport = self._transport
        if transport is not None:
            threading.Thread(target=transport.stop, name="tmc-stop", daemon=True).start()

    def _dispatch(self, message: Message, run: Run) -> None:
        listener = self._listeners.get(message.topic)
        if listener is not None:
            self._call_handler(listener, message, run)
        elif self._everything is not None:
            self._everything.consume(message)
        else:  # a single queue brings all topics of its app
            raise errors.NotFound(
                f"nothing here listens to {message.topic}: add a listener or attach a MessageConsumer"
            )

    def _call_handler(self, listener: _Listener, message: Message, run: Run) -> None:
        body = codecs.decode(message.body, message.content_type, listener.body_type)
        extra: dict[str, Any] = {}
        if listener.wants_message:
            extra[listener.wants_message] = message
        if listener.inbox is None:
            self._run_handler(listener, body, extra, run)
            return
        with listener.inbox.once(message.subscriber, message.id) as session:
            if session is None:
                return  # the effect happened before
            if listener.wants_session:
                extra[listener.wants_session] = session
            self._run_handler(listener, body, extra, run)

    def _run_handler(self, listener: _Listener, body: Any, extra: dict[str, Any], run: Run) -> None:
        if listener.is_async:
            self._await(listener.handler(body, **extra), run)
        else:
            listener.handler(body, **extra)

    def _await(self, handling: Coroutine[Any, Any, Any], run: Run) -> None:
        """Run a coroutine on the loop and wait until it has ended, however long it takes to notice that it was cancelled:
        until then the session of its inbox is in use.
        """
        loop, ended = self._loop, threading.Event()
        assert loop is not None

        def begin() -> None:
            run.task = loop.create_task(handling)
            run.task.add_done_callback(lambda _task: ended.set())

        loop.call_soon_threadsafe(begin)
        ended.wait()
        assert run.task is not None
        try:
            run.task.result()
        except asyncio.CancelledError as exc:
            raise CancelledError from exc  # an Exception: this thread itself was not cancelled


async def _cancel_others() -> None:
    """End what is still running on this loop, then the loop: a handler that hangs must not keep the process alive."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    asyncio.get_running_loop().stop()


_Answer = Callable[[Message], tuple[sender.Kind, Any]]
"""What to tell the center about a message; the copy whose attempt it names is known only when it is sent."""


def _ack(message: Message) -> tuple[sender.Kind, Any]:
    return sender.ACK, consumption_pb2.AckRequest(message_id=message.id, attempt=message.attempt)


def _nack(error: str, *, reject: bool = False, retry_after: timedelta | None = None, hangs: bool = False) -> _Answer:
    def answer(message: Message) -> tuple[sender.Kind, Any]:
        request = consumption_pb2.NackRequest(
            message_id=message.id, attempt=message.attempt, error=error[:500], reject=reject, handler_hangs=hangs
        )
        if retry_after is not None:
            request.retry_after_ms = min(max(0, round(retry_after.total_seconds() * 1000)), _LATEST_MS)
        return sender.NACK, request

    return answer


def _is_stored(answer: Future[Any]) -> bool:
    """Did the center take it? If not, the log says why."""
    exc = answer.exception()
    if isinstance(exc, errors.Decided):
        log.debug("answered too late: %s", exc)
    elif exc is not None:
        log.error("an answer was not stored, the message comes again: %s", exc)
    return exc is None


def _on_given_up(run: Run, answer: Future[Any]) -> None:
    _is_stored(answer)
    for receipt in run.receipts:
        receipt.answered()


def _blocking(center: Center | AsyncCenter) -> Center:
    """Raises TypeError."""
    found: Any = getattr(center, "blocking", center)
    if not hasattr(found, "sender"):
        raise TypeError(f"Consumer needs a center as tmc_client.connect() returns it, not {center!r}")
    blocking: Center = found
    return blocking


def _limit(max_handling: timedelta) -> float:
    """Raises ValueError, TypeError."""
    if not isinstance(max_handling, timedelta):
        raise TypeError(f"max_handling must be a timedelta, for example timedelta(minutes=10), not {max_handling!r}")
    if max_handling <= timedelta(0):
        raise ValueError(f"max_handling must be longer than nothing, not {max_handling}")
    return max_handling.total_seconds()


def _not_subscribed(app: str, topics: Sequence[str]) -> str:
    return (
        f"app {app} has no subscription to {', '.join(topics) or 'anything'}: subscribe this app first, "
        f"with: tmc admin subscribe {topics[0] if topics else 'TOPIC'} {app}"
    )


_FORMS = ("model_validate_json", "FromString", "__dataclass_fields__", "__attrs_attrs__", "__struct_fields__")


def _is_unreadable(body_type: Any) -> bool:
    """A class of the program or a library that nothing makes from bytes: a session, a client, tmc.Message."""
    if not isinstance(body_type, type) or body_type.__module__.partition(".")[0] in sys.stdlib_module_names:
        return False
    plain = issubclass(body_type, dict | list | tuple | str | int | float | Enum)
    return body_type is Message or not (plain or any(hasattr(body_type, form) for form in _FORMS))


def _inspect(topic: Topic[Any], handler: Callable[..., Any], inbox: SqlInbox | None, limit_s: float) -> _Listener:
    try:
        hints = get_type_hints(handler)
    except NameError as exc:
        raise TypeError(
            f"{handler.__name__}(): an annotation means nothing when the program runs ({exc}): import it outside of "
            "TYPE_CHECKING"
        ) from exc
    names = list(inspect.signature(handler).parameters)
    if not names:
        raise TypeError(f"{handler.__name__}() must take the body as its first parameter")
    body_type = hints.get(names[0], topic.type)
    if _is_unreadable(body_type):
        raise TypeError(
            f"{handler.__name__}(): no body can be read as {body_type.__name__}, the type of its first parameter, which is "
            "the body: take bytes, str, dict, list, a dataclass, a pydantic model or a protobuf message"
        )
    wants_message = next((name for name in names[1:] if hints.get(name) is Message), None)
    wants_session = "session" if "session" in names[1:] else None
    unknown = [name for name in names[1:] if name not in (wants_message, wants_session)]
    if unknown:
        raise TypeError(f"{handler.__name__}(): nobody fills {unknown}; known are the body, session and a tmc.Message")
    if wants_session and inbox is None:
        raise TypeError(f"{handler.__name__}() wants a session: give the listener inbox=SqlInbox(sessionmaker)")
    return _Listener(
        topic=topic,
        handler=handler,
        body_type=body_type,
        wants_message=wants_message,
        wants_session=wants_session,
        inbox=inbox,
        is_async=inspect.iscoroutinefunction(handler),
        limit_s=limit_s,
    )
