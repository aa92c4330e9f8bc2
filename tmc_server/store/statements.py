"""The statements of one shard, built once. Every UPDATE carries its guard; callers compare the row count.

`ids` is a list of message numbers in ascending order, see ByIds, or one for each subscription, see ByPairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import sqlalchemy as sa

from tmc_server.domain import consumption as c
from tmc_server.domain import message as m
from tmc_server.domain.numbers import ANSWERED, NO_SUBSCRIPTION, Shard
from tmc_server.store.line_statements import LineStatements
from tmc_server.store.sql import ByIds, ByPairs, InsertRows, by_ids, by_pairs, by_primary, has_state, through_index
from tmc_server.store.tables import alert, audit, failed, lease, retention, shard_tables, tombstone, waiting

CHECK_COLUMNS = ("check_attempt", "checked", "unreached_ms", "check_answer", "since_ms")  # begin at their defaults


class ShardStatements:
    """Named after what they do; parameters in the comments."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.tables = shard_tables(shard)
        self._for_messages(self.tables.message)
        self._for_consumptions(self.tables.consumption)
        self._for_limits(self.tables.consumption)
        self._for_claims(self.tables.message, self.tables.consumption)
        self._for_rescue(self.tables.consumption)
        self.lines = LineStatements(self.tables)
        self._for_checks(self.tables.message)
        self._around_a_check(self.tables.message)
        self._for_operators(self.tables.message)
        self._for_retention()
        self._for_notes()

    def _for_messages(self, message: sa.Table) -> None:
        self.insert_messages = InsertRows(message, without=CHECK_COLUMNS)
        self.delete_messages = message.delete().where(by_ids(message.c.id))
        with_keys = (
            message.c.topic_no == sa.bindparam("topic"),
            message.c.producer_tag == sa.bindparam("tag"),
            by_ids(message.c.message_key, "keys"),
        )
        # topic, tag, keys: the live messages that hold these keys.
        self.live_by_keys = sa.select(
            message.c.id,
            message.c.producer_no,
            message.c.message_key,
            message.c.attempt_id,
            message.c.digest,
            message.c.state,
        ).where(
            *with_keys,
            message.c.live == 1,
        )
        # topic, tag, keys: all attempts with these keys, live or rolled back.
        self.attempts_by_keys = sa.select(message.c.id, message.c.message_key, message.c.attempt_id).where(
            *with_keys,
        )
        # topic, tag, key, attempt: one attempt, live or rolled back; waits for a transaction that works on it.
        self.by_attempt_waiting = (
            sa.select(message.c.id)
            .where(
                message.c.topic_no == sa.bindparam("topic"),
                message.c.producer_tag == sa.bindparam("tag"),
                message.c.message_key == sa.bindparam("key"),
                message.c.attempt_id == sa.bindparam("attempt"),
            )
            .with_for_update()
        )
        locked = (
            sa.select(
                message.c.id,
                message.c.state,
                message.c.topic_no,
                message.c.producer_no,
                message.c.producer_tag,
                message.c.attempt_id,
                message.c.check_attempt,
                message.c.message_key,
                message.c.content_type,
                message.c.headers,
                message.c.body,
                message.c.delay_ms,
            )
            .where(by_ids(message.c.id))
            .order_by(message.c.id)
        )
        # ids: lock what is free; waiting here would hold up 200 neighbors.
        self.lock_messages = ByIds(locked.with_for_update(skip_locked=True))
        self.lock_message_waiting = ByIds(locked.with_for_update())
        self.existing_messages = sa.select(
            message.c.id, message.c.topic_no, message.c.producer_tag, message.c.state, message.c.headers
        ).where(by_ids(message.c.id))
        self.body_sizes = ByIds(
            sa.select(message.c.id, sa.func.length(message.c.body).label("size")).where(by_ids(message.c.id))
        )
        self.whole_messages = ByIds(sa.select(message).where(by_ids(message.c.id)))
        self.submit = ByIds(self._decide(m.MessageEvent.SUBMIT))
        self.roll_back = ByIds(self._decide(m.MessageEvent.ROLLBACK).values(live=None))
        # topic, limit: undecided messages, counted no further than the limit.
        self.count_open = sa.select(sa.func.count()).select_from(
            sa.select(sa.literal(1))
            .where(message.c.topic_no == sa.bindparam("topic"), message.c.due_ms.is_not(None))
            .limit(sa.bindparam("limit"))
            .subquery()
        )

    def _for_consumptions(self, consumption: sa.Table) -> None:
        self.insert_consumptions = InsertRows(consumption, without=("order_hash", "sequence", "extended", "begun"))
        self.insert_ordered = InsertRows(consumption, without=("extended", "begun"))
        since_ms = sa.func.coalesce(consumption.c.since_ms, consumption.c.created_ms).label("since_ms")
        mine = by_pairs(consumption.c.subscription_no, consumption.c.message_id)
        # ids: by subscription
        self.lock_consumptions = ByPairs(
            by_primary(
                sa.select(
                    consumption.c.message_id,
                    consumption.c.subscription_no,
                    consumption.c.state,
                    consumption.c.attempt,
                    consumption.c.tried,
                    consumption.c.due_ms,
                    consumption.c.tried_ms,
                    consumption.c.order_hash,
                    consumption.c.sequence,
                    consumption.c.created_ms,
                    consumption.c.closed_ms,
                    consumption.c.incarnation,
                    consumption.c.begun,
                    since_ms,
                )
                .where(mine)
                .order_by(consumption.c.message_id, consumption.c.subscription_no)
                .with_for_update(skip_locked=True),
                consumption,
            )
        )
        those = (consumption.c.subscription_no == sa.bindparam("subscription"), by_ids(consumption.c.message_id))
        self.existing_consumptions = sa.select(consumption.c.message_id).where(*those)
        self.states = ByIds(sa.select(consumption.c.message_id, consumption.c.state).where(*those))
        self.sequences = ByIds(sa.select(consumption.c.message_id, consumption.c.sequence).where(*those))
        # ids: by subscription; now
        self.ack = ByPairs(
            by_primary(
                consumption.update()
                .where(mine, has_state(consumption.c.state, c.sources(c.ConsumptionEvent.ACK)))
                .values(state=int(c.ConsumptionState.ACKED), due_ms=None, closed_ms=sa.bindparam("now")),
                consumption,
            )
        )
        # Rows that change alike, guarded by the state and the attempt that the decision was made on. The attempt is
        # answered, so it is no longer lost if its server run dies.
        self.change_consumptions = ByIds(
            by_primary(
                consumption.update()
                .where(
                    *those,
                    consumption.c.state == sa.bindparam("old_state"),
                    consumption.c.attempt == sa.bindparam("old_attempt"),
                )
                .values(
                    state=sa.bindparam("new_state"),
                    attempt=sa.bindparam("new_attempt"),
                    tried=sa.bindparam("new_tried"),
                    due_ms=sa.bindparam("new_due_ms"),
                    closed_ms=sa.bindparam("new_closed_ms"),
                    incarnation=None,
                    tried_ms=None,
                    extended=(consumption.c.extended + 1) * sa.bindparam("extends"),
                    begun=sa.bindparam("new_begun"),
                    since_ms=sa.func.coalesce(
                        sa.bindparam("new_since_ms", type_=sa.BigInteger), consumption.c.since_ms
                    ),
                ),
                consumption,
            )
        )
        # subscription, ids, now: FAILED ones get a fresh budget; many at once.
        reactivated = c.TRANSITIONS[c.ConsumptionState.FAILED, c.ConsumptionEvent.REACTIVATE]
        self.reactivate = ByIds(
            by_primary(
                consumption.update()
                .where(
                    *those,
                    has_state(consumption.c.state, c.sources(c.ConsumptionEvent.REACTIVATE)),
                )
                .values(
                    state=int(reactivated.to),
                    tried=0,
                    due_ms=sa.bindparam("now"),
                    since_ms=sa.bindparam("now"),
                    closed_ms=None,
                    incarnation=None,
                    tried_ms=None,
                    extended=0,
                    begun=ANSWERED,
                ),
                consumption,
            )
        )

        # subscription, ids, now: SCHEDULED ones are due, and the age of delayed ones begins; what is known of their copies stays.
        self.deliver_now = ByIds(
            by_primary(
                consumption.update()
                .where(
                    *those,
                    has_state(consumption.c.state, c.sources(c.ConsumptionEvent.HURRY)),
                )
                .values(
                    due_ms=sa.bindparam("now"),
                    since_ms=sa.case(
                        (consumption.c.since_ms > sa.bindparam("now"), sa.bindparam("now")),
                        else_=consumption.c.since_ms,
                    ),
                ),
                consumption,
            )
        )

    def _for_limits(self, consumption: sa.Table) -> None:
        # topic, subscription, limit: deliveries that are not acked, each kind counted no further than the limit.
        mine: sa.BindParameter[int] = sa.bindparam("subscription")
        kinds = (
            through_index(
                sa.select(sa.literal(1)).where(
                    consumption.c.subscription_no == mine, consumption.c.due_ms.is_not(None)
                ),
                consumption,
                f"{consumption.name}_due",
            ),
            sa.select(sa.literal(1)).where(
                failed.c.shard == self.shard,
                failed.c.topic_no == sa.bindparam("topic"),
                failed.c.subscription_no == mine,
            ),
            sa.select(sa.literal(1)).where(waiting.c.subscription_no == mine, waiting.c.shard == self.shard),
        )
        counts = (each.limit(sa.bindparam("limit")).subquery() for each in kinds)
        parts = [sa.select(sa.func.count()).select_from(each).scalar_subquery() for each in counts]
        self.count_unacked = sa.select(parts[0] + parts[1] + parts[2])

    def _for_claims(self, message: sa.Table, consumption: sa.Table) -> None:
        # subscription, now, limit: oldest due first, no locks.
        self.due_consumptions = (
            sa.select(
                consumption.c.message_id,
                consumption.c.state,
                consumption.c.attempt,
                consumption.c.tried,
                consumption.c.due_ms,
                consumption.c.tried_ms,
                consumption.c.incarnation,
                consumption.c.extended,
                consumption.c.begun,
                consumption.c.order_hash,
                consumption.c.sequence,
                sa.func.coalesce(consumption.c.since_ms, consumption.c.created_ms).label("since_ms"),
            )
            .where(
                consumption.c.subscription_no == sa.bindparam("subscription"),
                consumption.c.due_ms <= sa.bindparam("now"),
            )
            .order_by(consumption.c.due_ms, consumption.c.message_id)
            .limit(sa.bindparam("limit"))
        )
        leased = self._leased()
        # subscription, ids, attempt, now -> the claimed rows get one constant due time.
        self.claim = by_primary(
            consumption.update()
            .where(
                consumption.c.subscription_no == sa.bindparam("subscription"),
                by_ids(consumption.c.message_id),
                consumption.c.state == int(c.ConsumptionState.SCHEDULED),
                consumption.c.attempt == sa.bindparam("old_attempt"),
                consumption.c.tried == sa.bindparam("old_tried"),
                consumption.c.begun == sa.bindparam("old_begun"),
                consumption.c.due_ms <= sa.bindparam("now"),
                leased,
            )
            .values(
                state=sa.bindparam("new_state"),
                attempt=sa.bindparam("new_attempt"),
                tried=sa.bindparam("new_tried"),
                due_ms=sa.bindparam("new_due_ms"),
                closed_ms=sa.bindparam("new_closed_ms"),
                incarnation=sa.bindparam("new_incarnation"),
                tried_ms=sa.bindparam("new_tried_ms"),
                extended=0,
                begun=0,
            ),
            consumption,
        )
        # subscription, ids, old_attempt, now, new_due_ms: only the due time changes; the last copy may be queued.
        self.hold = by_primary(
            consumption.update()
            .where(
                consumption.c.subscription_no == sa.bindparam("subscription"),
                by_ids(consumption.c.message_id),
                consumption.c.state == int(c.ConsumptionState.SCHEDULED),
                consumption.c.attempt == sa.bindparam("old_attempt"),
                consumption.c.tried_ms.is_not(None),
                consumption.c.due_ms <= sa.bindparam("now"),
                leased,
            )
            .values(due_ms=sa.bindparam("new_due_ms")),
            consumption,
        )
        self.bodies = ByIds(
            sa.select(
                message.c.id,
                message.c.topic_no,
                message.c.producer_no,
                message.c.message_key,
                message.c.content_type,
                message.c.headers,
                message.c.body,
                message.c.delay_ms,
            ).where(by_ids(message.c.id))
        )

    def _for_rescue(self, consumption: sa.Table) -> None:
        leased = self._leased()
        # subscription, gone, since, ids, now: attempts of a dead server run, whose copies may be lost.
        died = (
            consumption.c.subscription_no == sa.bindparam("subscription"),
            consumption.c.state == int(c.ConsumptionState.SCHEDULED),
            consumption.c.incarnation == sa.bindparam("gone"),
            consumption.c.tried_ms >= sa.bindparam("since"),
        )
        self.rescue = by_primary(
            consumption.update()
            .where(*died, by_ids(consumption.c.message_id), leased)
            .values(
                due_ms=sa.bindparam("now"),
                tried=consumption.c.tried - 1,
                incarnation=None,
                tried_ms=None,
                begun=ANSWERED,
            ),
            consumption,
        )
        # the same: lock and read them before they are rescued.
        self.lock_rescued = by_primary(
            sa.select(
                consumption.c.message_id,
                consumption.c.attempt,
                consumption.c.tried_ms,
                consumption.c.incarnation,
            )
            .where(*died, by_ids(consumption.c.message_id), leased)
            .with_for_update(skip_locked=True),  # such a row is being answered
            consumption,
        )

    def handed_over(self, subscriptions: Sequence[int], gone: Mapping[int, int], limit: int) -> sa.Select[Any]:
        """Select attempts whose copies may be lost, without locks. gone: of server runs, since when (ms), by incarnation.

        One statement for all of them: servers may have died a hundred times today, and a shard may have a thousand subscriptions.
        """
        consumption = self.tables.consumption
        died = (
            sa.and_(consumption.c.incarnation == incarnation, consumption.c.tried_ms >= since_ms)
            for incarnation, since_ms in gone.items()
        )
        query = sa.select(consumption.c.message_id, consumption.c.subscription_no, consumption.c.incarnation).where(
            consumption.c.subscription_no.in_(subscriptions),
            consumption.c.state == int(c.ConsumptionState.SCHEDULED),
            consumption.c.due_ms.is_not(None),
            sa.or_(*died),
        )
        return through_index(query, consumption, f"{consumption.name}_due").limit(limit)

    def _for_checks(self, message: sa.Table) -> None:
        asked = (
            message.c.id,
            message.c.topic_no,
            message.c.producer_no,
            message.c.producer_tag,
            message.c.message_key,
            message.c.attempt_id,
            message.c.ledger_id,
            message.c.created_ms,
            message.c.check_target,
            message.c.state,
            message.c.check_attempt,
            message.c.checked,
            message.c.unreached_ms,
            message.c.due_ms,
            message.c.since_ms,
            message.c.headers,
        )
        # topic, now, limit: longest due first, no locks.
        self.due_checks = (
            sa.select(*asked)
            .where(message.c.topic_no == sa.bindparam("topic"), message.c.due_ms <= sa.bindparam("now"))
            .order_by(message.c.due_ms, message.c.id)
            .limit(sa.bindparam("limit"))
        )
        self.asked_messages = ByIds(sa.select(*asked).where(by_ids(message.c.id)).order_by(message.c.id))

    def _around_a_check(self, message: sa.Table) -> None:
        """Build what the duty writes before and after it asked."""
        prepared = message.c.state == int(m.MessageState.PREPARED)
        due = (by_ids(message.c.id), prepared, message.c.due_ms <= sa.bindparam("now"), self._leased())
        # ids, now, owner, epoch, until: a check of each begins.
        self.claim_checks = ByIds(
            by_primary(
                message.update()
                .where(*due)
                .values(check_attempt=message.c.check_attempt + 1, due_ms=sa.bindparam("until")),
                message,
            )
        )
        # ids, now, owner, epoch, until, since, answer: nobody can be asked, nothing is counted.
        self.hold_checks = ByIds(
            by_primary(
                message.update()
                .where(*due)
                .values(
                    due_ms=sa.bindparam("until"),
                    unreached_ms=sa.func.coalesce(message.c.unreached_ms, sa.bindparam("since")),
                    check_answer=sa.bindparam("answer"),
                ),
                message,
            )
        )
        # ids, old_attempt; new values: what answers that decide nothing leave behind.
        after_check = (
            message.update()
            .where(
                by_ids(message.c.id),
                prepared,
                message.c.check_attempt == sa.bindparam("old_attempt"),
            )
            .values(
                state=sa.bindparam("new_state"),
                checked=sa.bindparam("new_checked"),
                unreached_ms=sa.bindparam("new_unreached_ms"),
                due_ms=sa.bindparam("new_due_ms"),
                check_answer=sa.bindparam("new_answer"),
            )
        )
        self.after_check = ByIds(by_primary(after_check, message))
        # ids, decided_by.
        self.write_decided_by = ByIds(
            message.update().where(by_ids(message.c.id)).values(check_answer=sa.bindparam("decided_by"))
        )

    def _for_operators(self, message: sa.Table) -> None:
        # ids, now: an operator restarts the checks; check numbers continue, one on: an answer to an earlier check is over.
        self.reactivate_checks = ByIds(
            by_primary(
                message.update()
                .where(by_ids(message.c.id), has_state(message.c.state, m.sources(m.MessageEvent.REACTIVATE)))
                .values(
                    state=int(m.MessageState.PREPARED),
                    check_attempt=message.c.check_attempt + 1,
                    due_ms=sa.bindparam("now"),
                    checked=0,
                    unreached_ms=None,
                    since_ms=sa.bindparam("now"),
                ),
                message,
            )
        )
        # ids, until: an operator asks now.
        self.begin_check = ByIds(
            by_primary(
                message.update()
                .where(by_ids(message.c.id), has_state(message.c.state, m.sources(m.MessageEvent.SUBMIT)))
                .values(
                    check_attempt=message.c.check_attempt + 1,
                    due_ms=sa.case(
                        (message.c.state == int(m.MessageState.PREPARED), sa.bindparam("until")), else_=None
                    ),
                ),
                message,
            )
        )
        # topic, first, last, limit: by number, which carries the time. What waits for an operator has a table of its own.
        self.failed_checks = (
            sa.select(failed.c.message_id)
            .where(
                failed.c.shard == self.shard,
                failed.c.topic_no == sa.bindparam("topic"),
                failed.c.subscription_no == NO_SUBSCRIPTION,
                failed.c.message_id >= sa.bindparam("first"),
                failed.c.message_id < sa.bindparam("last"),
            )
            .order_by(failed.c.message_id)
            .limit(sa.bindparam("limit"))
        )

    def _for_retention(self) -> None:
        """Build removals: only what is closed, and was before a moment, goes; state and closing times are the guard."""
        message, consumption = self.tables.message, self.tables.consumption
        before: sa.BindParameter[int] = sa.bindparam("before")
        open_or_late = sa.exists().where(
            consumption.c.message_id == message.c.id,
            sa.or_(
                sa.not_(has_state(consumption.c.state, c.CLOSED)),
                consumption.c.closed_ms.is_(None),
                consumption.c.closed_ms >= before,
            ),
        )
        removable = (
            message.c.decided_ms < before,
            sa.or_(
                has_state(message.c.state, m.CLOSED_ITSELF),
                sa.and_(has_state(message.c.state, m.CLOSED_WITH_DELIVERIES), sa.not_(open_or_late)),
            ),
        )
        # For transactions that write only into tables of all shards: while the shard moves, they have to fail, too.
        self.fence = sa.select(sa.literal(1)).select_from(message).limit(1)
        # ids, before
        self.remove_messages = ByIds(message.delete().where(by_ids(message.c.id), *removable))
        # ids: what belongs to messages that are not there any more.
        self.remove_belongings = [
            ByIds(
                table.delete().where(
                    by_ids(table.c.message_id), sa.not_(sa.exists().where(message.c.id == table.c.message_id))
                )
            )
            for table in (consumption, self.tables.attempt)
        ]
        # after, last, passed: the number behind as many rows; nothing: there are no more.
        in_span = message.c.id > sa.bindparam("after"), message.c.id < sa.bindparam("last")
        by_number = sa.select(message.c.id).where(*in_span).order_by(message.c.id)
        self.end_of_window = by_number.offset(sa.bindparam("passed")).limit(1)
        # after, last, before, limit: in the order of their numbers.
        self.removable = by_number.where(*removable).limit(sa.bindparam("limit"))
        here = retention.c.shard == self.shard
        self.retained = sa.select(retention.c.horizon_ms, retention.c.run, retention.c.position).where(here)
        self.lock_retention = self.retained.with_for_update()
        # horizon, new_run, new_position
        self.note_retention = (
            retention.update()
            .where(here)
            .values(
                horizon_ms=sa.bindparam("horizon"),
                run=sa.bindparam("new_run"),
                position=sa.bindparam("new_position"),
            )
        )
        self.first_retention = retention.insert().values(shard=self.shard, horizon_ms=0, run="", position=0)

    def _leased(self) -> sa.ColumnElement[bool]:
        """Claims hold only while the lease does: owner, epoch, now."""
        return sa.exists().where(
            lease.c.shard == self.shard,
            lease.c.owner == sa.bindparam("owner"),
            lease.c.epoch == sa.bindparam("epoch"),
            lease.c.expires_ms > sa.bindparam("now"),
        )

    def _for_notes(self) -> None:
        """Build what is written beside a change: journal, tombstones, alerts, audit."""
        self.insert_attempts = InsertRows(self.tables.attempt)
        journal = self.tables.attempt
        # subscription, ids: the newest last.
        self.failed_attempts = ByIds(
            sa.select(journal.c.message_id, journal.c.error)
            .where(
                journal.c.subscription_no == sa.bindparam("subscription"),
                journal.c.unanswered == 0,
                by_ids(journal.c.message_id),
            )
            .order_by(journal.c.id)
        )
        self.insert_tombstones = InsertRows(tombstone)
        # ids: attempt ids
        self.tombstones = ByIds(
            sa.select(
                tombstone.c.attempt_id, tombstone.c.topic_no, tombstone.c.producer_tag, tombstone.c.message_key
            ).where(by_ids(tombstone.c.attempt_id))
        )
        self.insert_alerts = InsertRows(alert)
        self.insert_failed = InsertRows(failed, replaces=True)
        # topic, subscription, ids: they no longer wait for an operator.
        self.delete_failed = ByIds(
            failed.delete().where(
                failed.c.shard == self.shard,
                failed.c.topic_no == sa.bindparam("topic"),
                failed.c.subscription_no == sa.bindparam("subscription"),
                by_ids(failed.c.message_id),
            )
        )
        # kind, subscription, ids
        self.alerts_about = ByIds(
            sa.select(alert.c.message_id, alert.c.attempt).where(
                alert.c.kind == sa.bindparam("kind"),
                by_ids(alert.c.message_id),
                alert.c.subscription_no == sa.bindparam("subscription"),
            )
        )
        self.insert_audit = InsertRows(audit, without=["seal_no", "seal"])

    def _decide(self, event: m.MessageEvent) -> sa.Update:
        message = self.tables.message
        source = m.sources(event)
        target = m.TRANSITIONS[source[0], event].to
        return (
            message.update()
            .where(by_ids(message.c.id), has_state(message.c.state, source))
            .values(state=int(target), due_ms=None, decided_ms=sa.bindparam("now"))
        )


@cache
def statements_of(shard: Shard) -> ShardStatements:
    """The statements of one shard; built at first use."""
    return ShardStatements(shard)
