"""Protos are a promise: what protos_promised.txt lists stays as it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor

from tmc_common.protocol import admin_pb2, check_pb2, consumption_pb2, message_pb2, types_pb2

PROMISED = Path(__file__).with_name("protos_promised.txt")
FILES: list[FileDescriptor] = [
    module.DESCRIPTOR for module in (types_pb2, message_pb2, consumption_pb2, check_pb2, admin_pb2)
]
_TYPES = {
    value: name.removeprefix("TYPE_").lower()
    for name, value in vars(FieldDescriptor).items()
    if name.startswith("TYPE_")
}


def _type(field: FieldDescriptor) -> str:
    kind = field.message_type or field.enum_type
    name = kind.full_name if kind is not None else _TYPES[field.type]
    many = "repeated " if field.is_repeated else ""
    return f"{many}{name}{' optional' if field.has_presence and field.message_type is None else ''}"


def _messages(of: FileDescriptor | Descriptor) -> Iterator[Descriptor]:
    found = of.message_types_by_name if isinstance(of, FileDescriptor) else of.nested_types_by_name
    for message in found.values():
        yield message
        yield from _messages(message)


def _current() -> list[str]:
    lines = []
    for file in FILES:
        for service in file.services_by_name.values():
            for method in service.methods:
                streams = f"{method.client_streaming}/{method.server_streaming}"
                lines.append(
                    f"{method.full_name}: {method.input_type.full_name} {method.output_type.full_name} {streams}"
                )
        for message in _messages(file):
            lines += [f"{field.full_name} = {field.number}: {_type(field)}" for field in message.fields]
        for enum in file.enum_types_by_name.values():
            lines += [f"{enum.full_name}.{value.name} = {value.number}" for value in enum.values]
    return sorted(lines)


def test_nothing_that_was_promised_is_changed_or_removed() -> None:
    missing = set(PROMISED.read_text().splitlines()) - set(_current())
    assert not missing, "a field, value or method was changed or removed: add another one instead"


def test_what_is_new_is_promised_from_now_on() -> None:
    fresh = set(_current()) - set(PROMISED.read_text().splitlines())
    assert not fresh, f"add these lines to {PROMISED.name}"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_generated_code_has_the_same_place_for_everyone(file: FileDescriptor) -> None:
    options = file.GetOptions()
    assert (options.go_package, options.java_package) == ("tmc/v1;tmcv1", "tmc.v1")
    assert options.java_multiple_files
