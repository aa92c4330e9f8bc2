"""Answer checks from the ledger; a fence makes sure that "rolled back" stays true once it has been answered.

A message that is not in the ledger may belong to a transaction that is still open. Before "rolled back" is answered,
a marker is inserted with the primary key of the missing row: from then on that transaction cannot commit. Each marker
is committed in a transaction of its own, on separate connections: several in one would deadlock with blocks that send
several messages. Any failure on the way is answered UNKNOWN / NOT_NOW, and the center asks again, uncounted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

import sqlalchemy as sa

from tmc_client.checks.questions import Answer, Because, Question, Verdict
from tmc_client.forks import notice_fork, watch_forks
from tmc_client.local.engines import engine_beside, is_in_memory
from tmc_client.local.marker import COMMITTED, ROLLED_BACK, insert_marker, marker
from tmc_client.producing.ledger import ledger_id_of
from tmc_client.tables import lacking, ledger, ledger_info

log = logging.getLogger("tmc_client.checks.fence")

_CLOCKS_APART_MS = 3_600_000  # clock skew: messages are dated by the center's clock, cleaning by ours
_BUDGET_S = 1.5  # for the fences of one call; the center waits three seconds by default
_VERDICTS = {COMMITTED: Verdict.COMMIT, ROLLED_BACK: Verdict.ROLLBACK}


class LedgerAnswers:
    """Thread-safe. engine: of the business database; only its address and settings are used, not its connections."""

    def __init__(self, engine: sa.Engine, beside: dict[sa.Pool, sa.Engine] | None = None) -> None:
        """beside: see engines.engine_beside.

        Raises ValueError for SQLite in memory: it has one connection, and a fence needs a second one.
        """
        if is_in_memory(engine):
            raise ValueError("a ledger that answers checks cannot live in SQLite's memory: give it a file")
        self._engine = engine
        self._lock = threading.Lock()
        self._own: sa.Engine | None = None
        self._beside = {} if beside is None else beside
        watch_forks(self)

    def after_fork(self) -> None:
        """See forks.ForkAware: connections of the parent are not ours."""
        self._lock = threading.Lock()
        self._own = None
        self._beside.clear()

    def ledger_id(self) -> bytes:
        """Return the id of this ledger, which gets one if it has none. Raises SQLAlchemyError."""
        with self._connect() as connection:
            found = ledger_id_of(connection.execute)
            connection.commit()
        return found

    def answer(self, questions: Sequence[Question], *, fences: bool) -> list[Answer]:
        """One answer per question. fences: the caller has proved to be the center, so markers may be written."""
        until = time.monotonic() + _BUDGET_S
        try:
            known, ledger_id, horizon_ms = self._look(questions)
        except Exception as exc:  # drivers of asyncio raise errors of their own when they cannot connect
            why = self._lacking() or "the ledger cannot be read now."
            log.warning("checks are answered UNKNOWN: %s (%s)", why, _short(exc), exc_info=True)
            return [Answer.not_now(f"LEDGER_AWAY: {why}")] * len(questions)
        return [self._one(question, known, ledger_id, horizon_ms, fences, until) for question in questions]

    def _look(self, questions: Sequence[Question]) -> tuple[dict[str, int], bytes, int]:
        """States by message id, the ledger's id and its horizon."""
        ids = [question.message_id for question in questions]
        with self._connect() as connection:
            rows = connection.execute(
                sa.select(ledger.c.message_id, ledger.c.state).where(ledger.c.message_id.in_(ids))
            )
            known = {row.message_id: row.state for row in rows}
            # Read after the rows: cleaning moves the horizon before it deletes the first row.
            info = connection.execute(sa.select(ledger_info.c.ledger_id, ledger_info.c.horizon_ms)).one_or_none()
        return known, info.ledger_id if info is not None else b"", info.horizon_ms if info is not None else 0

    def _lacking(self) -> str:
        try:
            with self._connect() as connection:
                return lacking(connection, ledger_info, ledger)
        except Exception:  # noqa: BLE001 - the first error is logged
            return ""

    def _one(
        self, question: Question, known: dict[str, int], ledger_id: bytes, horizon_ms: int, fences: bool, until: float
    ) -> Answer:
        if not question.ledger_id or question.ledger_id != ledger_id:
            which = "another ledger" if question.ledger_id else "no ledger"
            detail = f"WRONG_LEDGER: the message was prepared with {which}."
            return Answer(Verdict.UNKNOWN, detail, Because.WRONG_LEDGER)
        state = known.get(question.message_id)
        if state is not None:
            return _of(state)
        if question.created_ms < horizon_ms + _CLOCKS_APART_MS and horizon_ms:
            return Answer(Verdict.UNKNOWN, "TOO_OLD: the ledger was cleaned since, its row may be gone.")
        if not fences:
            return Answer(Verdict.UNKNOWN, "NOT_THERE: a GET may not fence, set the option batch=true of the target.")
        if time.monotonic() > until:
            return Answer.not_now("IN_FLIGHT: there was no time left to fence it.")
        return self._fence(question)

    def _fence(self, question: Question) -> Answer:
        try:
            with self._connect() as connection:
                row = marker(question.message_id, question.topic, question.key, question.attempt_id)
                if not insert_marker(connection.execute, connection.dialect.name, row):
                    return Answer.not_now("IN_FLIGHT: its transaction is being committed.")
                connection.commit()
        except sa.exc.IntegrityError:
            return self._after_all(question)
        except Exception as exc:  # noqa: BLE001 - as above; the answer says it
            return Answer.not_now(f"IN_FLIGHT: {_short(exc)}")
        return Answer(Verdict.ROLLBACK, "FENCED: it is not in the ledger and cannot get there any more.")

    def _after_all(self, question: Question) -> Answer:
        """Look again in a new transaction: the row was inserted between the first look and the marker."""
        try:
            known, _, _ = self._look([question])
        except Exception as exc:  # noqa: BLE001 - as above; the answer says it
            return Answer.not_now(f"LEDGER_AWAY: {_short(exc)}")
        state = known.get(question.message_id)
        return Answer.not_now("IN_FLIGHT: it came and went.") if state is None else _of(state)

    def _connect(self) -> sa.Connection:
        notice_fork()
        with self._lock:
            if self._own is None:
                self._own = engine_beside(self._engine, self._beside)
            own = self._own
        return own.connect()

    def close(self) -> None:
        with self._lock:
            own, self._own = self._own, None
        if own is not None:
            own.dispose()
            self._beside.pop(self._engine.pool, None)


def _of(state: int) -> Answer:
    verdict = _VERDICTS.get(state, Verdict.UNKNOWN)
    return Answer(verdict, f"LEDGER: {verdict.name} is written there.")


def _short(exc: Exception) -> str:
    return str(getattr(exc, "orig", exc))[:200]
