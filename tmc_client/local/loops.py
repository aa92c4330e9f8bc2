"""Connections of asyncio belong to the event loop that made them: what a pool keeps is of no use on another one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tmc_client import errors

HANDLERS = "tmc-handlers"  # the thread with the event loop of a consumer's `async def` handlers
_SIGNS = ("attached to a different loop", "Event loop is closed")


@contextmanager
def on_one_loop(what: str) -> Iterator[None]:
    """Translate errors of the first statement over a connection. what: who uses it, for the message. Raises InvalidRequest."""
    try:
        yield
    except RuntimeError as exc:
        if not any(sign in str(exc) for sign in _SIGNS):
            raise
        raise errors.InvalidRequest(
            f"This engine has connections of another event loop: give {what} an engine of its own, or `await engine.dispose()` "
            "on that loop before it ends."
        ) from exc
