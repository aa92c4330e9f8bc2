"""The console behind real sockets: silent connections end, and one peer never has all of them."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import httpx
import pytest
import uvicorn

from tmc_common import http_connections as connections
from tmc_console.running import ConsoleConfig, run_beside
from tmc_storm.eventually import eventually

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


def test_requests_one_after_another_are_answered_on_one_connection(port: int) -> None:
    """Also one in two parts."""
    with socket.create_connection(("127.0.0.1", port), 10) as connection:
        for _ in range(4):
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1")
            time.sleep(0.3)
            connection.sendall(b"\r\n\r\n")
            answer = b""
            while not answer.endswith(b"ok\n"):
                answer += connection.recv(65_536)
            assert answer.startswith(b"HTTP/1.1 200")


async def _application(scope: Any, _receive: Any, send: Any) -> None:
    """/slow: a response in parts, for four times the patience. Others: one of many megabytes; /once: in one part."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    if scope["path"] == "/once":
        await send({"type": "http.response.body", "body": b"x" * (40 << 20)})
        return
    for _ in range(8 if scope["path"] == "/slow" else 40):
        slow = scope["path"] == "/slow"
        await send({"type": "http.response.body", "body": b"x" * (1 if slow else 1 << 20), "more_body": True})
        await asyncio.sleep(0.25 if slow else 0)
    await send({"type": "http.response.body", "body": b""})


@pytest.fixture
def streaming(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Run a server with `_application`; the value is its port."""
    monkeypatch.setattr(connections, "PATIENCE_S", 0.5)
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(_application, http=connections.PatientProtocol, log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])))
    thread.start()
    yield listening.getsockname()[1]
    server.should_exit = True
    thread.join(20)


def test_a_response_that_takes_longer_than_that_is_sent(streaming: int) -> None:
    assert httpx.get(f"http://127.0.0.1:{streaming}/slow", timeout=20).text == "x" * 8


def test_a_connection_that_rests_between_requests_is_kept(streaming: int) -> None:
    """As long as uvicorn keeps it, 5 s: clients and proxies would send their next request into a closed connection."""
    with httpx.Client(base_url=f"http://127.0.0.1:{streaming}", timeout=20) as client:
        first = client.get("/slow").extensions["network_stream"].get_extra_info("client_addr")
        time.sleep(2.5)  # five times the patience
        assert client.get("/slow").extensions["network_stream"].get_extra_info("client_addr") == first


def test_answers_do_not_wait_for_acknowledgements() -> None:
    with connections.listen("127.0.0.1:0") as listening, socket.create_connection(listening.getsockname()):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize("path", ["large", "once"])
def test_a_client_that_does_not_read_is_cut_off(streaming: int, path: str) -> None:
    with socket.create_connection(("127.0.0.1", streaming), 10) as connection:
        connection.sendall(f"GET /{path}".encode() + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        time.sleep(2.5)  # to look earlier would be to read on
        assert _read_to_the_end(connection) < 40 << 20


@pytest.mark.parametrize("path", ["large", "once"])
def test_a_client_that_reads_slowly_gets_all(streaming: int, path: str) -> None:
    with socket.create_connection(("127.0.0.1", streaming), 10) as connection:
        connection.sendall(f"GET /{path}".encode() + b" HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        assert _read_to_the_end(connection, pause_s=0.05) >= 40 << 20


def _read_to_the_end(connection: socket.socket, pause_s: float = 0.0) -> int:
    """Returns: bytes."""
    size = 0
    with suppress(ConnectionError):
        while part := connection.recv(1 << 20):
            size += len(part)
            time.sleep(pause_s)
    return size


def test_one_peer_does_not_take_all_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "PATIENCE_S", 300.0)
    with _more_than_one_peer_may_have(_console()) as opened:
        eventually(lambda: sum(map(_is_closed, opened)) == 20)


def test_connections_beyond_the_limit_are_closed_and_those_before_are_served(
    streaming: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections.PatientProtocol, "most", 5)
    monkeypatch.setattr(connections, "PATIENCE_S", 300.0)
    with httpx.Client(base_url=f"http://127.0.0.1:{streaming}", timeout=20) as known, ExitStack() as stack:
        known.get("/slow")
        opened = [stack.enter_context(socket.create_connection(("127.0.0.1", streaming), 10)) for _ in range(7)]
        eventually(lambda: sum(map(_is_closed, opened)) == 3)
        assert known.get("/slow").status_code == 200


def test_strangers_that_say_nothing_shut_nobody_out(port: int) -> None:
    def answers() -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    with _more_than_one_peer_may_have(port):
        eventually(answers)
