"""Finds out whether a database that was away has everything that was answered: an asynchronous replica may lack the end of it."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import sqlalchemy as sa

from tmc_common.eventlog import EventLog
from tmc_server.domain.ids import first_number
from tmc_server.domain.numbers import MessageNumber, Shard
from tmc_server.domain.operations import Stored
from tmc_server.errors import StoreUnavailable
from tmc_server.metrics import METRICS
from tmc_server.store.engines import Database
from tmc_server.store.outcomes import Outcome
from tmc_server.store.tables import shard_tables

log = EventLog("tmc.store")

_AGE_MS = 3_000_000  # retention keeps messages for an hour at least


class Witness:
    """The newest message that was stored in one database, which is looked for after an outage.

    Databases replicate transactions in the order of their commits: if this one is there, so is everything before it. What
    came after it, and stored no message, may be gone unseen: acks and decisions, which are asked for again. Thread-safe.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._newest: tuple[MessageNumber, Shard] | None = None
        self._changing = threading.Lock()

    def note(self, shard: Shard, outcomes: Sequence[Outcome]) -> None:
        """Remember what a batch has stored, now that it is committed."""
        stored = [
            outcome.message_id.number
            for outcome in outcomes
            if type(outcome) is Stored and outcome.changed and outcome.message_id is not None
        ]
        if stored:
            self._remember((max(stored), shard))

    def _remember(self, message: tuple[MessageNumber, Shard]) -> None:
        """Numbers grow with time: a decision on an older message says nothing about newer ones."""
        with self._changing:
            self._newest = max(message, self._newest or message)

    def look(self, connection: sa.Connection) -> None:
        """Say so if the newest message is not there any more; once.

        connection: a new one.  Raises: StoreUnavailable, StoreConflict.
        """
        with self._changing:
            newest, self._newest = self._newest, None
        if newest is None:
            return
        is_lost = False
        try:
            is_lost = not self._has(connection, *newest)
        finally:
            if not is_lost:
                self._remember(newest)
        if not is_lost:
            return
        METRICS.commits_lost.inc()
        number, shard = newest
        log.error(
            "commits_lost",
            "%s has lost what it had answered: message %d in shard %d is gone. If a replica took over, it was behind. "
            "Reconcile: see docs/failover.md",
            self._database.url.render_as_string(hide_password=True),
            number,
            shard,
        )

    def _has(self, connection: sa.Connection, number: MessageNumber, shard: Shard) -> bool:
        """Return whether the message is there; also if it may be gone for another reason."""
        message = shard_tables(shard).message
        try:
            with self._database.writing(connection):
                if number < first_number(self._database.now(connection) - _AGE_MS):
                    return True
                return connection.scalar(sa.select(message.c.id).where(message.c.id == number)) is not None
        except StoreUnavailable as exc:
            if exc.lacks_table:  # the shard moved
                return True
            raise
