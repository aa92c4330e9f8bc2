"""One shard's queue: turns by bytes, order within an app, who makes room for whom. All shards': the time of the lanes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from tmc_server.domain.numbers import Shard
from tmc_server.store.fair_queue import FairQueue, LaneTime

GREEDY, POLITE, THIRD = 1, 2, 3
SMALL = 4096  # four of these are a turn


@dataclass(frozen=True, kw_only=True)
class _Entry:
    app: int
    name: str
    size: int = SMALL


def _entry(app: int, name: str, size: int = SMALL) -> _Entry:
    return _Entry(app=app, name=name, size=size)


def _filled(
    *apps: tuple[int, int], limit: int = 1000, limit_bytes: int = 1 << 30, size: int = SMALL
) -> FairQueue[_Entry]:
    """(app, number of operations) pairs, in this order."""
    queue: FairQueue[_Entry] = FairQueue(limit, limit_bytes)
    for app, count in apps:
        for number in range(count):
            assert queue.add(_entry(app, f"{app}.{number}", size)) == []
    return queue


def _names(entries: list[_Entry]) -> list[str]:
    return [entry.name for entry in entries]


def test_one_app_alone_gets_whole_batches_in_its_order() -> None:
    queue = _filled((GREEDY, 10))
    assert _names(queue.take(6, 1 << 20)) == [f"1.{i}" for i in range(6)]
    assert _names(queue.take(6, 1 << 20)) == [f"1.{i}" for i in range(6, 10)]
    assert (queue.count, queue.bytes, queue.lines, list(queue.turns)) == (0, 0, {}, [])


def test_apps_take_turns_of_the_same_bytes_and_keep_their_own_order() -> None:
    queue = _filled((GREEDY, 9), (POLITE, 3), (THIRD, 5))
    taken = _names(queue.take(100, 1 << 20))
    assert taken == [
        "1.0",
        "1.1",
        "1.2",
        "1.3",
        "2.0",
        "2.1",
        "2.2",
        "3.0",
        "3.1",
        "3.2",
        "3.3",
        "1.4",
        "1.5",
        "1.6",
        "1.7",
        "3.4",
        "1.8",
    ]


def test_the_app_that_is_served_has_the_first_turn_and_others_go_on_in_theirs() -> None:
    queue = _filled((GREEDY, 9), (POLITE, 3), (THIRD, 5))
    assert _names(queue.take(8, 1 << 20, POLITE)) == ["2.0", "2.1", "2.2", "1.0", "1.1", "1.2", "1.3", "3.0"]
    assert _names(queue.take(4, 1 << 20, THIRD)) == ["3.1", "3.2", "3.3", "1.4"]


def test_a_turn_cut_off_by_the_end_of_a_batch_continues_in_the_next() -> None:
    queue = _filled((GREEDY, 6), (POLITE, 6))
    assert _names(queue.take(3, 1 << 20)) == ["1.0", "1.1", "1.2"]
    assert _names(queue.take(6, 1 << 20)) == ["1.3", "2.0", "2.1", "2.2", "2.3", "1.4"]


def test_large_operations_wait_until_their_app_has_saved_enough_turns() -> None:
    queue: FairQueue[_Entry] = FairQueue(1000, 1 << 30)
    queue.add(_entry(GREEDY, "large", 3 * 16_384))
    for number in range(12):
        queue.add(_entry(POLITE, f"2.{number}"))
    assert _names(queue.take(100, 1 << 20)) == [
        *(f"2.{i}" for i in range(8)),
        "large",
        *(f"2.{i}" for i in range(8, 12)),
    ]


def test_a_batch_ends_before_the_operation_that_would_make_it_too_large() -> None:
    queue = _filled((GREEDY, 3), size=1000)
    queue.add(_entry(GREEDY, "larger than any batch", 5000))
    assert _names(queue.take(100, 2500)) == ["1.0", "1.1"]
    assert _names(queue.take(100, 2500)) == ["1.2"]
    assert _names(queue.take(100, 2500)) == ["larger than any batch"]


def test_an_app_alone_may_fill_the_queue_and_no_more() -> None:
    queue = _filled((GREEDY, 9), limit=10)
    assert queue.has_room(GREEDY, 1)
    assert not queue.has_room(GREEDY, 2)


def test_a_polite_app_is_let_into_a_full_queue_and_the_newest_of_the_greedy_one_leave() -> None:
    queue = _filled((GREEDY, 10), limit=10)
    assert not queue.has_room(GREEDY, 1)
    left: list[str] = []
    for number in range(5):
        assert queue.has_room(POLITE, 1)
        left += _names(queue.add(_entry(POLITE, f"2.{number}")))
    assert left == ["1.9", "1.8", "1.7", "1.6", "1.5"]
    assert not queue.has_room(POLITE, 1)  # it holds its share
    assert not queue.has_room(GREEDY, 1)
    assert queue.has_room(THIRD, 3)
    left = [name for number in range(3) for name in _names(queue.add(_entry(THIRD, f"3.{number}")))]
    assert sorted(left) == ["1.3", "1.4", "2.4"]
    assert queue.count == 10


def test_room_is_shared_by_bytes_too() -> None:
    queue = _filled((GREEDY, 11), limit_bytes=10_000, size=1000)
    assert not queue.has_room(GREEDY, 1)
    assert queue.has_room(POLITE, 1)
    assert _names(queue.add(_entry(POLITE, "2.0", 2000))) == ["1.10", "1.9", "1.8"]
    assert queue.bytes == 10_000


def test_a_greedy_app_pushes_nobody_out() -> None:
    queue = _filled((POLITE, 2), (GREEDY, 8), limit=10)
    assert queue.add(_entry(GREEDY, "tried again", 4096)) == []
    assert len(queue.lines[POLITE].waiting) == 2


class _Lanes:
    """One lane, whose work takes a tenth of a millisecond for each operation. Queues of all shards."""

    def __init__(self) -> None:
        self.now = 0.0
        self.time = LaneTime(2_000, lambda: self.now)
        self.short = False  # the last batch was to be
        self.queues = {shard: FairQueue[_Entry](100_000, 1 << 30) for shard in map(Shard, range(32))}
        self.served: Counter[int] = Counter()

    def add(self, app: int, shard: int, count: int) -> None:
        self.time.arrive(app)
        for number in range(count):
            self.queues[Shard(shard)].add(_entry(app, f"{app}.{number}"))

    def work(self) -> list[_Entry]:
        ready = [shard for shard, queue in self.queues.items() if queue.count]
        turn = self.time.next(ready, self.queues)
        self.short = turn.is_short
        batch = self.queues[turn.shard].take(25 if turn.is_short else 400, 1 << 30, turn.app)
        self.time.charge(batch, len(batch) / 10_000)
        self.served.update(entry.app for entry in batch)
        return batch


def test_an_app_in_all_shards_gets_no_more_time_than_one_in_a_single_shard() -> None:
    lanes = _Lanes()
    for shard in range(32):
        lanes.add(GREEDY, shard, 2_000)
    lanes.add(POLITE, 31, 2_000)
    while lanes.served[POLITE] < 1_000:
        lanes.work()
    assert lanes.served[GREEDY] <= lanes.served[POLITE] + 400


def test_who_comes_seldom_is_served_next() -> None:
    lanes = _Lanes()
    for shard in range(32):
        lanes.add(GREEDY, shard, 2_000)
    for _ in range(20):
        lanes.work()
        lanes.add(POLITE, 31, 1)
        assert POLITE in {entry.app for entry in lanes.work()}


def test_an_app_that_comes_back_has_saved_nothing_up() -> None:
    lanes = _Lanes()
    lanes.add(POLITE, 31, 1)
    lanes.work()
    lanes.now += 2  # it is not awaited
    for shard in range(31):
        lanes.add(GREEDY, shard, 2_000)
    for _ in range(20):
        lanes.work()
    before = lanes.served[GREEDY]
    lanes.add(POLITE, 31, 2_000)
    while lanes.served[POLITE] < 1_000:
        lanes.work()
    assert lanes.served[GREEDY] - before >= 400


def test_a_batch_that_was_held_up_is_no_debt() -> None:
    """A database was away for half a minute while a lane served an app."""
    lanes = _Lanes()
    lanes.add(POLITE, 31, 1)
    lanes.time.charge([_entry(POLITE, "2.0")], 30.0)
    for shard in range(31):
        lanes.add(GREEDY, shard, 2_000)
    for _ in range(30):
        lanes.time.charge([_entry(GREEDY, "1.0")], 0.01)
    assert {entry.app for entry in lanes.work()} == {POLITE}


def test_of_one_app_the_shard_that_waits_longest_is_next() -> None:
    lanes = _Lanes()
    for shard in (7, 3):
        lanes.add(GREEDY, shard, 1)
    assert lanes.time.next([Shard(7), Shard(3)], lanes.queues).shard == 7


def test_batches_of_a_greedy_app_are_short_while_another_comes_and_goes() -> None:
    lanes = _Lanes()
    for shard in range(32):
        lanes.add(GREEDY, shard, 200)
    lanes.work()
    assert not lanes.short  # it is alone
    lanes.add(POLITE, 31, 1)
    assert {entry.app for entry in lanes.work()} == {GREEDY, POLITE}
    assert lanes.short  # both wait in it
    lanes.work()
    assert lanes.short
    lanes.now += 1.01
    lanes.work()
    assert not lanes.short  # the other was not seen for a second


def test_batches_of_an_app_with_many_callers_stay_long() -> None:
    lanes = _Lanes()
    lanes.add(POLITE, 31, 1)
    lanes.work()
    lanes.add(GREEDY, 0, 1_999)
    lanes.work()
    assert not lanes.short
