"""From requests to items, one by one or in batches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from tmc_server.domain.operations import Answer
from tmc_server.errors import TmcError
from tmc_server.requests.caller import Caller, Item

_SLICE = 100  # items; about a millisecond


def _try(make: Callable[[Any], Item], request: Any) -> Item:
    """One item of a batch: refused items do not stop their neighbors."""
    try:
        return make(request)
    except TmcError as error:
        return error.with_traceback(None)  # its frames hold the request


class Turns:
    """Large batches are made into items slice by slice, one batch of an app at a time.

    The loop is back with other apps after each slice, however many batches one app has sent.
    """

    def __init__(self) -> None:
        self._locks: dict[int, asyncio.Lock] = {}

    async def items(self, caller: Caller, make: Callable[[Any], Item], requests: Sequence[Any]) -> list[Item]:
        if len(requests) <= _SLICE:
            return [_try(make, request) for request in requests]
        made: list[Item] = []
        async with self._locks.setdefault(caller.app.number, asyncio.Lock()):
            for start in range(0, len(requests), _SLICE):
                made += [_try(make, request) for request in requests[start : start + _SLICE]]
                await asyncio.sleep(0)
        return made


def only(answers: Sequence[Answer]) -> Any:
    """The answer to a single call, raised when it is an error."""
    (answer,) = answers
    if isinstance(answer, TmcError):
        raise answer
    return answer
