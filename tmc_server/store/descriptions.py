"""What people see of a delivery in a list: its message's key, what went wrong last, and the fingerprint of that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from tmc_server.domain.numbers import MessageNumber, Shard, SubscriptionNumber
from tmc_server.store.journal import NO_ACK
from tmc_server.store.tables import failed, shard_tables

_Delivery = tuple[MessageNumber, SubscriptionNumber]


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """error: what its consumer said last; "no ack" of a FAILED delivery if it said nothing.  fingerprint: of a FAILED one."""

    key: str
    error: str
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """Which delivery. topic: number of the subscription's topic."""

    number: MessageNumber
    subscription: SubscriptionNumber
    topic: int
    failed: bool


def descriptions(
    connection: sa.Connection, shard: Shard, deliveries: Sequence[Described]
) -> Mapping[_Delivery, Description]:
    """Describe deliveries in one shard, by message and subscription."""
    tables = shard_tables(shard)
    message = tables.message
    numbers = sorted({each.number for each in deliveries})
    keys = sa.select(message.c.id, message.c.message_key).where(message.c.id.in_(numbers))
    key_of = {row.id: row.message_key for row in connection.execute(keys)}
    errors = _errors(connection, tables.attempt, numbers, {each.subscription for each in deliveries})
    failures = [each for each in deliveries if each.failed]
    fingerprints = _fingerprints(connection, shard, failures) if failures else {}
    return {
        (each.number, each.subscription): Description(
            key=key_of.get(each.number, ""),
            error=errors.get((each.number, each.subscription), NO_ACK if each.failed else ""),
            fingerprint=fingerprints.get((each.number, each.subscription), ""),
        )
        for each in deliveries
    }


def _errors(
    connection: sa.Connection, attempt: sa.Table, numbers: Sequence[MessageNumber], of: Iterable[SubscriptionNumber]
) -> Mapping[_Delivery, str]:
    """A journal may have thousands of rows for a message: only the newest of each delivery is read."""
    newest = (
        sa.select(sa.func.max(attempt.c.id))
        .where(attempt.c.message_id.in_(numbers), attempt.c.subscription_no.in_(sorted(of)), attempt.c.unanswered == 0)
        .group_by(attempt.c.message_id, attempt.c.subscription_no)
    )
    ids = list(connection.execute(newest).scalars())
    query = sa.select(attempt.c.message_id, attempt.c.subscription_no, attempt.c.error).where(attempt.c.id.in_(ids))
    return _by_delivery(connection.execute(query)) if ids else {}


def _fingerprints(connection: sa.Connection, shard: Shard, deliveries: Sequence[Described]) -> Mapping[_Delivery, str]:
    query = sa.select(failed.c.message_id, failed.c.subscription_no, failed.c.fingerprint).where(
        failed.c.shard == shard,
        failed.c.topic_no.in_(sorted({each.topic for each in deliveries})),
        failed.c.subscription_no.in_(sorted({each.subscription for each in deliveries})),
        failed.c.message_id.in_(sorted({each.number for each in deliveries})),
    )
    return _by_delivery(connection.execute(query))


def _by_delivery(rows: Iterable[Any]) -> Mapping[_Delivery, str]:
    return {(number, subscription): text for number, subscription, text in rows}
