"""Ends a call with one of our errors, without keeping its request in memory."""

from __future__ import annotations

from typing import Any, Protocol

import grpc

from tmc_server.errors import TmcError
from tmc_server.rpc.status import CODES, trailing

Context = grpc.aio.ServicerContext[Any, Any]


class Refusable(Protocol):
    """A call that can be ended early, over gRPC or not."""

    async def abort(self, code: Any, details: str = ..., trailing_metadata: Any = ...) -> Any: ...


_USUAL: dict[type[TmcError], tuple[tuple[str, bytes], ...]] = {}


async def refuse(context: Refusable, error: TmcError) -> None:
    """Send the status.

    A call's state holds the exception that ended it, the exception its frames, and the frames the call and its request: a
    cycle that keeps the request until the collector finds it, which on a busy server is hours later. So both exceptions let
    go of their frames, and the caller returns instead of raising: gRPC then raises what it noted itself.
    """
    let_go(error)
    details = _usual(type(error)) if _is_plain(error) else trailing(error)
    try:
        await context.abort(CODES[type(error)], error.sentence, details)
    except grpc.aio.AbortError as aborted:
        let_go(aborted)


def let_go(error: BaseException | None) -> None:
    """Free the frames that an exception and those before it came through."""
    while error is not None:
        error.__traceback__ = None
        before, error.__context__, error.__cause__ = error.__cause__ or error.__context__, None, None
        error = before


def _is_plain(error: TmcError) -> bool:
    """Return whether it says nothing but what its class says."""
    return (
        error.sentence == error.text
        and not error.field
        and not error.message_id
        and error.retry_after_ms == error.default_retry_after_ms
    )


def _usual(kind: type[TmcError]) -> tuple[tuple[str, bytes], ...]:
    """Strangers are refused often: the same bytes each time."""
    found = _USUAL.get(kind)
    if found is None:
        found = _USUAL[kind] = trailing(kind())
    return found
