"""A small client that does what grpcurl does over the wire: reflection v1 first, v1alpha when that is not there; list,
describe, invoke. It knows no stub of ours: everything comes from the server."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from grpc_reflection.v1alpha import reflection_pb2

VERSIONS = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")


class Reflection:
    """versions: services to try, in order; both speak the same messages."""

    def __init__(self, channel: grpc.Channel, versions: Sequence[str] = VERSIONS) -> None:
        self._channel = channel
        self._versions = list(versions)
        self.used = ""
        self._pool = descriptor_pool.DescriptorPool()
        self._loaded: set[str] = set()

    def ask(self, **request: str) -> Any:
        for version in self._versions:
            call = self._channel.stream_stream(
                f"/{version}/ServerReflectionInfo",
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
            )
            try:
                (answer,) = call(iter([reflection_pb2.ServerReflectionRequest(**request)]), timeout=10)
            except grpc.RpcError as exc:
                if exc.code() is grpc.StatusCode.UNIMPLEMENTED:
                    continue
                raise
            self.used = version
            return answer
        raise LookupError("the server does not speak reflection")

    def services(self) -> list[str]:
        return sorted(service.name for service in self.ask(list_services="").list_services_response.service)

    def describe(self, symbol: str) -> Any:
        """The descriptor of a service or message. Raises KeyError."""
        answer = self.ask(file_containing_symbol=symbol)
        if answer.HasField("error_response"):
            raise KeyError(answer.error_response.error_message)
        self._load(answer.file_descriptor_response.file_descriptor_proto)
        try:
            return self._pool.FindServiceByName(symbol)
        except KeyError:
            return self._pool.FindMessageTypeByName(symbol)

    def method(self, symbol: str) -> Any:
        """The descriptor of package.Service.Method, asked for by that name. Raises KeyError."""
        answer = self.ask(file_containing_symbol=symbol)
        if answer.HasField("error_response"):
            raise KeyError(answer.error_response.error_message)
        self._load(answer.file_descriptor_response.file_descriptor_proto)
        service, _, name = symbol.rpartition(".")
        return self._pool.FindServiceByName(service).methods_by_name[name]

    def _load(self, serialized: Sequence[bytes]) -> None:
        files = {file.name: file for file in map(descriptor_pb2.FileDescriptorProto.FromString, serialized)}

        def add(name: str) -> None:
            if name in self._loaded:
                return
            self._loaded.add(name)
            if name not in files:
                answer = self.ask(file_by_filename=name)
                for data in answer.file_descriptor_response.file_descriptor_proto:
                    file = descriptor_pb2.FileDescriptorProto.FromString(data)
                    files[file.name] = file
            for dependency in files[name].dependency:
                add(dependency)
            self._pool.Add(files[name])

        for name in list(files):
            add(name)

    def invoke(self, path: str, data: Mapping[str, Any], metadata: Sequence[tuple[str, str]] = ()) -> dict[str, Any]:
        """path: SERVICE/METHOD. Raises grpc.RpcError."""
        service, _, name = path.partition("/")
        method = self.describe(service).methods_by_name[name]
        request_class = message_factory.GetMessageClass(method.input_type)
        response_class = message_factory.GetMessageClass(method.output_type)
        call = self._channel.unary_unary(
            f"/{path}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=response_class.FromString,
        )
        request = json_format.ParseDict(data, request_class(), descriptor_pool=self._pool)
        return json_format.MessageToDict(call(request, metadata=metadata, timeout=10), descriptor_pool=self._pool)


@dataclass
class Line:
    """One grpcurl command line. action: list, describe, or SERVICE/METHOD to invoke."""

    address: str
    action: str
    argument: str = ""
    headers: list[tuple[str, str]] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    authority: str = ""
    plaintext: bool = False

    @classmethod
    def parse(cls, text: str, variables: Mapping[str, str]) -> Line:
        """Flags that this client does not know are an error: a page must not promise what nobody tried."""
        for name, value in variables.items():
            text = text.replace(f"${name}", value)
        program, *words = shlex.split(text)
        assert program == "grpcurl", text
        line, places = cls("", ""), []
        rest = iter(words)
        for word in rest:
            match word:
                case "-plaintext":
                    line.plaintext = True
                case "-cacert":
                    line.authority = next(rest)
                case "-H":
                    name, _, value = next(rest).partition(": ")
                    line.headers.append((name, value))
                case "-d":
                    line.data = json.loads(next(rest))
                case _ if word.startswith("-"):
                    raise AssertionError(f"unknown flag {word}: {text}")
                case _:
                    places.append(word)
        line.address, line.action, *more = places
        line.argument = more[0] if more else ""
        return line

    def channel(self) -> grpc.Channel:
        if self.plaintext:
            return grpc.insecure_channel(self.address)
        credentials = grpc.ssl_channel_credentials(Path(self.authority).read_bytes())
        return grpc.secure_channel(self.address, credentials)

    def run(self) -> Any:
        with self.channel() as channel:
            reflection = Reflection(channel)
            if self.action == "list":
                return reflection.services()
            if self.action == "describe":
                return reflection.describe(self.argument)
            return reflection.invoke(self.action, self.data, self.headers)
