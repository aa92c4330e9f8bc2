"""Run handlers, in threads or on an event loop: one run per message at a time, and one answer per run."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any

from tmc_client import errors
from tmc_client.connecting.sender import Sender
from tmc_client.consuming.calling import Answer, Calling, ack, nack, not_begun
from tmc_client.consuming.keeping import Keeper
from tmc_client.consuming.listeners import Listeners
from tmc_client.consuming.received import Message, Receipt
from tmc_client.consuming.runs import Run, Runs
from tmc_client.consuming.turns import Turn, Turns
from tmc_client.consuming.workers import Workers
from tmc_client.forks import abandon
from tmc_client.local.loops import HANDLERS
from tmc_common import tracing

log = logging.getLogger("tmc_client.consumer")

ANSWER_TIMEOUT_S = 120.0
_ASK_AGAIN_S = 0.5
_ASKED_OFTEN = 10


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
        self.keeper: Keeper = Keeper(answers, monotonic, watch=self.give_up_overdue)
        self._runs = Runs(self.keeper.begin, self.keeper.end, monotonic)
        self._workers: Workers | None = None
        self._turns = Turns(concurrency)
        self._turn_of: dict[Run, Turn] = {}  # of those whose handlers have begun
        self._calling = Calling(listeners, self._running_loop, self._runs.begin)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self.broken: str = ""
        self.arrived: int = 0

    @property
    def hanging(self) -> int:
        """Number of handlers that were given up and still run."""
        return self._runs.hanging

    @property
    def running(self) -> Sequence[str]:
        """Ids of the messages whose handlers run, and of those that wait for one."""
        return self._runs.active

    @property
    def threads(self) -> int:
        """Threads that take work; 0: not started."""
        return self._workers.count if self._workers is not None else 0

    def start(self) -> None:
        for topic, listener in self._listeners.by_topic.items():
            self._turns.open(topic, listener.concurrency, listener.batch)
        if self._listeners.need_a_loop:
            self._loop = asyncio.new_event_loop()
            self._loop_thread = threading.Thread(target=self._run_loop, name=HANDLERS, daemon=True)
            self._loop_thread.start()
        self._workers = Workers(self._concurrency, self._work)
        self.keeper.start()

    def check_inboxes(self) -> None:
        """See Calling."""
        self._calling.check_inboxes()

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        assert self._loop is not None
        return self._loop

    @property
    def paused(self) -> Sequence[str]:
        """Topics whose listeners wait for their inboxes."""
        return self._turns.paused

    def begin_no_more(self) -> None:
        """Start no more handlers; running ones may finish."""
        self._stopping.set()
        self._turns.stop()

    def give_back_waiting(self) -> int:
        """Give the messages that no handler has begun back to the center. After `begin_no_more`. Returns: how many."""
        left = self._turns.left()
        for run in left:
            self._give_back(run)
        return len(left)

    def wait_idle(self, seconds: float) -> bool:
        """Wait until no handler runs or waits, except those given up. Returns False on timeout."""
        return self._runs.wait_idle(seconds)

    def stop(self) -> None:
        """End threads and loop. Handlers that still run lose their loop, or keep their daemon thread."""
        self.begin_no_more()
        self.give_back_waiting()
        if self._loop is not None and self._loop_thread is not None:
            asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop)
            self._loop_thread.join(5)
        self.keeper.stop()

    def abandon(self) -> None:
        """Leave workers and loop, in a forked child, to the parent, whose threads they are."""
        abandon(self._workers, self._loop)

    def _run_loop(self) -> None:
        assert self._loop is not None
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def arrive(self, message: Message, receipt: Receipt) -> None:
        """A genuine copy came: run its handler, unless its message is being handled. See received.OnMessage."""
        run = self._runs.arrive(message, receipt, self._listeners.limit_s(message.topic))
        self.arrived += 1  # after its run is registered, so that `wait_idle` covers every copy that is counted
        if run is not None and not self._turns.add(run):
            self._give_back(run)

    def _work(self) -> bool:
        """Take a turn: call the handler of one message or batch and send the answers. Returns False: there are no more."""
        turn = self._turns.take()
        if turn is None:
            return False
        runs = [run for run in turn.runs if not run.is_suspect or self._may_begin(run)]
        unanswered, otherwise = dict.fromkeys(runs), None
        for run in runs:
            self._runs.begin(run)
            self.keeper.begun(run)
            self._turn_of[run] = turn
        try:
            if runs:
                for run, answer in self._calling.handle(runs):
                    del unanswered[run]
                    self._handled(run, answer)
        except errors.InboxDown as exc:
            otherwise = self._postponed(turn, exc)
        except BaseException as exc:  # noqa: BLE001 - SystemExit in a handler must not end this thread
            log.error("message %s could not be answered: %r", runs[0].message.id, exc)
        else:
            if runs and turn.probes:
                self._resumed(turn)
        for run in unanswered:
            self._handled(run, otherwise)
        self._turns.end(turn)
        return True

    def _handled(self, run: Run, answer: Answer | None) -> None:
        self._turn_of.pop(run, None)
        self._ended(run, answer)

    def _may_begin(self, run: Run) -> bool:
        """Ask the center whether the handler of a suspect may begin; if not, the message is left to others. Blocks."""
        asked = 0
        while not self._stopping.is_set():
            asked += 1
            try:
                self.keeper.ask(run).result()
            except (errors.Decided, errors.NotFound) as exc:
                log.debug("message %s is not handled here: %s", run.message.id, exc)
                self._ended(run, None)
                return False
            except errors.TmcError as exc:
                level = logging.WARNING if asked == _ASKED_OFTEN else logging.DEBUG
                log.log(level, "whether message %s may be handled is not known yet: %s", run.message.id, exc)
                self._stopping.wait(_ASK_AGAIN_S)
            else:
                return True
        # The center may have noted that it begins: only an answer takes that back. Another run that has begun stays.
        self._ended(run, nack("its consumer stopped before it began", retry_after=timedelta(0), run=run.number))
        return False

    def _postponed(self, turn: Turn, exc: errors.InboxDown) -> Answer:
        """The inbox of a listener cannot be used: no handler's fault, so the message comes again, uncounted."""
        pause_s, topic = self._turns.pause(turn), turn.runs[0].message.topic
        log.error(
            "message %s comes again, and the listener of %s is paused for %.0f s: its inbox cannot be used: %s",
            turn.runs[0].message.id,
            topic,
            pause_s,
            exc,
            exc_info=None if turn.is_paused_again else exc.__cause__,
        )
        return nack(f"its inbox cannot be used: {exc}", retry_after=timedelta(seconds=pause_s))

    def _resumed(self, turn: Turn) -> None:
        self._turns.resume(turn)
        log.info("the listener of %s works again", turn.runs[0].message.topic)

    def _give_back(self, run: Run) -> None:
        """Give a copy back that no handler has begun: the center delivers it again at once, uncounted."""
        self._ended(run, not_begun)

    def _ended(self, run: Run, answer: Answer | None) -> None:
        if not self._runs.end(run):
            self._came_back(run, answer)
            return
        stored = self._answer(run, answer)
        self._runs.answered(run)
        for receipt in run.receipts:
            receipt.handled()
        if stored is None:
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
        except Exception:  # a fault of ours: the thread has other messages to answer, and more to take
            log.exception("message %s could not be answered", run.message.id)
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
        # Of a batch once: its clean-up is not to be disturbed.
        for task in {run.task for run in overdue if run.task is not None}:
            self._running_loop().call_soon_threadsafe(task.cancel)
        if not self.broken and self._runs.hanging >= self._concurrency:
            self.break_off(
                f"{self._runs.hanging} handlers hang, as many as may run at once (concurrency): this consumer takes no more "
                "messages, its process must be started again"
            )

    def _give_up(self, run: Run) -> None:
        message = run.message
        handler = self._listeners.name(message.topic)
        error = f"{handler} has run longer than its max_handling of {run.limit_s:g} s and was given up"
        log.error("message %s of %s, attempt %d: %s", message.id, message.topic, message.attempt, error)
        assert self._workers is not None
        assert run.thread is not None
        turn = self._turn_of.pop(run, None)  # its worker may take it out at the same moment
        if turn is not None:
            self._turns.end(turn)
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

    def break_off(self, because: str) -> None:
        """Accept no more messages; the process should be restarted. because: a sentence."""
        self.broken = because
        log.critical(self.broken)
        self.begin_no_more()
        self.give_back_waiting()
        self._on_broken()


async def _cancel_others() -> None:
    """Cancel all tasks on this loop, then stop it: a hanging handler must not keep the process alive."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    asyncio.get_running_loop().stop()


def _is_stored(answer: Future[Any]) -> bool:
    """Return whether the center stored the answer; logs the reason if not."""
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
