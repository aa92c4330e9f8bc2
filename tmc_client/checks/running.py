"""Running check servers, and the protocols that the modules of this package share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tmc_client.checks.questions import Answer, Question
from tmc_client.checks.token import CheckToken
from tmc_client.connecting.connection import Caller
from tmc_client.forks import watch_forks

_OF_PARENTS: list[object] = []  # gRPC servers of a parent process: stopping or freeing them in a child would hang it


class Stoppable(Protocol):
    """A server that runs in threads of its own."""

    def stop(self) -> None: ...


class RunningServers:
    """The check servers of one Center, which closing it stops; not those of a parent process."""

    def __init__(self) -> None:
        self._servers: set[Stoppable] = set()
        watch_forks(self)

    def after_fork(self) -> None:
        """See forks.ForkAware."""
        _OF_PARENTS.append(self._servers)
        self._servers = set()

    def add(self, server: Stoppable) -> None:
        self._servers.add(server)

    def discard(self, server: Stoppable) -> None:
        self._servers.discard(server)

    def stop(self) -> None:
        for server in list(self._servers):
            server.stop()


class Answering(Protocol):
    """The part of answers.Checks that servers and web applications use."""

    connection: Caller
    running: RunningServers
    token: CheckToken

    def demand(self, token: str) -> None: ...
    def announce(self, address: str = "") -> bool: ...
    def answer(self, token: str, questions: Sequence[Question], *, fences: bool = True) -> list[Answer]: ...
