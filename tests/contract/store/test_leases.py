"""Leases: fair shares, take-over, release, and claims that hold only while the lease does."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from tests.support.store import StoreUnderTest
from tmc_server.domain.consumption import QueueLook
from tmc_server.domain.ports.delivery import Claimed
from tmc_server.errors import InvalidField
from tmc_server.store.due import SqlDueWork
from tmc_server.store.engines import Database, wall_clock_ms
from tmc_server.store.leases import ADOPTED_S, LAST_RESORT_MS, WITHOUT_OWNER_MS, ShardLeases
from tmc_server.store.nodes import NodeSlots, server_runs
from tmc_server.store.tables import lease

LEASE_MS = 10_000
SHARDS = list(range(32))
DAY_S = 86_400


class Servers:
    """Some servers that share the shards of one database."""

    def __init__(self, store: StoreUnderTest, count: int) -> None:
        self.store = store
        store.leases.release()  # the one of the fixture
        self.alive = list(range(1, count + 1))
        self.leases = [self.join(number) for number in range(1, count + 1)]

    def join(self, incarnation: int) -> ShardLeases:
        clock = self.store.clock
        return ShardLeases(
            database=self.store.database,
            shards=lambda: SHARDS,
            identity=lambda: incarnation,
            sharing=lambda: self.alive,
            lease_ms=LEASE_MS,
            monotonic=lambda: clock() / 1000,
        )

    def turn(self, *which: int) -> list[int]:
        """Everybody (or these) once. Returns: how many shards each holds."""
        for index, leases in enumerate(self.leases):
            if not which or index in which:
                leases.run_once()
        return [len(leases.held()) for leases in self.leases]

    def owners(self) -> list[int]:
        """All shards that somebody holds, each as often as it is held."""
        return sorted(shard for leases in self.leases for shard in leases.held())


def test_one_server_takes_all(store: StoreUnderTest) -> None:
    assert Servers(store, 1).turn() == [32]


def test_three_servers_share_fairly_and_each_shard_has_one_owner(store: StoreUnderTest) -> None:
    servers = Servers(store, 3)
    assert servers.turn() == [32, 0, 0]  # the first one finds nobody else's
    assert servers.turn() == [11, 11, 10]
    assert servers.turn() == [11, 11, 10]
    assert servers.owners() == SHARDS


def test_a_newcomer_gets_its_share_from_the_others(store: StoreUnderTest) -> None:
    servers = Servers(store, 1)
    servers.turn()
    servers.alive = [1, 2]
    servers.leases.append(servers.join(2))
    assert servers.turn() == [16, 16]
    assert servers.owners() == SHARDS


def test_what_a_killed_server_held_moves_when_its_lease_is_over_and_not_before(store: StoreUnderTest) -> None:
    servers = Servers(store, 2)
    servers.turn()
    servers.turn()
    servers.alive = [2]
    store.clock.advance((LEASE_MS - 1) / 1000)
    assert servers.turn(1)[1] == 16
    store.clock.advance(0.001)
    assert servers.turn(1)[1] == 32


def test_released_shards_move_at_once(store: StoreUnderTest) -> None:
    servers = Servers(store, 2)
    servers.turn()
    servers.turn()
    servers.leases[0].release()
    servers.alive = [2]
    assert servers.turn(1) == [0, 32]
    assert servers.turn(0) == [0, 32]  # who releases takes nothing any more


def test_a_shard_that_nobody_wants_is_taken_whatever_the_share(store: StoreUnderTest) -> None:
    servers = Servers(store, 2)
    assert servers.turn(0) == [32, 0]  # untouched for ever, so nobody waits for the second server
    servers.turn()
    servers.turn()
    assert servers.turn() == [16, 16]
    servers.leases[1].release()  # and is still counted as alive
    assert servers.turn(0) == [16, 0]
    store.clock.advance(WITHOUT_OWNER_MS / 1000)
    assert servers.turn(0) == [32, 0]
    assert servers.turn(0) == [16, 0]  # offered again, as the other one may only have been late
    store.clock.advance(WITHOUT_OWNER_MS / 1000)
    assert servers.turn(0) == [32, 0]
    for _ in range(int(ADOPTED_S) - 1):
        store.clock.advance(1)
        assert servers.turn(0) == [32, 0]  # nobody else wants them, so they are not offered all the time
    store.clock.advance(1)
    assert servers.turn(0) == [16, 0]


def test_after_a_clock_that_was_days_ahead_leases_are_taken_and_dead_servers_are_gone(store: StoreUnderTest) -> None:
    servers = Servers(store, 1)
    store.clock.advance(2 * DAY_S)
    dead = NodeSlots(store.database, "dead:1", store.clock)
    dead.acquire()
    assert servers.turn() == [32]
    servers.leases[0].release()
    store.clock.advance(-2 * DAY_S)
    started = ShardLeases(store.database, lambda: SHARDS, lambda: 2, lambda: [2], LEASE_MS)
    started.run_once()
    assert len(started.held()) == 32
    slots = NodeSlots(store.database, "new:2", store.clock)
    slots.acquire()
    slots.run_once()
    assert [[run.name for run in runs] for runs in (slots.alive, slots.gone)] == [["new:2"], ["dead:1"]]


def test_a_drained_server_gives_its_shards_to_the_others_and_takes_them_again(store: StoreUnderTest) -> None:
    servers = Servers(store, 3)
    servers.turn()
    servers.turn()
    servers.alive = [1, 3]
    assert servers.turn() == [11, 0, 16]
    assert servers.turn() == [16, 0, 16]
    store.clock.advance(1)
    assert servers.turn() == [16, 0, 16]
    servers.alive = [1, 2, 3]
    servers.turn()
    assert sorted(servers.turn()) == [10, 11, 11]
    assert servers.owners() == SHARDS


def test_a_drained_server_takes_what_nobody_else_takes_for_long_and_keeps_it(store: StoreUnderTest) -> None:
    servers = Servers(store, 2)
    servers.turn()
    servers.turn()
    servers.alive = [1]
    assert servers.turn(1)[1] == 0
    servers.leases[0].release()  # its heartbeat lasts, but it looks after nothing
    store.clock.advance((LAST_RESORT_MS - 1) / 1000)
    assert servers.turn(1) == [0, 0]
    store.clock.advance(0.001)
    assert servers.turn(1) == [0, 32]
    store.clock.advance(1)
    assert servers.turn(1) == [0, 32]


def test_the_only_server_is_never_drained_and_does_not_rest(store: StoreUnderTest) -> None:
    servers = Servers(store, 1)
    servers.turn()
    servers.leases[0].rest(60)
    for sharing in ([1], []):
        servers.alive = sharing
        store.clock.advance(LEASE_MS / 2_000)
        assert servers.turn() == [32]


def test_the_last_server_cannot_be_drained(store: StoreUnderTest) -> None:
    one, two = (NodeSlots(store.database, name, store.clock).acquire().incarnation for name in ("one:1", "two:2"))

    def drained() -> dict[int, bool]:
        with store.database.reading() as connection:
            return {run.incarnation: run.drained for run in server_runs(connection)}

    store.catalog_store.drain_server("operator", one, True, "its disk", [two])
    store.catalog_store.drain_server("operator", one, True, "again", [two])
    with pytest.raises(InvalidField, match="not be the last one"):
        store.catalog_store.drain_server("operator", two, True, "too", [one])
    assert drained() == {one: True, two: False}
    store.catalog_store.drain_server("operator", one, False, "mended", [two])
    assert drained() == {one: False, two: False}


def test_a_server_that_fails_rests_while_others_look_after_its_shards(store: StoreUnderTest) -> None:
    servers = Servers(store, 2)
    servers.turn()
    servers.turn()
    servers.leases[0].rest(60)
    assert servers.turn(0) == [0, 16]
    store.clock.advance(WITHOUT_OWNER_MS / 1000)
    assert servers.turn() == [0, 32]
    assert servers.turn() == [0, 16]
    store.clock.advance(WITHOUT_OWNER_MS / 1000)
    for _ in range(56):
        assert servers.turn() == [0, 32]
        store.clock.advance(1)
    for _ in range(6):
        servers.turn()
        store.clock.advance(1)
    assert servers.turn() == [16, 16]


def test_a_server_that_slept_through_its_lease_claims_nothing(store: StoreUnderTest) -> None:
    """Stopped between two statements: its own clock has not looked yet, the row in the table decides."""
    number = store.submitted()
    servers = Servers(store, 1)
    servers.turn()
    asleep = servers.leases[0]
    frozen = dict(asleep.held())
    store.clock.advance(LEASE_MS / 1000)
    assert asleep.held() == {}
    servers.alive = [2]
    other = servers.join(2)
    other.run_once()
    asleep.held = lambda: frozen
    store.outlet.room = None
    woken = SqlDueWork(store.writer, asleep, store.watch)
    before = store.row(number)
    assert woken.claim(store.shard, store.subscription.number, 10, QueueLook(), False) == Claimed()
    assert (
        woken.claim(store.shard, store.subscription.number, 10, QueueLook(consumers=0, messages=5), False) == Claimed()
    )
    assert woken.rescue(store.shard, {7: 0}) == 0
    assert store.row(number) == before
    owner = SqlDueWork(store.writer, other, store.watch)
    assert owner.claim(store.shard, store.subscription.number, 10, QueueLook(), False) == Claimed(delivered=1)
    assert store.delivered_attempts(number) == [1]


def test_without_a_heartbeat_nothing_is_held_and_nothing_is_handed_over(store: StoreUnderTest) -> None:
    store.leases.release()
    dead = ShardLeases(store.database, lambda: SHARDS, lambda: None, lambda: [1], LEASE_MS)
    dead.run_once()
    assert dead.held() == {}
    operation = store.prepared()
    store.outlet.room = 5
    store.perform(store.submit_of(operation.number), writer=store.new_writer(incarnation=None))
    row = store.row(operation.number)
    assert (row.attempt, row.tried, row.incarnation, row.tried_ms) == (0, 0, None, None)
    assert store.outlet.delivered == []


def test_who_still_beats_keeps_its_shards_a_little_longer(store: StoreUnderTest) -> None:
    """Its lease ran out a moment before its heartbeat: whoever takes over has to know that it is gone, to rescue its copies."""
    servers = Servers(store, 2)
    servers.turn()
    servers.turn()
    own = set(servers.leases[1].held())
    store.clock.advance(LEASE_MS / 2000)
    servers.turn(1)
    store.clock.advance(LEASE_MS / 2000)
    servers.turn(1)
    assert set(servers.leases[1].held()) == own
    store.clock.advance(WITHOUT_OWNER_MS / 1000)
    assert servers.turn(1)[1] == 32


def test_a_server_that_starts_after_the_clock_was_set_back_goes_on_with_the_time_of_the_others(
    store: StoreUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.leases.release()
    url = store.database.url.render_as_string(hide_password=False)
    first, later = Database(url), Database(url)
    ShardLeases(first, lambda: SHARDS, lambda: 1, lambda: [1], LEASE_MS).run_once()
    with first.reading() as connection:
        seen = connection.execute(sa.select(sa.func.max(lease.c.seen_ms)).where(lease.c.owner == 1)).scalar_one()
    if later.dialect.clock is None:
        now = wall_clock_ms()
        monkeypatch.setattr("tmc_server.store.engines.wall_clock_ms", lambda: now - 3_600_000)
    else:
        monkeypatch.setattr(type(later.dialect), "clock", f"{later.dialect.clock} - 3600000")
    with later.reading() as connection:
        assert later.now(connection) < seen
        ShardLeases(later, lambda: SHARDS, lambda: 2, lambda: [1, 2], LEASE_MS).run_once()
        assert later.now(connection) >= seen
    assert later.clock_ahead_ms > 3_000_000
    first.close()
    later.close()


def test_a_node_that_starts_after_the_clock_was_set_back_beats_with_the_time_of_the_others(
    store: StoreUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = store.database.url.render_as_string(hide_password=False)
    first, later = Database(url), Database(url)
    before = NodeSlots(first, "one:1")
    before.acquire()
    now = wall_clock_ms()
    if later.dialect.clock is None:
        monkeypatch.setattr("tmc_server.store.engines.wall_clock_ms", lambda: now - 3_600_000)
    else:
        monkeypatch.setattr(type(later.dialect), "clock", f"{later.dialect.clock} - 3600000")
    after = NodeSlots(later, "two:2")
    after.acquire()
    assert {run.incarnation for run in after.alive} >= {before.incarnation(), after.incarnation()}
    assert later.clock_ahead_ms > 3_000_000
    first.close()
    later.close()
