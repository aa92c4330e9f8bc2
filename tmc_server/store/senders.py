"""Where producers were seen, as they said with their calls; written behind the calls, never in their way."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from tmc_server.domain.catalog import App
from tmc_server.store.engines import Database, repeated
from tmc_server.store.tables import sender

SEEN_FOR_MS = 3_600_000
_MOST_WAITING = 1000


class Senders:
    """domain.ports.SeenSenders, and the duty that writes them down."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: set[tuple[int, str, str]] = set()

    def saw(self, app: App, tag: str, address: str) -> None:
        if len(self._waiting) < _MOST_WAITING:
            self._waiting.add((app.number, tag, address))

    def run_once(self) -> bool:
        """Write down who was seen, forget who was not seen for an hour."""
        waiting, self._waiting = self._waiting, set()
        if waiting:
            repeated(lambda: self._write(sorted(waiting)))
        return False

    def _write(self, seen: Sequence[tuple[int, str, str]]) -> None:
        with self._database.transaction() as connection:
            now = self._database.now(connection)
            connection.execute(sender.delete().where(sender.c.seen_ms < now - SEEN_FOR_MS))
            for number, tag, address in seen:
                row = {"app_no": number, "tag": tag, "address": address}
                if not connection.execute(sender.update().filter_by(**row).values(seen_ms=now)).rowcount:
                    connection.execute(sender.insert().values(**row, seen_ms=now))

    def seen_at(self, app: int, tag: str) -> Sequence[str]:
        """host:port of everybody of that app and tag who was seen within the last hour, newest first."""
        query = sa.select(sender.c.address).filter_by(app_no=app, tag=tag).order_by(sender.c.seen_ms.desc())
        with self._database.reading() as connection:
            fresh = sender.c.seen_ms >= self._database.now(connection) - SEEN_FOR_MS
            return list(connection.execute(query.where(fresh)).scalars())
