"""Copies of messages, made from rows, for the outlet."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping

from tmc_common.headers import SEQUENCE
from tmc_server.domain.numbers import Attempt, MessageNumber, OrderSequence, SubscriptionNumber
from tmc_server.domain.ports.delivery import Copy
from tmc_server.store.transaction import Transaction


def parse_headers(stored: str | None) -> dict[str, str]:
    """The headers column as a dictionary."""
    return dict(json.loads(stored)) if stored else {}


def with_sequence(headers: Mapping[str, str], sequence: OrderSequence | None) -> Mapping[str, str]:
    """The headers of a copy. sequence None: it is delivered without regard to its order key."""
    return headers if sequence is None else {**headers, SEQUENCE: str(sequence)}


def load_copies(
    tx: Transaction,
    subscription: SubscriptionNumber,
    numbers: Collection[MessageNumber],
    attempt: Attempt,
    sequences: Mapping[MessageNumber, OrderSequence],
) -> None:
    """Hand over a copy of each of these messages when the transaction is committed. sequences: of those that have one."""
    for row in tx.rows(tx.sql.bodies, ids=sorted(numbers)) if numbers else ():
        tx.copies.append(
            Copy(
                shard=tx.sql.shard,
                number=row.id,
                subscription=subscription,
                attempt=attempt,
                topic=row.topic_no,
                producer=row.producer_no,
                key=row.message_key,
                body=row.body,
                content_type=row.content_type,
                headers=with_sequence(parse_headers(row.headers), sequences.get(row.id)),
            )
        )
