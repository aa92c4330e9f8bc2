"""Running check servers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tmc_client.forks import watch_forks

if TYPE_CHECKING:
    from tmc_client.checks.grpc_server import ChecksServer

_OF_PARENTS: list[object] = []  # gRPC servers of a parent process: stopping or freeing them in a child would hang it


class RunningServers:
    """The check servers of one Center, which closing it stops; not those of a parent process."""

    def __init__(self) -> None:
        self._servers: set[ChecksServer] = set()
        watch_forks(self)

    def after_fork(self) -> None:
        """See forks.ForkAware."""
        _OF_PARENTS.append(self._servers)
        self._servers = set()

    def add(self, server: ChecksServer) -> None:
        self._servers.add(server)

    def discard(self, server: ChecksServer) -> None:
        self._servers.discard(server)

    def stop(self) -> None:
        for server in list(self._servers):
            server.stop()
