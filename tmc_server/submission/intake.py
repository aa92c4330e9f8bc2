"""Takes what arrives from one submit queue through the group commit, in the queue's order, and says what became of it.

One batch at a time, so that the order of the queue is the order of the store: within a transaction, messages are stored
before any is decided, which is why a batch ends before a message whose key it decides.

- A step that is refused for good is answered at once.
- One that can be repeated (an outage, a limit) is kept here and begins the next batch, after a pause; the queue holds
  what comes behind it.
- A submit that is there before its prepare waits for it, as long as a transaction of its topic may take, and holds up
  nothing. A rollback needs no waiting: it is remembered, and its prepare is refused.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

from tmc_common import submission as wire
from tmc_common.eventlog import EventLog
from tmc_server.domain.catalog import App, SubmitQueue
from tmc_server.domain.message import MessageState
from tmc_server.domain.operations import Answer, Decide, Prepare, Stored
from tmc_server.domain.ports.catalog import CatalogSource
from tmc_server.errors import (
    AlreadyRolledBack,
    InternalFault,
    InvalidField,
    KeyInProgress,
    MessageUnknown,
    Retryable,
    TmcError,
)
from tmc_server.requests.caller import Budget, Caller
from tmc_server.requests.deciding import Deciding
from tmc_server.requests.preparing import Preparing
from tmc_server.requests.producing import perform_both
from tmc_server.submission.letters import Letter, Place, Step, authenticate, may_reply_to, step_of

log = EventLog("tmc.submission")

WINDOW = 1_000
"""Letters that may be here, of one queue or partition."""
_BATCH = 400
_BATCH_BYTES = 4 << 20
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_LONGEST_PATIENCE_S = 600.0  # below the time after which RabbitMQ gives up a consumer that does not acknowledge
_LOOKS_S = (0.05, 0.1, 0.2, 0.5)  # from one look for the prepare of an early submit to the next


@dataclass(frozen=True, slots=True)
class Described:
    """The answer to `describe`. check_token: what checks show the app's services."""

    check_token: str


Made = TypeVar("Made")
Outcome = Answer | Described
Settle = Callable[[Sequence[tuple[Letter, Outcome]]], None]
"""Called on the loop with what is done: its reader answers, acknowledges and forgets it."""


@dataclass(frozen=True, kw_only=True)
class Desk:
    """The use cases, and the limits of apps: the same ones that the RPCs have."""

    catalog: CatalogSource
    preparing: Preparing
    deciding: Deciding
    budget: Budget


@dataclass(slots=True, eq=False, kw_only=True)
class _Waiting:
    """A letter that is here. wrong: why it is refused.  since, again: seconds of the monotonic clock.  looks: for its prepare.

    patience_s: how long it waits for its prepare; 0: it is no submit.  is_charged: to the rate of its app.
    """

    letter: Letter
    since: float
    step: Step | None = None
    wrong: TmcError | None = None
    again: float = 0.0
    looks: int = 0
    patience_s: float = 0.0
    is_charged: bool = False

    @property
    def message(self) -> tuple[str, str]:
        assert self.step is not None
        return self.step.topic, self.step.key

    @property
    def attempt(self) -> tuple[str, str, bytes]:
        assert self.step is not None
        return *self.message, self.step.attempt_id


class Intake:
    """One queue, or one partition of a topic. On the loop only."""

    def __init__(
        self, place: Place, desk: Desk, settle: Settle, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self.place = place
        self._desk = desk
        self._settle = settle
        self._monotonic = monotonic
        self._fresh: deque[Letter] = deque()
        self._parsed: _Waiting | None = None  # the first of the fresh ones, when a batch ended before it
        self._held: list[_Waiting] = []
        self._early: dict[tuple[str, str, bytes], list[_Waiting]] = {}
        self._pauses = 0
        self._paused_until = 0.0
        self._arrival = asyncio.Event()
        self._closing = asyncio.Event()

    @property
    def waiting(self) -> int:
        """Return how many letters are here that were tried and not answered."""
        return len(self._held) + sum(map(len, self._early.values()))

    def arrived(self, letters: Iterable[Letter]) -> None:
        self._fresh.extend(letters)
        self._arrival.set()

    def close(self) -> None:
        """Begin nothing more. What is under way is finished, and `run` returns."""
        self._closing.set()
        self._arrival.set()

    async def run(self) -> None:
        """Work until it is closed."""
        while not self._closing.is_set():
            self._arrival.clear()
            found = self._registered()
            if found is None:  # it was closed, or this server does not know it yet
                await self._wait(self._closing, _LONGEST_PAUSE_S)
            elif batch := self._next_batch(*found):
                await self._take(found[0], batch)
            elif (pause_s := self._paused_until - self._monotonic()) > 0:
                await self._wait(self._closing, pause_s)
            else:
                await self._wait(self._arrival, self._until_a_look())

    @staticmethod
    async def _wait(event: asyncio.Event, seconds: float | None) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(event.wait(), seconds)

    def _until_a_look(self) -> float | None:
        """Return in how many seconds an early submit looks for its prepare. None: there is none."""
        due = [several[0].again for several in self._early.values()]
        return max(0.0, min(due) - self._monotonic()) if due else None

    def _registered(self) -> tuple[App, SubmitQueue] | None:
        app = self._desk.catalog.current.app_by_id.get(self.place.app)
        queue = app.submit_queue(self.place.tag) if app is not None else None
        return (app, queue) if app is not None and queue is not None and not app.disabled else None

    def _next_batch(self, app: App, queue: SubmitQueue) -> list[_Waiting]:
        """Return what is held, then submits that look for their prepares again, then what arrived, up to the first that
        needs a batch of its own.
        """
        now = self._monotonic()
        if now < self._paused_until:
            return []
        batch, self._held = self._held, []
        decided = {key for each in batch for key in _decided_by(each.step)}
        end, size = len(batch) + _BATCH, 0
        while self._fresh and len(batch) < end and size < _BATCH_BYTES:
            waiting = self._parsed or self._opened(self._fresh[0], app, queue, now)
            self._parsed = waiting
            step = waiting.step
            if step is not None and step.stores and self._must_follow(step, decided):
                break
            self._parsed = None
            self._fresh.popleft()
            size += len(waiting.letter.body)
            batch.append(waiting)
            decided.update(_decided_by(step))
            if step is not None and step.operation == wire.PREPARE:
                batch += self._early.pop(waiting.attempt, [])
        return batch + self._early_ones(now)

    @staticmethod
    def _must_follow(step: Step, decided: set[tuple[str, str]]) -> bool:
        """Return whether a message comes after decisions of this batch: of its key, or of its topic if that is ordered."""
        return (step.topic, step.key) in decided or (bool(step.order_key) and (step.topic, "") in decided)

    def _early_ones(self, now: float) -> list[_Waiting]:
        due = [attempt for attempt, several in self._early.items() if several[0].again <= now]
        return [each for attempt in due for each in self._early.pop(attempt)]

    def _opened(self, letter: Letter, app: App, queue: SubmitQueue, now: float) -> _Waiting:
        found = _tried(lambda: self._step_of(letter, app, queue))
        if isinstance(found, Step):
            return _Waiting(letter=letter, since=now, step=found)
        return _Waiting(letter=letter, since=now, wrong=found)

    def _step_of(self, letter: Letter, app: App, queue: SubmitQueue) -> Step:
        """Raises CredentialsInvalid, InvalidField."""
        authenticate(letter, self.place, queue)
        if letter.reply_to and not may_reply_to(letter.reply_to, app.id):
            raise InvalidField(
                "reply_to", f"begin with {wire.replies_of(app.id)}, or be {wire.DIRECT_REPLIES} of RabbitMQ"
            )
        step = step_of(letter, app)
        if step.instance is not None and not queue.secrets:
            raise InvalidField(wire.CHECK_ADDRESS, "be left out: in a queue that is not signed anybody could give one")
        if step.operation == wire.DESCRIBE and not (queue.secrets and letter.reply_to):
            raise InvalidField(wire.OPERATION, "be signed, and say where to reply, to be describe")
        return step

    async def _take(self, app: App, batch: list[_Waiting]) -> None:
        """Run a batch, and sort what comes of it."""
        caller = Caller(app=app, tag=self.place.tag, only_this_tag=True)
        uncharged = [each for each in batch if not each.is_charged]
        size = sum(len(each.letter.body) for each in batch)
        try:
            if uncharged:
                self._desk.preparing.admit(caller, len(uncharged))
            for each in uncharged:
                each.is_charged = True
            self._desk.budget.begin_request(app, size)
        except Retryable as error:
            self._hold(batch, error)
            return
        try:
            items = [self._item(caller, each) for each in batch]
            outcomes: list[Outcome] = await perform_both(self._desk.preparing, self._desk.deciding, caller, items)
        finally:
            self._desk.budget.end_request(app, size)
        self._sort(batch, outcomes)

    def _item(self, caller: Caller, waiting: _Waiting) -> Prepare | Decide | Described | TmcError:
        step = waiting.step
        if step is not None:
            return _tried(lambda: self._asked(caller, waiting, step))
        assert waiting.wrong is not None
        return waiting.wrong

    def _asked(self, caller: Caller, waiting: _Waiting, step: Step) -> Prepare | Decide | Described:
        """Raises what the use cases raise."""
        desk = self._desk
        if step.instance is not None:
            desk.preparing.announce(replace(caller, instance=step.instance))
        if step.operation == wire.DESCRIBE:
            return Described(caller.app.check_token)
        if not step.stores:
            decide = desk.deciding.item(
                caller,
                commit=step.operation == wire.SUBMIT,
                message_id=step.message_id,
                topic=step.topic,
                key=step.key,
                attempt_id=step.attempt_id,
            )
            if step.operation == wire.SUBMIT and not step.message_id:  # who knows the id was answered the prepare
                waiting.patience_s = min(decide.topic.transaction_time_ms / 1000, _LONGEST_PATIENCE_S)
            return decide
        return desk.preparing.item(
            caller,
            publish=step.operation == wire.PUBLISH,
            topic=step.topic,
            key=step.key,
            body=step.body,
            content_type=step.content_type,
            headers=step.headers,
            attempt_id=step.attempt_id,
            delay_ms=step.delay_ms,
            order_key=step.order_key,
            ledger_id=step.ledger_id,
            check_target=step.check_target,
            transaction_time_ms=step.transaction_time_ms,
        )

    def _sort(self, batch: Sequence[_Waiting], outcomes: Sequence[Outcome]) -> None:
        done: list[tuple[Letter, Outcome]] = []
        held: list[_Waiting] = []
        trouble: TmcError | None = None
        now = self._monotonic()
        unstored = {
            each.attempt
            for each, outcome in zip(batch, outcomes, strict=True)
            if each.step is not None and each.step.stores and _is_repeated(outcome)
        }
        for waiting, outcome in zip(batch, outcomes, strict=True):
            if isinstance(outcome, TmcError) and _is_repeated(outcome):
                trouble = outcome
                held.append(waiting)
            elif isinstance(outcome, MessageUnknown) and waiting.patience_s and waiting.attempt in unstored:
                held.append(waiting)
            elif isinstance(outcome, MessageUnknown) and now - waiting.since < waiting.patience_s:
                waiting.again = now + _LOOKS_S[min(waiting.looks, len(_LOOKS_S) - 1)]
                waiting.looks += 1
                self._early.setdefault(waiting.attempt, []).append(waiting)
            elif isinstance(outcome, AlreadyRolledBack) and _needs_nobody(waiting):
                done.append((waiting.letter, Stored(message_id=None, state=MessageState.ROLLED_BACK, changed=False)))
            else:
                done.append((waiting.letter, outcome))
        if done:
            self._settle(done)
        if trouble is not None:
            self._hold(held, trouble)
        else:
            self._pauses = 0

    def _hold(self, batch: list[_Waiting], error: TmcError) -> None:
        """Keep them, in their order, for the first batch after a pause."""
        if self._pauses == 0:
            log.info("submission_waits", "what is in %s waits: %s", self.place.queue, error)
        pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**self._pauses)
        self._pauses += 1
        self._held = batch
        self._paused_until = self._monotonic() + max(pause_s, min(_LONGEST_PAUSE_S, error.retry_after_ms / 1000))


def _decided_by(step: Step | None) -> Iterable[tuple[str, str]]:
    """Return what a step decides, or stores decided: a key, and of ordered topics the place of what comes behind it."""
    return ((step.topic, step.key), (step.topic, "")) if step is not None and step.operation != wire.PREPARE else ()


def _needs_nobody(waiting: _Waiting) -> bool:
    """Return whether a prepare came after its own rollback, as it does when both come again, and nobody waits for an answer."""
    return waiting.step is not None and waiting.step.operation == wire.PREPARE and not waiting.letter.reply_to


def _is_repeated(outcome: Outcome) -> bool:
    """Return whether it is tried again here. Another attempt with the same key is the producer's own affair."""
    return isinstance(outcome, Retryable) and not isinstance(outcome, KeyInProgress)


def _tried(work: Callable[[], Made]) -> Made | TmcError:
    """Return what it makes, or why that is refused: one letter must not stop its queue, whatever is wrong with it."""
    try:
        return work()
    except TmcError as error:
        return error.with_traceback(None)
    except Exception as exc:  # noqa: BLE001 - the edge: logged, and its sender gets a correlation id
        return _unforeseen(exc)


def _unforeseen(exc: Exception) -> TmcError:
    correlation_id = uuid.uuid4().hex[:12]
    log.error("submission_failed", "a letter failed, correlation id %s", correlation_id, exc_info=exc)
    return InternalFault(
        f"The center failed on this message; its operators find it by correlation id {correlation_id}."
    )
