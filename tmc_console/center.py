"""The center's admin service as pages call it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from tmc_common.admin_calls import admin_call

_DEADLINE_S = 30.0
_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.FAILED_PRECONDITION: 409,
    grpc.StatusCode.ABORTED: 409,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}


class Refused(Exception):
    """A call that the center refused, or that did not reach it. status: the one of HTTP.  reason: of tmc.v1.Reason, or ""."""

    def __init__(self, status: int, reason: str, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status
        self.reason = reason
        self.sentence = sentence


class Center:
    """connect: makes the channel, on the loop of the first call. Safe for all sessions: the token comes with each call."""

    def __init__(self, connect: Callable[[], grpc.aio.Channel]) -> None:
        self._connect = connect
        self._channel: grpc.aio.Channel | None = None
        self._calls: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}

    async def ask(self, token: str, rpc: str, filled: Message | None = None, **fields: Any) -> Any:
        """Call an RPC. filled: its request, instead of its fields. Raises Refused."""
        made, call = self._call(rpc)
        metadata = (("authorization", f"Bearer {token}"),) if token else ()
        try:
            return await call(made(**fields) if filled is None else filled, metadata=metadata, timeout=_DEADLINE_S)
        except grpc.aio.AioRpcError as exc:
            raise _refused(exc) from None  # the request may hold what no log should

    def _call(self, rpc: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
        if self._channel is None:
            self._channel = self._connect()
        if rpc not in self._calls:
            self._calls[rpc] = admin_call(self._channel, rpc)
        return self._calls[rpc]

    async def close(self) -> None:
        channel, self._channel, self._calls = self._channel, None, {}
        if channel is not None:
            await channel.close()


def _refused(exc: grpc.aio.AioRpcError) -> Refused:
    reason = ""
    for key, value in exc.trailing_metadata() or ():
        if key == "grpc-status-details-bin" and isinstance(value, bytes):
            reason = _reason(value)
    sentence = exc.details() or exc.code().name
    if exc.code() is grpc.StatusCode.UNAVAILABLE and not reason:
        sentence = "The center cannot be reached: is a server running at this address?"
    return Refused(_STATUS.get(exc.code(), 502), reason, sentence)


def _reason(data: bytes) -> str:
    info = error_details_pb2.ErrorInfo()
    for detail in status_pb2.Status.FromString(data).details:
        if detail.Unpack(info):
            return str(info.reason)
    return ""
