"""The door: an ASGI application that serves each unary RPC as POST of JSON, and says what it serves as OpenAPI.

Which path leads to which RPC is read from the OpenAPI document, which scripts/generate makes from protos/.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from http import HTTPStatus
from importlib.resources import files
from typing import Any

import grpc
from google.protobuf.descriptor import ServiceDescriptor

from tmc_common.addresses import is_loopback
from tmc_server.http.call import HttpCall, Receive, Refusal, Scope
from tmc_server.http.json_form import JsonForm
from tmc_server.rpc.calls import Call, Edge, unary_call, unforeseen
from tmc_server.rpc.refusing import refuse

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

OPENAPI_PATH = "/v1/openapi.json"
_DOCUMENTS = (OPENAPI_PATH, "/healthz")
_JSON, _PROBLEM = "application/json", "application/problem+json"
_OPERATORS_PATHS, _OPERATORS_BYTES = "/v1/admin:", 1 << 20
_BASE64 = 4 / 3  # how much longer bodies are in JSON
_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: HTTPStatus.BAD_REQUEST,
    grpc.StatusCode.FAILED_PRECONDITION: HTTPStatus.BAD_REQUEST,
    grpc.StatusCode.UNAUTHENTICATED: HTTPStatus.UNAUTHORIZED,
    grpc.StatusCode.PERMISSION_DENIED: HTTPStatus.FORBIDDEN,
    grpc.StatusCode.NOT_FOUND: HTTPStatus.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS: HTTPStatus.CONFLICT,
    grpc.StatusCode.ABORTED: HTTPStatus.CONFLICT,
    grpc.StatusCode.RESOURCE_EXHAUSTED: HTTPStatus.TOO_MANY_REQUESTS,
    grpc.StatusCode.UNAVAILABLE: HTTPStatus.SERVICE_UNAVAILABLE,
    grpc.StatusCode.INTERNAL: HTTPStatus.INTERNAL_SERVER_ERROR,
}


def document() -> bytes:
    """Return the OpenAPI document."""
    return files("tmc_server.http").joinpath("openapi.json").read_bytes()


@dataclass(frozen=True, kw_only=True)
class _Problem:
    """Why a request does not become a call. headers: of the response, besides the usual ones."""

    status: HTTPStatus
    sentence: str
    headers: Headers = field(default_factory=list)


class Door:
    """only_here: it may only be addressed as this machine, so that no web page reaches it under a name of its own."""

    def __init__(
        self,
        services: Mapping[str, ServiceDescriptor],
        servicers: Mapping[str, object],
        edge: Edge,
        *,
        request_bytes: int,
        only_here: bool = False,
    ) -> None:
        self._doorkeeper = edge.doorkeeper
        self._most_bytes = round(request_bytes * _BASE64)  # of an app's request
        self._only_here = only_here
        self._form = JsonForm()
        self._document = document()
        self.is_serving = False
        self._calls: dict[str, Call] = {}
        for path, operations in json.loads(self._document)["paths"].items():
            service, _, name = operations["post"]["operationId"].partition(".")
            method = services[f"tmc.v1.{service}"].methods_by_name[name]
            behavior = getattr(servicers[f"tmc.v1.{service}"], name)
            self._calls[path] = unary_call(method, behavior, edge, self._form.decoder(method.input_type))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request as ASGI has it."""
        path = scope["path"]
        call = HttpCall(scope, receive, self._most_of(path))
        problem = self._unfit(scope)
        if problem is None and path in self._calls:
            await self._serve(self._calls[path], call, send)
            return
        await self._doorkeeper.admit(call)
        if problem is not None:
            body = {"title": problem.status.phrase, "status": problem.status, "detail": problem.sentence}
            await _respond(send, problem.status, _PROBLEM, _dumped(body), problem.headers)
        elif path == OPENAPI_PATH:
            await _respond(send, HTTPStatus.OK, _JSON, self._document)
        else:
            status = HTTPStatus.OK if self.is_serving else HTTPStatus.SERVICE_UNAVAILABLE
            await _respond(send, status, _JSON, _dumped({"status": "SERVING" if self.is_serving else "NOT_SERVING"}))

    def _most_of(self, path: str) -> int:
        """Return how many bytes a request may have: operators have no budget of bytes, and send nothing that is large."""
        return min(self._most_bytes, _OPERATORS_BYTES) if path.startswith(_OPERATORS_PATHS) else self._most_bytes

    def _unfit(self, scope: Scope) -> _Problem | None:
        path, headers = scope["path"], dict(scope["headers"])
        if self._only_here and not _names_this_machine(headers.get(b"host", b"").decode("latin-1")):
            return _Problem(
                status=HTTPStatus.MISDIRECTED_REQUEST,
                sentence="This center is open to this machine only: address it as 127.0.0.1.",
            )
        if path not in self._calls and path not in _DOCUMENTS:
            return _Problem(
                status=HTTPStatus.NOT_FOUND, sentence=f"There is no such path: GET {OPENAPI_PATH} lists all."
            )
        methods = ("GET", "HEAD") if path in _DOCUMENTS else ("POST",)
        if scope["method"] not in methods:
            return _Problem(
                status=HTTPStatus.METHOD_NOT_ALLOWED,
                sentence=f"Use {methods[0]} here.",
                headers=[(b"allow", ", ".join(methods).encode())],
            )
        return None if path in _DOCUMENTS else self._unfit_body(headers, self._most_of(path))

    @staticmethod
    def _unfit_body(headers: Mapping[bytes, bytes], most_bytes: int) -> _Problem | None:
        if b"content-length" in headers and b"transfer-encoding" in headers:
            # A proxy in front may go by the other one, and take a part of this request for the next.
            return _Problem(
                status=HTTPStatus.BAD_REQUEST,
                sentence="Send a length or chunks, not both.",
                headers=[(b"connection", b"close")],
            )
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        unfit = ""
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            unfit = "Send the request uncompressed."
        elif kind != _JSON.encode():  # pages of other origins cannot send this one without asking, which is refused
            unfit = f"Send the request with the content type {_JSON}."
        if unfit:
            return _Problem(status=HTTPStatus.UNSUPPORTED_MEDIA_TYPE, sentence=unfit)
        if int(headers.get(b"content-length", b"0")) > most_bytes:
            return _Problem(
                status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                sentence=f"A request has at most {most_bytes} bytes here: send smaller batches.",
            )
        return None

    async def _serve(self, serve: Call, call: HttpCall, send: Send) -> None:
        answer = await serve(None, call)
        text = b""
        if answer is not None:
            try:
                text = await self._form.text(answer)
            except Exception as exc:  # noqa: BLE001 - the edge: see rpc/calls.py
                await refuse(call, unforeseen(exc))
        if call.refusal is not None:
            status, headers, body = _rendered(call.refusal)
            await _respond(send, status, _PROBLEM, body, headers)
        elif answer is not None:  # otherwise its client is gone
            await _respond(send, HTTPStatus.OK, _JSON, text)


def _names_this_machine(host: str) -> bool:
    return is_loopback(host) or is_loopback(f"{host}:80")


def _dumped(body: Mapping[str, object]) -> bytes:
    return json.dumps(body).encode()


def _rendered(refusal: Refusal) -> tuple[HTTPStatus, Headers, bytes]:
    """Status, headers and body of a problem as RFC 9457 has them, with our reason in it."""
    status = _STATUS[refusal.code]
    body: dict[str, object] = {
        "title": status.phrase,
        "status": status,
        "detail": refusal.sentence,
        "code": refusal.code.name,
        "reason": refusal.reason,
        "field": refusal.field,
        "messageId": refusal.message_id,
        "retryAfterMs": refusal.retry_after_ms,
    }
    headers: Headers = []
    if refusal.retry_after_ms:
        headers.append((b"retry-after", str(-(-refusal.retry_after_ms // 1000)).encode()))
    if status is HTTPStatus.UNAUTHORIZED:
        headers.append((b"www-authenticate", b"Bearer"))
    return status, headers, _dumped({name: value for name, value in body.items() if value})


async def _respond(send: Send, status: int, kind: str, body: bytes, headers: Headers | None = None) -> None:
    usual = [
        (b"content-type", kind.encode()),
        (b"content-length", str(len(body)).encode()),
        (b"cache-control", b"no-store"),
        (b"x-content-type-options", b"nosniff"),
    ]
    await send({"type": "http.response.start", "status": int(status), "headers": usual + (headers or [])})
    await send({"type": "http.response.body", "body": body})
