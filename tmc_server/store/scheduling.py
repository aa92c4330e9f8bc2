"""Consumption rows for messages that are submitted in this transaction: one per message and subscriber."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tmc_common.headers import ORDER_KEY, REPLAY_TO
from tmc_server.domain import consumption
from tmc_server.domain.catalog import Subscription
from tmc_server.domain.consumption import Row
from tmc_server.domain.numbers import NO_SUBSCRIPTION, MessageNumber, OrderHash, OrderSequence, SubscriptionNumber
from tmc_server.domain.ordering import OrderMode, order_hash
from tmc_server.domain.ports.reading import Flow
from tmc_server.store.copies import Submitted, copy_of
from tmc_server.store.lines import LineName, Lines
from tmc_server.store.transaction import Transaction


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where a message stands among those of its order key. waits: an earlier one is open."""

    line: OrderHash
    sequence: OrderSequence
    waits: bool


def lines_of(tx: Transaction, topic: int, headers: Mapping[str, str]) -> set[LineName]:
    """The lines that a message with these headers joins when it is submitted."""
    key = headers.get(ORDER_KEY)
    if key is None:
        return set()
    hashed = order_hash(key)
    subscribers = [each for each in tx.catalog.subscribers(topic) if _is_for(headers, each.number)]
    return {(each.number, hashed) for each in subscribers if each.order is not OrderMode.OFF}


def _is_for(headers: Mapping[str, str], subscription: SubscriptionNumber) -> bool:
    """A replay may be for one subscriber only; all other messages are for all."""
    only = headers.get(REPLAY_TO)
    return only is None or only == str(subscription)


def schedule(tx: Transaction, messages: Sequence[Submitted], lines: Lines) -> None:
    """Insert a row per message and subscriber; copies with room at the outlet count as attempted and are sent.

    messages: in the order of their submits.  lines: those that they join.
    """
    by_topic: dict[int, list[Submitted]] = {}
    for message in messages:
        by_topic.setdefault(message.topic, []).append(message)
    rows = _Rows(tx)
    for topic, of_topic in by_topic.items():
        tx.traffic[Flow(topic, NO_SUBSCRIPTION)] += len(of_topic)
        for subscription in tx.catalog.subscribers(topic):
            submitted = [each for each in of_topic if _is_for(each.headers, subscription.number)]
            places = _join(lines, subscription, submitted)
            waiting = {number for number, place in places.items() if place.waits}
            prompt = sum(1 for each in submitted if each.delay_ms == 0 and each.number not in waiting)
            room = tx.reserve(subscription.number, prompt) if prompt else 0
            for message in submitted:
                place = places.get(message.number)
                if message.number in waiting:
                    rows.add(message, subscription.number, consumption.waiting(), place)
                elif room > 0 and message.delay_ms == 0:
                    room -= 1
                    first = consumption.first_try(subscription.policy, tx.now, message.number)
                    rows.add(message, subscription.number, first, place, goes_out=True)
                    sequence = place.sequence if place is not None else None
                    tx.copies.append(copy_of(tx, message, subscription.number, first.attempt, sequence))
                else:
                    rows.add(message, subscription.number, consumption.untried(tx.now + message.delay_ms), place)
    rows.insert()


def _join(lines: Lines, subscription: Subscription, messages: Sequence[Submitted]) -> Mapping[MessageNumber, _Place]:
    """Places of the messages that have an order key, if this subscription heeds it."""
    places: dict[MessageNumber, _Place] = {}
    if subscription.order is OrderMode.OFF:
        return places
    for message in messages:
        key = message.headers.get(ORDER_KEY)
        if key is not None:
            line = order_hash(key)
            sequence, waits = lines.join((subscription.number, line), message.number)
            places[message.number] = _Place(line=line, sequence=sequence, waits=waits)
    return places


class _Rows:
    """Consumption rows of one transaction, inserted together. Most have no order key: those are cheaper."""

    def __init__(self, tx: Transaction) -> None:
        self._tx = tx
        self._plain: list[dict[str, Any]] = []
        self._ordered: list[dict[str, Any]] = []
        self._waiting: list[dict[str, Any]] = []

    def add(
        self,
        message: Submitted,
        subscription: SubscriptionNumber,
        row: Row,
        place: _Place | None,
        goes_out: bool = False,
    ) -> None:
        now = self._tx.now
        values = {
            "message_id": message.number,
            "subscription_no": subscription,
            "state": int(row.state),
            "attempt": row.attempt,
            "tried": row.tried,
            "due_ms": row.due_ms,
            "incarnation": self._tx.incarnation if goes_out else None,
            "created_ms": now,
            "closed_ms": None,
            "tried_ms": now if goes_out else None,
            "since_ms": row.due_ms if message.delay_ms else None,
        }
        if place is None:
            self._plain.append(values)
            return
        named = {"order_hash": place.line, "sequence": place.sequence}
        self._ordered.append(values | named)
        if place.waits:
            due_ms = now + message.delay_ms
            self._waiting.append(
                {
                    "subscription_no": subscription,
                    **named,
                    "message_id": message.number,
                    "due_ms": due_ms,
                    "shard": self._tx.sql.shard,
                }
            )

    def insert(self) -> None:
        self._tx.insert(self._tx.sql.insert_consumptions, self._plain)
        self._tx.insert(self._tx.sql.insert_ordered, self._ordered)
        self._tx.insert(self._tx.sql.lines.insert_waiting, self._waiting)
