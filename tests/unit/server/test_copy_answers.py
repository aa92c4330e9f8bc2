"""Outcomes of copies that left the center: until one is stored, its message gets no second copy."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from tests.support.outlet import SomeCatalog, a_copy
from tests.support.store import RecordingOutlet
from tmc_server.delivery.answers import CopyAnswers
from tmc_server.delivery.routing import RoutingOutlet
from tmc_server.domain.operations import Answer, Operation
from tmc_server.domain.ports.delivery import Copy
from tmc_server.errors import ConsumptionClosed, ShuttingDown


class _Store:
    """A performer that answers when it is let."""

    def __init__(self, *, stops: bool = False) -> None:
        self.opened = asyncio.Event()
        self._stops = stops

    async def perform(self, operations: Sequence[Operation]) -> list[Answer]:
        await self.opened.wait()
        if self._stops:
            raise ShuttingDown
        return [ConsumptionClosed() for _ in operations]  # final, as good as done


def _answer(answers: CopyAnswers, kind: str, copies: Sequence[Copy]) -> None:
    if kind == "acknowledge":
        answers.acknowledge(copies)
    elif kind == "refuse":
        answers.refuse(copies, "no stock")
    else:
        answers.give_back(copies)


@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("kind", ["acknowledge", "refuse", "give_back"])
def test_a_message_is_unwritten_until_the_outcome_of_its_copy_is_stored(kind: str, stops: bool) -> None:
    async def run() -> None:
        catalog = SomeCatalog("consumer", 1)
        answers = CopyAnswers(asyncio.get_running_loop(), catalog)
        answers.performer = store = _Store(stops=stops)
        outlet = RoutingOutlet(catalog, RecordingOutlet(room=10), {}, lambda *_: None, answers.unstored)
        copies = [a_copy(1) for _ in range(3)]

        def unwritten() -> set[tuple[int, int]]:
            look = outlet.look(1)
            assert look is not None
            return set(look.unwritten)

        _answer(answers, kind, copies)
        assert unwritten() == {(copy.shard, copy.number) for copy in copies}
        store.opened.set()
        while unwritten():
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(run(), 60))
