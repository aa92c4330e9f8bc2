"""Rows of the shard tables as views."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from tmc_server.domain.consumption import ConsumptionState
from tmc_server.domain.numbers import MessageNumber, Shard, SubscriptionNumber
from tmc_server.domain.views import CheckView, ConsumptionView, MessageView
from tmc_server.store.copies import parse_headers
from tmc_server.store.records import record_of
from tmc_server.store.tables import order

Heads = Mapping[tuple[SubscriptionNumber, int], MessageNumber]
"""Whose turn it is, by subscription and hash of the order key."""


def message_view(shard: Shard, row: Any) -> MessageView:
    return record_of(
        MessageView,
        row,
        shard=shard,
        number=row.id,
        topic=row.topic_no,
        producer=row.producer_no,
        key=row.message_key,
        body=row._mapping.get("body"),
        headers=parse_headers(row.headers),
        check=CheckView(
            attempt=row.check_attempt,
            checked=row.checked,
            due_ms=row.due_ms,
            unreached_ms=row.unreached_ms,
            target=row.check_target,
            last_answer=row.check_answer,
        ),
    )


def heads_of(connection: sa.Connection, consumptions: Sequence[Any]) -> Heads:
    """Return whose turn it is in the lines of those that wait."""
    hashes: dict[SubscriptionNumber, list[int]] = {}
    for row in consumptions:
        if row.state == ConsumptionState.WAITING:
            hashes.setdefault(row.subscription_no, []).append(row.order_hash)
    return {
        (subscription, row.order_hash): MessageNumber(row.head_id)
        for subscription, wanted in hashes.items()
        for row in connection.execute(
            sa.select(order.c.order_hash, order.c.head_id).where(
                order.c.subscription_no == subscription, order.c.order_hash.in_(wanted)
            )
        )
    }


def consumption_view(shard: Shard, row: Any, heads: Heads) -> ConsumptionView:
    return ConsumptionView(
        shard=shard,
        number=row.message_id,
        subscription=row.subscription_no,
        state=ConsumptionState(row.state),
        attempt=row.attempt,
        tried=row.tried,
        due_ms=row.due_ms,
        created_ms=row.created_ms,
        closed_ms=row.closed_ms,
        tried_ms=row.tried_ms,
        extended=row.extended,
        sequence=row.sequence,
        tried_by=row.incarnation,
        waits_for=(heads.get((row.subscription_no, row.order_hash)) if row.state == ConsumptionState.WAITING else None),
    )
