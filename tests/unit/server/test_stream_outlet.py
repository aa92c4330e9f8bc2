"""Built-in delivery: credit is never overdrawn, nothing reserved gets lost."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tmc_server.delivery.stream import StreamLimits, StreamOutlet
from tmc_server.domain.ports.delivery import Copy
from tmc_server.errors import ShuttingDown


def _copy(number: int, subscription: int = 1) -> Copy:
    return Copy(
        shard=5,
        number=number,
        subscription=subscription,
        attempt=1,
        topic=1,
        producer=1,
        key="k",
        body=b"",
        content_type="t",
        headers={},
    )


_LIMITS = StreamLimits()


def _run(story, limits: StreamLimits = _LIMITS) -> None:
    async def main() -> None:
        given_back: list[Copy] = []
        wakes: list[int] = []
        outlet = StreamOutlet(asyncio.get_running_loop(), given_back.extend, lambda: wakes.append(1), limits)
        await story(outlet, given_back, wakes)

    asyncio.run(main())


def test_no_consumer_no_room() -> None:
    async def story(outlet, given_back, wakes) -> None:
        assert outlet.reserve(1, 10) == 0
        stream = outlet.open([1])
        assert outlet.reserve(1, 10) == 0
        outlet.add_credit(stream, 3)
        assert (wakes, outlet.reserve(2, 1), outlet.reserve(1, 10), outlet.reserve(1, 10)) == ([1], 0, 3, 0)

    _run(story)


def test_consumers_share_what_comes() -> None:
    async def story(outlet, given_back, wakes) -> None:
        streams = [outlet.open([1]) for _ in range(3)]
        for stream in streams:
            outlet.add_credit(stream, 10)
        assert outlet.reserve(1, 6) == 6
        outlet.deliver([_copy(i) for i in range(6)])
        batches = [await stream.next_batch(10, 1 << 20) for stream in streams]
        assert [len(batch) for batch in batches] == [2, 2, 2]

    _run(story)


def test_a_short_consumer_does_not_hold_up_the_others() -> None:
    async def story(outlet, given_back, wakes) -> None:
        poor, rich = outlet.open([1]), outlet.open([1])
        outlet.add_credit(poor, 1)
        outlet.add_credit(rich, 10)
        granted = outlet.reserve(1, 10) + outlet.reserve(1, 10)
        assert granted == 11

    _run(story)


def test_what_was_not_written_is_given_back() -> None:
    async def story(outlet, given_back, wakes) -> None:
        stream = outlet.open([1])
        outlet.add_credit(stream, 5)
        assert outlet.reserve(1, 4) == 4
        outlet.deliver([_copy(1), _copy(2)])
        await asyncio.sleep(0)
        outlet.close(stream)
        assert [copy.number for copy in given_back] == [1, 2]
        outlet.deliver([_copy(3), _copy(4)])  # reserved before the consumer left
        await asyncio.sleep(0)
        assert [copy.number for copy in given_back] == [1, 2, 3, 4]
        assert outlet.reserve(1, 1) == 0

    _run(story)


def test_what_was_taken_and_not_written_is_given_back_in_order() -> None:
    async def story(outlet, given_back, wakes) -> None:
        stream = outlet.open([1])
        outlet.add_credit(stream, 5)
        outlet.reserve(1, 3)
        outlet.deliver([_copy(i) for i in range(3)])
        batch = await stream.next_batch(2, 1 << 20)
        stream.put_back(batch)
        stream.close()
        assert [copy.number for copy in given_back] == [0, 1, 2]

    _run(story)


def test_a_batch_has_a_size_in_bytes_but_one_copy_always_fits() -> None:
    async def story(outlet, given_back, wakes) -> None:
        stream = outlet.open([1])
        outlet.add_credit(stream, 5)
        outlet.reserve(1, 3)
        outlet.deliver([replace(_copy(i), body=b"x" * 100) for i in range(3)])
        await asyncio.sleep(0)
        assert [len(await stream.next_batch(10, size)) for size in (200, 1)] == [2, 1]

    _run(story)


def test_credit_without_end_gets_no_more_copies_ahead_than_the_limit() -> None:
    async def story(outlet, given_back, wakes) -> None:
        stream = outlet.open([1])
        for _ in range(10):
            outlet.add_credit(stream, 60)
        assert outlet.reserve(1, 10_000) == 100
        outlet.deliver([_copy(i) for i in range(100)])
        outlet.add_credit(stream, 60)
        await asyncio.sleep(0)
        assert outlet.reserve(1, 10_000) == 0  # all of it waits in memory
        assert len(await stream.next_batch(30, 1 << 20)) == 30
        outlet.add_credit(stream, 60)
        assert outlet.reserve(1, 10_000) == 0  # taken, and not written yet
        await stream.next_batch(30, 1 << 20)
        outlet.add_credit(stream, 60)
        assert outlet.reserve(1, 10_000) == 30

    _run(story, StreamLimits(copies=100))


def test_a_reader_that_never_reads_holds_no_more_bytes_than_the_limit() -> None:
    async def story(outlet, given_back, wakes) -> None:
        stream = outlet.open([1])
        outlet.add_credit(stream, 10_000)
        handed_over = 0
        for _ in range(50):
            granted = outlet.reserve(1, 400)
            outlet.deliver([replace(_copy(handed_over + i), body=b"x" * 250_000) for i in range(granted)])
            handed_over += granted
            await asyncio.sleep(0)
        assert (stream.unwritten, stream.unwritten_bytes) == (4, 1_000_000)
        assert len(given_back) == handed_over - 4
        assert handed_over <= 16  # the first promise was made before any body was known; then nothing goes to and fro
        assert not wakes[1:]
        await stream.next_batch(200, 1 << 20)
        assert outlet.reserve(1, 400) == 0
        waiting = asyncio.ensure_future(stream.next_batch(200, 1 << 20))  # so the first was written
        await asyncio.sleep(0)
        assert (stream.unwritten, len(wakes), outlet.reserve(1, 400)) == (0, 2, 4)
        waiting.cancel()

    _run(story, StreamLimits(bytes=1_000_000))


def test_one_copy_always_fits_however_large() -> None:
    async def story(outlet, given_back, wakes) -> None:
        stream = outlet.open([1])
        outlet.add_credit(stream, 5)
        assert outlet.reserve(1, 5) == 1
        outlet.deliver([replace(_copy(1), body=b"x" * 5_000)])
        await asyncio.sleep(0)
        assert (len(await stream.next_batch(10, 1)), given_back, outlet.reserve(1, 5)) == (1, [], 0)

    _run(story, StreamLimits(bytes=1_000))


def test_a_copy_is_named_as_unwritten_until_it_is_written() -> None:
    async def story(outlet, given_back, wakes) -> None:
        stream = outlet.open([1])
        outlet.add_credit(stream, 5)
        outlet.reserve(1, 2)
        outlet.deliver([_copy(8), _copy(9)])
        assert outlet.look(1).unwritten == {(5, 8), (5, 9)}
        await asyncio.sleep(0)
        await stream.next_batch(1, 1 << 20)
        assert outlet.look(1).unwritten == {(5, 8), (5, 9)}
        await stream.next_batch(1, 1 << 20)
        assert outlet.look(1).unwritten == {(5, 9)}
        stream.close()
        assert (outlet.look(1).unwritten, given_back) == (frozenset(), [])

    _run(story)


def test_a_reader_that_takes_nothing_is_cut_and_all_it_held_up_is_given_back() -> None:
    async def story(outlet, given_back, wakes) -> None:
        stream = outlet.open([1])
        outlet.add_credit(stream, 5)
        outlet.reserve(1, 5)
        outlet.deliver([_copy(i) for i in range(5)])
        await asyncio.sleep(0)
        assert len(await stream.next_batch(2, 1 << 20)) == 2
        while stream.open:
            await asyncio.sleep(0.01)
        assert [copy.number for copy in given_back] == [0, 1, 2, 3, 4]
        assert (stream.unwritten, stream.unwritten_bytes, outlet.look(1).unwritten) == (0, 0, frozenset())
        assert outlet.reserve(1, 5) == 0
        with pytest.raises(ShuttingDown, match="open another one"):
            await stream.next_batch(2, 1 << 20)  # the reader came back
        stream.close()  # as the ending call does
        assert len(given_back) == 5

    _run(story, StreamLimits(patience_s=0.01))


def test_a_stream_that_waits_for_copies_is_not_cut() -> None:
    async def story(outlet, given_back, wakes) -> None:
        stream = outlet.open([1])
        outlet.add_credit(stream, 5)
        outlet.reserve(1, 1)
        outlet.deliver([_copy(1)])
        await asyncio.sleep(0)
        await stream.next_batch(2, 1 << 20)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stream.next_batch(2, 1 << 20), 0.1)
        assert (stream.open, given_back) == (True, [])

    _run(story, StreamLimits(patience_s=0.02))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 20)), max_size=6),
    st.lists(st.integers(0, 30), max_size=10),
)
def test_never_more_than_the_credit_and_all_of_it(credits: list[tuple[int, int]], wants: list[int]) -> None:
    async def story(outlet, given_back, wakes) -> None:
        streams = [outlet.open([1]) for _ in range(3)]
        for which, credit in credits:
            outlet.add_credit(streams[which], credit)
        total, granted = sum(credit for _, credit in credits), 0
        for want in wants:
            got = outlet.reserve(1, want)
            assert got <= want
            granted += got
            outlet.release(1, got // 2)
            granted -= got // 2
        assert granted <= total
        assert outlet.reserve(1, 10_000) + 0 <= total - granted

    _run(story)
