"""Server reflection, v1 and v1alpha, for clients that ask by any symbol.

grpcio-reflection looks symbols up in protobuf's pool, which knows no methods there: `tmc.v1.AdminService.ListTopics` is not
found, and clients that resolve a method by its own name, such as ghz, fail. Here every symbol of every file that our
services reach is in one table: services, methods, messages, fields, oneofs, enums, enum values, extensions. The protocol is
that of grpc/reflection/v1/reflection.proto; v1alpha is the same on the wire, so one servicer answers both names.

A file is answered with everything it imports. What is not found is an error response in the stream, which stays open.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Any

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.rpc import error_details_pb2
from grpc_reflection.v1alpha import reflection_pb2

NAMES = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")
_MOST_QUESTIONS = 10_000  # of one stream: a client asks once per symbol or file


class Described:
    """Every symbol of some files and what they import. Immutable, so one serves all streams."""

    def __init__(self, roots: Iterable[FileDescriptor]) -> None:
        self._files: dict[str, FileDescriptorProto] = {}
        self._symbols: dict[str, str] = {}  # full name -> file
        self._extensions: dict[str, dict[int, str]] = {}  # extended message -> field number -> file
        self._messages: set[str] = set()
        for root in roots:
            self._add(root)

    def _add(self, file: FileDescriptor) -> None:
        if file.name in self._files:
            return
        made: Any = FileDescriptorProto()
        file.CopyToProto(made)
        self._files[file.name] = made
        for imported in file.dependencies:
            self._add(imported)
        scope = f"{made.package}." if made.package else ""
        for message in made.message_type:
            self._add_message(made.name, scope, message)
        for enum in made.enum_type:
            self._add_enum(made.name, scope, enum)
        self._add_extensions(made.name, scope, made.extension)
        for service in made.service:
            self._symbols[scope + service.name] = made.name
            for method in service.method:
                self._symbols[f"{scope}{service.name}.{method.name}"] = made.name

    def _add_message(self, file: str, scope: str, message: Any) -> None:
        name = scope + message.name
        self._symbols[name] = file
        self._messages.add(name)
        for part in (*message.field, *message.oneof_decl):
            self._symbols[f"{name}.{part.name}"] = file
        for nested in message.nested_type:
            self._add_message(file, f"{name}.", nested)
        for enum in message.enum_type:
            self._add_enum(file, f"{name}.", enum)
        self._add_extensions(file, f"{name}.", message.extension)

    def _add_enum(self, file: str, scope: str, enum: Any) -> None:
        """A value is known by the scope of its enum, as in C++, and by the enum's own name, as people write it."""
        self._symbols[scope + enum.name] = file
        for value in enum.value:
            self._symbols[scope + value.name] = file
            self._symbols[f"{scope}{enum.name}.{value.name}"] = file

    def _add_extensions(self, file: str, scope: str, extensions: Sequence[FieldDescriptorProto]) -> None:
        for extension in extensions:
            self._symbols[scope + extension.name] = file
            self._extensions.setdefault(extension.extendee.lstrip("."), {})[extension.number] = file

    def file(self, name: str) -> Iterator[bytes]:
        """The file, then what it imports, each once. Raises KeyError."""
        seen, waiting = {name}, [name]
        self._files[name]
        while waiting:
            file = self._files[waiting.pop(0)]
            yield file.SerializeToString()
            waiting += [each for each in file.dependency if each not in seen]
            seen.update(file.dependency)

    def file_of_symbol(self, symbol: str) -> Iterator[bytes]:
        """Raises KeyError."""
        return self.file(self._symbols[symbol.removeprefix(".")])

    def file_of_extension(self, message: str, number: int) -> Iterator[bytes]:
        """Raises KeyError."""
        return self.file(self._extensions[message.removeprefix(".")][number])

    def extensions_of(self, message: str) -> list[int]:
        """Raises KeyError: there is no such message. One that nobody extends has none."""
        name = message.removeprefix(".")
        if name not in self._messages:
            raise KeyError(name)
        return sorted(self._extensions.get(name, {}))


class Reflection:
    """The servicer of both services. names: of all services of the server."""

    def __init__(self, names: Iterable[str], described: Described) -> None:
        self._names = sorted(names)
        self._described = described

    async def answer(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        """ServerReflectionInfo: an answer to each request, in order."""
        left = _MOST_QUESTIONS
        async for request in requests:
            left -= 1
            if left < 0:
                await context.abort(
                    grpc.StatusCode.RESOURCE_EXHAUSTED, f"at most {_MOST_QUESTIONS} questions in one stream"
                )
            yield self.answer_one(request)

    def answer_one(self, request: Any) -> Any:
        """One request's answer, or the error response that the protocol has for it."""
        answer = reflection_pb2.ServerReflectionResponse(valid_host=request.host, original_request=request)
        try:
            self._fill(answer, request)
        except KeyError as exc:
            answer.error_response.error_code = grpc.StatusCode.NOT_FOUND.value[0]
            answer.error_response.error_message = f"There is no {exc.args[0]!r} here."
        return answer

    def _fill(self, answer: Any, request: Any) -> None:
        asked = request.WhichOneof("message_request")
        if asked == "list_services":
            for name in self._names:
                answer.list_services_response.service.add(name=name)
        elif asked == "all_extension_numbers_of_type":
            numbers = self._described.extensions_of(request.all_extension_numbers_of_type)
            answer.all_extension_numbers_response.base_type_name = request.all_extension_numbers_of_type
            answer.all_extension_numbers_response.extension_number.extend(numbers)
        elif asked is None:
            answer.error_response.error_code = grpc.StatusCode.INVALID_ARGUMENT.value[0]
            answer.error_response.error_message = "The request asks for nothing."
        else:
            answer.file_descriptor_response.file_descriptor_proto.extend(self._files(asked, request))

    def _files(self, asked: str, request: Any) -> Iterator[bytes]:
        if asked == "file_by_filename":
            return self._described.file(request.file_by_filename)
        if asked == "file_containing_symbol":
            return self._described.file_of_symbol(request.file_containing_symbol)
        extension = request.file_containing_extension
        return self._described.file_of_extension(extension.containing_type, extension.extension_number)


def add_reflection(server: grpc.aio.Server, services: Iterable[str]) -> None:
    """Answer under both names about these services, the details of their errors, and reflection itself."""
    pool = descriptor_pool.Default()
    files = [pool.FindServiceByName(name).file for name in services]
    own, of_errors = reflection_pb2.DESCRIPTOR, error_details_pb2.DESCRIPTOR  # grpcurl shows what it can look up
    reflection = Reflection([*services, *NAMES], Described([*files, own, _as_v1(own), of_errors]))
    handler = grpc.stream_stream_rpc_method_handler(
        reflection.answer,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    for name in NAMES:
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": handler}),)
        )


def _as_v1(alpha: FileDescriptor) -> FileDescriptor:
    """grpc/reflection/v1/reflection.proto, which the library does not ship: the older file under its newer name."""
    made = FileDescriptorProto()
    alpha.CopyToProto(made)
    newer: Any = FileDescriptorProto.FromString(made.SerializeToString())
    newer.name, newer.package = "grpc/reflection/v1/reflection.proto", "grpc.reflection.v1"
    for message in newer.message_type:
        for field in (each for each in message.field if each.type_name):
            field.type_name = field.type_name.replace("grpc.reflection.v1alpha.", "grpc.reflection.v1.")
    for method in newer.service[0].method:
        method.input_type = method.input_type.replace("v1alpha.", "v1.")
        method.output_type = method.output_type.replace("v1alpha.", "v1.")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(newer)
    return pool.FindFileByName(newer.name)
