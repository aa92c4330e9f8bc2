"""Kind `http`: GET PATH?bizID=..&messageKey=.. as TrustMessage asks, or one POST for many questions.

An answer is exactly 1, 2, 3 or 4 (prepared, commit, rollback, unknown), or a JSON object whose status is one of these
or COMMIT, ROLLBACK, UNKNOWN. Nothing else decides anything. Redirects are not followed, proxies not used, compressed
answers not read, and the deadline is that of the whole answer, not of a packet.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import aclosing
from functools import lru_cache
from typing import Any, TypeVar
from urllib.parse import urlencode

import httpx
import uvloop

from tmc_common import tracing
from tmc_common.limited import UNCOMPRESSED, Compressed, TooLarge, read_body_async
from tmc_server.checks.channels import LONGEST_ANSWER, LONGEST_SINGLE, NOT_ASKED, FailureBudget, mismatch_of
from tmc_server.domain.checks import CheckAnswer, CheckReason, CheckTarget, Question, Verdict
from tmc_server.domain.ports.checks import Endpoint
from tmc_server.errors import CheckRefused
from tmc_server.outgoing import ENDPOINT, TARGET, PinnedTransport

Result = TypeVar("Result")
_STATUS = {
    "1": Verdict.UNKNOWN,
    "2": Verdict.COMMIT,
    "3": Verdict.ROLLBACK,
    "4": Verdict.UNKNOWN,
    "COMMIT": Verdict.COMMIT,
    "ROLLBACK": Verdict.ROLLBACK,
    "UNKNOWN": Verdict.UNKNOWN,
}
_ECHOES = {"messageKey": "key", "bizID": "biz_id", "messageId": "message_id"}
_OPTIONS = {"path", "batch"}
_SPARE_S = 5.0
_NOTHING: Mapping[str, str] = {}


def answer_of(question: Question, body: bytes) -> CheckAnswer:
    """Return what one answer means."""
    try:
        text = body.decode().strip("\r\n ")
        if text in ("1", "2", "3", "4"):
            return _said(text)
        return answer_of_object(question, json.loads(text, object_pairs_hook=_once))
    except (ValueError, RecursionError):
        return CheckAnswer.unknown(CheckReason.NOT_UNDERSTOOD, _shown(body))


def answer_of_object(question: Question, found: object) -> CheckAnswer:
    """Return what one JSON object means. Echoes of the question, where there are any, must be right."""
    if not isinstance(found, dict) or not set(found) <= {"status", "detail", "unknownReason", *_ECHOES}:
        return CheckAnswer.unknown(CheckReason.NOT_UNDERSTOOD, _shown(json.dumps(found).encode()))
    for name, field in _ECHOES.items():
        if name in found and found[name] != getattr(question, field):
            return CheckAnswer.unknown(CheckReason.OTHER_MESSAGE, f"It is about {name} {str(found[name])[:128]!r}.")
    status = found.get("status")
    if isinstance(status, int) and not isinstance(status, bool):
        status = str(status)
    if not isinstance(status, str) or status not in _STATUS:
        return CheckAnswer.unknown(CheckReason.NOT_UNDERSTOOD, f"status {str(status)[:128]!r} is none.")
    # JSON may have halves of surrogate pairs, which no database takes.
    said = _said(status, str(found.get("detail", ""))[:500].encode("utf-8", "replace").decode())
    reason = _UNKNOWN_REASONS.get(str(found.get("unknownReason")))
    return CheckAnswer.unknown(reason, said.detail) if reason and said.verdict is Verdict.UNKNOWN else said


_UNKNOWN_REASONS = {reason.name: reason for reason in (CheckReason.NOT_NOW, CheckReason.WRONG_LEDGER)}


def _said(status: str, detail: str = "") -> CheckAnswer:
    return CheckAnswer(_STATUS[status], detail=detail or f"status {status}")


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if len({name for name, _ in pairs}) != len(pairs):
        raise ValueError("a name stands there twice")
    return dict(pairs)


def _shown(body: bytes) -> str:
    return repr(body[:200])[1:]


class HttpChecks:
    """domain.ports.checks.Asker. One event loop in a thread of its own, started at the first question."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls or ssl.create_default_context()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._transport = PinnedTransport(self._tls)  # used by that loop alone

    def accept(self, target: CheckTarget) -> None:
        unknown = set(target.options) - _OPTIONS
        if unknown:
            raise CheckRefused(f"http takes the options path and batch, not {', '.join(sorted(unknown))}.")
        path = target.options.get("path", "")
        if not path.startswith("/") or not path.isascii() or not path.isprintable() or set(path) & set(" \\#"):
            raise CheckRefused("http needs the option path, beginning with /, for example /verifyMessage.")
        if target.options.get("batch", "false") not in ("true", "false"):
            raise CheckRefused("The option batch is true (one POST for many questions) or false (a GET for each).")

    def asks_singly(self, target: CheckTarget) -> bool:
        return not _is_batch(target)

    def examine(self, target: CheckTarget, endpoint: Endpoint, token: str) -> None:
        question = Question(
            message_id="0-0-0-0",
            topic="tmc.examine",
            key="tmc-examine",
            biz_id="",
            attempt_id=b"",
            ledger_id=b"",
            created_ms=0,
        )
        until = time.monotonic() + 2 * target.deadline_ms / 1000
        answer = self.ask(target, endpoint, token, [question], until)[0]
        if answer.reason is CheckReason.WRONG_PROTOCOL:
            raise CheckRefused(f"{endpoint}: {answer.detail}")
        if answer.reason in (CheckReason.UNREACHABLE, CheckReason.TIMED_OUT):
            raise CheckRefused(
                f"{endpoint} does not answer ({answer.detail}): start the service, or correct the address."
            )
        if answer.detail in ("status 404", "status 405"):
            raise CheckRefused(f"{endpoint} has no {target.options['path']} ({answer.detail}): correct the path.")

    def render(self, target: CheckTarget, question: Question) -> str:
        if _is_batch(target):
            return f"POST {target.options['path']} {json.dumps({'items': [_item(question)]})}"
        return f"GET {_path(target, question)}"

    def ask(
        self, target: CheckTarget, endpoint: Endpoint, token: str, questions: Sequence[Question], until: float
    ) -> list[CheckAnswer]:
        if _is_batch(target):
            return self._run(self._ask_together(target, endpoint, token, questions), target.deadline_ms / 1000)
        return self._run(self._ask_each(target, endpoint, token, questions, until), until - time.monotonic())

    def _run(self, work: Coroutine[Any, Any, Result], seconds: float) -> Result:
        with self._lock:
            if self._loop is None:
                self._loop = uvloop.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="tmc-http-checks", daemon=True)
                self._thread.start()
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(seconds + _SPARE_S)

    async def _ask_each(
        self, target: CheckTarget, endpoint: Endpoint, token: str, questions: Sequence[Question], until: float
    ) -> list[CheckAnswer]:
        """A few workers share the page."""
        answers: list[CheckAnswer] = [NOT_ASKED] * len(questions)
        waiting = iter(enumerate(questions))
        failures_left = FailureBudget(target, until)

        async def work() -> None:
            while failures_left.remain and (one := next(waiting, None)) is not None:
                index, question = one
                path, about = _path(target, question), _about(question)
                got = await self._call(target, endpoint, token, "GET", path, None, LONGEST_SINGLE, about)
                answers[index] = got if isinstance(got, CheckAnswer) else answer_of(question, got)
                failures_left.note(answers[index])

        await asyncio.gather(*(work() for _ in range(min(target.concurrency, len(questions)))))
        return answers

    async def _ask_together(
        self, target: CheckTarget, endpoint: Endpoint, token: str, questions: Sequence[Question]
    ) -> list[CheckAnswer]:
        body = json.dumps({"items": [_item(question) for question in questions]}).encode()
        got = await self._call(target, endpoint, token, "POST", target.options["path"], body, LONGEST_ANSWER)
        if isinstance(got, CheckAnswer):
            return [got] * len(questions)
        try:
            results = json.loads(got, object_pairs_hook=_once)["results"]
            if not isinstance(results, list) or len(results) != len(questions):
                raise ValueError("another number of results")
        except (ValueError, KeyError, TypeError, RecursionError):
            return [CheckAnswer.unknown(CheckReason.NOT_UNDERSTOOD, _shown(got))] * len(questions)
        return [
            answer_of_object(question, result)
            if _names(result)
            else CheckAnswer.unknown(CheckReason.NOT_UNDERSTOOD, "A result of a batch has to name its messageId.")
            for question, result in zip(questions, results, strict=True)
        ]

    async def _call(
        self,
        target: CheckTarget,
        endpoint: Endpoint,
        token: str,
        method: str,
        path: str,
        body: bytes | None,
        most: int,
        about: Mapping[str, str] = _NOTHING,
    ) -> bytes | CheckAnswer:
        request = _request(target, endpoint, token, method, path, body, about)
        try:
            async with asyncio.timeout(target.deadline_ms / 1000):
                response = await self._transport.handle_async_request(request)
                async with aclosing(response):
                    return await _read(response, most)
        except TimeoutError:
            return CheckAnswer.unknown(CheckReason.TIMED_OUT, f"nothing complete within {target.deadline_ms} ms")
        except httpx.ConnectError as exc:
            mismatch = mismatch_of(str(exc))
            reason = CheckReason.WRONG_PROTOCOL if mismatch else CheckReason.UNREACHABLE
            return CheckAnswer.unknown(reason, mismatch or str(exc)[:300])
        except httpx.RemoteProtocolError as exc:
            mismatch = mismatch_of(str(exc))
            reason = CheckReason.WRONG_PROTOCOL if mismatch else CheckReason.FAILED
            return CheckAnswer.unknown(reason, mismatch or f"{type(exc).__name__}: {exc}"[:300])
        except (httpx.HTTPError, ValueError, OSError) as exc:
            return CheckAnswer.unknown(CheckReason.FAILED, f"{type(exc).__name__}: {exc}"[:300])

    def close(self) -> None:
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            asyncio.run_coroutine_threadsafe(self._transport.aclose(), loop).result(5)
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join(5)
            loop.close()


def _request(
    target: CheckTarget,
    endpoint: Endpoint,
    token: str,
    method: str,
    path: str,
    body: bytes | None,
    about: Mapping[str, str],
) -> httpx.Request:
    headers = {"Host": endpoint.authority, "Accept": "application/json", **UNCOMPRESSED}
    headers |= {**dict(tracing.metadata()), "Tmc-Check-Token": token, **about}
    if body is not None:
        headers["Content-Type"] = "application/json"
    return httpx.Request(
        method,
        _origin(endpoint.authority, target.tls),
        headers=[(name.encode(), value.encode()) for name, value in headers.items()],
        content=body,
        extensions={ENDPOINT: endpoint, TARGET: path.encode()},
    )


@lru_cache(maxsize=1024)
def _origin(authority: str, tls: bool) -> httpx.URL:
    return httpx.URL(f"{'https' if tls else 'http'}://{authority}/")


async def _read(response: httpx.Response, most: int) -> bytes | CheckAnswer:
    """The body as it comes off the wire. A connection whose answer is left unread is closed with the response."""
    if response.status_code != 200:
        reason = {401: CheckReason.DENIED, 403: CheckReason.DENIED}.get(response.status_code)  # 404: maybe one key
        where = " (redirects are not followed)" if 300 <= response.status_code < 400 else ""
        return CheckAnswer.unknown(reason or CheckReason.FAILED, f"status {response.status_code}{where}")
    try:
        return await read_body_async(response, most)
    except Compressed as exc:
        return CheckAnswer.unknown(CheckReason.NOT_UNDERSTOOD, str(exc))
    except TooLarge as exc:
        return CheckAnswer.unknown(CheckReason.TOO_LARGE, str(exc))


def _is_batch(target: CheckTarget) -> bool:
    return target.options.get("batch") == "true"


def _path(target: CheckTarget, question: Question) -> str:
    path = target.options["path"]
    query = urlencode({"bizID": question.biz_id, "messageKey": question.key})
    return f"{path}{'&' if '?' in path else '?'}{query}"


def _about(question: Question) -> dict[str, str]:
    """Headers for what a GET in TrustMessage's format cannot carry."""
    return {
        "Tmc-Message-Id": question.message_id,
        "Tmc-Topic": question.topic,
        "Tmc-Attempt-Id": question.attempt_id.hex(),
        "Tmc-Ledger-Id": question.ledger_id.hex(),
        "Tmc-Created-Ms": str(question.created_ms),
    }


def _item(question: Question) -> dict[str, object]:
    return {
        "messageId": question.message_id,
        "topic": question.topic,
        "bizID": question.biz_id,
        "messageKey": question.key,
        "attemptId": question.attempt_id.hex(),
        "ledgerId": question.ledger_id.hex(),
        "createdMs": question.created_ms,
    }


def _names(result: object) -> bool:
    return isinstance(result, dict) and "messageId" in result
