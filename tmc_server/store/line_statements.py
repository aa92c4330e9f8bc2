"""The statements about lines of order keys; see tmc_server.store.lines. A subscription's lines are in one shard."""

from __future__ import annotations

import sqlalchemy as sa

from tmc_server.domain import consumption as c
from tmc_server.store.sql import ByIds, InsertRows, by_ids, by_primary, has_state
from tmc_server.store.tables import ShardTables, order, waiting


class LineStatements:
    """`ids` are hashes of order keys, or where it says so numbers of messages; in ascending order."""

    def __init__(self, tables: ShardTables) -> None:
        self._for_turns()
        self._for_deliveries(tables.consumption)
        self._for_repair(tables.consumption)

    def _for_turns(self) -> None:
        mine = order.c.subscription_no == sa.bindparam("subscription")
        lines = sa.select(order.c.order_hash, order.c.head_id, order.c.last_sequence).where(
            mine, by_ids(order.c.order_hash)
        )
        # subscription, ids: what is free.
        self.lock = ByIds(lines.with_for_update(skip_locked=True))
        self.lock_waiting = ByIds(lines.order_by(order.c.order_hash).with_for_update())
        self.existing = ByIds(sa.select(order.c.order_hash).where(mine, by_ids(order.c.order_hash)))
        self.insert = InsertRows(order)
        self.replace = InsertRows(order, replaces=True)
        # subscription, ids: nothing is open in these lines.
        self.empty = ByIds(order.update().where(mine, by_ids(order.c.order_hash)).values(head_id=0))
        self.insert_waiting = InsertRows(waiting)
        # subscription, ids: whose turn comes next in each line. One look-up per line, however many wait in it.
        others = waiting.alias("others")
        self._first_of_line = (
            sa.select(sa.func.min(others.c.sequence))
            .where(others.c.subscription_no == order.c.subscription_no, others.c.order_hash == order.c.order_hash)
            .correlate(order)
            .scalar_subquery()
        )
        its_first = sa.and_(
            waiting.c.subscription_no == order.c.subscription_no,
            waiting.c.order_hash == order.c.order_hash,
            waiting.c.sequence == self._first_of_line,
        )
        self.next = ByIds(
            sa.select(waiting.c.order_hash, waiting.c.sequence, waiting.c.message_id, waiting.c.due_ms)
            .select_from(sa.join(order, waiting, its_first))
            .where(mine, by_ids(order.c.order_hash))
        )

    def _for_deliveries(self, consumption: sa.Table) -> None:
        """`ids` are numbers of messages."""
        those = (
            consumption.c.subscription_no == sa.bindparam("subscription"),
            by_ids(consumption.c.message_id),
        )
        # subscription, ids, new values
        released = by_primary(
            consumption.update()
            .where(*those, has_state(consumption.c.state, c.sources(c.ConsumptionEvent.RELEASE)))
            .values(
                state=int(c.TRANSITIONS[c.ConsumptionState.WAITING, c.ConsumptionEvent.RELEASE].to),
                attempt=sa.bindparam("new_attempt"),
                tried=sa.bindparam("new_tried"),
                due_ms=sa.bindparam("new_due_ms"),
                incarnation=sa.bindparam("new_incarnation"),
                tried_ms=sa.bindparam("new_tried_ms"),
                since_ms=sa.bindparam("new_since_ms"),
            ),
            consumption,
        )
        self.release = ByIds(released)
        self.release_out_of_order = ByIds(released.values(sequence=None))
        # subscription, ids, now
        self.cancel = ByIds(
            consumption.update()
            .where(*those, consumption.c.state == int(c.ConsumptionState.WAITING))
            .values(
                state=int(c.TRANSITIONS[c.ConsumptionState.WAITING, c.ConsumptionEvent.REMOVE].to),
                closed_ms=sa.bindparam("now"),
            )
        )
        # subscription, ids: others of their keys have overtaken them.
        self.forget_sequence = ByIds(consumption.update().where(*those).values(sequence=None))

    def _for_repair(self, consumption: sa.Table) -> None:
        of_it = waiting.c.subscription_no == sa.bindparam("subscription")
        place = (waiting.c.order_hash, waiting.c.sequence)
        # subscription, ids, limit
        self.waiting = ByIds(
            sa.select(*place, waiting.c.message_id, waiting.c.due_ms)
            .where(of_it, by_ids(waiting.c.order_hash))
            .order_by(*place)
            .limit(sa.bindparam("limit"))
        )
        really_waits = sa.exists().where(
            consumption.c.message_id == waiting.c.message_id,
            consumption.c.subscription_no == waiting.c.subscription_no,
            consumption.c.state == int(c.ConsumptionState.WAITING),
        )
        # subscription, ids
        self.drop_strays = ByIds(
            waiting.delete().where(of_it, by_ids(waiting.c.order_hash), sa.not_(really_waits.correlate(waiting)))
        )
        behind = (waiting.c.subscription_no == order.c.subscription_no, waiting.c.order_hash == order.c.order_hash)
        waits = sa.exists().where(*behind).correlate(order)
        # The next one only: all of a long line would take too long.
        strays = (
            sa.exists()
            .where(*behind, waiting.c.sequence == self._first_of_line, sa.not_(really_waits.correlate(waiting)))
            .correlate(order)
        )
        idle = sa.and_(order.c.head_id == 0, sa.not_(waits), order.c.last_sequence < sa.bindparam("before"))
        head = sa.and_(
            consumption.c.message_id == order.c.head_id, consumption.c.subscription_no == order.c.subscription_no
        )
        states = (
            sa.select(
                order.c.order_hash,
                order.c.head_id,
                consumption.c.state,
                waits.label("waits"),
                strays.label("strays"),
                idle.label("idle"),
            )
            .select_from(sa.outerjoin(order, consumption, head))
            .where(order.c.subscription_no == sa.bindparam("subscription"))
        )
        # subscription, after, limit, before: lines whose last sequence is less have long been without messages.
        self.page = (
            states.where(order.c.order_hash > sa.bindparam("after"))
            .order_by(order.c.order_hash)
            .limit(sa.bindparam("limit"))
        )
        # subscription, ids, before
        self.states = ByIds(states.where(by_ids(order.c.order_hash)))
        # subscription, ids
        self.forget = ByIds(
            order.delete().where(
                order.c.subscription_no == sa.bindparam("subscription"),
                by_ids(order.c.order_hash),
                order.c.head_id == 0,
            )
        )
