"""What may be on its way to a broker: exact pauses on a manual clock."""

from __future__ import annotations

from tmc_server.delivery.window import Destination, Window


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def _window(size: int = 100, size_bytes: int = 1000) -> tuple[Window, Clock, list[int]]:
    clock, woken = Clock(), []
    return Window(size, size_bytes, lambda: woken.append(1), clock), clock, woken


def test_one_destination_gets_half_and_all_together_no_more_than_the_window() -> None:
    window, _, _ = _window(100)
    one, two, three = Destination("one"), Destination("two"), Destination("three")
    assert window.reserve(one, 80) == 50
    assert window.reserve(two, 30) == 30
    assert window.reserve(three, 80) == 20
    assert window.reserve(three, 1) == 0
    window.release(one, 50)
    assert window.reserve(three, 80) == 30


def test_who_was_refused_is_woken_when_three_quarters_of_the_window_are_free() -> None:
    window, _, woken = _window(100)
    one, two = Destination("one"), Destination("two")
    window.reserve(one, 50)
    window.reserve(two, 50)
    window.release(one, 10)
    assert woken == []  # nobody was refused yet
    window.reserve(one, 50)
    window.release(two, 30)
    assert woken == []
    window.release(two, 20)
    window.release(one, 14)
    assert woken == []
    window.release(one, 1)
    assert woken == [1]


def test_bodies_count_too() -> None:
    window, _, _ = _window(100, size_bytes=1000)
    one = Destination("one")
    window.reserve(one, 1)
    window.add_bytes(1000)
    assert window.reserve(one, 1) == 0
    window.add_bytes(-1)
    assert window.reserve(one, 1) == 1


def test_a_destination_that_refuses_pauses_1_2_4_to_60_seconds() -> None:
    window, clock, _ = _window()
    bad, good = Destination("bad"), Destination("good")
    pauses = []
    for _ in range(9):
        for copy in range(3):  # the copies of one probe are one failure
            failure = window.failed(bad)
            assert failure.begins_a_pause == (copy == 0)
            if failure.begins_a_pause:
                pauses.append((failure.pauses, failure.pause_s))
        assert window.reserve(bad, 10) == 0
        assert window.reserve(good, 1) == 1
        clock.now = bad.paused_until
    assert pauses == [(1, 1), (2, 2), (3, 4), (4, 8), (5, 16), (6, 32), (7, 60), (8, 60), (9, 60)]


def test_after_a_pause_ten_copies_try_it_and_the_first_success_opens_it() -> None:
    window, clock, _ = _window()
    bad = Destination("bad")
    window.failed(bad)
    clock.now = 1.0
    assert window.reserve(bad, 40) == 10
    assert window.reserve(bad, 40) == 0
    window.release(bad, 10)
    assert window.succeeded(bad) is True
    assert window.succeeded(bad) is False
    assert window.reserve(bad, 40) == 40


def test_how_long_nothing_came_out_while_somebody_reads() -> None:
    window, clock, _ = _window()
    queue = Destination("queue")
    clock.now = 100.0
    assert window.looked(queue, consumers=0) == 0
    clock.now = 200.0
    assert window.looked(queue, consumers=1) == 100_000
    assert window.looked(queue, consumers=0) == 0  # without consumers nothing can come out
    clock.now = 230.0
    window.passed(queue, tried_ms=5)
    clock.now = 231.0
    assert (window.looked(queue, consumers=1), queue.passed_ms) == (1000, 5)


def test_a_large_claim_gets_much_room_or_none_and_a_small_one_what_there_is() -> None:
    window, _, _ = _window(100)
    one = Destination("one")
    assert window.reserve(one, 45) == 45
    assert window.reserve(one, 20) == 0  # five are free, too few for a claim
    assert window.reserve(one, 3) == 3
    window.release(one, 20)
    assert window.reserve(one, 100) == 22
