"""Encode and decode bodies: bytes, str, protobuf messages, and everything else as JSON by its declared type.

JSON is written by the standard library and read by msgspec, which converts to the declared type: dataclasses,
TypedDicts and named tuples with everything nested in them, dates, UUIDs, decimals, enums. Unknown fields are ignored,
so a producer can add fields. pydantic and protobuf are recognized by duck typing: neither has to be installed.
"""

from __future__ import annotations

import dataclasses
import json
from functools import lru_cache
from typing import Any, Generic, TypeVar

from tmc_client.errors import CodecError

T = TypeVar("T")

BYTES, TEXT, JSON, PROTOBUF = "application/octet-stream", "text/plain", "application/json", "application/x-protobuf"


@dataclasses.dataclass(frozen=True)
class Topic(Generic[T]):
    """A topic's name and the type of its bodies."""

    name: str
    type: Any = Any

    def __str__(self) -> str:
        return self.name


def topic(name: str, type: type[T] | None = None) -> Topic[T]:
    """Declare a topic, once, in a module that producers and consumers share."""
    return Topic(name, Any if type is None else type)


def encode(body: object) -> tuple[bytes, str]:
    """The bytes of a body and their content type. Raises CodecError."""
    try:
        match body:
            case bytes():
                return body, BYTES
            case bytearray() | memoryview():
                return bytes(body), BYTES
            case str():
                return body.encode(), TEXT
        if hasattr(body, "model_dump_json"):
            return body.model_dump_json().encode(), JSON
        if hasattr(body, "SerializeToString"):
            return body.SerializeToString(), PROTOBUF
        text = json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=_plain)
        return text.encode(), JSON
    except Exception as exc:
        if not _is_of_a_codec(exc):
            raise
        raise CodecError(
            f"A body of type {type(body).__name__} cannot be sent: {exc}. {_WHAT_TRAVELS}", field="body"
        ) from exc


_WHAT_TRAVELS = (
    "Send bytes, str, a protobuf message, a pydantic model, or what JSON can carry: dict, list, dataclasses, dates, UUID, "
    "Decimal, Enum."
)


_WRONG = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RecursionError)


def _is_of_a_codec(exc: Exception) -> bool:
    """Return whether a codec raised it; others are none of our business, e.g. what a signal handler raises meanwhile."""
    return isinstance(exc, _WRONG) or type(exc).__module__.partition(".")[0] in ("msgspec", "google", "pydantic_core")


def _plain(value: Any) -> Any:
    """Convert a value that JSON cannot represent."""
    import msgspec

    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    return msgspec.to_builtins(value, str_keys=True, enc_hook=_plain_model)


def _plain_model(value: Any) -> Any:
    """A pydantic model in a dataclass."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    raise TypeError(f"it holds an object of type {type(value).__name__}")


def decode(body: bytes, content_type: str, wanted: Any) -> Any:
    """Decode a body to the wanted type; for Any, by its content type. Raises CodecError."""
    try:
        if wanted is bytes:
            return body
        if wanted is str:
            return body.decode()
        if hasattr(wanted, "model_validate_json"):
            return wanted.model_validate_json(body)
        if hasattr(wanted, "FromString"):
            return wanted.FromString(body)
        if wanted is Any or wanted is object:
            return json.loads(body) if content_type == JSON else body.decode() if content_type == TEXT else body
        return _reader(wanted)(body)
    except Exception as exc:
        if not _is_of_a_codec(exc):
            raise
        raise CodecError(f"The body is no {getattr(wanted, '__name__', wanted)}: {exc}", field="body") from exc


@lru_cache(256)
def _reader(wanted: Any) -> Any:
    """A function from JSON to this type."""
    if hasattr(wanted, "__pydantic_validator__"):  # a dataclass of pydantic's
        import pydantic

        return pydantic.TypeAdapter(wanted).validate_json
    import msgspec

    decoder = msgspec.json.Decoder(wanted, dec_hook=_model)

    def read(body: bytes) -> Any:
        try:
            return decoder.decode(body)
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:  # NaN and Infinity, which Python's json writes, are not JSON
            return msgspec.convert(json.loads(body), wanted, dec_hook=_model)

    return read


def _model(wanted: Any, value: Any) -> Any:
    """A pydantic model in a dataclass or a list."""
    if hasattr(wanted, "model_validate"):
        return wanted.model_validate(value)
    raise TypeError(f"a {getattr(wanted, '__name__', wanted)} cannot be read from JSON")
