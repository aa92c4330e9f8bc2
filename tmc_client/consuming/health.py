"""GET /healthz of a consumer's process: 200 while it is well, 503 with a sentence for each thing that is wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_PATIENCE_S = 5.0


class HealthEndpoint:
    """wrong: see Consumer.health.  port 0: a free one.  Raises OSError: the port is taken."""

    def __init__(self, host: str, port: int, wrong: Callable[[], Sequence[str]]) -> None:
        class Handler(BaseHTTPRequestHandler):
            timeout = _PATIENCE_S

            def do_GET(self) -> None:
                found = wrong() if self.path.partition("?")[0] == "/healthz" else None
                status = 404 if found is None else 503 if found else 200
                body = "".join(f"{sentence}\n" for sentence in found or (["ok"] if status == 200 else [])).encode()
                self.send_response(status)
                self.send_header("Content-Type", "text/plain; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Probes are not logged."""

        self._server = ThreadingHTTPServer((host, port), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, name="tmc-health", daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
