"""An ordinary web server, where something else was expected."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@contextmanager
def web_server() -> Iterator[int]:
    """Answers everything with 404. Yields: its port on 127.0.0.1."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Nothing)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Nothing(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_error(404)

    def log_message(self, *_: Any) -> None:
        """Nothing on the screen of a test."""
