"""One open transaction over one shard, as the parts of a batch see it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from tmc_server.domain.catalog import Catalog
from tmc_server.domain.fingerprint import fingerprint
from tmc_server.domain.ids import first_number
from tmc_server.domain.numbers import MessageNumber, SubscriptionNumber
from tmc_server.domain.ports.delivery import Copy, Outlet
from tmc_server.domain.ports.reading import Flow
from tmc_server.store.auditing import act
from tmc_server.store.dialects import dialect_of
from tmc_server.store.sql import InsertRows, Literals
from tmc_server.store.statements import ShardStatements

Hook = Callable[[str], None]
"""Called at named points of a transaction; tests park a thread there.

Points: begin, read, locked, lines locked, buried, written, committed.
"""


def no_hook(_point: str) -> None:
    """Production does nothing at the hook points."""


class GuardBroken(Exception):
    """A guarded UPDATE changed another number of rows than was decided: the transaction must not commit."""


@dataclass
class Transaction:
    """now: milliseconds, the database's clock, one value for the whole transaction.

    incarnation: this server run; None: its heartbeat is over, nothing may be handed over.
    traffic: what it submits and acks.
    drained_until: by subscription, the time of the newest attempt that a consumer answered in this transaction.
    """

    connection: sa.Connection
    now: int
    sql: ShardStatements
    catalog: Catalog
    catalog_is_stale: bool
    outlet: Outlet
    incarnation: int | None
    reach: Hook = no_hook
    copies: list[Copy] = field(default_factory=list)
    reserved: Counter[SubscriptionNumber] = field(default_factory=Counter)
    drained_until: Counter[SubscriptionNumber] = field(default_factory=Counter)
    failed: Counter[tuple[int, SubscriptionNumber]] = field(
        default_factory=Counter
    )  # by topic and subscription; 0: a check's
    traffic: Counter[Flow] = field(default_factory=Counter)
    _horizon: int | None = None

    @property
    def locking_reads_see_inserts(self) -> bool:
        return dialect_of(self.connection.dialect.name).locking_reads_see_inserts

    def rows(self, statement: sa.Executable | Literals, **parameters: Any) -> Sequence[Any]:
        """Return the rows, with an attribute per column."""
        if isinstance(statement, Literals):
            return statement.rows(self.connection, **parameters)
        return self.connection.execute(statement, parameters).fetchall()

    def execute(self, statement: sa.Executable | Literals, **parameters: Any) -> sa.CursorResult[Any]:
        """Run a statement whose row count is an answer, not an expectation."""
        if isinstance(statement, Literals):
            return statement.run(self.connection, **parameters)
        return self.connection.execute(statement, parameters)

    def is_gone(self, number: MessageNumber) -> bool:
        """Return whether a message that is not there may have been removed by the retention duty: it is older than
        the horizon.
        """
        if self._horizon is None:
            found = self.rows(self.sql.retained)
            self._horizon = first_number(found[0].horizon_ms) if found else 0
        return number < self._horizon

    def insert(self, statement: InsertRows, rows: Sequence[Mapping[str, Any]]) -> None:
        if rows:
            statement.run(self.connection, rows)

    def insert_free(self, statement: InsertRows, rows: Sequence[Mapping[str, Any]]) -> set[Any]:
        """Insert rows that clash with none, see Dialect.insert_free. Returns: the first column of what is in."""
        return statement.run_free(self.connection, rows) if rows else set()

    def change(self, statement: sa.Executable | Literals, expected: int, **parameters: Any) -> None:
        """Run a guarded UPDATE or DELETE that must hit `expected` rows."""
        changed = self.execute(statement, **parameters).rowcount
        if changed != expected:
            raise GuardBroken(f"{changed} rows instead of {expected}: {statement}")

    def note(self, actor: str, action: str, subject: str, reason: str) -> None:
        """Insert an audit row in the transaction of the change."""
        self.insert(self.sql.insert_audit, [act(self.now, actor, action, subject, reason=reason)])

    def note_failed(self, topic: int, subscription: SubscriptionNumber, causes: Mapping[MessageNumber, str]) -> None:
        """Record what now waits for an operator: FAILED deliveries, or CHECK_FAILED messages under subscription 0.

        causes: the error of each.
        """
        rows = [
            {
                "shard": self.sql.shard,
                "topic_no": topic,
                "subscription_no": subscription,
                "message_id": number,
                "failed_ms": self.now,
                "fingerprint": fingerprint(cause),
            }
            for number, cause in sorted(causes.items())
        ]
        self.insert(self.sql.insert_failed, rows)
        self.failed[topic, subscription] += len(rows)

    def note_recovered(self, topic: int, subscription: SubscriptionNumber, numbers: Sequence[MessageNumber]) -> None:
        """Delete the records of rows that are no longer FAILED or CHECK_FAILED."""
        self.execute(self.sql.delete_failed, topic=topic, subscription=subscription, ids=sorted(numbers))

    def reserve(self, subscription: SubscriptionNumber, wanted: int) -> int:
        """Reserve room at the outlet; it is released automatically if the transaction fails."""
        granted = self.outlet.reserve(subscription, wanted) if self.incarnation is not None else 0
        self.reserved[subscription] += granted
        return granted

    def release(self) -> None:
        """The transaction failed: nothing will be delivered."""
        for subscription, count in self.reserved.items():
            self.outlet.release(subscription, count)
        self.reserved.clear()
        self.copies = []

    def alert_once(self, alerts: Iterable[Mapping[str, Any]]) -> None:
        """Put alerts into the outbox; one per kind, message, subscription and attempt.

        The caller holds the lock of the row that each alert is about, so looking first is safe.
        """
        wanted: dict[tuple[str, SubscriptionNumber], dict[tuple[MessageNumber, int], Mapping[str, Any]]] = {}
        for alert in alerts:
            alike = wanted.setdefault((alert["kind"], alert["subscription_no"]), {})
            alike.setdefault((alert["message_id"], alert["attempt"]), alert)
        fresh: list[Mapping[str, Any]] = []
        for (kind, subscription), alike in wanted.items():
            numbers = sorted({number for number, _ in alike})
            known = self.rows(self.sql.alerts_about, kind=kind, subscription=subscription, ids=numbers)
            seen = {(row.message_id, row.attempt) for row in known}
            fresh += [alert for about, alert in alike.items() if about not in seen]
        common = {"shard": self.sql.shard, "created_ms": self.now, "sent_ms": None}
        self.insert(self.sql.insert_alerts, [{"fingerprint": "", **alert, **common} for alert in fresh])
