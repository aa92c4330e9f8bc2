"""Checks over HTTP, in the form of the center's kind `http`: a GET for one message, a POST with JSON for many.

A GET answers from existing rows but never fences, because a GET must not change anything.

The token is verified first: without it nothing is parsed and no body is read. A body has at most 4 MiB, however it is
sent, and every field must have a type and a length that a center sends.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from tmc_client import errors, tracing
from tmc_client.checks.questions import Answer, Denied, Question

if TYPE_CHECKING:
    from tmc_client.checks.answers import Checks

_MOST_BYTES = 4 << 20
_MOST = 1_000
_MOST_FIELDS = 16
_LONGEST_TEXT = 1_024  # keys have at most 255 characters
Reply = tuple[int, dict[str, Any]]


def turned_away(checks: Checks, method: str, headers: Mapping[str, str]) -> Reply | None:
    """Check a request before any of its body is read. Returns: the refusal; None: it may be read."""
    try:
        checks.demand(headers.get("tmc-check-token", ""))
    except Denied:
        return 403, {"error": "This is not the check token of this app."}
    except errors.TmcError as exc:
        return 503, {"error": f"The check token is not known yet: {exc}"}
    if method not in ("GET", "POST"):
        return 405, {"error": "GET asks about one message, POST about many."}
    try:
        length = _length(headers)
    except ValueError:
        return 400, {"error": "Content-Length is no length."}
    return (413, {"error": f"at most {_MOST_BYTES} bytes"}) if length > _MOST_BYTES else None


def reply(checks: Checks, method: str, query: str, headers: Mapping[str, str], body: bytes) -> Reply:
    """headers: names in lower case. Returns: status and JSON. Only for requests that were not turned away."""
    try:
        return _get(checks, query, headers) if method == "GET" else _post(checks, headers, body)
    except Denied:
        return 403, {"error": "This is not the check token of this app."}
    except errors.TmcError as exc:
        return 503, {"error": f"The check token is not known yet: {exc}"}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return 400, {"error": "This is no question of a center: see docs/checks.md."}


def _length(headers: Mapping[str, str]) -> int:
    """The announced length of the body; 0: none was announced. Raises ValueError."""
    text = headers.get("content-length", "") or "0"
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise ValueError(text)
    return int(text)


def _get(checks: Checks, query: str, headers: Mapping[str, str]) -> Reply:
    asked = parse_qs(query, strict_parsing=True, max_num_fields=_MOST_FIELDS)
    question = _question(
        {
            "messageId": headers.get("tmc-message-id", ""),
            "topic": headers.get("tmc-topic", ""),
            "messageKey": asked["messageKey"][0],
            "attemptId": headers.get("tmc-attempt-id", ""),
            "ledgerId": headers.get("tmc-ledger-id", ""),
            "createdMs": int(headers.get("tmc-created-ms", "0")),
        }
    )
    with tracing.answering([question], headers):
        answer = checks.answer(headers.get("tmc-check-token", ""), [question], fences=False)[0]
    return 200, {"messageKey": question.key, **_said(answer)}


def _post(checks: Checks, headers: Mapping[str, str], body: bytes) -> Reply:
    items = json.loads(body)["items"]
    if not isinstance(items, list):
        raise TypeError("items is no list")
    if len(items) > _MOST:
        return 400, {"error": f"at most {_MOST} questions in one call"}
    questions = [_question(item) for item in items]
    with tracing.answering(questions, headers):
        answers = checks.answer(headers.get("tmc-check-token", ""), questions)
    results = [
        {"messageId": question.message_id, **_said(answer)} for question, answer in zip(questions, answers, strict=True)
    ]
    return 200, {"results": results}


def _question(item: Mapping[str, Any]) -> Question:
    """Parse one question. Raises ValueError, KeyError, TypeError, AttributeError if no center would send it."""
    texts = [item["messageId"], item["topic"], item["messageKey"], item.get("attemptId", ""), item.get("ledgerId", "")]
    created_ms = item.get("createdMs", 0)
    if not all(isinstance(text, str) and len(text) <= _LONGEST_TEXT and "\0" not in text for text in texts):
        raise ValueError("a field is no text, or too long")
    if type(created_ms) is not int or not 0 <= created_ms < 1 << 62:
        raise ValueError("createdMs is no time")
    message_id, topic, key, attempt_id, ledger_id = texts
    return Question(
        message_id=message_id,
        topic=topic,
        key=key,
        attempt_id=bytes.fromhex(attempt_id),
        ledger_id=bytes.fromhex(ledger_id),
        created_ms=created_ms,
    )


def _said(answer: Answer) -> dict[str, str]:
    said = {"status": answer.verdict.name, "detail": answer.detail}
    return said | ({"unknownReason": answer.because.name} if answer.because else {})


class WsgiChecks:
    """A WSGI application."""

    def __init__(self, checks: Checks) -> None:
        self._checks = checks

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        method = environ["REQUEST_METHOD"]
        headers = {
            name[5:].replace("_", "-").lower(): value for name, value in environ.items() if name.startswith("HTTP_")
        }
        headers["content-length"] = environ.get("CONTENT_LENGTH") or ""
        refused = turned_away(self._checks, method, headers)
        if refused is not None:
            status, found = refused
        else:
            body = environ["wsgi.input"].read(_length(headers)) if _length(headers) else b""
            status, found = reply(self._checks, method, environ.get("QUERY_STRING", ""), headers, body)
        data = json.dumps(found).encode()
        start_response(
            f"{status} {'OK' if status == 200 else 'Refused'}",
            [("Content-Type", "application/json"), ("Content-Length", str(len(data)))],
        )
        return [data]


class Beside:
    """A WSGI application that answers checks at `path` and passes all other requests to another application."""

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

        method = scope["method"]
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        refused = await asyncio.to_thread(turned_away, self._checks, method, headers)
        body = b"" if refused is not None else await self._body(receive)
        if refused is not None:
            status, found = refused
        elif body is None:
            status, found = 413, {"error": f"at most {_MOST_BYTES} bytes"}
        else:
            query = scope["query_string"].decode("latin-1")
            status, found = await asyncio.to_thread(reply, self._checks, method, query, headers, body)
        data = json.dumps(found).encode()
        answer = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": answer})
        await send({"type": "http.response.body", "body": data})

    @staticmethod
    async def _body(receive: Any) -> bytes | None:
        """Read the body. Returns None: it is too long, or the client disconnected."""
        body = bytearray()
        while True:
            event = await receive()
            body += event.get("body", b"")
            if len(body) > _MOST_BYTES or event.get("type") == "http.disconnect":
                return None
            if not event.get("more_body"):
                return bytes(body)
