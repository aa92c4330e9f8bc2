"""The console behind real sockets: silent connections end, and one peer never has all of them."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import httpx
import pytest

from tests.support.eventually import eventually
from tmc_console import connections
from tmc_console.running import ConsoleConfig, run_beside

BEGINNINGS = {
    "nothing": b"",
    "half a request": b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-A: ",
    "half a form": b"POST /preferences HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n"
    b"Content-Type: application/x-www-form-urlencoded\r\n\r\nlanguage=",
    "half of a second request": b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nGET /healthz HTTP/1.1\r\nX-A: ",
}


def _console() -> int:
    """Without a center: nobody asks it for anything. Returns: its port."""
    return run_beside(ConsoleConfig(listen="127.0.0.1:0", center="127.0.0.1:1"))


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(connections, "PATIENCE_S", 0.5)
    return _console()


@contextmanager
def _more_than_one_peer_may_have(port: int) -> Iterator[Sequence[socket.socket]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), 10))
            for _ in range(connections.MOST_OF_A_PEER + 20)
        ]


def _is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        while connection.recv(65_536):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return True


@pytest.mark.parametrize("said", BEGINNINGS)
def test_a_connection_without_a_whole_request_ends(port: int, said: str) -> None:
    with socket.create_connection(("127.0.0.1", port), 10) as connection:
        connection.sendall(BEGINNINGS[said])
        eventually(lambda: _is_closed(connection))


def test_a_request_that_takes_longer_than_that_is_answered(port: int) -> None:
    """In parts, each soon after the one before; and one after another on the same connection."""
    with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        for _ in range(4):
            assert client.get("/healthz").status_code == 200
            time.sleep(0.3)


def test_one_peer_does_not_take_all_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "PATIENCE_S", 300.0)
    with _more_than_one_peer_may_have(_console()) as opened:
        eventually(lambda: sum(map(_is_closed, opened)) == 20)


def test_strangers_that_say_nothing_shut_nobody_out(port: int) -> None:
    def answers() -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    with _more_than_one_peer_may_have(port):
        eventually(answers)
