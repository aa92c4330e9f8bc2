"""Checks over gRPC: the servicer of tmc.v1.CheckService, and a small server around it for services that have none."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError

from tmc_client import errors, tracing
from tmc_client.checks.questions import Answer, Denied, Question
from tmc_client.extras import needed_by
from tmc_common.addresses import HostPort
from tmc_common.protocol import check_pb2, check_pb2_grpc

if TYPE_CHECKING:
    from tmc_client.checks.answers import Checks

_MOST = 1_000
_CALLS_PER_THREAD = 16
_ANNOUNCE_S = 600.0
_RETRY_S = 5.0
_SERVICE = "/tmc.v1.CheckService/"
_OPTIONS = [
    ("grpc.max_receive_message_length", 4 << 20),
    ("grpc.compression_enabled_algorithms_bitset", 1),  # nothing that could swell after its size was looked at
    ("grpc.server_handshake_timeout_ms", 5_000),  # connections that say nothing give their file handle back
    ("grpc.max_connection_idle_ms", 600_000),
    ("grpc.max_allowed_incoming_connections", 256),  # a center has one per server
]
_TOKEN_KEY = "tmc-check-token"  # noqa: S105 - the name of a metadata key


class CheckServicer(check_pb2_grpc.CheckServiceServicer):
    """tmc.v1.CheckService for a blocking gRPC server."""

    def __init__(self, checks: Checks) -> None:
        self._checks = checks

    def Check(self, request: check_pb2.CheckRequest, context: Any) -> check_pb2.CheckResponse:
        return self._answers([request], context)[0]

    def CheckMany(self, request: check_pb2.CheckManyRequest, context: Any) -> check_pb2.CheckManyResponse:
        demand_token(self._checks, context)
        if len(request.items) > _MOST:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"at most {_MOST} questions in one call")
        return check_pb2.CheckManyResponse(results=self._answers(request.items, context))

    def _answers(self, requests: Any, context: Any) -> list[check_pb2.CheckResponse]:
        token = demand_token(self._checks, context)
        questions = [question_of(request) for request in requests]
        with tracing.answering(questions, {name: str(text) for name, text in context.invocation_metadata()}):
            answers = self._checks.answer(token, questions)
        return [response_of(question, answer) for question, answer in zip(questions, answers, strict=True)]


def demand_token(checks: Checks, context: Any) -> str:
    """Abort calls without a valid token. Returns: the token that was presented."""
    token = str(dict(context.invocation_metadata()).get(_TOKEN_KEY, ""))
    try:
        checks.demand(token)
    except Denied:
        context.abort(grpc.StatusCode.PERMISSION_DENIED, "This is not the check token of this app.")
    except errors.TmcError as exc:
        context.abort(grpc.StatusCode.UNAVAILABLE, f"The check token is not known yet: {exc}")
    return token


class TokenFirst(grpc.ServerInterceptor):
    """Verifies the token before the request is parsed: generated code would parse the message of any caller first.

    `ChecksServer` uses it. Use it in your own server: grpc.server(..., interceptors=[TokenFirst(checks)]). It affects
    only calls of tmc.v1.CheckService.
    """

    def __init__(self, checks: Checks) -> None:
        self._checks = checks

    def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = continuation(details)
        if handler is None or not details.method.startswith(_SERVICE):
            return handler
        parse, answer = handler.request_deserializer, handler.unary_unary

        def answer_known(data: bytes, context: Any) -> Any:
            demand_token(self._checks, context)
            try:
                request = parse(data)
            except DecodeError:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, "The bytes are no request.")
            return answer(request, context)

        return grpc.unary_unary_rpc_method_handler(answer_known, None, handler.response_serializer)


def question_of(request: check_pb2.CheckRequest) -> Question:
    return Question(
        message_id=request.message_id,
        topic=request.topic,
        key=request.key,
        attempt_id=request.attempt_id,
        ledger_id=request.ledger_id,
        created_ms=request.created_ms,
    )


def response_of(question: Question, answer: Answer) -> check_pb2.CheckResponse:
    verdict: Any = int(answer.verdict)
    because: Any = int(answer.because)
    return check_pb2.CheckResponse(
        verdict=verdict,
        detail=answer.detail,
        message_id=question.message_id,
        unknown_reason=because,
    )


def _place(address: str) -> HostPort:
    """Raises InvalidRequest."""
    try:
        return HostPort.parse(address)
    except (ValueError, AttributeError) as exc:
        raise errors.InvalidRequest(f"checks.serve({address!r}): give 'host:port', port 0 takes a free one.") from exc


class ChecksServer:
    """A gRPC server that answers checks and nothing else.

    address: host:port, port 0 takes a free one. Centers without service discovery learn it from the producer's calls.
    advertise: host:port that the center can reach.  agent, service, tag: register it in Consul (`tmc-client[consul]`), with
    agent_token or CONSUL_HTTP_TOKEN.
    """

    def __init__(
        self,
        checks: Checks,
        address: str,
        *,
        credentials: grpc.ServerCredentials | None = None,
        threads: int = 8,
        agent: str = "",
        service: str = "",
        tag: str = "",
        agent_token: str = "",
        advertise: str = "",
    ) -> None:
        place = _place(address)
        self._server = grpc.server(
            ThreadPoolExecutor(threads, thread_name_prefix="tmc-checks"),
            interceptors=[TokenFirst(checks)],
            options=_OPTIONS,
            maximum_concurrent_rpcs=_CALLS_PER_THREAD * threads,
        )
        check_pb2_grpc.add_CheckServiceServicer_to_server(CheckServicer(checks), self._server)  # type: ignore[no-untyped-call]
        add = self._server.add_insecure_port if credentials is None else self._server.add_secure_port
        try:
            self.port: int = add(address, *([credentials] if credentials is not None else []))
        except RuntimeError as exc:
            raise errors.InvalidRequest(
                f"Cannot listen on {address}: give checks.serve() another address, or stop what uses it."
            ) from exc
        self.address: str = str(HostPort(place.host, self.port))
        self._agent, self._service, self._tag, self._agent_token = agent, service, tag, agent_token
        self.advertised: str = advertise or self.address
        if not advertise and place.is_unspecified:
            raise ValueError("this address means nothing to the center: say advertise='HOST:PORT' that it can reach")
        self._checks = checks
        self._stopping = threading.Event()
        self._registration: Any = None
        if agent:
            with needed_by("checks.serve(agent=...)"):
                import tmc_client.discovery  # noqa: F401 - now, and not when the server has started

    def start(self) -> None:
        self._server.start()
        self._checks.running.add(self)  # keeps a reference: a server that is garbage-collected would stop
        self._checks.connection.announce(self.advertised)
        threading.Thread(target=self._announce, name="tmc-checks-announce", daemon=True).start()
        if self._agent:
            from tmc_client.discovery import Registration

            self._registration = Registration(
                self._agent, self._service, self.advertised, tag=self._tag, check="tcp", token=self._agent_token
            )
            self._registration.start()

    def _announce(self) -> None:
        """Announce the address to the center, repeatedly: the center forgets it after an hour."""
        while not self._stopping.is_set():
            self._stopping.wait(_ANNOUNCE_S if self._checks.announce(self.advertised) else _RETRY_S)

    def stop(self, grace: float = 2.0) -> None:
        self._checks.running.discard(self)
        self._stopping.set()
        if self._registration is not None:
            self._registration.stop()
        self._server.stop(grace).wait()

    def __enter__(self) -> ChecksServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
