"""Fetches the description of a service's method by server reflection, within limits, into a pool of its own.

The stock client for reflection has neither deadline nor bounds. Here everything is fetched first, v1 and then v1alpha, within
one deadline and limits on files, bytes and depth; only then a pool is built, which does no input or output any more.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, message_factory
from google.protobuf.descriptor import Descriptor, MethodDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError, Message
from grpc_reflection.v1alpha import reflection_pb2

from tmc_server.checks.channels import mismatch_of
from tmc_server.domain.checks import CheckReason

MOST_FILES = 256
MOST_BYTES = 1 << 20
MOST_DEPTH = 32
_SERVICES = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")  # the same on the wire

_REASONS = {
    grpc.StatusCode.DEADLINE_EXCEEDED: CheckReason.TIMED_OUT,
    grpc.StatusCode.UNAVAILABLE: CheckReason.UNREACHABLE,
    grpc.StatusCode.RESOURCE_EXHAUSTED: CheckReason.BAD_DESCRIPTION,  # larger than the channel takes
}


class Undescribed(Exception):
    """The method cannot be called. reason: typed; the text says what is wrong."""

    def __init__(self, reason: CheckReason, text: str) -> None:
        super().__init__(text)
        self.reason = reason


@dataclass(frozen=True, kw_only=True)
class Method:
    """One unary method: its path, and classes of its messages out of their own pool."""

    path: str
    request: type[Message]
    response: type[Message]
    pool: DescriptorPool


def describe(channel: grpc.Channel, method: str, metadata: Any, deadline_s: float) -> Method:
    """method: package.Service/Method. Raises Undescribed."""
    service, _, name = method.partition("/")
    until = time.monotonic() + deadline_s
    for reflection in _SERVICES:
        try:
            files = _fetch(channel, reflection, service, metadata, until)
        except grpc.RpcError as exc:
            if exc.code() is grpc.StatusCode.UNIMPLEMENTED:
                continue
            mismatch = mismatch_of(exc.details() or "")
            if exc.code() is grpc.StatusCode.UNAVAILABLE and mismatch:
                raise Undescribed(CheckReason.WRONG_PROTOCOL, mismatch) from exc
            reason = _REASONS.get(exc.code(), CheckReason.NO_REFLECTION)
            raise Undescribed(reason, f"{exc.code().name}: {(exc.details() or '')[:200]}") from exc
        return _build(files, service, name)
    raise Undescribed(CheckReason.NO_REFLECTION, "The service offers neither grpc.reflection.v1 nor v1alpha.")


def _fetch(
    channel: grpc.Channel, reflection: str, service: str, metadata: Any, until: float
) -> dict[str, descriptor_pb2.FileDescriptorProto]:
    """The file of the service and everything it imports, by name."""
    questions: SimpleQueue[Any] = SimpleQueue()
    stream = channel.stream_stream(
        f"/{reflection}/ServerReflectionInfo",
        reflection_pb2.ServerReflectionRequest.SerializeToString,
        reflection_pb2.ServerReflectionResponse.FromString,
    )(iter(questions.get, None), timeout=max(0.01, until - time.monotonic()), metadata=metadata)
    try:
        return _collect(questions, stream, service)
    except DecodeError as exc:
        raise Undescribed(
            CheckReason.BAD_DESCRIPTION, "The service describes itself in bytes that are no descriptors."
        ) from exc
    finally:
        questions.put(None)
        stream.cancel()


def _collect(
    questions: SimpleQueue[Any], stream: Iterator[Any], service: str
) -> dict[str, descriptor_pb2.FileDescriptorProto]:
    files: dict[str, descriptor_pb2.FileDescriptorProto] = {}
    size = 0
    wanted: deque[tuple[int, str]] = deque()
    request = reflection_pb2.ServerReflectionRequest(file_containing_symbol=service)
    depth = 0
    while True:
        questions.put(request)
        try:
            answer = next(stream)
        except StopIteration:
            raise Undescribed(CheckReason.NO_REFLECTION, "The service stopped describing itself.") from None
        if answer.HasField("error_response"):
            missing = f"{answer.error_response.error_message[:200]} ({service})"
            raise Undescribed(CheckReason.NO_METHOD, f"The service knows no such symbol or file: {missing}")
        for data in answer.file_descriptor_response.file_descriptor_proto:
            size += len(data)
            if size > MOST_BYTES or len(files) >= MOST_FILES:
                limits = f"more than {MOST_FILES} files or {MOST_BYTES} bytes"
                raise Undescribed(CheckReason.BAD_DESCRIPTION, f"The description is too large: {limits}.")
            file = descriptor_pb2.FileDescriptorProto.FromString(data)
            if file.name not in files:
                files[file.name] = file
                wanted += [(depth + 1, name) for name in file.dependency]
        while wanted and wanted[0][1] in files:
            wanted.popleft()
        if not wanted:
            return files
        depth, name = wanted.popleft()
        if depth > MOST_DEPTH:
            raise Undescribed(CheckReason.BAD_DESCRIPTION, f"The description imports deeper than {MOST_DEPTH} files.")
        request = reflection_pb2.ServerReflectionRequest(file_by_filename=name)


def _build(files: dict[str, descriptor_pb2.FileDescriptorProto], service: str, name: str) -> Method:
    pool = DescriptorPool()
    try:
        for file in _imports_first(files):
            pool.Add(file)
        found: MethodDescriptor | None = pool.FindServiceByName(service).methods_by_name.get(name)
        if found is None:
            raise Undescribed(CheckReason.NO_METHOD, f"{service} has no method {name}.")
        if found.client_streaming or found.server_streaming:
            raise Undescribed(
                CheckReason.BAD_DESCRIPTION, f"{service}/{name} streams: only unary methods can be asked."
            )
        request, response = _class_of(found.input_type), _class_of(found.output_type)
    except (TypeError, KeyError, ValueError) as exc:
        raise Undescribed(CheckReason.BAD_DESCRIPTION, f"The description does not fit together: {exc}"[:300]) from exc
    except RecursionError:  # a class is made of each message that it can reach, one inside the other
        raise Undescribed(
            CheckReason.BAD_DESCRIPTION, f"Messages of {service}/{name} contain one another too deeply."
        ) from None
    return Method(path=f"/{service}/{name}", request=request, response=response, pool=pool)


def _class_of(descriptor: Descriptor) -> type[Message]:
    made: type[Message] = message_factory.GetMessageClass(descriptor)
    return made


def _imports_first(
    files: dict[str, descriptor_pb2.FileDescriptorProto],
) -> Iterator[descriptor_pb2.FileDescriptorProto]:
    """Files, imports first. Raises Undescribed for circular imports."""
    done: set[str] = set()
    under_way: dict[str, Iterator[str]] = {}
    for root in files:
        stack = [] if root in done else [root]
        if stack:
            under_way[root] = iter(files[root].dependency)
        while stack:
            name = next((n for n in under_way[stack[-1]] if n in files and n not in done), None)
            if name is None:
                finished = stack.pop()
                del under_way[finished]
                done.add(finished)
                yield files[finished]
            elif name in under_way:
                raise Undescribed(CheckReason.BAD_DESCRIPTION, f"{name} imports itself, by way of others.")
            else:
                under_way[name] = iter(files[name].dependency)
                stack.append(name)
