"""How many messages are submitted and acked: counted by each server, and shared in a table for the overview."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping

import sqlalchemy as sa

from tmc_server.domain.ports.reading import Flow
from tmc_server.store.engines import Database, repeating
from tmc_server.store.tables import traffic as table

_CURRENT_MS = 30_000  # rows that are older are of servers that are gone, or idle
_FORGET_MS = 86_400_000


class Traffic:
    """What this server submitted and acked since the last look. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[Flow] = Counter()

    def add(self, counts: Mapping[Flow, int]) -> None:
        with self._lock:
            self._counts.update(counts)

    def take(self) -> Counter[Flow]:
        """Take what was counted, and start from zero."""
        with self._lock:
            taken, self._counts = self._counts, Counter()
        return taken


class SqlTraffic:
    """domain.ports.reading.TrafficReader, and the duty that writes this server's part.

    incarnation: of this server run; None: its heartbeat is over.
    """

    def __init__(
        self,
        database: Database,
        traffic: Traffic,
        incarnation: Callable[[], int | None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._database = database
        self._traffic = traffic
        self._incarnation = incarnation
        self._monotonic = monotonic
        self._since = monotonic()
        self._written: set[Flow] = set()

    def run_once(self) -> bool:
        """Write what was counted since the last run; nothing if that is nothing. Returns False: nothing is left to do."""
        me, now = self._incarnation(), self._monotonic()
        counts = self._traffic.take()
        window_ms, self._since = max(1, round((now - self._since) * 1000)), now
        flows = self._written | set(counts)
        if me is not None and flows:
            self._write(me, {flow: counts[flow] for flow in flows}, window_ms)
            self._written = set(counts)
        return False

    @repeating
    def _write(self, me: int, counts: Mapping[Flow, int], window_ms: int) -> None:
        with self._database.transaction() as connection:
            now = self._database.now(connection)
            mine = table.c.incarnation == me
            connection.execute(table.delete().where(sa.or_(mine, table.c.updated_ms < now - _FORGET_MS)))
            rows = [
                {
                    "incarnation": me,
                    "topic_no": flow.topic,
                    "subscription_no": flow.subscription,
                    "messages": count,
                    "window_ms": window_ms,
                    "updated_ms": now,
                }
                for flow, count in sorted(counts.items())
                if count
            ]
            if rows:
                connection.execute(table.insert(), rows)

    def per_second(self) -> Mapping[Flow, float]:
        with self._database.reading() as connection:
            current = table.c.updated_ms > self._database.now(connection) - _CURRENT_MS
            rates: dict[Flow, float] = {}
            for row in connection.execute(sa.select(table).where(current)):
                flow = Flow(row.topic_no, row.subscription_no)
                rates[flow] = rates.get(flow, 0) + row.messages * 1000 / row.window_ms
            return rates
