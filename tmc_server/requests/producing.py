"""Prepares and decisions in one batch."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TypeVar

from tmc_server.domain.operations import Answer, Decide, Prepare
from tmc_server.errors import TmcError
from tmc_server.requests.caller import Caller, Item
from tmc_server.requests.deciding import Deciding
from tmc_server.requests.preparing import Preparing

Other = TypeVar("Other")


async def perform_both(
    preparing: Preparing, deciding: Deciding, caller: Caller, items: Sequence[Prepare | Decide | Answer | Other]
) -> list[Answer | Other]:
    """Return what became of each; an item that is neither is its own answer.

    Messages and decisions are in the group commit's queues before either is answered.
    """
    stores = [item for item in items if isinstance(item, Prepare)]
    decides = [item for item in items if isinstance(item, Decide)]
    stored, decided = await asyncio.gather(
        _answers(preparing, caller, stores),
        _answers(deciding, caller, decides),
    )
    of_stores, of_decides = iter(stored), iter(decided)
    return [
        next(of_stores) if isinstance(item, Prepare) else next(of_decides) if isinstance(item, Decide) else item
        for item in items
    ]


async def _answers(use_case: Preparing | Deciding, caller: Caller, items: Sequence[Item]) -> Sequence[Answer]:
    """Return the answers, or for each of them what was raised for all."""
    try:
        return await use_case.perform(caller, items)
    except TmcError as error:
        return [error] * len(items)
