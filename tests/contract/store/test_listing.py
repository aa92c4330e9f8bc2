"""Lists by age: every row once, over all shards, oldest or newest first."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
import sqlalchemy as sa

from tests.support.store import StoreUnderTest, server_store
from tmc_server.domain.consumption import ConsumptionState
from tmc_server.domain.message import MessageState
from tmc_server.domain.numbers import MessageNumber, Shard, SubscriptionNumber
from tmc_server.domain.ports.reading import Span
from tmc_server.store.engines import ShardMap
from tmc_server.store.listing import Lister
from tmc_server.store.tables import failed, shard_tables
from tmc_storm.services.mariadb import MariaDB
from tmc_storm.services.postgresql import PostgreSQL

ALL = [Shard(number) for number in range(32)]
BOTH = pytest.mark.parametrize("newest_first", [False, True])


@pytest.fixture
def lister(store: StoreUnderTest) -> Lister:
    return Lister(ShardMap(store.database, [store.database] * 32), lambda: store.watch.current.topics)


def _sent(store: StoreUnderTest, count: int) -> list[MessageNumber]:
    """Submitted messages, one a second."""
    numbers = []
    for _ in range(count):
        numbers.append(MessageNumber(store.submitted()))
        store.clock.advance(1)
    return numbers


def _messages(lister: Lister, state: MessageState | None, span: Span) -> Sequence[MessageNumber]:
    return [view.number for view in lister.messages(ALL, None, state, span)]


@BOTH
def test_pages_by_age(store: StoreUnderTest, lister: Lister, newest_first: bool) -> None:
    numbers = _sent(store, 7)
    seen: list[MessageNumber] = []
    after = None
    while page := _messages(lister, None, Span(newest_first=newest_first, after=after, limit=3)):
        seen += page
        after = (store.shard, page[-1])
    assert seen == sorted(numbers, reverse=newest_first)


@BOTH
def test_pages_of_deliveries_over_shards(store: StoreUnderTest, lister: Lister, newest_first: bool) -> None:
    """Two shards have a message with the same number."""
    numbers = _sent(store, 3)
    other = Shard((store.shard + 1) % 32)
    here, there = shard_tables(Shard(store.shard)).consumption, shard_tables(other).consumption
    with store.database.transaction() as connection:
        connection.execute(there.insert().from_select([column.name for column in here.c], sa.select(here)))
    places = sorted(((number, shard) for number in numbers for shard in (store.shard, other)), reverse=newest_first)
    seen = []
    after = None
    mine = {store.subscription.number: store.subscription.topic}
    while page := lister.consumptions(ALL, mine, None, "", Span(newest_first=newest_first, after=after, limit=1)):
        seen += [(view.number, view.shard) for view in page]
        after = (page[-1].shard, page[-1].number)
    assert seen == places


def test_states(store: StoreUnderTest, lister: Lister) -> None:
    waits, acked, failed = store.prepared().number, store.submitted(room=1), store.submitted(room=1)
    store.perform(store.ack_of(acked, 1), store.nack_of(failed, 1, reject=True))
    assert _messages(lister, MessageState.PREPARED, Span()) == [waits]
    assert _messages(lister, MessageState.COMMITTED, Span()) == sorted([acked, failed])
    assert _messages(lister, MessageState.CHECK_FAILED, Span()) == []
    mine = {store.subscription.number: store.subscription.topic}
    for state, number in ((ConsumptionState.ACKED, acked), (ConsumptionState.FAILED, failed)):
        assert [view.number for view in lister.consumptions(ALL, mine, state, "", Span())] == [number]
    assert lister.consumptions(ALL, mine, ConsumptionState.SCHEDULED, "", Span()) == []
    assert lister.consumptions(ALL, {}, None, "", Span()) == []


def test_a_list_says_what_went_wrong(store: StoreUnderTest, lister: Lister) -> None:
    """The newest error, also of one that is tried again."""
    tried, given_up, fine = (store.submitted(room=1) for _ in range(3))
    store.perform(
        store.nack_of(tried, 1, error="busy"), store.nack_of(given_up, 1, reject=True, error="no stock for 17")
    )
    mine = {store.subscription.number: store.subscription.topic}
    views = {view.number: view for view in lister.consumptions(ALL, mine, None, "", Span())}
    assert {number: view.error for number, view in views.items()} == {
        tried: "busy",
        given_up: "no stock for 17",
        fine: "",
    }
    assert all(view.key for view in views.values())
    fingerprint = views[given_up].fingerprint
    assert re.fullmatch("[0-9a-f]{12}", fingerprint)
    state = ConsumptionState.FAILED
    assert [view.number for view in lister.consumptions(ALL, mine, state, fingerprint, Span())] == [given_up]
    assert lister.consumptions(ALL, mine, state, "0" * 12, Span()) == []


def test_a_fingerprint_is_of_one_subscriber(store: StoreUnderTest, lister: Lister) -> None:
    """Another one has failed on the same message, with another error."""
    number = store.submitted(room=1)
    store.perform(store.nack_of(number, 1, reject=True, error="no stock"))
    mine, other = store.subscription, SubscriptionNumber(99)
    table = shard_tables(Shard(store.shard)).consumption
    with store.database.transaction() as connection:
        for copied in (table, failed):
            (row,) = connection.execute(sa.select(copied)).mappings()
            changes = {"fingerprint": "0" * 12} if copied is failed else {}
            connection.execute(copied.insert().values({**row, "subscription_no": other, **changes}))
    both = {mine.number: mine.topic, other: mine.topic}
    views = lister.consumptions(ALL, both, ConsumptionState.FAILED, "", Span())
    assert [(view.subscription, view.error) for view in views] == [(mine.number, "no stock"), (other, "no ack")]
    for view in views:
        assert lister.consumptions(ALL, both, ConsumptionState.FAILED, view.fingerprint, Span()) == [view]


def test_a_window_of_time(store: StoreUnderTest, lister: Lister) -> None:
    began = store.clock()
    numbers = _sent(store, 5)
    span = Span(from_ms=began + 1_000, to_ms=began + 3_000)
    assert _messages(lister, None, span) == numbers[1:3]


def test_undecided_messages_are_found_without_a_look_at_decided_ones(database_server: MariaDB | PostgreSQL) -> None:
    store = server_store(database_server)
    lister = Lister(ShardMap(store.database, [store.database] * 32), lambda: store.watch.current.topics)
    _sent(store, 50)
    undecided = [store.prepared().number for _ in range(3)]
    asked: list[tuple[str, Any]] = []

    def keep(_connection: Any, _cursor: Any, statement: str, parameters: Any, *_: object) -> None:
        asked.append((statement, parameters))

    sa.event.listen(store.database.readers, "before_cursor_execute", keep)
    assert _messages(lister, MessageState.PREPARED, Span()) == undecided
    sa.event.remove(store.database.readers, "before_cursor_execute", keep)
    with store.database.reading() as connection:
        plans = [connection.exec_driver_sql(f"EXPLAIN {text}", values).mappings().all() for text, values in asked]
    assert len(plans) == 32
    used = [str([row.get("key", row) for row in plan]) for plan in plans]
    assert [each for each in used if not re.search(r"tmc_message_\d\d_due", each)] == []
    store.close()
