"""What HTTP servers of others answer, read up to a limit: a few kilobytes can be made to swell to gigabytes."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx

UNCOMPRESSED = {"Accept-Encoding": "identity"}
"""Header to send with the request: how long a compressed body is, is known only when it is in memory."""


class TooLarge(ValueError):
    """An answer is longer than it may be, or takes longer."""


class Compressed(ValueError):
    """An answer is compressed, which was not asked for."""


def read_body(response: httpx.Response, most: int, seconds: float) -> bytes:
    """The body of a streamed response. most: bytes.  Raises TooLarge, Compressed, httpx.HTTPError."""
    _refuse_compressed(response)
    body, until = bytearray(), time.monotonic() + seconds
    for part in response.iter_raw():
        _add(body, part, most)
        if time.monotonic() > until:
            raise TooLarge(f"it is still being sent after {seconds:g} s")
    return bytes(body)


async def read_body_async(response: httpx.Response, most: int) -> bytes:
    """Read as `read_body` does. The caller limits the time."""
    _refuse_compressed(response)
    body = bytearray()
    async for part in response.aiter_raw():
        _add(body, part, most)
    return bytes(body)


def parsed(body: bytes) -> Any:
    """The JSON in it. Raises ValueError, also for lists within lists that Python does not follow."""
    try:
        return json.loads(body)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _refuse_compressed(response: httpx.Response) -> None:
    """Raises Compressed."""
    if response.headers.get("Content-Encoding", "identity") != "identity":
        raise Compressed("It is compressed, which was not asked for.")


def _add(body: bytearray, part: bytes, most: int) -> None:
    """Raises TooLarge."""
    body += part
    if len(body) > most:
        raise TooLarge(f"more than {most} bytes")
