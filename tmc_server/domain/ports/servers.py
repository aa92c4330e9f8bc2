"""The servers of a center and the places of its shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tmc_server.domain.numbers import Shard
from tmc_server.domain.placement import MoveStep


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRun:
    """One run of a server, as its heartbeat tells. expires_ms: gone after that, by the catalog database's clock.

    catalog_version: of the copy of the catalog it uses, as far as it said so.  drained: it looks after no shards.
    """

    incarnation: int
    name: str
    started_ms: int
    expires_ms: int
    catalog_version: int = 0
    drained: bool = False


class Members(Protocol):
    """The servers of this center, as of the last heartbeat."""

    @property
    def alive(self) -> Sequence[ServerRun]: ...
    @property
    def gone(self) -> Sequence[ServerRun]: ...


@dataclass(frozen=True, slots=True)
class ServerView:
    """shards: those it looks after."""

    run: ServerRun
    alive: bool
    shards: Sequence[Shard]


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveProgress:
    """How far a shard is on its way. database: identity of where it goes.  address: "" if this server does not know it.

    updated_ms: the last sign of the command that moves it.
    """

    database: str
    address: str
    step: MoveStep
    copied_rows: int
    expected_rows: int
    started_ms: int
    updated_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlace:
    """Where the catalog says a shard is. place: address of its database when that was stored, without credentials."""

    shard: Shard
    identity: str
    place: str
    move: MoveProgress | None = None
