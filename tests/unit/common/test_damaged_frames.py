"""Frames of AMQP that the library cannot decode: they must not end the connection, since they would come again."""

from __future__ import annotations

import struct

import pika
import pytest

from tmc_common.amqp import DAMAGED, decoded


def _header(table: bytes) -> bytes:
    """A header frame on channel 3, of a body of 5 bytes, with this table of headers and nothing else."""
    properties = struct.pack(">H", 1 << 13) + struct.pack(">L", len(table)) + table
    payload = struct.pack(">HHQ", 60, 0, 5) + properties
    return struct.pack(">BHL", 2, 3, len(payload)) + payload + b"\xce"


@pytest.mark.parametrize(
    "value",
    [b"T" + struct.pack(">Q", 1 << 62), b"T" + struct.pack(">Q", 253402300800), b"?what"],
)
def test_damaged_properties_are_marked(value: bytes) -> None:
    data = _header(b"\x01a" + value)
    size, header = decoded(data + b"the next frame")
    assert (size, header.channel_number, header.body_size) == (len(data), 3, 5)
    assert header.properties.headers == {DAMAGED: True}


def test_others_are_as_the_library_decodes_them() -> None:
    data = _header(b"\x01aS\x00\x00\x00\x01b")
    size, header = decoded(data)
    assert (size, header.properties.headers) == (len(data), {"a": "b"})
    assert decoded(data[:10]) == (0, None)
    with pytest.raises(pika.exceptions.InvalidFrameError):
        decoded(data[:-1] + b"?")
