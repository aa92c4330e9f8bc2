"""Call a listener's function with its message, or with a batch, and say what is answered to the center.

A batch fails as a whole: it has one transaction. It is then tried again in halves, so that a message that cannot be
handled is found and nacked alone.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import AsyncExitStack, ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from tmc_client import codecs, errors, tracing
from tmc_client.connecting import sender
from tmc_client.consuming.listeners import Listener, Listeners
from tmc_client.consuming.received import Message
from tmc_client.consuming.runs import Run
from tmc_common.protocol import consumption_pb2

if TYPE_CHECKING:
    from tmc_client.consuming.inbox import SqlInbox

log = logging.getLogger("tmc_client.consumer")

_LOOK_S = 1.0
_LATEST_MS = 86_400_000  # the center takes a day at most

Answer = Callable[[Message], tuple[sender.Kind, Any]]
"""Makes the answer for a message; which copy's attempt it names is known only when it is sent."""


def ack(message: Message) -> tuple[sender.Kind, Any]:
    return sender.ACK, consumption_pb2.AckRequest(message_id=message.id, attempt=message.attempt)


def nack(
    error: str, *, reject: bool = False, retry_after: timedelta | None = None, hangs: bool = False, run: int = 0
) -> Answer:
    """Report a failure. run: the answer has no effect if another run of the attempt has begun; 0: it has."""
    text = error[:500].encode("utf-8", "replace").decode()  # halves of surrogate pairs are no text for the center

    def answer(message: Message) -> tuple[sender.Kind, Any]:
        request = consumption_pb2.NackRequest(
            message_id=message.id, attempt=message.attempt, error=text, reject=reject, handler_hangs=hangs, run=run
        )
        if retry_after is not None:
            request.retry_after_ms = min(max(0, round(retry_after.total_seconds() * 1000)), _LATEST_MS)
        return sender.NACK, request

    return answer


def not_begun(message: Message) -> tuple[sender.Kind, Any]:
    """Report that no handler was called."""
    return sender.NACK, consumption_pb2.NackRequest(message_id=message.id, attempt=message.attempt, not_begun=True)


_AROUND: list[tuple[Callable[[], None], Callable[[], None]]] = []


def around_handlers(before: Callable[[], None], after: Callable[[], None]) -> None:
    """Have a framework's connections looked after: called in the thread of each handler. Must not raise."""
    if (before, after) not in _AROUND:
        _AROUND.append((before, after))


class Calling:
    """loop: where `async def` handlers run.  begin: called with each run of a batch before a half of it is handled."""

    def __init__(
        self, listeners: Listeners, loop: Callable[[], asyncio.AbstractEventLoop], begin: Callable[[Run], None]
    ) -> None:
        self._listeners = listeners
        self._loop = loop
        self._begin = begin

    def check_inboxes(self) -> None:
        """Raises InvalidRequest: one cannot be used as it is. Unavailable: its database does not answer, or refuses."""
        checked: set[int] = set()
        for listener in list(self._listeners.by_topic.values()):
            inbox = listener.inbox
            if inbox is None or id(inbox) in checked:
                continue
            try:
                if inbox.is_async:
                    self._await(inbox.check_async(), ())
                else:
                    inbox.check()
            except errors.InvalidRequest as exc:
                raise errors.InvalidRequest(f"The inbox of {listener.handler.__name__}(): {exc}") from exc
            except Exception as exc:
                raise errors.Unavailable(f"The inbox of {listener.handler.__name__}(): {_text(exc)}") from exc
            checked.add(id(inbox))

    def handle(self, runs: Sequence[Run]) -> Iterator[tuple[Run, Answer]]:
        """Call the handler. Yields each run with its answer for the center as soon as there is one.

        Raises InboxDown: of the others nothing was handled, or nobody knows whether it was.
        """
        for before, _ in _AROUND:
            before()
        try:
            yield from self._handle(runs)
        finally:
            for _, after in _AROUND:
                after()

    def _handle(self, runs: Sequence[Run]) -> Iterator[tuple[Run, Answer]]:
        listener = self._listeners.by_topic.get(runs[0].message.topic)
        if listener is None or listener.batch is None:
            (run,) = runs
            yield run, self._one(listener, run)
            return
        bodies: dict[str, Any] = {}
        readable: list[Run] = []
        for run in runs:
            try:
                bodies[run.message.id] = _body(listener, run.message)
                readable.append(run)
            except errors.CodecError as exc:
                yield run, _outcome(run.message, exc)
        if readable:
            yield from self._in_halves(listener, readable, bodies, readable)

    def _one(self, listener: Listener | None, run: Run) -> Answer:
        message = run.message
        try:
            with tracing.handling([message], time.monotonic() - run.arrived):
                if listener is not None:
                    self._call(listener, [run], {message.id: _body(listener, message)})
                elif self._listeners.everything is not None:
                    self._listeners.everything.consume(message)
                else:  # a single queue brings all topics of its app
                    raise errors.NotFound(
                        f"nothing here listens to {message.topic}: add a listener or attach a MessageConsumer"
                    )
        except errors.InboxDown:
            raise
        except _OUTCOMES as exc:
            return _outcome(message, exc)
        except Exception as exc:
            if not run.given_up:
                log.warning("the handler of %s failed on %s", message.topic, message.id, exc_info=True)
            return nack(_text(exc))
        return ack

    def _in_halves(
        self, listener: Listener, runs: Sequence[Run], bodies: dict[str, Any], batch: Sequence[Run]
    ) -> Iterator[tuple[Run, Answer]]:
        """Call the handler with these of a batch; if it fails, with each half."""
        if len(runs) == 1:
            yield runs[0], self._one(listener, runs[0])
            return
        failure: Exception | None = None
        try:
            with tracing.handling([run.message for run in runs], time.monotonic() - runs[0].arrived):
                self._call(listener, runs, bodies)
        except errors.InboxDown:
            raise
        except errors.Later as exc:
            yield from ((run, _outcome(run.message, exc)) for run in runs)
            return
        except Exception as exc:
            log.debug("a batch of %d messages of %s failed", len(runs), runs[0].message.topic, exc_info=True)
            failure = exc
        if failure is None:
            yield from ((run, ack) for run in runs)
            return
        if isinstance(failure, CancelledError) or any(run.given_up for run in runs):
            yield from ((run, nack(_text(failure))) for run in runs)
            return
        middle = len(runs) // 2
        for half in (runs[:middle], runs[middle:]):
            if any(run.given_up for run in half):  # with the other half, which hung: they come again
                yield from ((run, nack(_text(failure))) for run in half)
                continue
            for run in batch:
                self._begin(run)  # each call may take as long as a handler may
            yield from self._in_halves(listener, half, bodies, batch)

    def _call(self, listener: Listener, runs: Sequence[Run], bodies: dict[str, Any]) -> None:
        """Call the handler, in one transaction of the inbox if there is one,
        with those messages that have not had their effect.
        """
        messages = [run.message for run in runs]
        if listener.inbox is None:
            self._invoke(listener, messages, bodies, None, runs)
        elif listener.inbox.is_async:
            self._await(self._with_async_inbox(listener, listener.inbox, messages, bodies), runs)
        else:
            with ExitStack() as stack:
                with _opening():
                    effects = stack.enter_context(listener.inbox.once_each(messages))
                if effects.messages:
                    self._invoke(listener, effects.messages, bodies, effects.handle, runs)

    def _invoke(
        self,
        listener: Listener,
        messages: Sequence[Message],
        bodies: Mapping[str, Any],
        handle: Any,
        runs: Sequence[Run],
    ) -> None:
        called = _called(listener, messages, bodies, handle)
        if listener.is_async:
            self._await(called(), runs)
        else:
            called()

    async def _with_async_inbox(
        self, listener: Listener, inbox: SqlInbox, messages: Sequence[Message], bodies: Mapping[str, Any]
    ) -> None:
        async with AsyncExitStack() as stack:
            with _opening():
                effects = await stack.enter_async_context(inbox.once_async(messages))
            if effects.messages:
                await _called(listener, effects.messages, bodies, effects.handle)()

    def _await(self, handling: Coroutine[Any, Any, Any], runs: Sequence[Run]) -> None:
        """Run a coroutine on the loop and wait until it ends.

        Even a cancelled one is waited for: until it ends, it may use the session of its inbox.
        """
        loop, ended = self._loop(), threading.Event()
        tasks: list[asyncio.Task[Any]] = []

        def begin() -> None:
            task = loop.create_task(handling)
            tasks.append(task)
            for run in runs:
                run.task = task
            task.add_done_callback(lambda _task: ended.set())

        try:
            loop.call_soon_threadsafe(begin)
            while not ended.wait(_LOOK_S):
                if not loop.is_running():
                    raise RuntimeError("the event loop has ended")
        except RuntimeError as exc:
            handling.close()
            raise CancelledError from exc
        try:
            tasks[0].result()
        except asyncio.CancelledError as exc:
            raise CancelledError from exc  # an Exception: this thread itself was not cancelled


@contextmanager
def _opening() -> Iterator[None]:
    """Raise InboxDown for whatever fails before a handler begins, except for a message that comes out of order."""
    try:
        yield
    except (errors.OutOfOrder, errors.InboxDown):
        raise
    except Exception as exc:
        raise errors.InboxDown(_text(exc)) from exc


def _called(
    listener: Listener, messages: Sequence[Message], bodies: Mapping[str, Any], handle: Any
) -> Callable[[], Any]:
    """The handler with its arguments: lists, if it takes batches."""
    extra: dict[str, Any] = {}
    if listener.wants_message:
        extra[listener.wants_message] = list(messages) if listener.batch else messages[0]
    if listener.wants_session:
        extra[listener.wants_session] = handle
    read = [bodies[message.id] for message in messages]
    return partial(listener.handler, read if listener.batch else read[0], **extra)


def _body(listener: Listener, message: Message) -> Any:
    """Raises CodecError."""
    return codecs.decode(message.body, message.content_type, listener.body_type)


_OUTCOMES = (errors.Reject, errors.Later, errors.CodecError)


def _outcome(message: Message, exc: Exception) -> Answer:
    """The answer for what a handler says, or for a body that it cannot take."""
    if isinstance(exc, errors.Reject):
        log.info("the handler of %s rejected %s: %s", message.topic, message.id, exc)
        return nack(str(exc), reject=True)
    if isinstance(exc, errors.Later):
        return nack(str(exc), retry_after=exc.after)
    log.error("message %s: %s", message.id, exc)
    return nack(str(exc))


def _text(exc: Exception) -> str:
    return f"{type(exc).__name__}: {exc}"
