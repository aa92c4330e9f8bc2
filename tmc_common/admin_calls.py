"""The admin service by the names of its RPCs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.protobuf import message_factory

from tmc_common.protocol import admin_pb2

SERVICE = admin_pb2.DESCRIPTOR.services_by_name["AdminService"]


def admin_call(channel: Any, rpc: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return what makes a request of its fields, and the call. channel: of grpc, or of grpc.aio."""
    method = SERVICE.methods_by_name[rpc]
    request, response = map(message_factory.GetMessageClass, (method.input_type, method.output_type))
    call = channel.unary_unary(
        f"/{SERVICE.full_name}/{rpc}",
        request_serializer=request.SerializeToString,
        response_deserializer=response.FromString,
    )
    return request, call
