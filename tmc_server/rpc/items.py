"""From requests to items, one by one or in batches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tmc_server.domain.operations import Answer
from tmc_server.errors import TmcError
from tmc_server.requests.caller import Caller, Item

Made = TypeVar("Made")
_SLICE = 100  # items; about a millisecond


class Turns:
    """Large batches are taken apart and answered slice by slice, one batch of an app at a time.

    The loop is back with other apps after each slice, however many batches one app has sent.
    """

    def __init__(self) -> None:
        self._locks: dict[int, asyncio.Lock] = {}

    async def items(self, caller: Caller, make: Callable[[Any], Item], requests: Sequence[Any]) -> list[Item]:
        """Refused ones do not stop their neighbors."""

        def item(request: Any) -> Item:
            try:
                return make(request)
            except TmcError as error:
                return error.with_traceback(None)  # its frames hold the request

        return await self.each(caller, item, requests)

    async def each(self, caller: Caller, make: Callable[[Any], Made], given: Sequence[Any]) -> list[Made]:
        """Return what `make` makes of each."""
        if len(given) <= _SLICE:
            return list(map(make, given))
        made: list[Made] = []
        async with self._locks.setdefault(caller.app.number, asyncio.Lock()):
            for start in range(0, len(given), _SLICE):
                made += map(make, given[start : start + _SLICE])
                await asyncio.sleep(0)
        return made


def only(answers: Sequence[Answer]) -> Any:
    """The answer to a single call, raised when it is an error."""
    (answer,) = answers
    if isinstance(answer, TmcError):
        raise answer
    return answer
