"""The lines of order keys in one transaction: lock them, let messages join, and advance when a head is closed.

A line's row is locked only if it is free: an operation that finds it locked is retried. Holding it, a transaction is the
only one that gives sequences in this line, closes its head, or schedules the next of its deliveries.
Source: docs/decisions/0022-order.md.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

import sqlalchemy as sa

from tmc_server.domain import consumption
from tmc_server.domain.catalog import Subscription
from tmc_server.domain.consumption import Row
from tmc_server.domain.numbers import (
    FIRST_ATTEMPT,
    NO_MESSAGE,
    MessageNumber,
    OrderHash,
    OrderSequence,
    SubscriptionNumber,
)
from tmc_server.domain.ordering import Line
from tmc_server.store.copies import load_copies
from tmc_server.store.engines import StoreConflict
from tmc_server.store.scanning import chunks
from tmc_server.store.tables import waiting
from tmc_server.store.transaction import GuardBroken, Transaction

_DELETED_AT_ONCE = 200

LineName = tuple[SubscriptionNumber, OrderHash]


class Lines:
    """Lines that this transaction has locked; a context manager that writes what changed.

    busy: those that another transaction has locked.
    """

    def __init__(self, tx: Transaction, names: Iterable[LineName] = (), wait: bool = False) -> None:
        """wait: for transactions that have locked them, instead of leaving them alone."""
        self._tx = tx
        self._lines: dict[LineName, Line] = {}
        self._stored: set[LineName] = set()
        self._changed: set[LineName] = set()
        self._emptied: set[LineName] = set()
        self.busy: set[LineName] = set()
        for subscription, hashes in sorted(_by_subscription(names).items()):
            self._lock(subscription, sorted(hashes), wait)

    def _lock(self, subscription: SubscriptionNumber, hashes: Sequence[OrderHash], wait: bool) -> None:
        tx = self._tx
        statement = tx.sql.lines.lock_waiting if wait else tx.sql.lines.lock
        for row in tx.rows(statement, subscription=subscription, ids=hashes):
            name = (subscription, OrderHash(row.order_hash))
            self._lines[name] = Line(head=MessageNumber(row.head_id), last=OrderSequence(row.last_sequence))
            self._stored.add(name)
        missing = [each for each in hashes if (subscription, each) not in self._lines]
        locked = tx.rows(tx.sql.lines.existing, subscription=subscription, ids=missing) if missing and not wait else ()
        self.busy.update((subscription, OrderHash(row.order_hash)) for row in locked)
        for each in missing:
            if (subscription, each) not in self.busy:
                self._lines[subscription, each] = Line()
        tx.reach("lines locked")

    def is_head(self, name: LineName | None, number: MessageNumber) -> bool:
        """name None: the delivery is in no line."""
        line = self._lines.get(name) if name is not None else None
        return line is not None and line.head == number

    def join(self, name: LineName, number: MessageNumber) -> tuple[OrderSequence, bool]:
        """A message joins at the end. Returns: its sequence, and whether it waits for others."""
        line = self._lines[name] = self._lines[name].join(number, self._tx.now)
        self._changed.add(name)
        return line.last, line.head != number

    def leave(self, subscription: SubscriptionNumber, places: Iterable[tuple[OrderHash, OrderSequence]]) -> None:
        """Remove deliveries that no longer wait."""
        for part in chunks(sorted(places), _DELETED_AT_ONCE):
            # MariaDB looks up each part of an OR in the primary key, but scans for a list of pairs.
            which = " OR ".join(f"(order_hash = {int(each)} AND sequence = {int(at)})" for each, at in part)
            of_it = f"DELETE FROM {waiting.name} WHERE subscription_no = {int(subscription)}"
            left = self._tx.connection.exec_driver_sql(f"{of_it} AND ({which})").rowcount
            if left != len(part):
                raise GuardBroken(f"{left} rows instead of {len(part)} left their lines")

    def advance(self, subscription: Subscription, closed: Mapping[OrderHash, OrderSequence | None]) -> int:
        """The heads of these lines are closed: schedule the next delivery of each. Returns: how many were scheduled.

        closed: lines with the sequence of their closed heads; None: not known.
        """
        last = {each: self._lines[subscription.number, each].last for each in closed}
        followed = sorted(each for each, sequence in closed.items() if sequence != last[each])
        found: Sequence[Any] = ()
        if followed:
            found = self._tx.rows(self._tx.sql.lines.next, subscription=subscription.number, ids=followed)
        following = {OrderHash(row.order_hash): MessageNumber(row.message_id) for row in found}
        for each in closed:
            name = (subscription.number, each)
            self._lines[name] = self._lines[name].advance(following.get(each, NO_MESSAGE))
            (self._changed if each in following else self._emptied).add(name)
        self.release(subscription, found)
        return len(found)

    def release(self, subscription: Subscription, found: Sequence[Any], in_turn: bool = True) -> None:
        """Schedule WAITING rows, given as rows of the waiting table; those that are due and have room go out at once.

        in_turn False: their order key has no effect any more.
        """
        if not found:
            return
        tx = self._tx
        self.leave(subscription.number, [(OrderHash(row.order_hash), OrderSequence(row.sequence)) for row in found])
        prompt = sorted(MessageNumber(row.message_id) for row in found if row.due_ms <= tx.now)
        room = tx.reserve(subscription.number, len(prompt)) if prompt and not subscription.is_removed else 0
        going = set(prompt[:room])
        sequences = {row.message_id: OrderSequence(row.sequence) for row in found} if in_turn else {}
        groups: dict[Row, list[MessageNumber]] = {}
        for row in found:
            number = MessageNumber(row.message_id)
            if number in going:
                after = consumption.first_try(subscription.policy, tx.now, number)
            else:
                after = consumption.untried(max(row.due_ms, tx.now))
            groups.setdefault(after, []).append(number)
        for after, numbers in groups.items():
            goes_out = after.tried > 0
            tx.change(
                tx.sql.lines.release if in_turn else tx.sql.lines.release_out_of_order,
                len(numbers),
                subscription=subscription.number,
                ids=sorted(numbers),
                new_attempt=after.attempt,
                new_tried=after.tried,
                new_due_ms=after.due_ms,
                new_incarnation=tx.incarnation if goes_out else None,
                new_tried_ms=tx.now if goes_out else None,
                new_since_ms=tx.now if goes_out else after.due_ms,
            )
        load_copies(tx, subscription.number, going, FIRST_ATTEMPT, sequences)

    def __enter__(self) -> Lines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if exc is None:
            self._write()

    def _write(self) -> None:
        """Raises StoreConflict: another transaction began one of these lines at the same moment."""
        tx = self._tx
        for subscription, hashes in _by_subscription(self._emptied & self._stored).items():
            tx.change(tx.sql.lines.empty, len(hashes), subscription=subscription, ids=sorted(hashes))
        tx.insert(tx.sql.lines.replace, self._rows(self._changed & self._stored))
        try:
            tx.insert(tx.sql.lines.insert, self._rows(self._changed - self._stored))
        except sa.exc.IntegrityError as exc:
            raise StoreConflict("another transaction began the same line at the same moment") from exc

    def _rows(self, names: Collection[LineName]) -> list[dict[str, int]]:
        return [
            {
                "subscription_no": subscription,
                "order_hash": each,
                "head_id": self._lines[subscription, each].head,
                "last_sequence": self._lines[subscription, each].last,
                "shard": self._tx.sql.shard,
            }
            for subscription, each in sorted(names)
        ]


def _by_subscription(names: Iterable[LineName]) -> Mapping[SubscriptionNumber, set[OrderHash]]:
    found: dict[SubscriptionNumber, set[OrderHash]] = {}
    for subscription, each in names:
        found.setdefault(subscription, set()).add(each)
    return found
