"""One shard's queue: turns by bytes, order within an app, who makes room for whom."""

from __future__ import annotations

from dataclasses import dataclass

from tmc_server.store.fair_queue import FairQueue

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
