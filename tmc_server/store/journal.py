"""The journal of a shard: attempts that failed, attempts that nobody answered, and checks that decided nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tmc_server.domain.numbers import Attempt, MessageNumber, SubscriptionNumber
from tmc_server.store.transaction import Transaction

NO_ACK = "no ack"
LOST = "no handler began this copy, and nobody answered; this attempt does not count"
DIED = "a handler began and never answered: its process ended, or lost the center"


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalRow:
    """subscription: NO_SUBSCRIPTION: a check.  tried_ms, tried_by: when and by which server run it was handed over; None: not
    known.  unanswered: nobody said anything.
    """

    number: MessageNumber
    subscription: SubscriptionNumber
    attempt: Attempt
    error: str
    tried_ms: int | None = None
    tried_by: int | None = None
    unanswered: bool = False


def write_journal(tx: Transaction, rows: Sequence[JournalRow]) -> None:
    """Write rows in the transaction of the change."""
    tx.insert(tx.sql.insert_attempts, [values_of(row, tx.now, tx.incarnation) for row in rows])


def last_errors(
    tx: Transaction, subscription: SubscriptionNumber, numbers: Sequence[MessageNumber]
) -> Mapping[MessageNumber, str]:
    """Return what consumers said last; only those that said something."""
    rows = tx.rows(tx.sql.failed_attempts, subscription=subscription, ids=sorted(numbers)) if numbers else ()
    return {row.message_id: row.error for row in rows}


def values_of(row: JournalRow, now: int, incarnation: int | None) -> Mapping[str, Any]:
    """incarnation: of the server run that writes it; None: its heartbeat is over."""
    return {
        "message_id": row.number,
        "subscription_no": row.subscription,
        "attempt": row.attempt,
        "at_ms": now,
        "incarnation": incarnation or 0,
        "error": row.error,
        "tried_ms": row.tried_ms,
        "tried_by": row.tried_by,
        "unanswered": int(row.unanswered),
    }
