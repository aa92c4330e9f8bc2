"""Run handlers, in threads or on an event loop: one run per message at a time, and one answer per run."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from tmc_client import errors
from tmc_client.batches import Batch
from tmc_client.calling import Answer, Calling, ack, nack
from tmc_client.connection import abandon
from tmc_client.keeping import Keeper
from tmc_client.listeners import Listeners
from tmc_client.received import Message, Receipt
from tmc_client.runs import Run, Runs
from tmc_client.sender import Sender
from tmc_client.workers import HANDLERS, Workers
from tmc_common import tracing

log = logging.getLogger("tmc_client.consumer")

ANSWER_TIMEOUT_S = 120.0


class Handling:
    """The handlers of one consumer. concurrency: handlers at once.

    on_broken: called once, when as many handlers hang as may run at once; must not block.

    keeper: keeps the center from sending second copies of what is being handled here.
    broken: why this process should be restarted; "": no reason.
    arrived: copies so far.
    """

    def __init__(
        self,
        answers: Sender,
        listeners: Listeners,
        *,
        concurrency: int,
        on_broken: Callable[[], None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sender = answers
        self._listeners = listeners
        self._concurrency = concurrency
        self._on_broken = on_broken
        self.keeper = Keeper(answers, monotonic, watch=self.give_up_overdue)
        self._runs = Runs(self.keeper.begin, self.keeper.end, monotonic)
        self._workers: Workers | None = None
        self._batches: dict[str, Batch] = {}
        self._calling = Calling(listeners, self._running_loop)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread: threading.Thread | None = None
        self._stopping = False
        self.broken = ""
        self.arrived = 0

    @property
    def hanging(self) -> int:
        """Number of handlers that were given up and still run."""
        return self._runs.hanging

    @property
    def threads(self) -> int:
        """Threads that take work; 0: not started."""
        return self._workers.count if self._workers is not None else 0

    def start(self) -> None:
        self._workers = Workers(self._concurrency)
        self._batches = {
            topic: Batch(listener.batch) for topic, listener in self._listeners.by_topic.items() if listener.batch
        }
        if self._listeners.need_a_loop:
            self._loop = asyncio.new_event_loop()
            self._loop_thread = threading.Thread(target=self._run_loop, name=HANDLERS, daemon=True)
            self._loop_thread.start()
        self.keeper.start()

    def check_inboxes(self) -> None:
        """See Calling."""
        self._calling.check_inboxes()

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        assert self._loop is not None
        return self._loop

    def begin_no_more(self) -> None:
        """Start no more handlers: the center redelivers queued messages; running handlers may finish."""
        self._stopping = True
        for batch in self._batches.values():
            batch.stop()

    def wait_idle(self, seconds: float) -> bool:
        """Wait until no handler runs or waits, except those given up. Returns False on timeout."""
        return self._runs.wait_idle(seconds)

    def stop(self) -> None:
        """End threads and loop. Handlers that still run lose their loop, or keep their daemon thread."""
        self.begin_no_more()
        if self._workers is not None:
            self._workers.stop()
        if self._loop is not None and self._loop_thread is not None:
            asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop)
            self._loop_thread.join(5)
        self.keeper.stop()

    def abandon(self) -> None:
        """In a forked child: the threads are those of the parent."""
        abandon(self._workers, self._loop)

    def _run_loop(self) -> None:
        assert self._loop is not None
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def arrive(self, message: Message, receipt: Receipt) -> None:
        """A genuine copy came: run its handler, unless its message is being handled. See received.OnMessage."""
        assert self._workers is not None
        run = self._runs.arrive(message, receipt, self._listeners.limit_s(message.topic))
        self.arrived += 1  # after its run is registered, so that `wait_idle` covers every copy that is counted
        if run is None:
            return
        batch = self._batches.get(message.topic)
        if batch is None:
            self._workers.submit(partial(self._work, (run,)))
        elif batch.add(run):
            self._workers.submit(partial(self._work_batch, batch))

    def _work_batch(self, batch: Batch) -> None:
        if runs := batch.take():
            self._work(runs)

    def _work(self, runs: Sequence[Run]) -> None:
        """Call the handler of one message or batch and send the answers. Runs in a worker thread."""
        begun = not self._stopping
        answers: Sequence[Answer | None] = [None] * len(runs)
        if begun:
            for run in runs:
                self._runs.begin(run)
            try:
                answers = self._calling.handle(runs)
            except BaseException as exc:  # noqa: BLE001 - SystemExit in a handler must not end this thread
                log.error("message %s could not be answered: %r", runs[0].message.id, exc)
        for run, answer in zip(runs, answers, strict=True):
            self._ended(run, answer, begun)

    def _ended(self, run: Run, answer: Answer | None, begun: bool) -> None:
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

    def _on_stored(self, run: Run, answer: Answer | None, stored: Future[Any]) -> None:
        self._forget(run, done=_is_stored(stored) and answer is ack)

    def _answer(self, run: Run, answer: Answer | None) -> Future[Any] | None:
        """Send the answer to the center. Returns: its future; None: nothing was sent."""
        try:
            with tracing.within(run.message.headers):
                return None if answer is None else self._sender.send(*answer(run.message), ANSWER_TIMEOUT_S)
        except errors.TmcError as exc:
            log.error("message %s could not be answered: %s", run.message.id, exc)
            return None

    def _forget(self, run: Run, done: bool) -> None:
        """Release a run whose answer was stored or given up; the center sends another copy if it has to."""
        for receipt in run.receipts:
            receipt.answered()
        for message, receipt in self._runs.forget(run):
            if done:
                receipt.handled()
                receipt.answered()
            else:
                self.arrive(message, receipt)

    def give_up_overdue(self) -> None:
        """Give up handlers that have run too long. Called in the keeper's thread."""
        overdue = self._runs.overdue()
        for run in overdue:
            self._give_up(run)
        for task in {
            run.task for run in overdue if run.task is not None
        }:  # of a batch once: its clean-up is not to be disturbed
            self._running_loop().call_soon_threadsafe(task.cancel)
        if not self.broken and self._runs.hanging >= self._concurrency:
            self._break()

    def _give_up(self, run: Run) -> None:
        message = run.message
        handler = self._listeners.name(message.topic)
        error = f"{handler} has run longer than its max_handling of {run.limit_s:g} s and was given up"
        log.error("message %s of %s, attempt %d: %s", message.id, message.topic, message.attempt, error)
        assert self._workers is not None
        assert run.thread is not None
        self._workers.replace(run.thread)
        stored = self._answer(run, nack(error, hangs=True))
        for receipt in run.receipts:
            receipt.handled()
            if stored is None:
                receipt.answered()
        if stored is not None:
            stored.add_done_callback(partial(_on_given_up, run))

    def _came_back(self, run: Run, answer: Answer | None) -> None:
        """A handler that was given up has ended after all: if it succeeded, ack its message."""
        self._runs.came_back(run)
        if answer is ack:
            log.warning("the handler of %s ended on %s after it was given up", run.message.topic, run.message.id)
            stored = self._answer(run, answer)
            if stored is not None:
                stored.add_done_callback(_is_stored)

    def _break(self) -> None:
        """Every handler thread hangs: accept no more messages; the process should be restarted."""
        self.broken = (
            f"{self._runs.hanging} handlers hang, as many as may run at once (concurrency): this consumer takes no more "
            "messages, its process must be started again"
        )
        log.critical(self.broken)
        self._stopping = True
        self._on_broken()


async def _cancel_others() -> None:
    """Cancel all tasks on this loop, then stop it: a hanging handler must not keep the process alive."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    asyncio.get_running_loop().stop()


def _is_stored(answer: Future[Any]) -> bool:
    """Whether the center stored the answer; logs the reason if not."""
    exc = answer.exception()
    if isinstance(exc, errors.Decided):
        log.debug("answered too late: %s", exc)
    elif exc is not None:
        log.error("an answer was not stored, the message is redelivered: %s", exc)
    return exc is None


def _on_given_up(run: Run, answer: Future[Any]) -> None:
    _is_stored(answer)
    for receipt in run.receipts:
        receipt.answered()
