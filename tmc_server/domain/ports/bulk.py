"""Bulk jobs as requests and duties use them. All block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tmc_server.domain.bulk import BulkAction, BulkItem, BulkJob, BulkProgress, Place, Selection
from tmc_server.domain.numbers import BulkJobNumber, MessageNumber, Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class NewBulkJob:
    """A job to store. hold_ms: how long it waits before its first delivery."""

    dry_run: str
    action: BulkAction
    selection: Selection
    count: int
    rate: int
    hold_ms: int
    actor: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A selected delivery. error: what it failed with, if it did; fingerprint: of that."""

    place: Place
    number: MessageNumber
    error: str = ""
    fingerprint: str = ""


class BulkStore(Protocol):
    """Jobs, over all databases."""

    def now(self) -> int:
        """Milliseconds since the epoch, by the clock of the catalog's database."""

    def dry_run(self, selection: Selection, most: int, samples: int) -> tuple[int, Sequence[Match]]:
        """Return how many it matches, counted not much further than `most`, and some of them.

        Raises InvalidField: it took too long.
        """

    def start(self, new: NewBulkJob) -> BulkJob:
        """Store it, audited; one from the same dry run is answered as it is."""

    def stop(self, actor: str, number: BulkJobNumber, reason: str) -> BulkJob | None:
        """Stop a job; audited. What is done stays done. Returns: the job, changed or finished before; None: there is none."""

    def job(self, number: BulkJobNumber) -> BulkJob | None: ...
    def jobs(self, before: BulkJobNumber | None, limit: int) -> Sequence[BulkJob]:
        """Newest first."""

    def active(self) -> Sequence[BulkJob]:
        """Return those that are neither finished nor stopped, and whose start time has come."""

    def progress(self, job: BulkJob) -> BulkProgress: ...
    def items(
        self, job: BulkJob, after: tuple[Shard, MessageNumber], limit: int, failures_only: bool
    ) -> Sequence[BulkItem]:
        """Return items in the order of shard and number, up to about `limit`: the rows of one message stay together."""

    def finish(self, job: BulkJob) -> bool:
        """Mark it finished if all of its shards are. Returns: whether it is."""


class BulkWork(Protocol):
    """Jobs in the shards of one database that this server looks after."""

    def unfinished(self, job: BulkJob) -> Sequence[Shard]:
        """Return those of its shards that are held here and not finished."""

    def step(self, job: BulkJob, shard: Shard, limit: int) -> BulkProgress:
        """Read up to `limit` deliveries, act on those that match, and record the outcomes in the same transaction."""
