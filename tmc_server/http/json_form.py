"""Requests and answers as the JSON of protobuf.

JSON becomes objects that are far larger than its text, and slowly. So a request with more values than any valid one has is
refused by counting them, and what is not small is converted in a thread, for one request at a time, and one of a sender.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from google.protobuf import json_format, message_factory
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from tmc_server.errors import MalformedRequest
from tmc_server.rpc.calls import Decode

_SMALL_BYTES = 4_096
_MOST_VALUES = 100_000
_MOST_SAID = 200  # characters of what is wrong

Result = TypeVar("Result")


class JsonForm:
    """Converts between JSON and messages. On the loop only."""

    def __init__(self) -> None:
        self._one = asyncio.Lock()
        self._of_sender: dict[int, asyncio.Lock] = {}

    def decoder(self, descriptor: Descriptor) -> Decode:
        """Return what makes messages of this type from JSON."""
        kind = message_factory.GetMessageClass(descriptor)

        async def decode(sender: int, data: bytes) -> Message:
            if len(data) <= _SMALL_BYTES:
                return _parsed(kind(), data)
            async with self._of_sender.setdefault(sender, asyncio.Lock()):
                return await self._in_turn(lambda: _parsed(kind(), data))

        return decode

    async def text(self, message: Message) -> bytes:
        """Return the JSON of an answer."""
        if message.ByteSize() <= _SMALL_BYTES:
            return _text(message)
        return await self._in_turn(lambda: _text(message))

    async def _in_turn(self, work: Callable[[], Result]) -> Result:
        async with self._one:
            return await asyncio.to_thread(work)


def _text(message: Message) -> bytes:
    return json_format.MessageToJson(message, indent=None).encode()


def _parsed(message: Message, data: bytes) -> Message:
    if sum(data.count(mark) for mark in (b",", b"{", b"[")) > _MOST_VALUES:
        raise MalformedRequest(f"This request has more than {_MOST_VALUES} values: send smaller batches.")
    try:
        return json_format.Parse(data, message)
    except (json_format.ParseError, ValueError, RecursionError) as exc:
        said = f"{exc}".replace("\n", " ").strip(" .")[:_MOST_SAID]
        name = message.DESCRIPTOR.name
        raise MalformedRequest(f"This is not the JSON of {name}, with bytes as base64: {said}.") from None
