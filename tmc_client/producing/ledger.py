"""The producer's ledger: one row per message, written by the local transaction that the message belongs to.

It is the authority on what committed: after a restart, a producer submits the messages whose submit was never
answered (`Center.resume`), and checks are answered from it. A row is settled once its submit has been answered. The
table lives in the business database: call `create_tables(engine)`, or add `tables.metadata` to your migrations.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import sqlalchemy as sa

from tmc_client import errors
from tmc_client.forks import notice_fork, watch_forks
from tmc_client.local.engines import Source, engine_of
from tmc_client.local.marker import COMMITTED, ROLLED_BACK
from tmc_client.producing.answered import SETTLE_BATCH
from tmc_client.producing.producer import Prepared, Producer, wait
from tmc_client.tables import compare_exactly, ledger, ledger_info, metadata, raise_if_lacking

log = logging.getLogger("tmc_client.ledger")

_RESUME_PAGE = 500
_SETTLE_AT = 200
_SETTLE_EVERY_S = 0.5


def create_tables(engine: Source) -> None:
    """Create the tables of ledger, inbox and outbox where they are missing, mend those of earlier versions. Safe to repeat.

    engine: or a function that returns a new connection of a driver. Raises InvalidRequest for anything else.
    """
    create_tables_of(engine_of(engine, "tmc.create_tables()"))


def create_tables_of(engine: sa.Engine) -> None:
    """Create the tables, also over the blocking side of an AsyncEngine, in its greenlet."""
    last = len(metadata.tables) + 1
    for attempt in range(last + 1):  # processes that start at the same time may race for each table
        try:
            metadata.create_all(engine)
            with engine.begin() as connection:
                compare_exactly(connection)
                ledger_id_of(connection.execute)
            return
        except (sa.exc.OperationalError, sa.exc.IntegrityError, sa.exc.ProgrammingError):
            if attempt == last:
                raise


_LEDGER_ID = sa.select(ledger_info.c.ledger_id)
_LEDGER_ID_NOW = _LEDGER_ID.with_for_update(read=True)  # what others have committed since our snapshot, too
_NEW = sa.select(
    sa.literal_column("1"), sa.bindparam("new", type_=ledger_info.c.ledger_id.type), sa.literal_column("0")
)
_NEW_LEDGER_ID = (
    ledger_info.insert()
    .prefix_with("IGNORE", dialect="mysql")
    .prefix_with("IGNORE", dialect="mariadb")
    .prefix_with("OR IGNORE", dialect="sqlite")
    .from_select(["id", "ledger_id", "horizon_ms"], _NEW.suffix_with("ON CONFLICT DO NOTHING", dialect="postgresql"))
)


def known_ledger_id(run: Callable[[Any, dict[str, Any]], Any]) -> bytes:
    """Return the id as `ledger_id_of` does; b"": it has none yet."""
    found = run(_LEDGER_ID, {}).fetchone()
    return b"" if found is None else bytes(found[0])


def ledger_id_of(run: Callable[[Any, dict[str, Any]], Any]) -> bytes:
    """The random id of this ledger, created on first use: checks name the ledger they refer to.

    run: see LocalTransaction. Read in each block, since a connection may change its schema, e.g. with the tenant.
    Of several first transactions at once, one creates it and the others wait for that one.
    """
    known = known_ledger_id(run)
    if known:
        return known
    run(_NEW_LEDGER_ID, {"new": os.urandom(16)})
    return bytes(run(_LEDGER_ID_NOW, {}).fetchone()[0])


def rows_for(messages: Sequence[Prepared]) -> list[dict[str, Any]]:
    """Ledger rows in message order, so that two blocks take their locks in the same order."""
    now = time.time_ns() // 1_000_000
    rows = [
        {
            "message_id": message.message_id,
            "state": COMMITTED,
            "topic": message.topic,
            "message_key": message.key,
            "attempt_id": message.attempt_id,
            "created_ms": now,
            "settled_ms": None,
        }
        for message in messages
    ]
    return sorted(rows, key=lambda row: str(row["message_id"]))


def fenced(message_ids: Sequence[str]) -> sa.Select[Any]:
    """The query for rollback markers of these messages."""
    return sa.select(ledger.c.message_id).where(
        ledger.c.message_id.in_(list(message_ids)), ledger.c.state == ROLLED_BACK
    )


def settle_statement(message_ids: Sequence[str]) -> sa.Update:
    """Mark rows as answered."""
    now = time.time_ns() // 1_000_000
    return _settling(list(message_ids)).values(settled_ms=now)


def _settling(message_ids: Sequence[Any]) -> sa.Update:
    """Build the update of these rows, by the primary key.

    On MariaDB, a scan of a small table would wait for every block that is about to commit.
    """
    change = ledger.update().where(ledger.c.message_id.in_(message_ids))
    for dialect in ("mysql", "mariadb"):
        change = change.with_hint("FORCE INDEX (PRIMARY)", dialect_name=dialect)
    return change


_SETTLE_EXACTLY = _settling([sa.bindparam(f"id{number}") for number in range(SETTLE_BATCH)]).values(
    settled_ms=sa.bindparam("now")
)


def settle_batch(message_ids: Sequence[str]) -> tuple[sa.Update, dict[str, Any]]:
    """Mark exactly SETTLE_BATCH rows as answered: a statement that is compiled once, and its parameters."""
    ids = {f"id{number}": message_id for number, message_id in enumerate(sorted(message_ids))}
    return _SETTLE_EXACTLY, {**ids, "now": time.time_ns() // 1_000_000}


def unsettled_after(message_id: str) -> sa.Select[Any]:
    """The query for a page of committed messages whose submit was never answered, ordered by id; for `prepared_by`."""
    return (
        sa.select(ledger.c.message_id, ledger.c.topic, ledger.c.message_key, ledger.c.attempt_id)
        .where(ledger.c.settled_ms.is_(None), ledger.c.state == COMMITTED, ledger.c.message_id > message_id)
        .order_by(ledger.c.message_id)
        .limit(_RESUME_PAGE)
    )


def prepared_by(row: sa.Row[Any]) -> Prepared:
    """Return the message of a row of the ledger, to submit it."""
    return Prepared(message_id=row.message_id, topic=row.topic, key=row.message_key, attempt_id=bytes(row.attempt_id))


def answered(outcomes: Iterable[tuple[str, BaseException | None]]) -> tuple[list[str], BaseException | None]:
    """Sort out what came of submits. outcomes: each message with what its submit raised.

    Returns: the messages that are answered; and the first error that a retry or a corrected configuration can cure, or that
    is not the center's: to raise once they are marked. Other errors are logged.
    """
    found: list[str] = []
    first: BaseException | None = None
    for message_id, exc in outcomes:
        if exc is None or isinstance(exc, errors.Gone):  # closed long ago, so it was decided: only its mark was lost
            found.append(message_id)
        elif not isinstance(exc, errors.TmcError) or exc.retryable or isinstance(exc, errors.NotAuthenticated):
            first = first or exc
        else:
            log.error("message %s is in the ledger but the center refuses its submit: %s", message_id, exc)
    return found, first


def resume(producer: Producer, engine: Source, timeout: timedelta = timedelta(seconds=30)) -> int:
    """See Center.resume."""
    engine = engine_of(engine, "center.resume()")
    submitted, last = 0, ""
    while True:
        try:
            with engine.connect() as connection:
                page = [prepared_by(row) for row in connection.execute(unsettled_after(last))]
        except sa.exc.SQLAlchemyError as exc:
            raise_if_lacking(exc, engine, ledger)
            raise
        if not page:
            return submitted
        last = page[-1].message_id
        futures = [producer.submit(message, timeout) for message in page]
        done, failure = answered(
            (message.message_id, _raised(future, timeout)) for message, future in zip(page, futures, strict=True)
        )
        submitted += len(done)
        if done:
            with engine.begin() as connection:
                connection.execute(settle_statement(done))
        if failure is not None:
            raise failure


def _raised(future: Future[Any], timeout: timedelta) -> errors.TmcError | None:
    try:
        wait(future, timeout)
    except errors.TmcError as exc:
        return exc
    return None


class Settler:
    """Settles answered messages in their ledgers, in background batches. A lost mark costs one repeated submit."""

    def __init__(self) -> None:
        self.after_fork()
        watch_forks(self)

    def after_fork(self) -> None:
        """See forks.ForkAware: the parent marks its own."""
        self._condition = threading.Condition()
        self._writing = threading.RLock()  # a signal handler may close the center while the same thread does
        self._waiting: dict[sa.Engine, list[str]] = {}
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, engine: sa.Engine, message_ids: Sequence[str]) -> None:
        notice_fork()
        with self._condition:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="tmc-settler", daemon=True)
                self._thread.start()
                atexit.register(self._flush_at_exit, os.getpid())
            waiting = self._waiting.setdefault(engine, [])
            waiting.extend(message_ids)
            if len(waiting) >= _SETTLE_AT:
                self._condition.notify_all()

    def _run(self) -> None:
        while not self._closed:
            with self._condition:
                self._condition.wait(_SETTLE_EVERY_S)
            self.flush()

    def flush(self) -> None:
        """Write what waits, and what is being written: afterward no connection of the program is in use here."""
        with self._writing:
            self._write()

    def _write(self) -> None:
        with self._condition:
            waiting, self._waiting = self._waiting, {}
        for engine, ids in waiting.items():
            try:
                with engine.begin() as connection:
                    connection.execute(settle_statement(ids))
            except Exception as exc:  # a user's event listener or a driver may raise anything; keep the thread alive
                log.warning(
                    "%d answered messages stay unsettled and are submitted again at the next start: %s",
                    len(ids),
                    exc,
                    exc_info=True,
                )

    def _flush_at_exit(self, process: int) -> None:
        """Flush for a program that ends without closing its center; not of its forked children, which have their own."""
        if process == os.getpid():
            self.flush()

    def close(self) -> None:
        atexit.unregister(self._flush_at_exit)
        self._closed = True
        with self._condition:
            self._condition.notify_all()
        self.flush()
