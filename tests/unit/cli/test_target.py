"""Several addresses of one center: a command takes a server that is there."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import grpc
import pytest

from tmc_cli.target import Target, first_that_listens
from tmc_storm.services.ports import free_port


@pytest.fixture
def there() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


def test_one_that_is_away_is_passed_over(there: str) -> None:
    away = f"127.0.0.1:{free_port()}"
    assert first_that_listens(f"{away}, {there}") == there
    assert first_that_listens(f"{there},{away}") == there
    assert first_that_listens(f"nonsense,{there}") == there


def test_if_none_is_there_the_first_is_named() -> None:
    away = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    assert first_that_listens(",".join(away)) == away[0]


def test_a_single_one_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "create_connection", None)
    assert first_that_listens("center.internal:50051") == "center.internal:50051"


class Late(grpc.RpcError):
    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.DEADLINE_EXCEEDED

    def details(self) -> str:
        return "Deadline Exceeded"


def test_no_answer_in_time_says_that_it_may_have_been_done(there: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tmc_cli.target._PROBE_S", 0.05)
    said = Target(address=there).explain(Late())
    assert said == f"{there} did not answer in time: what you asked for may have been done. Look before you repeat it."
