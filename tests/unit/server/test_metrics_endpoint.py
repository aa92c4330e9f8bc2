"""The metrics port answers scrapes whoever else is connected, from one thread."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import httpx
import pytest

from tmc_server.telemetry import MetricsEndpoint
from tmc_storm.eventually import eventually


@pytest.fixture
def endpoint(request: pytest.FixtureRequest) -> Iterator[MetricsEndpoint]:
    made = MetricsEndpoint("127.0.0.1:0", **getattr(request, "param", {}))
    made.start()
    yield made
    made.stop()


def _scrape(port: int) -> str:
    return httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=30).text


def _silent(port: int, count: int) -> list[socket.socket]:
    return [socket.create_connection(("127.0.0.1", port), 10) for _ in range(count)]


def test_fifty_silent_connections_cost_no_thread_and_stop_no_scrape(endpoint: MetricsEndpoint) -> None:
    before = threading.active_count()
    silent = _silent(endpoint.port, 50)
    eventually(lambda: endpoint.connections == 50)
    assert "tmc_prepared_total" in _scrape(endpoint.port)
    assert threading.active_count() == before
    for each in silent:
        each.close()
    eventually(lambda: endpoint.connections == 0)


@pytest.mark.parametrize("endpoint", [{"connections": 8, "patience_s": 3600.0}], indirect=True)
def test_beyond_the_limit_the_longest_silent_scraper_is_dropped(endpoint: MetricsEndpoint) -> None:
    first, *rest = silent = _silent(endpoint.port, 8)
    eventually(lambda: endpoint.connections == 8)
    assert "tmc_prepared_total" in _scrape(endpoint.port)
    first.settimeout(30)
    assert first.recv(1) == b""
    eventually(lambda: endpoint.connections == len(rest))
    for each in silent:
        each.close()


@pytest.mark.parametrize("endpoint", [{"patience_s": 0.05}], indirect=True)
def test_a_connection_that_never_asks_is_closed(endpoint: MetricsEndpoint) -> None:
    silent, slow = _silent(endpoint.port, 2)
    slow.sendall(b"GET /metrics HTTP/1.1\r\n")
    for each in (silent, slow):
        each.settimeout(30)
        assert each.recv(1) == b""
        each.close()
    eventually(lambda: endpoint.connections == 0)


def test_what_is_no_scrape_gets_no_metrics(endpoint: MetricsEndpoint) -> None:
    assert _status(endpoint.port, "/other")[0] == 404
    assert httpx.post(f"http://127.0.0.1:{endpoint.port}/metrics", content=b"x", timeout=30).status_code == 405
    with socket.create_connection(("127.0.0.1", endpoint.port), 10) as flood:
        flood.settimeout(30)
        with pytest.raises(OSError, match=r".+"):
            while True:
                flood.sendall(b"x" * 65_536)


def test_a_port_that_is_taken_is_named_with_its_setting_and_leaves_nothing_behind(endpoint: MetricsEndpoint) -> None:
    other = MetricsEndpoint(f"127.0.0.1:{endpoint.port}")
    with pytest.raises(OSError, match="metrics") as caught:
        other.start()
    assert str(caught.value) == (
        f"Cannot listen on 127.0.0.1:{endpoint.port} for metrics (Address already in use): set [telemetry] listen "
        "(TMC_TELEMETRY__LISTEN) to another address, or stop what uses it."
    )
    other.stop()
    assert other.port == 0


def test_a_host_that_is_not_there_is_named_with_its_setting() -> None:
    with pytest.raises(
        OSError, match=r"no-such-host\.invalid:1 for metrics \(no such host\): set \[telemetry\] listen"
    ):
        MetricsEndpoint("no-such-host.invalid:1").start()


def test_it_answers_as_soon_as_it_is_started_and_may_be_stopped_at_once() -> None:
    for _ in range(50):
        made = MetricsEndpoint("127.0.0.1:0")
        made.start()
        made.stop()
        assert made.port == 0


def _status(port: int, path: str) -> tuple[int, str]:
    answer = httpx.get(f"http://127.0.0.1:{port}{path}", timeout=30)
    return answer.status_code, answer.text


def test_a_process_is_healthy_before_it_is_ready(endpoint: MetricsEndpoint) -> None:
    assert _status(endpoint.port, "/healthz") == (200, "ok\n")
    assert _status(endpoint.port, "/readyz") == (503, "starting or stopping\n")
    endpoint.is_ready = True
    assert _status(endpoint.port, "/readyz") == (200, "ready\n")
    assert _status(endpoint.port, "/ready")[0] == 404


def test_a_server_whose_event_loop_hangs_is_not_healthy(
    endpoint: MetricsEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _status(endpoint.port, "/healthz") == (200, "ok\n")  # it starts
    endpoint.beat()
    assert _status(endpoint.port, "/healthz") == (200, "ok\n")
    monkeypatch.setattr("tmc_server.telemetry.SILENT_S", 0.0)
    assert _status(endpoint.port, "/healthz") == (503, "the event loop hangs\n")
