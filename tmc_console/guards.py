"""What every response and every change has to have: headers that keep others out, and proof that a form is ours."""

from __future__ import annotations

import hmac
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "font-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",  # with no-referrer, browsers would hide the origin of our own forms
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}
MOST_BYTES = 1 << 20


class Headers:
    """Middleware: no page is framed, stored, or able to load or run anything that is not ours."""

    def __init__(self, app: ASGIApp, secure: bool) -> None:
        self._app = app
        self._secure = secure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
                if self._secure:
                    headers["strict-transport-security"] = "max-age=31536000"
            await send(message)

        await self._app(scope, receive, send_with_headers)


class BodyLimit:
    """Middleware: a form says how long it is, and is no longer than a megabyte."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            length = dict(scope["headers"]).get(b"content-length", b"")
            if not (length.isdigit() and int(length) <= MOST_BYTES):
                await PlainTextResponse("The form is too long.\n", 413)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def is_ours(request: Request, shown: str, expected: str) -> bool:
    """Return whether a form comes from one of our pages. shown: the token in the form."""
    if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        return False
    origin = request.headers.get("origin", "")
    if origin and urlsplit(origin).netloc != request.headers.get("host", ""):
        return False
    return hmac.compare_digest(shown.encode(), expected.encode())


def local_path(wanted: str) -> str:
    """Return where to go next: a path of this console, whatever the form said."""
    path = "".join(character for character in wanted if character.isprintable())  # browsers skip tabs and line breaks
    return path if path.startswith("/") and not path.startswith(("//", "/\\")) else "/"
