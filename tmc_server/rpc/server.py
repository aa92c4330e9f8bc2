"""Builds the gRPC server: our services, health, reflection v1 and v1alpha."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from tmc_common.protocol import admin_pb2, consumption_pb2, message_pb2
from tmc_server.certificates import KeyPair, Renewal
from tmc_server.config import LimitsConfig, TlsConfig
from tmc_server.rpc.calls import Edge, handlers
from tmc_server.rpc.reflection import add_reflection
from tmc_server.rpc.strangers import UnauthenticatedMethods

SERVICES = {
    "tmc.v1.MessageService": message_pb2.DESCRIPTOR.services_by_name["MessageService"],
    "tmc.v1.ConsumptionService": consumption_pb2.DESCRIPTOR.services_by_name["ConsumptionService"],
    "tmc.v1.AdminService": admin_pb2.DESCRIPTOR.services_by_name["AdminService"],
}
_HEADROOM = 1 << 20
_WINDOW_BYTES = 16_384  # what a call may send before anybody waits for it
_PENDING = 4_000
_HANDSHAKE_MS = 5_000  # TLS and the first frame
_IDLE_MS = 300_000  # without a call; clients connect again by themselves
_KEEPALIVE_MS = 30_000
_KEEPALIVE_TIMEOUT_MS = 10_000


@dataclass
class GrpcServer:
    """The server, its health, and the port it got."""

    server: grpc.aio.Server
    health: HealthServicer
    port: int

    async def set_serving(self, serving: bool) -> None:
        """Set the health of every service and of the server as a whole."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in (*SERVICES, health.OVERALL_HEALTH):
            await self.health.set(name, status)


def build(servicers: Mapping[str, object], edge: Edge, listen: str, tls: TlsConfig, limits: LimitsConfig) -> GrpcServer:
    """listen: host:port, port 0 for a free one. Raises OSError when it is taken; CertificateUnusable."""
    server = grpc.aio.server(
        options=_options(limits), interceptors=(UnauthenticatedMethods(edge.reads, edge.doorkeeper),)
    )
    for name, descriptor in SERVICES.items():
        server.add_generic_rpc_handlers((handlers(descriptor, servicers[name], edge),))
    healthy = HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    add_reflection(server, [*SERVICES, health.SERVICE_NAME])
    try:
        port = (
            server.add_secure_port(listen, _credentials(tls)) if tls.certificate else server.add_insecure_port(listen)
        )
    except RuntimeError as exc:
        raise OSError(
            f"Cannot listen on {listen}: choose another address ([server] listen, or --port of tmc dev) or stop what uses it."
        ) from exc
    edge.doorkeeper.ports.add(port)
    return GrpcServer(server, healthy, port)


def _options(limits: LimitsConfig) -> list[tuple[str, int]]:
    """Return what one connection may cost before anybody looks at it, and when it is closed."""
    return [
        ("grpc.max_receive_message_length", limits.request_bytes + _HEADROOM),
        ("grpc.max_send_message_length", -1),
        ("grpc.compression_enabled_algorithms_bitset", 1),  # nothing that could swell after its size was looked at
        ("grpc.so_reuseport", 0),
        ("grpc.max_allowed_incoming_connections", limits.connections),
        # A client keeps further calls back until one ended. Ended ones that still occupy memory here do not count: it knows
        # nothing of them, and would not repeat what is refused because of them. gRPC itself still counts some that ended a
        # moment ago, so clients may have up to half as many workers without being refused anything.
        ("grpc.max_concurrent_streams", limits.calls_per_connection),
        ("grpc.http.overload_protection", 0),
        # Calls that nobody has looked at yet; above the first number gRPC drops some, no matter who sent them.
        ("grpc.server.max_pending_requests", _PENDING),
        ("grpc.server.max_pending_requests_hard_limit", 2 * _PENDING),
        # Windows stay this small until a request is read; measuring the line would let them grow to megabytes per call.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", _WINDOW_BYTES),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
        ("grpc.max_connection_idle_ms", _IDLE_MS),
        # Behind a name with several addresses a client looks for others only when a connection ends; gRPC adds the jitter.
        ("grpc.max_connection_age_ms", limits.connection_seconds * 1_000),
        ("grpc.max_connection_age_grace_ms", limits.connection_grace_seconds * 1_000),
        ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        # Clients may ping every 10 s, idle ones as well; the default would answer that with too_many_pings.
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
    ]


def _credentials(tls: TlsConfig) -> Any:
    """Return credentials that follow the files. Raises OSError, CertificateUnusable."""
    renewal = Renewal(tls)
    authority = Path(tls.client_authority).read_bytes() if tls.client_authority else None

    def configuration(pair: KeyPair) -> Any:
        return grpc.ssl_server_certificate_configuration([(pair.key, pair.chain)], authority)

    def at_handshake() -> Any:
        pair = renewal.renewed()
        return None if pair is None else configuration(pair)

    return grpc.dynamic_ssl_server_credentials(
        configuration(renewal.pair), at_handshake, require_client_authentication=authority is not None
    )
