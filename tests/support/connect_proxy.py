"""An HTTP proxy that takes CONNECT, as those of companies do."""

from __future__ import annotations

import contextlib
import socket
import threading


class ConnectProxy:
    """asked: the hosts that it was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self._listening = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listening.getsockname()[1]}"

    def _accept(self) -> None:
        while True:
            try:
                caller, _ = self._listening.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._serve, args=(caller,), daemon=True).start()

    def _serve(self, caller: socket.socket) -> None:
        """Serve one caller. Others than CONNECT are turned away, such as a channel of an earlier test that knows this port."""
        with caller, contextlib.suppress(OSError):
            head = b""
            while b"\r\n\r\n" not in head:
                data = caller.recv(4096)
                if not data:
                    return
                head += data
            method, place = head.decode("latin-1").split()[:2]
            if method != "CONNECT":
                return
            self.asked.append(place)
            host, _, port = place.rpartition(":")
            with socket.create_connection((host, int(port))) as center:
                caller.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                threading.Thread(target=_pump, args=(center, caller), daemon=True).start()
                _pump(caller, center)

    def close(self) -> None:
        self._listening.close()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    try:
        while data := source.recv(65_536):
            sink.sendall(data)
    except OSError:
        return
