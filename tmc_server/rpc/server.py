"""Builds the gRPC server: our services, health, reflection v1 and v1alpha."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import descriptor_pool
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha._async import ReflectionServicer

from tmc_client.protocol import admin_pb2, consumption_pb2, message_pb2
from tmc_server.config import TlsConfig
from tmc_server.rpc.authentication import Authentication
from tmc_server.rpc.calls import handlers

SERVICES = {
    "tmc.v1.MessageService": message_pb2.DESCRIPTOR.services_by_name["MessageService"],
    "tmc.v1.ConsumptionService": consumption_pb2.DESCRIPTOR.services_by_name["ConsumptionService"],
    "tmc.v1.AdminService": admin_pb2.DESCRIPTOR.services_by_name["AdminService"],
}
_REFLECTION = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")
_HEADROOM = 1 << 20


@dataclass
class GrpcServer:
    """The server, its health, and the port it got."""

    server: grpc.aio.Server
    health: HealthServicer
    port: int

    async def set_serving(self, serving: bool) -> None:
        """For every service and for the server as a whole."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in (*SERVICES, health.OVERALL_HEALTH):
            await self.health.set(name, status)


def build(
    servicers: Mapping[str, object], authentication: Authentication, listen: str, tls: TlsConfig, message_bytes: int
) -> GrpcServer:
    """listen: host:port, port 0 for a free one.  message_bytes: the largest request. Raises OSError when it is taken."""
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", message_bytes + _HEADROOM),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),
            # Clients may ping every 10 s, idle ones as well; the default would answer that with too_many_pings.
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            ("grpc.keepalive_permit_without_calls", 1),
        ]
    )
    for name, descriptor in SERVICES.items():
        server.add_generic_rpc_handlers((handlers(descriptor, servicers[name], authentication),))
    healthy = HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    _add_reflection(server)
    try:
        port = (
            server.add_secure_port(listen, _credentials(tls)) if tls.certificate else server.add_insecure_port(listen)
        )
    except RuntimeError as exc:
        raise OSError(f"Cannot listen on {listen}: choose another address or stop what uses it.") from exc
    return GrpcServer(server, healthy, port)


def _add_reflection(server: grpc.aio.Server) -> None:
    """The library ships v1alpha only; v1 is the same on the wire, so one servicer answers both names."""
    names = [*SERVICES, health.SERVICE_NAME, *_REFLECTION]
    servicer = ReflectionServicer(names, pool=descriptor_pool.Default())
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    for name in _REFLECTION:
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": handler}),)
        )


def _credentials(tls: TlsConfig) -> Any:
    assert tls.certificate is not None
    assert tls.key is not None
    chain = [(Path(tls.key).read_bytes(), Path(tls.certificate).read_bytes())]
    authority = Path(tls.client_authority).read_bytes() if tls.client_authority else None
    return grpc.ssl_server_credentials(chain, authority, require_client_auth=authority is not None)
