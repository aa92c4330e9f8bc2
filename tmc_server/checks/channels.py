"""gRPC calls into services that are not ours: pinned addresses, hard deadlines, small answers, no retries, no proxies."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import grpc

from tmc_common import tracing
from tmc_common.mismatch import spoken_instead
from tmc_server.domain.checks import CheckAnswer, CheckReason, CheckTarget
from tmc_server.domain.ports.checks import Endpoint

LONGEST_ANSWER = 1 << 20  # of a batch, or of a description
LONGEST_SINGLE = 64 << 10
TOKEN_KEY = "tmc-check-token"  # noqa: S105 - the name of a metadata key
_UNUSED_S = 600.0
_SURELY_OVER_S = 60.0
_MOST_CHANNELS = 256
_REASONS = {
    grpc.StatusCode.UNAVAILABLE: CheckReason.UNREACHABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED: CheckReason.TIMED_OUT,
    grpc.StatusCode.UNIMPLEMENTED: CheckReason.NO_METHOD,
    grpc.StatusCode.UNAUTHENTICATED: CheckReason.DENIED,
    grpc.StatusCode.PERMISSION_DENIED: CheckReason.DENIED,
    grpc.StatusCode.RESOURCE_EXHAUSTED: CheckReason.TOO_LARGE,
}
_OPTIONS = [
    ("grpc.max_receive_message_length", LONGEST_ANSWER),
    ("grpc.compression_enabled_algorithms_bitset", 1),  # nothing that could swell after the size was looked at
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.service_config_disable_resolution", 1),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.client_idle_timeout_ms", 30_000),  # or a channel that nobody uses would try to connect for ever
]


def problem_of(exc: grpc.RpcError) -> CheckAnswer:
    """An UNKNOWN answer with what went wrong, in the reader's words."""
    code, details = exc.code(), (exc.details() or "")[:300]
    mismatch = mismatch_of(details)
    if code is grpc.StatusCode.UNAVAILABLE and mismatch:  # the service's own errors may say anything
        return CheckAnswer.unknown(CheckReason.WRONG_PROTOCOL, mismatch)
    reason = _REASONS.get(code, CheckReason.FAILED)
    if reason is CheckReason.TOO_LARGE and "larger than max" not in details:
        reason = CheckReason.FAILED  # it has run out of something of its own
    return CheckAnswer.unknown(reason, f"{code.name}: {details}")


def mismatch_of(details: str) -> str:
    """Return what is wrong with the target, if gRPC says that the service speaks something else; "": it does not say that."""
    instead = spoken_instead(details)
    return f"The service speaks {instead}: set the target's --kind and --tls to what it speaks." if instead else ""


class Channels:
    """One channel per service and address, closed when nobody used it for ten minutes. Thread-safe.

    Addresses may be the senders' choice: of more than 256 channels those that were used longest ago are closed, unless
    that was less than a minute ago and a call may be under way.

    credentials: for targets with TLS.
    """

    def __init__(self, credentials: grpc.ChannelCredentials | None = None) -> None:
        self._credentials = credentials or grpc.ssl_channel_credentials()
        self._lock = threading.Lock()
        self._open: dict[tuple[Endpoint, bool], tuple[float, grpc.Channel]] = {}

    def method(self, target: CheckTarget, endpoint: Endpoint, path: str) -> Any:
        """A unary method that takes and gives bytes."""
        return self.channel(target, endpoint).unary_unary(path, _as_it_is, _as_it_is)

    def channel(self, target: CheckTarget, endpoint: Endpoint) -> grpc.Channel:
        key, now = (endpoint, target.tls), time.monotonic()
        with self._lock:
            known = self._open.get(key)
            channel = known[1] if known is not None else self._connect(endpoint, target.tls)
            self._open.pop(key, None)
            self._open[key] = (now, channel)  # at the end: the first ones were used longest ago
            surplus = len(self._open) - _MOST_CHANNELS
            rested = [
                name
                for number, (name, (used, _)) in enumerate(self._open.items())
                if now - used > (_SURELY_OVER_S if number < surplus else _UNUSED_S)
            ]
            for name in rested:
                self._open.pop(name)[1].close()
        return channel

    def _connect(self, endpoint: Endpoint, tls: bool) -> grpc.Channel:
        family = "ipv6" if ":" in endpoint.address else "ipv4"
        options = [*_OPTIONS, ("grpc.default_authority", endpoint.authority)]
        if not tls:
            return grpc.insecure_channel(f"{family}:{endpoint.pinned}", options)
        options.append(("grpc.ssl_target_name_override", endpoint.host))
        return grpc.secure_channel(f"{family}:{endpoint.pinned}", self._credentials, options)

    def close(self) -> None:
        with self._lock:
            for _, channel in self._open.values():
                channel.close()
            self._open.clear()


def call_one(method: Any, request: bytes, target: CheckTarget, token: str, longest: int) -> bytes | CheckAnswer:
    """One call within the target's deadline."""
    try:
        answer: bytes = method(request, timeout=target.deadline_ms / 1000, metadata=_metadata(token))
    except grpc.RpcError as exc:
        return problem_of(exc)
    return answer if len(answer) <= longest else CheckAnswer.unknown(CheckReason.TOO_LARGE, f"{len(answer)} bytes")


def _metadata(token: str) -> tuple[tuple[str, str], ...]:
    return ((TOKEN_KEY, token), *tracing.metadata())


class FailureBudget:
    """Whether to continue a page of single questions: until a whole round of them fails or time runs out."""

    def __init__(self, target: CheckTarget, until: float) -> None:
        self._round = target.concurrency
        self._last_start = until - target.deadline_ms / 1000
        self._failed = 0

    @property
    def remain(self) -> bool:
        return self._failed < self._round and time.monotonic() <= self._last_start

    def note(self, answer: object) -> None:
        """Count a failure of the service; any other outcome resets the count."""
        of_service = isinstance(answer, CheckAnswer) and answer.reason.of_service
        self._failed = self._failed + 1 if of_service else 0


NOT_ASKED = CheckAnswer.unknown(CheckReason.NOT_ASKED)


def call_each(
    method: Any, requests: Sequence[bytes], target: CheckTarget, token: str, until: float
) -> list[bytes | CheckAnswer]:
    """A call per question, `concurrency` of them at once."""
    failures_left, calls = FailureBudget(target, until), deque[Any]()
    answers: list[bytes | CheckAnswer] = []

    def finish() -> None:
        try:
            answer: bytes | CheckAnswer = calls.popleft().result()
        except grpc.RpcError as exc:
            answer = problem_of(exc)
        if isinstance(answer, bytes) and len(answer) > LONGEST_SINGLE:
            answer = CheckAnswer.unknown(CheckReason.TOO_LARGE, f"{len(answer)} bytes")
        failures_left.note(answer)
        answers.append(answer)

    for request in requests:
        if len(calls) >= target.concurrency:
            finish()
        if not failures_left.remain:
            break
        calls.append(method.future(request, timeout=target.deadline_ms / 1000, metadata=_metadata(token)))
    while calls:
        finish()
    return [*answers, *[NOT_ASKED] * (len(requests) - len(answers))]


def _as_it_is(data: bytes) -> bytes:
    return data
