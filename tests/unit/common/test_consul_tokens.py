"""Tokens of calls to Consul, and the registration of instances."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tmc_common import consul
from tmc_common.consul import Registration, agent_client


@pytest.mark.parametrize(
    ("configured", "environment", "expected"),
    [("ours", None, "ours"), ("ours", "theirs", "ours"), ("", "theirs", "theirs"), ("", None, None)],
)
def test_a_configured_token_comes_before_that_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, configured: str, environment: str | None, expected: str | None
) -> None:
    monkeypatch.delenv("CONSUL_HTTP_TOKEN", raising=False)
    if environment is not None:
        monkeypatch.setenv("CONSUL_HTTP_TOKEN", environment)
    assert agent_client("127.0.0.1:8500", configured, timeout_s=1).token == expected


class Agent:
    def __init__(self) -> None:
        self.known: dict[str, Any] = {}
        self.registered: list[str] = []
        self.agent = SimpleNamespace(
            services=lambda: self.known, service=SimpleNamespace(register=self.register, deregister=self.known.pop)
        )

    def register(self, _service: str, *, service_id: str, **settings: Any) -> None:
        self.registered.append(service_id)
        self.known[service_id] = settings


def test_an_instance_of_an_earlier_run_is_registered_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its check and its token are those of a run that is over."""
    agent = Agent()
    monkeypatch.setattr(consul, "agent_client", lambda *_args, **_settings: agent)
    first = Registration("127.0.0.1:8500", "tmc", "10.0.0.1:50051")
    assert [first.run_once(), first.run_once()] == [True, False]
    second = Registration("127.0.0.1:8500", "tmc", "10.0.0.1:50051")
    assert [second.run_once(), second.run_once()] == [True, False]
    agent.known.clear()
    assert second.run_once()
    assert len(agent.registered) == 3
