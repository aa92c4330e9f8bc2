"""Clocks that are wrong: message numbers, and the database's clock carried on between two readings."""

from __future__ import annotations

import pytest

from tests.support.clock import ManualClock
from tmc_server.domain.ids import EPOCH_MS, IdGenerator, first_number
from tmc_server.errors import NoIdentity
from tmc_server.store.engines import CarriedClock


@pytest.mark.parametrize("ms", [0, EPOCH_MS, EPOCH_MS + (1 << 41), 2**53, 2**62])
def test_the_first_number_of_any_time_that_a_caller_may_name_fits_its_column(ms: int) -> None:
    assert 0 <= first_number(ms) < 1 << 63


class TestNumbers:
    @pytest.mark.parametrize("wrong_ms", [0, EPOCH_MS - 1, EPOCH_MS + (1 << 41)])
    def test_a_clock_that_no_number_can_carry_is_refused_with_a_sentence(self, wrong_ms: int) -> None:
        ids = IdGenerator(ManualClock(wrong_ms))
        ids.lease(1, 0, 1 << 62)
        with pytest.raises(NoIdentity, match="set the clock"):
            ids.next()

    def test_a_clock_that_is_set_before_the_epoch_stops_the_numbers_until_it_is_right(self) -> None:
        clock = ManualClock(EPOCH_MS + 5)
        ids = IdGenerator(clock)
        ids.lease(1, 0, 1 << 62)
        first = ids.next()
        clock.now_ms = EPOCH_MS - 1
        with pytest.raises(NoIdentity):
            ids.next()
        clock.now_ms = EPOCH_MS + 4
        assert ids.next() == first + 1

    def test_the_first_and_the_last_millisecond_make_numbers(self) -> None:
        clock = ManualClock(EPOCH_MS)
        ids = IdGenerator(clock)
        ids.lease(0, 0, 1 << 62)
        assert ids.next() == 0
        clock.now_ms = EPOCH_MS + (1 << 41) - 1
        assert ids.next() == ((1 << 41) - 1) << 22


class TestCarriedClock:
    """Readings are (database's time, asked at, answered at); the database is ahead of our clock by 1,000,000 ms."""

    def test_a_reading_is_off_by_half_of_what_it_took(self) -> None:
        clock = CarriedClock()
        assert clock.take(1_010_000, 10.0, 10.2) == pytest.approx(100, abs=1)
        assert clock.at(10.2) == 1_010_100

    def test_a_slow_answer_does_not_move_it(self) -> None:
        clock = CarriedClock()
        clock.take(1_010_000, 9.9995, 10.0005)
        clock.take(1_011_000, 11.0, 16.0)  # read at once, answered five seconds later: the middle would be 2.5 s off
        assert clock.at(16.0) == 1_016_000

    def test_it_goes_back_by_no_more_than_it_may_have_been_ahead(self) -> None:
        clock = CarriedClock()
        error = clock.take(1_010_200, 10.0, 10.2)  # read at the end: 100 ms ahead
        before = clock.at(10.3)
        clock.take(1_010_300, 10.3, 10.3)
        assert before - clock.at(10.3) <= error + 1
        assert clock.at(10.3) == pytest.approx(1_010_300, abs=1)

    def test_a_clock_that_was_set_forward_is_followed(self) -> None:
        clock = CarriedClock()
        clock.take(1_010_000, 10.0, 10.0)
        clock.take(4_611_000, 11.0, 11.0)
        assert clock.at(11.0) == pytest.approx(4_611_000, abs=1)
        assert clock.ahead_ms == 0

    def test_after_a_clock_was_set_back_time_goes_on_a_tenth_slower_until_it_has_caught_up(self) -> None:
        clock = CarriedClock()
        clock.take(101_010_000, 10.0, 10.0)
        clock.take(101_011_000 - 60_000, 11.0, 11.0)
        assert clock.at(11.0) == pytest.approx(101_010_900, abs=2)
        assert clock.ahead_ms == pytest.approx(59_900, abs=2)
        for second in range(12, 711):
            before = clock.at(second)
            clock.take(101_000_000 + second * 1000 - 60_000, second, second)
            assert clock.at(second) >= before - 1_000
        assert clock.at(710) == pytest.approx(101_650_000, abs=2)
        assert clock.ahead_ms == 0

    def test_a_server_that_starts_later_goes_on_from_what_another_one_has_seen(self) -> None:
        clock = CarriedClock()
        clock.take(1_010_000, 10.0, 10.0)
        clock.not_before(1_005_000, 10.0)
        assert clock.at(10.0) == pytest.approx(1_010_000, abs=1)
        clock.not_before(3_610_000, 10.0)
        assert clock.at(11.0) == 3_611_000
        clock.take(1_011_000, 11.0, 11.0)
        assert clock.at(11.0) == pytest.approx(3_610_900, abs=2)

    def test_a_second_later_it_is_read_again(self) -> None:
        clock = CarriedClock()
        assert not clock.knows(10.0)
        clock.take(1_010_000, 10.0, 10.0)
        assert clock.knows(11.0)
        assert not clock.knows(12.0)
