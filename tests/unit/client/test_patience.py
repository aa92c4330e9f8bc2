"""Calls without a healthy server carry what the caller gave along, like all others."""

from __future__ import annotations

import time
from collections import deque
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from tmc_client.connecting.connection import Connection


class _Method:
    """Answers at once. Keeps the metadata of each call."""

    def __init__(self) -> None:
        self.seen: list[tuple[tuple[str, str], ...]] = []

    def future(self, _request: object, *, timeout: float, metadata: tuple[tuple[str, str], ...]) -> Any:
        self.seen.append(metadata)
        call = Mock(
            **{"cancelled.return_value": False, "exception.return_value": None, "result.return_value": "answer"}
        )
        call.add_done_callback.side_effect = lambda done: done(call)
        return call


def test_a_patient_call_carries_the_callers_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    method, server = _Method(), SimpleNamespace(patience_s=1.0)
    servers: Any = SimpleNamespace(answered=lambda *_: None)
    monkeypatch.setattr(Connection, "_method", lambda *_: (method, (("ours", "1"),)))
    connection = Connection.__new__(Connection)
    connection._monotonic = time.monotonic
    waiting: deque[Any] = deque([server])
    more, end = (("theirs", "2"),), time.monotonic() + 60
    assert connection._call_patiently(servers, waiting, "/p", str, "request", more, end, OSError()) == "answer"
    assert method.seen == [(("ours", "1"), ("theirs", "2"))]
