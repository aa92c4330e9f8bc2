"""Finds out whether a database that was away has everything that was answered: an asynchronous replica may lack the end of it."""

from __future__ import annotations

from collections import deque
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

_BATCHES = 64
_AGE_MS = 600_000  # a replica that is further behind is found by its operator; and retention keeps messages for longer


class Witness:
    """The last messages that were stored in one database, of which the newest is looked for after an outage.

    Databases replicate transactions in the order of their commits: if the newest message is there, so is everything before
    it. What came after it, and stored no message, may be gone unseen: acks and decisions, which are asked for again.
    Thread-safe.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._recent: deque[tuple[Shard, Sequence[Outcome]]] = deque(maxlen=_BATCHES)

    def note(self, shard: Shard, outcomes: Sequence[Outcome]) -> None:
        """Remember a batch that is committed."""
        self._recent.append((shard, outcomes))

    def look(self) -> None:
        """Say so if the newest message is not there any more; once."""
        newest = self._newest()
        if newest is None:
            return
        shard, number = newest
        message = shard_tables(shard).message
        try:
            with self._database.reading() as connection:
                is_old = number < first_number(self._database.now(connection) - _AGE_MS)
                if is_old or connection.scalar(sa.select(message.c.id).where(message.c.id == number)) is not None:
                    return
        except StoreUnavailable:  # away again, or the shard moved; another lane looks when it connects
            return
        self._recent.clear()
        METRICS.commits_lost.inc()
        log.error(
            "commits_lost",
            "%s has lost what it had answered: message %d in shard %d is gone. If a replica took over, it was behind. "
            "Reconcile: see docs/failover.md",
            self._database.url.render_as_string(hide_password=True),
            number,
            shard,
        )

    def _newest(self) -> tuple[Shard, MessageNumber] | None:
        stored = [
            (outcome.message_id.number, shard)
            for shard, outcomes in list(self._recent)
            for outcome in outcomes
            if isinstance(outcome, Stored) and outcome.changed and outcome.message_id is not None
        ]
        if not stored:
            return None
        number, shard = max(stored)
        return shard, number
