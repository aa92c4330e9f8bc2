"""Receive webhooks: answer as the test wants, and keep what came."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Posted:
    """headers: by their names in lower case.  events: those of a batch, or the only one."""

    path: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def events(self) -> list[dict[str, Any]]:
        found = json.loads(self.body)
        return found if isinstance(found, list) else [found]

    @property
    def keys(self) -> list[str]:
        return [event["subject"] for event in self.events]


@dataclass(frozen=True)
class Reply:
    """status 0: the connection is closed without an answer."""

    status: int = 204
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


class Receiver:
    """answer: called in a thread of the request."""

    def __init__(self) -> None:
        self.answer: Callable[[Posted], Reply] = lambda _: Reply()
        self.got: list[Posted] = []
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hooks?from=center"

    @property
    def keys(self) -> list[str]:
        """The keys of all messages, in the order in which they came."""
        return [key for posted in list(self.got) for key in posted.keys]


@contextmanager
def receiver(port: int = 0) -> Iterator[Receiver]:
    made = Receiver()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            headers = {name.lower(): text for name, text in self.headers.items()}
            length = int(headers["content-length"])
            body = self.rfile.read(length)
            if len(body) < length:  # its sender was killed
                self.close_connection = True
                return
            posted = Posted(self.path, headers, body)
            made.got.append(posted)
            reply = made.answer(posted)
            if not reply.status:
                self.close_connection = True
                return
            self.send_response(reply.status)
            for name, text in {**reply.headers, "Content-Length": str(len(reply.body))}.items():
                self.send_header(name, text)
            self.end_headers()
            self.wfile.write(reply.body)

        def log_message(self, *_: Any) -> None:
            """Nothing on the screen of a test."""

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    made.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield made
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
