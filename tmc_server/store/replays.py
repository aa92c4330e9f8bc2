"""Send acked messages again, each to one subscriber: as new messages, since an ack is never undone.

A replay is in the shard of its original, so that original and replay are in one transaction. Its key and attempt id are
made from the original, the subscription and the job, so that a repeated transaction finds its own work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import count
from typing import Any

from tmc_common.headers import REPLAY_KEYS, REPLAY_OF, REPLAY_TO
from tmc_server.domain.catalog import Topic
from tmc_server.domain.consumption import ConsumptionState
from tmc_server.domain.ids import IdGenerator, MessageId
from tmc_server.domain.message import digest_of
from tmc_server.domain.numbers import NO_JOB, BulkJobNumber, MessageNumber, Shard, SubscriptionNumber
from tmc_server.domain.operations import Answer, Prepare, Stored
from tmc_server.domain.placement import shard_of
from tmc_server.errors import ConsumptionClosed, MessageGone, SubscriptionUnknown
from tmc_server.store.batch import ShardWriter, in_transaction
from tmc_server.store.copies import parse_headers
from tmc_server.store.engines import StoreConflict
from tmc_server.store.messages import prepare
from tmc_server.store.outcomes import Outcome, Wait
from tmc_server.store.transaction import Transaction


@dataclass(frozen=True, kw_only=True)
class Replays:
    """Replays of deliveries to one subscription. job: that asks for them; NO_JOB: an operator, for a single one."""

    tx: Transaction
    ids: IdGenerator
    subscription: SubscriptionNumber
    job: BulkJobNumber = NO_JOB

    def publish(self, numbers: Sequence[MessageNumber]) -> Mapping[MessageNumber, Outcome]:
        """numbers: of acked messages. Returns: what is stored for each that is there; one that was sent before is as it was.

        A job leaves out what is a replay itself, so that a repeated job does not multiply messages.
        """
        rows = self.tx.rows(self.tx.sql.whole_messages, ids=sorted(numbers)) if numbers else ()
        found: dict[MessageNumber, Outcome] = {}
        operations: dict[MessageNumber, Prepare] = {}
        for row in sorted(rows, key=self._places(numbers)):
            if self.job != NO_JOB and REPLAY_TO in parse_headers(row.headers):
                found[row.id] = ConsumptionClosed("It is a replay itself: only `tmc admin replay` sends it again.")
            else:
                operations[row.id] = self._operation(row)
        outcomes = prepare(self.tx, list(operations.values())) if operations else {}
        return found | {number: outcomes[operation] for number, operation in operations.items()}

    def _places(self, numbers: Sequence[MessageNumber]) -> Callable[[Any], tuple[int, int]]:
        """The order of replays: by the sequences of the originals, so that an order key keeps its order."""
        which = {"subscription": self.subscription, "ids": sorted(numbers)}
        rows = self.tx.rows(self.tx.sql.sequences, **which) if numbers else ()
        sequences = {row.message_id: row.sequence or 0 for row in rows}
        return lambda row: (sequences.get(row.id, 0), row.id)

    def within(self, numbers: Sequence[MessageNumber], most_bytes: int) -> Sequence[MessageNumber]:
        """The first of these messages whose bodies have at most `most_bytes` together; at least one."""
        rows = self.tx.rows(self.tx.sql.body_sizes, ids=sorted(numbers)) if numbers else ()
        sizes = {row.id: row.size for row in rows}
        total, fitting = 0, list[MessageNumber]()
        for number in numbers:
            total += sizes.get(number, 0)
            if fitting and total > most_bytes:
                break
            fitting.append(number)
        return fitting

    def _operation(self, row: Any) -> Prepare:
        tx = self.tx
        topic = tx.catalog.topics[row.topic_no]
        original = str(MessageId(row.topic_no, row.producer_no, tx.sql.shard, row.id))
        key = _key_in(tx.sql.shard, topic, f"{REPLAY_KEYS}{original}.{self.subscription}.{self.job}")
        headers = {**parse_headers(row.headers), REPLAY_OF: original, REPLAY_TO: str(self.subscription)}
        return Prepare(
            shard=tx.sql.shard,
            app=row.producer_no,
            number=self.ids.next(),
            topic=topic,
            producer_tag=row.producer_tag,
            key=key,
            attempt_id=sha256(key.encode()).digest()[:16],
            digest=digest_of(row.body, row.content_type, headers, 0),
            body=row.body,
            content_type=row.content_type,
            headers=headers,
            delay_ms=0,
            ledger_id=None,
            publish=True,
        )


class SqlReplays:
    """domain.ports.delivery.Replaying over all databases. writer: that of a shard now."""

    def __init__(self, writer: Callable[[Shard], ShardWriter], ids: IdGenerator) -> None:
        self._writer = writer
        self._ids = ids

    def replay(
        self, actor: str, shard: Shard, number: MessageNumber, subscription: SubscriptionNumber, reason: str
    ) -> Answer:
        def change(tx: Transaction) -> Answer:
            lives = (subscription, *tx.catalog.earlier_registrations.get(subscription, ()))
            states = [row.state for life in lives for row in tx.rows(tx.sql.states, subscription=life, ids=[number])]
            if not states and tx.is_gone(number):
                return MessageGone()
            if not states:
                return SubscriptionUnknown(
                    "There is no such delivery: `tmc admin get-message` shows those of a message."
                )
            if int(ConsumptionState.ACKED) not in states:
                state = ConsumptionState(states[0]).name
                return ConsumptionClosed(
                    f"The delivery is {state}: only ACKED ones are replayed. `tmc admin reactivate` delivers a FAILED one again."
                )
            if tx.catalog.subscriptions[subscription].is_removed:
                return ConsumptionClosed("The subscription was removed, so nothing is sent to it again.")
            outcome = (
                Replays(tx=tx, ids=self._ids, subscription=subscription).publish([number]).get(number, MessageGone())
            )
            if isinstance(outcome, Wait):
                raise StoreConflict("the line of its order key is locked")
            if isinstance(outcome, Stored) and outcome.changed:
                tx.note(actor, "replay delivery", f"message {number} subscription {subscription}", reason)
            return outcome

        return in_transaction(self._writer(shard), shard, change)


def _key_in(shard: Shard, topic: Topic, stem: str) -> str:
    """The first key with this stem whose place is this shard; it takes `spread` tries on average."""
    keys = (f"{stem}.{number}" for number in count())
    return next(key for key in keys if shard_of(topic.table_index, topic.spread, key) == shard)
