"""Consumers: a decorator on a function, and a loop that calls it.

A handler that returns is acked to the center (in batches, repeated until stored); one that raises is nacked, and the
subscription's retry policy decides; `Reject` and `Later` say otherwise. Without an inbox a handler runs at least once per
message; with one, its effect happens exactly once.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import signal
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from tmc_client import codecs, errors, sender
from tmc_client.codecs import Topic
from tmc_client.protocol import consumption_pb2
from tmc_client.transports.stream import StreamTransport

if TYPE_CHECKING:
    from tmc_client.center import Center
    from tmc_client.inbox import SqlInbox

log = logging.getLogger("tmc_client.consumer")

Handler = TypeVar("Handler", bound=Callable[..., Any])
_ACK_TIMEOUT_S = 120.0
_LATEST_MS = 86_400_000  # the center takes a day at most


@dataclass(frozen=True)
class Message:
    """What a handler may want to know beside the body. attempt: 1 for the first copy.  subscriber: APP.TAG."""

    id: str
    topic: str
    key: str
    body: bytes
    content_type: str
    headers: Mapping[str, str]
    attempt: int
    producer: str
    subscriber: str


@dataclass(frozen=True)
class _Listener:
    topic: Topic[Any]
    handler: Callable[..., Any]
    body_type: Any
    wants_message: str | None
    wants_session: str | None
    inbox: SqlInbox | None


class Consumer:
    """concurrency: handlers at once.  prefetch: copies fetched ahead; by default four times the concurrency."""

    def __init__(self, center: Center, *, concurrency: int = 8, prefetch: int | None = None) -> None:
        self._center = center
        self._concurrency = concurrency
        self._prefetch = prefetch or concurrency * 4
        self._listeners: dict[str, _Listener] = {}
        self._transport: StreamTransport | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread: threading.Thread | None = None
        self._running = 0
        self._idle = threading.Condition()
        self._stop_requested = threading.Event()

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

    def start(self) -> None:
        """Begin to receive; returns at once. Raises ValueError without listeners."""
        if not self._listeners:
            raise ValueError("nothing to consume: decorate a function with @consumer.listener(topic) first")
        self._pool = ThreadPoolExecutor(self._concurrency, thread_name_prefix="tmc-handler")
        if any(inspect.iscoroutinefunction(listener.handler) for listener in self._listeners.values()):
            self._loop = asyncio.new_event_loop()
            self._loop_thread = threading.Thread(target=self._run_loop, name="tmc-handlers", daemon=True)
            self._loop_thread.start()
        self._transport = StreamTransport(
            self._center.connection, list(self._listeners), self._prefetch, self._on_delivery
        )
        self._transport.start()

    def stop(self, grace: timedelta = timedelta(seconds=30)) -> None:
        """Take nothing more, let running handlers end, store their acks. What was not begun comes again."""
        self._stop_requested.set()
        if self._transport is not None:
            self._transport.stop()
        with self._idle:
            self._idle.wait_for(lambda: self._running == 0, grace.total_seconds())
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        if self._loop is not None and self._loop_thread is not None:
            asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop)
            self._loop_thread.join(5)
        self._center.sender.flush(grace.total_seconds())

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
        if self._stop_requested.is_set():
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self._stop_requested.set()

    def __enter__(self) -> Consumer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _on_delivery(self, delivery: consumption_pb2.Delivery, give_credit: Callable[[], None]) -> None:
        assert self._pool is not None
        with self._idle:
            self._running += 1
        handled = partial(self._handled, give_credit)
        self._pool.submit(self._handle, delivery).add_done_callback(handled)

    def _handled(self, give_credit: Callable[[], None], done: Future[None]) -> None:
        with self._idle:
            self._running -= 1
            self._idle.notify_all()
        if not done.cancelled() and (exc := done.exception()) is not None:
            log.error("a copy could not be answered: %r", exc)
        give_credit()

    def _handle(self, delivery: consumption_pb2.Delivery) -> None:
        if self._stop_requested.is_set():
            return  # not begun: the center delivers it again
        message = Message(
            delivery.message_id, delivery.topic, delivery.key, delivery.body, delivery.content_type,
            dict(delivery.headers), delivery.attempt, delivery.producer, delivery.subscriber,
        )  # fmt: skip
        try:
            self._call_handler(self._listeners[delivery.topic], message)
        except errors.Reject as exc:
            self._nack(message, str(exc), reject=True)
        except errors.Later as exc:
            self._nack(message, str(exc), retry_after=exc.after)
        except errors.CodecError as exc:
            log.error("message %s: %s", message.id, exc)
            self._nack(message, str(exc))
        except Exception as exc:
            log.warning("the handler of %s failed on %s", message.topic, message.id, exc_info=True)
            self._nack(message, f"{type(exc).__name__}: {exc}")
        else:
            self._send(sender.ACK, consumption_pb2.AckRequest(message_id=message.id))

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

    def _nack(self, message: Message, error: str, reject: bool = False, retry_after: timedelta | None = None) -> None:
        request = consumption_pb2.NackRequest(
            message_id=message.id, attempt=message.attempt, error=error[:500], reject=reject
        )
        if retry_after is not None:
            request.retry_after_ms = min(max(0, round(retry_after.total_seconds() * 1000)), _LATEST_MS)
        self._send(sender.NACK, request)

    def _send(self, kind: sender.Kind, request: Any) -> None:
        self._center.sender.send(kind, request, _ACK_TIMEOUT_S).add_done_callback(_report)


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
