"""What reflection finds, without a server."""

from __future__ import annotations

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection_pb2

from tmc_common.protocol import message_pb2
from tmc_server.rpc.reflection import Described, Reflection


@pytest.mark.parametrize(
    "symbol",
    [
        "tmc.v1.MessageService",
        "tmc.v1.MessageService.Prepare",
        ".tmc.v1.MessageService.Prepare",
        "tmc.v1.PrepareRequest",
        "tmc.v1.PrepareRequest.topic",
    ],
)
def test_a_method_is_found_by_its_own_name_like_any_other_symbol(symbol: str) -> None:
    described = Described([message_pb2.DESCRIPTOR])
    first = descriptor_pb2.FileDescriptorProto.FromString(next(iter(described.file_of_symbol(symbol))))
    assert first.name == message_pb2.DESCRIPTOR.name


def test_extensions_are_found_by_type_and_number() -> None:
    pool = descriptor_pool.DescriptorPool()
    base = descriptor_pb2.FileDescriptorProto(name="base.proto", package="a", syntax="proto2")
    base.message_type.add(name="Open").extension_range.add(start=100, end=200)
    more = descriptor_pb2.FileDescriptorProto(
        name="more.proto", package="b", syntax="proto2", dependency=["base.proto"]
    )
    kinds = descriptor_pb2.FieldDescriptorProto
    holder = more.message_type.add(name="Holder")
    for scope, name, number in ((more.extension, "outer", 101), (holder.extension, "inner", 150)):
        scope.add(name=name, number=number, extendee=".a.Open", type=kinds.TYPE_INT32, label=kinds.LABEL_OPTIONAL)
    pool.Add(base)
    pool.Add(more)
    reflection = Reflection([], Described([pool.FindFileByName("more.proto")]))

    def files(**asked: object) -> list[str]:
        answer = reflection.answer_one(reflection_pb2.ServerReflectionRequest(**asked))
        found = map(
            descriptor_pb2.FileDescriptorProto.FromString, answer.file_descriptor_response.file_descriptor_proto
        )
        return [file.name for file in found] or [answer.error_response.error_message]

    for symbol in ("b.outer", "b.Holder.inner", "b.Holder"):
        assert files(file_containing_symbol=symbol) == ["more.proto", "base.proto"]
    for number, found in ((101, ["more.proto", "base.proto"]), (150, ["more.proto", "base.proto"]), (102, None)):
        extension = reflection_pb2.ExtensionRequest(containing_type="a.Open", extension_number=number)
        assert files(file_containing_extension=extension) == (found or ["There is no 102 here."])
    numbers = reflection.answer_one(reflection_pb2.ServerReflectionRequest(all_extension_numbers_of_type="a.Open"))
    assert list(numbers.all_extension_numbers_response.extension_number) == [101, 150]
