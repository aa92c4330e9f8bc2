"""Checks over HTTP, in the form of the center's kind `http`: a GET for one message, a POST with JSON for many.

A GET may answer from what is written, but never fences: nothing that is asked by GET changes anything.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from tmc_client import errors
from tmc_client.questions import Denied, Question

if TYPE_CHECKING:
    from tmc_client.checking import Checks

_MOST_BYTES = 4 << 20
_MOST = 1_000
Reply = tuple[int, dict[str, Any]]


def reply(checks: Checks, method: str, query: str, headers: Mapping[str, str], body: bytes) -> Reply:
    """headers: names in lower case. Returns: status and JSON."""
    try:
        if method == "GET":
            return _get(checks, query, headers)
        if method == "POST":
            return _post(checks, headers, body)
    except Denied:
        return 403, {"error": "This is not the check token of this app."}
    except errors.TmcError as exc:
        return 503, {"error": f"The check token is not known yet: {exc}"}
    except (ValueError, KeyError, TypeError, AttributeError):
        return 400, {"error": "This is no question of a center: see docs/checks.md."}
    return 405, {"error": "GET asks about one message, POST about many."}


def _get(checks: Checks, query: str, headers: Mapping[str, str]) -> Reply:
    asked = parse_qs(query, strict_parsing=True)
    question = Question(
        headers.get("tmc-message-id", ""),
        headers.get("tmc-topic", ""),
        asked["messageKey"][0],
        bytes.fromhex(headers.get("tmc-attempt-id", "")),
        bytes.fromhex(headers.get("tmc-ledger-id", "")),
        int(headers.get("tmc-created-ms", "0")),
    )
    answer = checks.answer(headers.get("tmc-check-token", ""), [question], fences=False)[0]
    return 200, {"status": answer.verdict.name, "messageKey": question.key, "detail": answer.detail}


def _post(checks: Checks, headers: Mapping[str, str], body: bytes) -> Reply:
    items = json.loads(body)["items"]
    if len(items) > _MOST:
        return 400, {"error": f"at most {_MOST} questions in one call"}
    questions = [
        Question(
            item["messageId"], item["topic"], item["messageKey"], bytes.fromhex(item.get("attemptId", "")),
            bytes.fromhex(item.get("ledgerId", "")), int(item.get("createdMs", 0)),
        )
        for item in items
    ]  # fmt: skip
    answers = checks.answer(headers.get("tmc-check-token", ""), questions)
    results = [
        {"messageId": question.message_id, "status": answer.verdict.name, "detail": answer.detail}
        for question, answer in zip(questions, answers, strict=True)
    ]
    return 200, {"results": results}


class WsgiChecks:
    """A WSGI application."""

    def __init__(self, checks: Checks) -> None:
        self._checks = checks

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        length = int(environ.get("CONTENT_LENGTH") or 0)
        headers = {
            name[5:].replace("_", "-").lower(): value for name, value in environ.items() if name.startswith("HTTP_")
        }
        if length > _MOST_BYTES:
            status, found = 413, {"error": f"at most {_MOST_BYTES} bytes"}
        else:
            body = environ["wsgi.input"].read(length) if length else b""
            status, found = reply(
                self._checks, environ["REQUEST_METHOD"], environ.get("QUERY_STRING", ""), headers, body
            )
        data = json.dumps(found).encode()
        start_response(
            f"{status} {'OK' if status == 200 else 'Refused'}",
            [("Content-Type", "application/json"), ("Content-Length", str(len(data)))],
        )
        return [data]


class Beside:
    """A WSGI application in front of another: `path` is ours."""

    def __init__(self, application: Any, checks: WsgiChecks, path: str) -> None:
        self._application = application
        self._checks = checks
        self._path = path

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        ours = environ.get("PATH_INFO") == self._path
        return self._checks(environ, start_response) if ours else self._application(environ, start_response)


class AsgiChecks:
    """An ASGI application. Answers are looked up in a thread, not on the loop."""

    def __init__(self, checks: Checks) -> None:
        self._checks = checks

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            raise ValueError(f"checks come over HTTP, not as {scope['type']}")
        import asyncio

        body = bytearray()
        while True:
            event = await receive()
            body += event.get("body", b"")
            if not event.get("more_body") or len(body) > _MOST_BYTES:
                break
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if len(body) > _MOST_BYTES:
            status, found = 413, {"error": f"at most {_MOST_BYTES} bytes"}
        else:
            status, found = await asyncio.to_thread(
                reply, self._checks, scope["method"], scope["query_string"].decode("latin-1"), headers, bytes(body)
            )
        data = json.dumps(found).encode()
        answer = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": answer})
        await send({"type": "http.response.body", "body": data})
