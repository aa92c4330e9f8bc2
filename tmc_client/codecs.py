"""Bodies: bytes, str, dict and list (JSON), dataclasses (JSON), pydantic models (JSON), protobuf messages.

The declared type decides how bytes are read; pydantic and protobuf are recognised by what they offer, so that neither
has to be installed.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Generic, TypeVar, get_origin

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
        if dataclasses.is_dataclass(body) and not isinstance(body, type):
            body = dataclasses.asdict(body)
        return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode(), JSON
    except (TypeError, ValueError) as exc:
        raise CodecError(f"A body of type {type(body).__name__} cannot be sent: {exc}", field="body") from exc


def decode(body: bytes, content_type: str, wanted: Any) -> Any:
    """A body as the wanted type; Any: by its content type. Raises CodecError."""
    try:
        if wanted is bytes:
            return body
        if wanted is str:
            return body.decode()
        if hasattr(wanted, "model_validate_json"):
            return wanted.model_validate_json(body)
        if hasattr(wanted, "FromString"):
            return wanted.FromString(body)
        if dataclasses.is_dataclass(wanted) and isinstance(wanted, type):
            return wanted(**json.loads(body))
        if wanted is Any:
            return json.loads(body) if content_type == JSON else body.decode() if content_type == TEXT else body
        value = json.loads(body)
        container = get_origin(wanted) or wanted
        if isinstance(container, type) and not isinstance(value, container):
            raise TypeError(f"it holds a {type(value).__name__}")
        return value
    except Exception as exc:
        raise CodecError(f"The body is no {getattr(wanted, '__name__', wanted)}: {exc}", field="body") from exc
