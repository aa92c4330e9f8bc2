"""The outbox's SQL: which messages are due, what became of them, and which relay works."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import sqlalchemy as sa

from tmc_client import errors
from tmc_client.cleaning import delete_pages
from tmc_client.outbox.entries import Draft, Entry, State
from tmc_client.tables import ledger_info, raise_if_lacking
from tmc_client.tables import outbox as table
from tmc_client.tables import outbox_relay as relay
from tmc_common.clocks import CLOCK_MS

log = logging.getLogger("tmc_client.outbox")

_UNSENT = table.c.state == int(State.UNSENT)
ALWAYS_DUE_MS = 1  # ordered messages are always due, so a fast clock cannot delay others
_PAGE = 1_000
_FAR_AHEAD = 10  # leases
_PAGE_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True)
class OutboxStats:
    """How an outbox stands. sent_directly: of those sent.  oldest_unsent_ms: when it was added, milliseconds since the
    epoch; None: all is sent.
    """

    unsent: int
    sent: int
    sent_directly: int
    failed: int
    oldest_unsent_ms: int | None

    @property
    def direct_share(self) -> float:
        """0 to 1; 0: nothing was sent."""
        return self.sent_directly / self.sent if self.sent else 0.0

    @property
    def failed_share(self) -> float:
        """0 to 1, of all that is sent or given up."""
        closed = self.sent + self.failed
        return self.failed / closed if closed else 0.0


@dataclass(frozen=True, kw_only=True)
class Head:
    """The first of a line. due_ms: None: it was given up, and everything behind it waits."""

    id: int
    due_ms: int | None


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A message as the table has it. Times: milliseconds since the epoch; None: not sent."""

    id: int
    topic: str
    key: str
    order_key: str
    state: State
    tries: int
    created_ms: int
    sent_ms: int | None
    direct: bool
    error: str


class OutboxStore:
    """Raises Unavailable if the database does not answer. engine: of the business database.

    clock: milliseconds since the epoch, for tests; by default the database's.
    """

    def __init__(self, engine: sa.Engine, clock: Callable[[], int] | None = None) -> None:
        self.engine = engine
        self._clock = clock
        self._ledger_id = b""
        self._believes = False

    @contextmanager
    def _reading(self) -> Iterator[sa.Connection]:
        """Raises Unavailable; InvalidRequest if our tables are missing."""
        with self._translated(), self.engine.connect() as connection:
            yield connection

    @contextmanager
    def _writing(self) -> Iterator[sa.Connection]:
        """One transaction. Raises as `_reading`."""
        with self._translated(), self.engine.begin() as connection:
            yield connection

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except sa.exc.SQLAlchemyError as exc:
            raise_if_lacking(exc, self.engine, table, relay, ledger_info)
            raise errors.Unavailable(
                f"The database of this outbox does not answer: {getattr(exc, 'orig', exc)}"
            ) from exc

    def ledger_id(self) -> bytes:
        """Return which database this is; b"": nobody has asked for it yet, so that it has no id. Read once."""
        if not self._ledger_id:
            with self._reading() as connection:
                self._ledger_id = _ledger_id(connection)
        return self._ledger_id

    def believe(self, ledger_id: bytes) -> None:
        """Believe what a transaction over our own pool has read. It holds a connection: a second one is taken later, to see."""
        if ledger_id and not self._ledger_id:
            self._ledger_id, self._believes = ledger_id, True

    def _see(self, connection: sa.Connection) -> None:
        self._believes = False
        found = _ledger_id(connection)
        if found != self._ledger_id:
            self._ledger_id = found
            log.error(
                "messages were added in another schema than that of the outbox, by a search_path or the like, and nobody sends "
                "them: give the outbox an engine whose connections are in the schema of its sessions"
            )

    def now(self) -> int:
        """Milliseconds since the epoch."""
        with self._reading() as connection:
            return self._now(connection)

    def _now(self, connection: sa.Connection) -> int:
        expression = CLOCK_MS.get(self.engine.dialect.name)
        if self._clock is not None:
            return self._clock()
        if expression is None:
            return now_ms()
        return int(connection.exec_driver_sql(f"SELECT {expression}").scalar_one())

    def hold(self, owner: str, lease_ms: int) -> int | None:
        """Become or stay the relay that works, for `lease_ms`. Returns: the time; None: another one works."""
        with self._writing() as connection:
            now = self._now(connection)
            # A lease that ends much later than any can was written before the database's clock was set back.
            is_over = sa.or_(relay.c.until_ms < now, relay.c.until_ms > now + _FAR_AHEAD * lease_ms)
            free = sa.or_(relay.c.owner == owner, is_over)
            mine = relay.update().where(relay.c.id == 1, free).values(owner=owner, until_ms=now + lease_ms)
            if connection.execute(mine).rowcount == 1:
                return now
            if connection.execute(sa.select(relay.c.id)).one_or_none() is not None:
                return None
        with suppress(errors.Unavailable), self._writing() as connection:  # another one may be faster
            connection.execute(relay.insert().values(id=1, owner=owner, until_ms=now + lease_ms))
            return now
        return None

    def let_go(self, owner: str) -> None:
        """Another relay may work at once."""
        with self._writing() as connection:
            connection.execute(relay.update().where(relay.c.owner == owner).values(until_ms=0))

    def due(self, now: int, limit: int) -> list[Entry]:
        """Return those unsent messages that are due longest, in the order of their ids; of large ones fewer, at least one."""
        sizes = sa.select(table.c.id, sa.func.length(table.c.body)).where(table.c.due_ms <= now)
        with self._reading() as connection:
            found = connection.execute(sizes.order_by(table.c.due_ms, table.c.id).limit(limit)).all()
        return self.by_ids(_fitting(found))

    def by_ids(self, ids: Sequence[int]) -> list[Entry]:
        """Return those of these messages that are not sent."""
        if not ids:
            return []
        with self._reading() as connection:
            if self._believes:
                self._see(connection)
            query = sa.select(table).where(table.c.id.in_(sorted(ids)), _UNSENT).order_by(table.c.id)
            return [Entry.of(row) for row in connection.execute(query)]

    def by_drafts(self, drafts: Sequence[Draft]) -> list[Entry]:
        """Return those of these that are there and not sent."""
        attempts = {draft.attempt_id for draft in drafts}
        return [entry for entry in self.by_ids([draft.id for draft in drafts]) if entry.attempt_id in attempts]

    def heads(self, entries: Iterable[Entry]) -> Mapping[str, Head]:
        """The first message that is not sent of each line of these, by line."""
        ids = sorted(entry.id for entry in entries if entry.line)
        if not ids:
            return {}
        lines = sa.select(table.c.line).where(table.c.id.in_(ids)).distinct().subquery()
        row = table.alias()  # the first of each line by the index, however many there are
        first = sa.select(row.c.id).where(row.c.line == lines.c.line).order_by(row.c.id).limit(1).scalar_subquery()
        with self._reading() as connection:
            heads = list(connection.execute(sa.select(first).select_from(lines)).scalars())
            query = sa.select(table.c.line, table.c.id, table.c.due_ms).where(table.c.id.in_(heads))
            found = connection.execute(query.where(table.c.line.is_not(None)))  # not sent in between
            return {row.line: Head(id=row.id, due_ms=row.due_ms) for row in found}

    def sent(self, ids: Sequence[int], *, direct: bool) -> None:
        """Note that the target took these."""
        values = {"state": int(State.SENT), "due_ms": None, "line": None, "direct": int(direct), "error": ""}
        with self._writing() as connection:
            mine = _by_ids(table.update(), ids).where(_UNSENT)
            connection.execute(mine.values(sent_ms=now_ms() if self._clock is None else self._clock(), **values))

    def later(self, entries: Sequence[Entry], due_ms: int, error: str = "", tries: int = 0) -> None:
        """Try these again at that time. tries: counted on top."""
        values: dict[str, Any] = {"due_ms": due_ms, "tries": table.c.tries + tries}
        if error:
            values["error"] = error[:500]
        self._change(entries, values)

    def postpone(self, line: str, due_ms: int | None) -> None:
        """Postpone what is behind the head of a line to that time; None: until the head, which was given up, is decided
        about.
        """
        earlier = table.c.due_ms.is_not(None) if due_ms is None else table.c.due_ms < due_ms
        behind = sa.select(table.c.id).where(table.c.line == line, _UNSENT, earlier).limit(_PAGE)
        while True:
            with self._writing() as connection:  # read first: one that is about to commit must not be waited for
                ids = connection.execute(behind).scalars().all()
                if not ids:
                    return
                connection.execute(_by_ids(table.update(), ids).where(_UNSENT).values(due_ms=due_ms))

    def failed(self, entries: Sequence[Entry], error: str) -> None:
        """Give these up. A line stays behind its message."""
        values = {"state": int(State.FAILED), "due_ms": None, "tries": table.c.tries + 1, "error": error[:500]}
        self._change(entries, values)

    def _change(self, entries: Sequence[Entry], values: Mapping[str, Any]) -> None:
        with self._writing() as connection:
            mine = _by_ids(table.update(), [entry.id for entry in entries]).where(_UNSENT)
            connection.execute(mine.values(**values))

    def standing(self) -> OutboxStats:
        """Counts by state."""
        counts = sa.select(table.c.state, table.c.direct, sa.func.count(), sa.func.min(table.c.created_ms))
        with self._reading() as connection:
            rows = connection.execute(counts.group_by(table.c.state, table.c.direct)).fetchall()
        found = {(State(state), bool(direct)): (count, oldest) for state, direct, count, oldest in rows}
        none = (0, None)
        directly = found.get((State.SENT, True), none)[0]
        unsent, oldest = found.get((State.UNSENT, False), none)
        return OutboxStats(
            unsent=unsent,
            sent=directly + found.get((State.SENT, False), none)[0],
            sent_directly=directly,
            failed=found.get((State.FAILED, False), none)[0],
            oldest_unsent_ms=oldest,
        )

    def by_key(self, key: str) -> list[Kept]:
        """Return all messages with this key, in the order in which they were added."""
        return self._kept(sa.select(table).where(table.c.message_key == key))

    def given_up(self, limit: int) -> list[Kept]:
        """FAILED messages, the oldest first."""
        return self._kept(sa.select(table).where(table.c.state == int(State.FAILED)).limit(limit))

    def _kept(self, query: sa.Select[Any]) -> list[Kept]:
        columns = [column for column in table.c if column.name not in ("body", "headers")]
        with self._reading() as connection:
            rows = connection.execute(query.with_only_columns(*columns).order_by(table.c.id))
            return [
                Kept(
                    id=row.id,
                    topic=row.topic,
                    key=row.message_key,
                    order_key=row.order_key,
                    state=State(row.state),
                    tries=row.tries,
                    created_ms=row.created_ms,
                    sent_ms=row.sent_ms,
                    direct=bool(row.direct),
                    error=row.error,
                )
                for row in rows
            ]

    def retry(self, ids: Sequence[int]) -> int:
        """Try FAILED messages again, with a fresh count and age. Returns: how many."""
        now = self.now()
        values = {"state": int(State.UNSENT), "tries": 0, "due_ms": now, "created_ms": now}
        return self._of_failed(table.update().values(**values), ids)

    def discard(self, ids: Sequence[int]) -> int:
        """Delete FAILED messages; what waits behind them is sent. Returns: how many."""
        return self._of_failed(table.delete(), ids)

    def _of_failed(self, change: Any, ids: Sequence[int]) -> int:
        given_up = table.c.state == int(State.FAILED)
        with self._writing() as connection:
            named = sa.select(table.c.line).where(table.c.id.in_(sorted(ids)), given_up, table.c.line.is_not(None))
            lines = list(connection.execute(named).scalars())
            changed = int(connection.execute(_by_ids(change, ids).where(given_up)).rowcount)
            parked = (table.c.line.in_(sorted(set(lines))), _UNSENT, table.c.due_ms.is_(None))
            connection.execute(table.update().where(*parked).values(due_ms=ALWAYS_DUE_MS))
            return changed

    def clean(self, older_than: timedelta) -> int:
        """Delete messages that were sent longer ago than that. Returns: how many."""
        before = self.now() - round(older_than.total_seconds() * 1000)
        old = (table.c.state == int(State.SENT), table.c.direct.in_((0, 1)), table.c.created_ms < before)
        return delete_pages(self._writing, table.c.id, *old, table.c.sent_ms < before)


def _ledger_id(connection: sa.Connection) -> bytes:
    return connection.execute(sa.select(ledger_info.c.ledger_id)).scalar() or b""


def _by_ids(change: Any, ids: Sequence[int]) -> Any:
    """Limit a change to these ids.

    An UPDATE goes by the primary key and nothing else: on MariaDB, a scan would wait for every row that somebody is
    about to commit.
    """
    if isinstance(change, sa.Update):  # a DELETE takes no such hint
        for dialect in ("mysql", "mariadb"):
            change = change.with_hint("FORCE INDEX (PRIMARY)", dialect_name=dialect)
    return change.where(table.c.id.in_(sorted(ids)))


def _fitting(sizes: Iterable[Any]) -> list[int]:
    """The first ids whose bodies have a few megabytes together; at least one. sizes: ids with the bytes of their bodies."""
    total, fitting = 0, list[int]()
    for number, size in sizes:
        total += size
        if fitting and total > _PAGE_BYTES:
            break
        fitting.append(number)
    return fitting


def columns_of(request: Any, line: str, *, created_ms: int, due_ms: int) -> dict[str, Any]:
    """The row of a message. request: a PublishRequest."""
    return {
        "topic": request.topic,
        "message_key": request.key,
        "order_key": request.order_key,
        "line": line or None,
        "body": request.body,
        "content_type": request.content_type,
        "headers": json.dumps(dict(request.headers)),
        "delay_ms": request.delay_ms,
        "attempt_id": request.attempt_id,
        "state": int(State.UNSENT),
        "tries": 0,
        "due_ms": due_ms,
        "created_ms": created_ms,
        "sent_ms": None,
        "direct": 0,
        "error": "",
    }


def now_ms() -> int:
    """Return this machine's time, milliseconds since the epoch."""
    return time.time_ns() // 1_000_000
