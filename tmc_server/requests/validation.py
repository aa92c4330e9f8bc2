"""What a field may look like. Each function returns the value or raises InvalidField naming the field and the rule."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from tmc_common import fields
from tmc_common.addresses import HostPort
from tmc_server.domain.declared import Bounds, Declared, bounds
from tmc_server.domain.ids import MessageId
from tmc_server.domain.numbers import MessageNumber, Shard
from tmc_server.errors import InvalidField

MAX_ITEMS = 1000
ATTEMPT_ID_BYTES = 16
ERROR_CHARACTERS = 500

_APP = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
_HOST = re.compile(r"[A-Za-z0-9_.-]+|[0-9A-Fa-f:.]+", re.ASCII)


Given = ParamSpec("Given")
Value = TypeVar("Value")
Record = TypeVar("Record", bound=Declared)


def _refusing(rule: Callable[Given, Value]) -> Callable[Given, Value]:
    @wraps(rule)
    def apply(*args: Given.args, **kwargs: Given.kwargs) -> Value:
        try:
            return rule(*args, **kwargs)
        except fields.FieldInvalid as exc:
            raise refused(exc) from None

    return apply


def refused(exc: fields.FieldInvalid) -> InvalidField:
    return InvalidField(exc.field, exc.rule)


topic = _refusing(fields.topic)
key = _refusing(fields.key)
producers_key = _refusing(fields.producers_key)
line = _refusing(fields.line)
headers = _refusing(fields.headers)
between = _refusing(fields.between)


def app_id(value: str, field: str = "id") -> str:
    if not _APP.fullmatch(value):
        raise InvalidField(field, "be 1 to 64 characters of A-Z a-z 0-9 _ -")
    return value


def tag(value: str, field: str = "tag", may_be_empty: bool = True) -> str:
    if not (_APP.fullmatch(value) or (may_be_empty and not value)):
        raise InvalidField(field, "be 1 to 64 characters of A-Z a-z 0-9 _ -")
    return value


def check_target(value: str, field: str = "check_target") -> str:
    """The name of a target, or nothing."""
    if value and not (_APP.fullmatch(value) and len(value) <= 32):
        raise InvalidField(field, "be at most 32 characters of A-Z a-z 0-9 _ -")
    return value


def address(value: str, field: str) -> str:
    """host:port, or nothing."""
    if not value:
        return value
    try:
        place = HostPort.parse(value)
    except ValueError:
        raise InvalidField(field, "be host:port") from None
    if len(value) > 255 or not place.port or not _HOST.fullmatch(place.host):
        raise InvalidField(field, "be host:port")
    return value


def hexadecimal_id(value: str, field: str) -> bytes:
    """16 bytes, or none."""
    try:
        found = bytes.fromhex(value)
    except ValueError:
        found = b"?"
    if found and len(found) != 16:
        raise InvalidField(field, "be empty or exactly 16 bytes, in hexadecimal")
    return found


def reason(value: str) -> str:
    """Accept what an operator writes into the audit trail."""
    return line(value, "reason", ERROR_CHARACTERS, least=1)


def attempt_id(value: bytes) -> bytes:
    if len(value) != ATTEMPT_ID_BYTES:
        raise InvalidField("attempt_id", "be exactly 16 bytes, made once per transaction")
    return value


def ledger_id(value: bytes) -> bytes | None:
    if value and len(value) != ATTEMPT_ID_BYTES:
        raise InvalidField("ledger_id", "be empty or exactly 16 bytes")
    return value or None


def message_id(value: str) -> MessageId:
    parsed = MessageId.parse(value)
    if parsed is None:
        raise InvalidField("message_id", "be one that the center gave you, TOPIC-APP-SHARD-NUMBER")
    return parsed


def items(count: int, field: str = "items") -> int:
    return between(count, field, 1, MAX_ITEMS)


def page_size(value: int) -> int:
    return between(value or 100, "page_size", 1, 1000)


def page_token(value: str) -> tuple[Shard, MessageNumber] | None:
    """Shard and number of the last row of the page before; None: there is none."""
    if not value:
        return None
    match = re.fullmatch(r"([0-9]{1,2})-([0-9]{1,19})", value, re.ASCII)
    if match is None or int(match[1]) > 31 or int(match[2]) >= 1 << 63:
        raise InvalidField("page_token", "be one that the center gave you")
    return Shard(int(match[1])), MessageNumber(int(match[2]))


def numbers_token(value: str) -> tuple[int, ...]:
    """A page token of several numbers; (): there is none."""
    if not value:
        return ()
    numbers = (
        tuple(map(int, value.split("-"))) if re.fullmatch(r"[0-9]{1,19}(-[0-9]{1,19}){0,63}", value, re.ASCII) else ()
    )
    if not numbers or max(numbers) >= 1 << 63:
        raise InvalidField("page_token", "be one that the center gave you")
    return numbers


def number_token(value: str) -> int:
    """A page token that is one number."""
    if not re.fullmatch(r"[0-9]{1,18}", value, re.ASCII):
        raise InvalidField("page_token", "be one that the center gave you")
    return int(value)


def fingerprint(value: str) -> str:
    """Accept the fingerprint of an error, or nothing."""
    if value and not re.fullmatch(r"[0-9a-f]{12}", value, re.ASCII):
        raise InvalidField("fingerprint", "be 12 hex digits, as dry runs and failed deliveries show it")
    return value


def within_bounds(record: Record, within: str = "") -> Record:
    """Demand that every setting is within what its declaration allows. within: the path of the record, for errors."""
    for name, limits in bounds(record).items():
        bounded(getattr(record, name), within + name, limits)
    return record


def bounded(value: str | int, field: str, limits: Bounds) -> None:
    """The characters of a text are counted."""
    if isinstance(value, str):
        line(value, field, limits.high, limits.low)
    else:
        between(value, field, limits.low, limits.high)
