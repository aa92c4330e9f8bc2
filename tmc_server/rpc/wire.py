"""Refuses requests that cost too much to decode: protobuf turns two bytes into an object of 100 bytes.

Small requests are decoded as they are. A large one with suspiciously many fields is walked first, and refused at the first
list that is longer than any valid one: that costs a walk over the valid part at most.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from google.protobuf.descriptor import Descriptor

from tmc_server.errors import MalformedRequest
from tmc_server.requests.validation import MAX_ITEMS

_SMALL_BYTES = 65_536
_DENSE = 16  # one field per 16 bytes or fewer is suspicious
_MOST_FIELDS = MAX_ITEMS + 64  # of one message; headers are fewer still
_LENGTH_DELIMITED = 2
_SIZES = {1: 8, 5: 4}


def check_fields(data: bytes, descriptor: Descriptor) -> None:
    """Raises MalformedRequest when a message in it has more fields than any valid one."""
    if len(data) > _SMALL_BYTES and _dense(data):
        _walk(data, 0, len(data), descriptor)


def _dense(data: bytes) -> bool:
    """Could many of its bytes be the tags of items (field 1) or headers (field 5)? Both may be written overlong."""
    return sum(data.count(tag) for tag in (b"\x0a", b"\x8a", b"\x2a", b"\xaa")) * _DENSE > len(data)


@cache
def _inner(descriptor: Descriptor) -> Mapping[int, Descriptor]:
    """Return the types of the fields that hold messages themselves, by number."""
    return {field.number: field.message_type for field in descriptor.fields if field.message_type is not None}


def _walk(data: bytes, at: int, end: int, descriptor: Descriptor) -> None:
    fields, known = 0, _inner(descriptor)
    while at < end:
        fields += 1
        if fields > _MOST_FIELDS:
            raise MalformedRequest(f"A part of this request has more than {_MOST_FIELDS} fields: send smaller batches.")
        tag, at = _varint(data, at, end)
        kind = tag & 7
        if kind == 0:
            _, at = _varint(data, at, end)
        elif kind == _LENGTH_DELIMITED:
            size, at = _varint(data, at, end)
            inner = known.get(tag >> 3)
            if inner is not None and at + size <= end:
                _walk(data, at, at + size, inner)
            at += size
        elif kind in _SIZES:
            at += _SIZES[kind]
        else:
            raise MalformedRequest  # groups: our protos have none
    if at > end:
        raise MalformedRequest


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise MalformedRequest
