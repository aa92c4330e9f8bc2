"""Copies of messages, made from rows, for the outlet."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from msgspec import Struct

from tmc_common.eventlog import EventLog
from tmc_common.headers import SEQUENCE
from tmc_server.domain.numbers import Attempt, MessageNumber, OrderSequence, SubscriptionNumber
from tmc_server.domain.operations import Prepare
from tmc_server.domain.ports.delivery import Copy
from tmc_server.store.transaction import Transaction

log = EventLog("tmc.store")


def parse_headers(stored: str | None) -> dict[str, str]:
    """The headers column as a dictionary."""
    return dict(json.loads(stored)) if stored else {}


class Submitted(Struct, frozen=True, kw_only=True):
    """A submitted message, with what its copies carry."""

    number: MessageNumber
    topic: int
    producer: int
    key: str
    body: bytes
    content_type: str
    headers: Mapping[str, str]
    delay_ms: int

    @classmethod
    def published(cls, operation: Prepare) -> Submitted:
        return cls(
            number=operation.number,
            topic=operation.topic.number,
            producer=operation.app,
            key=operation.key,
            body=operation.body,
            content_type=operation.content_type,
            headers=dict(operation.headers),
            delay_ms=operation.delay_ms,
        )

    @classmethod
    def stored(cls, row: Any) -> Submitted:
        return cls(
            number=row.id,
            topic=row.topic_no,
            producer=row.producer_no,
            key=row.message_key,
            body=row.body,
            content_type=row.content_type,
            headers=parse_headers(row.headers),
            delay_ms=row.delay_ms,
        )


def load_copies(
    tx: Transaction,
    subscription: SubscriptionNumber,
    numbers: Collection[MessageNumber],
    attempt: Attempt,
    sequences: Mapping[MessageNumber, OrderSequence],
    redelivered: Collection[MessageNumber] = (),
) -> None:
    """Hand over a copy of each of these messages when the transaction is committed.

    sequences: of those that have one.  redelivered: see Copy.
    """
    for row in tx.rows(tx.sql.bodies, ids=sorted(numbers)) if numbers else ():
        try:
            submitted = Submitted.stored(row)
        except ValueError as exc:  # it is never begun, so its owner is alerted; the others are none of its business
            log.error("message_damaged", "message %d in shard %s cannot be read: %s", row.id, tx.sql.shard, exc)
            continue
        again = row.id in redelivered
        tx.copies.append(copy_of(tx, submitted, subscription, attempt, sequences.get(row.id), redelivered=again))


def copy_of(
    tx: Transaction,
    message: Submitted,
    subscription: SubscriptionNumber,
    attempt: Attempt,
    sequence: OrderSequence | None,
    redelivered: bool = False,
) -> Copy:
    """sequence None: the copy is delivered without regard to its order key."""
    headers = message.headers if sequence is None else {**message.headers, SEQUENCE: str(sequence)}
    return Copy(
        shard=tx.sql.shard,
        number=message.number,
        subscription=subscription,
        attempt=attempt,
        topic=message.topic,
        producer=message.producer,
        key=message.key,
        body=message.body,
        content_type=message.content_type,
        headers=headers,
        redelivered=redelivered,
    )
