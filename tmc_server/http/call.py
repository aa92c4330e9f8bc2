"""One HTTP request, with the face of a gRPC call: the edge and its limits do not know which of the two they serve."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
from google.rpc import error_details_pb2, status_pb2

from tmc_server.errors import MalformedRequest
from tmc_server.rpc.doorkeeper import peer_name

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why a call was refused. code: of gRPC.  field, message_id: "": none.  retry_after_ms: 0: none."""

    code: grpc.StatusCode
    sentence: str
    reason: str = ""
    field: str = ""
    message_id: str = ""
    retry_after_ms: int = 0


class Disconnected(grpc.aio.AbortError):
    """The client is gone, or sends the rest no more."""


class HttpCall:
    """A request with those methods of `grpc.aio.ServicerContext` that the edge uses. most_bytes: of its body."""

    def __init__(self, scope: Scope, receive: Receive, most_bytes: int) -> None:
        self._scope = scope
        self._receive = receive
        self._most_bytes = most_bytes
        self._reading: asyncio.Future[bytes] | None = None
        self.refusal: Refusal | None = None

    def peer(self) -> str:
        return peer_name(self._scope["client"])

    def invocation_metadata(self) -> Iterable[tuple[str, str]]:
        return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in self._scope["headers"]]

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        names: Mapping[str, Iterable[bytes]] = self._scope["state"].get("certificate", {})
        return names

    def time_remaining(self) -> None:
        """Return None: HTTP knows no deadline of the client."""

    def code(self) -> grpc.StatusCode | None:
        return self.refusal.code if self.refusal is not None else None

    async def read(self) -> bytes:
        """Read the body, which nobody took from the connection before.

        Raises MalformedRequest: it is too long; AbortError: the call was refused meanwhile, or its client is gone.
        """
        self._reading = asyncio.ensure_future(self._body())
        try:
            return await self._reading
        except asyncio.CancelledError:
            if self.refusal is None:
                raise
            raise grpc.aio.AbortError from None

    async def _body(self) -> bytes:
        parts: list[bytes] = []
        size = 0
        while True:
            event = await self._receive()
            if event["type"] == "http.disconnect":
                raise Disconnected
            parts.append(event.get("body", b""))
            size += len(parts[-1])
            if size > self._most_bytes:
                raise MalformedRequest(f"A request has at most {self._most_bytes} bytes here: send smaller batches.")
            if not event.get("more_body", False):
                return b"".join(parts)

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Iterable[tuple[str, str | bytes]] = ()
    ) -> NoReturn:
        """Refuse the call, from any task. Raises AbortError."""
        rich = dict(trailing_metadata).get("grpc-status-details-bin", b"")
        assert isinstance(rich, bytes)
        self.refusal = _refusal(code, details, status_pb2.Status.FromString(rich))
        if self._reading is not None:
            self._reading.cancel()
        raise grpc.aio.AbortError


def _refusal(code: grpc.StatusCode, sentence: str, status: status_pb2.Status) -> Refusal:
    info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    for packed in status.details:
        for detail in (info, bad, retry):
            packed.Unpack(detail)
    return Refusal(
        code=code,
        sentence=sentence,
        reason=info.reason,
        field=bad.field_violations[0].field if bad.field_violations else "",
        message_id=info.metadata["message_id"],
        retry_after_ms=retry.retry_delay.ToMilliseconds(),
    )
