"""Our own kinds keep the contract that is published for others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import pytest

from tests.integration.server.test_askers import OPTIONS, at
from tests.support.rogue import RogueGrpc, RogueHttp
from tmc_server.checks.channels import Channels
from tmc_server.checks.contract import AskerContract
from tmc_server.checks.grpc import GrpcChecks
from tmc_server.checks.http import HttpChecks
from tmc_server.checks.reflection import ReflectionChecks
from tmc_server.domain.checks import CheckTarget
from tmc_server.domain.ports.checks import Asker, Endpoint
from tmc_storm.services.ports import free_port


class _Rogues:
    @pytest.fixture(autouse=True)
    def rogues(self) -> Iterator[None]:
        self.http, self.grpc = RogueHttp(), RogueGrpc()
        self.http.say("commit", b"2")
        self.http.say("rollback", b"3")
        self.http.say("unknown", b"4")
        self.http.say("garbage", b"surely")
        yield
        self.http.stop()
        self.grpc.stop()


class TestHttp(_Rogues, AskerContract):
    PATHS: ClassVar = {"refuse": "error"}

    def asker(self) -> Asker:
        return HttpChecks()

    def endpoint(self, behavior: str) -> Endpoint:
        self.path = self.PATHS.get(behavior, behavior)
        return at(free_port() if behavior == "away" else self.http.port)

    def target(self) -> CheckTarget:
        # The path belongs to the target here, so both are made for the behavior that is asked for next.
        return CheckTarget(name="", kind="http", options={"path": "/verify"})

    @pytest.fixture(autouse=True)
    def by_path(self, rogues: None) -> None:
        """One path whose behavior changes."""

        def behave(connection, body):
            if self.path in self.http.answers:
                self.http.answers[self.path](connection, body)
            else:
                getattr(self.http, f"do_{self.path}")(connection)

        self.http.answers["verify"] = behave


class TestGrpc(_Rogues, AskerContract):
    MODES: ClassVar = {"refuse": "denied", "garbage": "junk"}

    def asker(self) -> Asker:
        return GrpcChecks(Channels())

    def endpoint(self, behavior: str) -> Endpoint:
        self.grpc.mode = self.MODES.get(behavior, behavior)
        return at(free_port() if behavior == "away" else self.grpc.port)

    def target(self) -> CheckTarget:
        return CheckTarget(name="", kind="grpc")


class TestReflection(_Rogues, AskerContract):
    ORDERS: ClassVar = {"commit": 1, "rollback": 2, "unknown": 3}

    def asker(self) -> Asker:
        return ReflectionChecks(Channels())

    def endpoint(self, behavior: str) -> Endpoint:
        self.grpc.mode = {"refuse": "unimplemented", "garbage": "junk"}.get(behavior, behavior)
        self.grpc.order = {"payment": self.ORDERS.get(behavior, 0)}
        return at(free_port() if behavior == "away" else self.grpc.port)

    def target(self) -> CheckTarget:
        return CheckTarget(name="", kind="reflection", options=OPTIONS | {"UNKNOWN": "STATUS_OPEN"})
