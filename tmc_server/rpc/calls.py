"""What surrounds every RPC: decode, authenticate, run, turn errors into statuses.

Handlers are made from the service descriptors, so a new RPC cannot be forgotten: without an entry in domain/rights.py
the server does not start. No client input ends in UNKNOWN or INTERNAL: bytes that are no request are an
INVALID_ARGUMENT, and an exception that nobody foresaw is logged with a correlation id and tells the caller only that id.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message

from tmc_server.domain.rights import RIGHTS, Right
from tmc_server.errors import InternalFault, MalformedRequest, TmcError
from tmc_server.metrics import METRICS
from tmc_server.rpc.authentication import Authentication
from tmc_server.rpc.status import CODES, trailing

log = logging.getLogger("tmc.rpc")

Context = grpc.aio.ServicerContext[Any, Any]


class _Malformed:
    """Stands for a request that could not be decoded."""


MALFORMED = _Malformed()


def handlers(service: ServiceDescriptor, servicer: object, authentication: Authentication) -> grpc.GenericRpcHandler:
    """All methods of `servicer`, each async (identity, request) -> response, or (identity, requests) -> responses."""
    made = {method.name: _handler(method, getattr(servicer, method.name), authentication) for method in service.methods}
    return grpc.method_handlers_generic_handler(service.full_name, made)


def _handler(method: MethodDescriptor, behaviour: Any, authentication: Authentication) -> Any:
    right = RIGHTS[f"{method.containing_service.full_name}/{method.name}"]
    identify = authentication.app if right is Right.APP else authentication.admin
    request_class = message_factory.GetMessageClass(method.input_type)
    name = f"{method.containing_service.name}/{method.name}"
    options = {
        "request_deserializer": _tolerant(request_class),
        "response_serializer": lambda response: response.SerializeToString(),
    }
    if method.server_streaming:
        return grpc.stream_stream_rpc_method_handler(_streaming(behaviour, identify), **options)
    return grpc.unary_unary_rpc_method_handler(_unary(name, behaviour, identify), **options)


def _tolerant(request_class: type[Message]) -> Callable[[bytes], Message | _Malformed]:
    def deserialize(data: bytes) -> Message | _Malformed:
        try:
            return request_class.FromString(data)
        except DecodeError:
            return MALFORMED

    return deserialize


def _unary(
    name: str, behaviour: Callable[[Any, Any], Awaitable[Message]], identify: Callable[[Any], Any]
) -> Callable[[Any, Context], Awaitable[Message]]:
    served = METRICS.call_seconds.labels(name, "OK")

    async def call(request: Any, context: Context) -> Message:
        began = time.monotonic()
        try:
            identity = identify(context.invocation_metadata() or ())
            if request is MALFORMED:
                raise MalformedRequest
            answer = await behaviour(identity, request)
        except Exception as exc:
            error = _as_ours(exc)
            METRICS.call_seconds.labels(name, CODES[type(error)].name).observe(time.monotonic() - began)
            await _abort(context, error)
            raise AssertionError("abort raises") from exc
        served.observe(time.monotonic() - began)
        return answer

    return call


def _streaming(
    behaviour: Callable[[Any, Any], AsyncIterator[Message]], identify: Callable[[Any], Any]
) -> Callable[[Any, Context], AsyncIterator[Message]]:
    async def call(requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Message]:
        try:
            identity = identify(context.invocation_metadata() or ())
            async for response in behaviour(identity, requests):
                yield response
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except Exception as exc:  # noqa: BLE001 - the edge, as above
            await _abort(context, _as_ours(exc))

    return call


def _as_ours(exc: Exception) -> TmcError:
    return exc if isinstance(exc, TmcError) and type(exc) in CODES else _unforeseen(exc)


async def _abort(context: Context, error: TmcError) -> None:
    await context.abort(CODES[type(error)], error.sentence, trailing(error))


def _unforeseen(exc: Exception) -> TmcError:
    correlation_id = uuid.uuid4().hex[:12]
    log.error("a call failed, correlation id %s", correlation_id, exc_info=exc)
    return InternalFault(f"The center failed on this call; its operators find it by correlation id {correlation_id}.")
