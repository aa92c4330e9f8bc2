"""The fault proxy itself: a tool that lies would make every test on it lie."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from tmc_storm.eventually import eventually
from tmc_storm.tcp_proxy import TcpProxy


@pytest.fixture
def echo() -> Iterator[int]:
    """A server that sends back what it gets."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer(connection: socket.socket) -> None:
        with connection:
            try:
                while data := connection.recv(1 << 16):
                    connection.sendall(data)
            except OSError:
                return

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def test_it_passes_everything_on_and_holds_it_back_while_the_hole_is_open(echo: int) -> None:
    with TcpProxy("127.0.0.1", echo) as proxy, socket.create_connection(("127.0.0.1", proxy.port)) as client:
        client.sendall(b"one")
        assert client.recv(10) == b"one"
        proxy.black_hole()
        client.sendall(b"two")
        client.settimeout(0.2)
        with pytest.raises(TimeoutError):
            client.recv(10)
        proxy.pass_through()
        client.settimeout(30)
        assert client.recv(10) == b"two"
        assert (proxy.accepted, proxy.passed_bytes) == (1, 6)


def test_a_black_hole_accepts_new_connections_and_says_nothing_on_them(echo: int) -> None:
    with TcpProxy("127.0.0.1", echo) as proxy:
        proxy.black_hole()
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=0.2) as client:
            client.sendall(b"hello")
            with pytest.raises(TimeoutError):
                client.recv(10)


def test_a_cut_is_an_end_of_stream_and_a_reset_is_an_error_and_both_leave_room_for_new_connections(echo: int) -> None:
    with TcpProxy("127.0.0.1", echo) as proxy:
        for end in (proxy.cut, proxy.reset):
            with socket.create_connection(("127.0.0.1", proxy.port), timeout=30) as client:
                client.sendall(b"here")
                assert client.recv(10) == b"here"
                end()
                if end == proxy.cut:
                    assert client.recv(10) == b""
                else:
                    with pytest.raises(ConnectionResetError):
                        client.recv(10)
        eventually(lambda: proxy.open_connections == 0)
        assert proxy.accepted == 2


def test_data_is_delayed_and_arrives_whole(echo: int) -> None:
    with TcpProxy("127.0.0.1", echo) as proxy, socket.create_connection(("127.0.0.1", proxy.port)) as client:
        proxy.delay(0.05)
        client.settimeout(30)
        client.sendall(b"late")
        assert client.recv(10) == b"late"


def test_closing_ends_its_connections_and_its_port(echo: int) -> None:
    proxy = TcpProxy("127.0.0.1", echo)
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=30) as client:
        client.sendall(b"here")
        assert client.recv(10) == b"here"
        proxy.close()
        assert client.recv(10) == b""
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", proxy.port), timeout=30)
