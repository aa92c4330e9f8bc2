"""The ledgers that one process answers for, e.g. one per tenant: each question goes to the one it was prepared with."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import sqlalchemy as sa

from tmc_client.checks.fence import LedgerAnswers
from tmc_client.checks.questions import Answer, Because, Question, Verdict
from tmc_client.forks import watch_forks
from tmc_client.local.engines import Source, engine_of

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

    from tmc_client.checks.aio_fence import AsyncLedgerAnswers, LoopBeside

log = logging.getLogger("tmc_client.checks")

_LOOK_AGAIN_S = 5.0
_BUDGET_S = 2.0  # for all ledgers of one call; the center waits three seconds by default


class Ledgers:
    """Thread-safe. Their ids are read when a question needs them; one that is away delays others by its connect, each 5 s."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._looking = threading.Lock()
        self._all: list[LedgerAnswers | AsyncLedgerAnswers] = []
        self._homes: dict[bytes, LedgerAnswers | AsyncLedgerAnswers] = {}
        self._unread: list[LedgerAnswers | AsyncLedgerAnswers] = []
        self._looked = float("-inf")
        self._beside: dict[sa.Pool, sa.Engine] = {}
        self._loop: LoopBeside | None = None
        watch_forks(self)

    def after_fork(self) -> None:
        """See forks.ForkAware: a thread of the parent may have held them."""
        self._lock, self._looking = threading.Lock(), threading.Lock()

    def add(self, engine: Source | AsyncEngine) -> None:
        """Raises InvalidRequest: it is no engine, and no function that returns a new connection."""
        made = self._answers_of(engine)
        with self._lock:
            self._all.append(made)
            self._unread.append(made)
            self._looked = float("-inf")

    def _answers_of(self, engine: Source | AsyncEngine) -> LedgerAnswers | AsyncLedgerAnswers:
        if isinstance(engine, sa.Engine) or callable(engine):
            return LedgerAnswers(engine_of(engine, "center.checks()", pooled=True), self._beside)
        from tmc_client.checks.aio_fence import AsyncLedgerAnswers, LoopBeside

        if self._loop is None:
            self._loop = LoopBeside()
        return AsyncLedgerAnswers(engine, self._loop, self._beside)

    def only_id(self) -> bytes:
        """The id of the only ledger; b"": there are several. Raises SQLAlchemyError: its database does not answer."""
        return self._all[0].ledger_id() if len(self._all) == 1 else b""

    def answer(self, questions: Sequence[Question], *, fences: bool) -> list[Answer]:
        """One answer per question. fences: see LedgerAnswers."""
        if len(self._all) == 1:
            return self._all[0].answer(questions, fences=fences)
        by_ledger: dict[bytes, list[int]] = {}
        for index, question in enumerate(questions):
            by_ledger.setdefault(question.ledger_id, []).append(index)
        if any(ledger_id not in self._homes for ledger_id in by_ledger):
            self._look()
        until = self._monotonic() + _BUDGET_S
        answers: dict[int, Answer] = {}
        for ledger_id, indexes in by_ledger.items():
            found = self._of(ledger_id, [questions[index] for index in indexes], fences, until)
            answers.update(zip(indexes, found, strict=True))
        return [answers[index] for index in range(len(questions))]

    def _of(self, ledger_id: bytes, questions: Sequence[Question], fences: bool, until: float) -> Sequence[Answer]:
        """Return the answers of one ledger. until: monotonic seconds."""
        home = self._homes.get(ledger_id)
        if home is not None and self._monotonic() < until:
            return home.answer(questions, fences=fences)
        if home is not None:
            answer = Answer.not_now("LEDGER_AWAY: there was no time left for this ledger.")
        elif self._unread and ledger_id:
            answer = Answer.not_now("LEDGER_AWAY: a ledger that may be this one cannot be read now.")
        else:
            detail = "WRONG_LEDGER: the message was prepared with another ledger, or none."
            answer = Answer(Verdict.UNKNOWN, detail, Because.WRONG_LEDGER)
        return [answer] * len(questions)

    def _look(self) -> None:
        """Read ids that are not known, for one is asked about that nobody has. At most every five seconds, and by one thread:
        a database may hang, and others are asked meanwhile.
        """
        if not self._looking.acquire(blocking=False):
            return
        try:
            with self._lock:
                now = self._monotonic()
                if now - self._looked < _LOOK_AGAIN_S:
                    return
                self._looked = now
                sought = list(self._unread or self._all)  # all: a database may have been replaced
            for each in sought:
                self._read(each)
        finally:
            self._looking.release()

    def _read(self, each: LedgerAnswers | AsyncLedgerAnswers) -> None:
        try:
            ledger_id = each.ledger_id()
        except Exception as exc:  # drivers of asyncio raise errors of their own when they cannot connect
            log.warning("the id of a ledger cannot be read: %s", getattr(exc, "orig", exc), exc_info=True)
            return
        with self._lock:
            self._homes[ledger_id] = each
            if each in self._unread:
                self._unread.remove(each)

    def close(self) -> None:
        with self._lock:
            for each in self._all:
                each.close()
            if self._loop is not None:
                self._loop.close()
