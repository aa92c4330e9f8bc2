"""Addresses that producers give with their calls, stored in the background so that calls are never delayed.

Tags and addresses are chosen by the senders, so each app has limits: 64 new places a second on the way to the table,
32 environments in it, and 16 addresses per environment. Known environments stay: a further one waits until one has
not been seen for an hour. The most recently seen addresses are kept, since instances come and go. No app can take
room from another.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterable, Sequence

import sqlalchemy as sa

from tmc_server.domain.catalog import App
from tmc_server.errors import Retryable
from tmc_server.store.engines import Database, repeated
from tmc_server.store.tables import sender

SEEN_FOR_MS = 3_600_000
MOST_WAITING = 64
MOST_TAGS = 32
MOST_ADDRESSES = 16
_MOST_APPS = 1_000
_LONGEST_ADDRESS = 255  # as the table has it
_LONGEST_TAG = 64


class SqlSeenSenders:
    """domain.ports.checks.SeenSenders, and the duty that writes them down."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = threading.Lock()  # calls note places while the duty writes others down
        self._waiting: dict[int, dict[tuple[str, str], None]] = {}  # by app; places in the order they were seen in

    def saw(self, app: App, tag: str, address: str) -> None:
        if len(tag) > _LONGEST_TAG or len(address) > _LONGEST_ADDRESS:
            return
        with self._lock:
            if app.number not in self._waiting and len(self._waiting) >= _MOST_APPS:
                return
            places = self._waiting.setdefault(app.number, {})
            if len(places) < MOST_WAITING:
                places[tag, address] = None

    def run_once(self) -> bool:
        """Store the places seen since the last run, delete those not seen for an hour. Once a second.

        What could not be written waits for the next run: services that send nothing say only every ten minutes
        where they are.
        """
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        while waiting:
            app, places = waiting.popitem()
            try:
                repeated(lambda app=app, places=list(places): self._write(app, places))  # type: ignore[misc]
            except Retryable:
                self._put_back({**waiting, app: places})
                raise
        return False

    def _put_back(self, waiting: dict[int, dict[tuple[str, str], None]]) -> None:
        with self._lock:
            for app, places in waiting.items():
                both = places | self._waiting.get(app, {})
                self._waiting[app] = dict.fromkeys(itertools.islice(both, MOST_WAITING))

    def _write(self, app: int, places: Sequence[tuple[str, str]]) -> None:
        """One transaction per app: a flood of one is no burden of another."""
        with self._database.transaction() as connection:
            now = self._database.now(connection)
            connection.execute(sender.delete().where(sender.c.seen_ms < now - SEEN_FOR_MS))
            known = _places(connection, app)
            for tag, address in sorted(_admitted({tag for tag, _ in known}, places)):
                row = {"app_no": app, "tag": tag, "address": address}
                if (tag, address) in known:
                    connection.execute(sender.update().filter_by(**row).values(seen_ms=now))
                else:
                    connection.execute(sender.insert().values(**row, seen_ms=now))
            for tag, address in _surplus(_places(connection, app)):
                connection.execute(sender.delete().filter_by(app_no=app, tag=tag, address=address))

    def seen_at(self, app: int, tag: str) -> Sequence[str]:
        """host:port of all instances of an app and tag seen within the last hour, newest first."""
        query = sa.select(sender.c.address).filter_by(app_no=app, tag=tag).order_by(sender.c.seen_ms.desc())
        with self._database.reading() as connection:
            fresh = sender.c.seen_ms >= self._database.now(connection) - SEEN_FOR_MS
            return list(connection.execute(query.where(fresh).limit(MOST_ADDRESSES)).scalars())


def _places(connection: sa.Connection, app: int) -> dict[tuple[str, str], None]:
    """Tag and address of each place of an app, seen last first."""
    query = sa.select(sender.c.tag, sender.c.address).filter_by(app_no=app)
    rows = connection.execute(query.order_by(sender.c.seen_ms.desc(), sender.c.tag, sender.c.address))
    return dict.fromkeys(rows)


def _admitted(tags: set[str], places: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Places whose environment is one of these, or finds room beside them."""
    found = []
    for tag, address in places:
        if tag in tags or len(tags) < MOST_TAGS:
            tags = tags | {tag}
            found.append((tag, address))
    return found


def _surplus(places: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Addresses beyond the bound of their environment. places: seen last first."""
    kept: Counter[str] = Counter()
    found = []
    for tag, address in places:
        kept[tag] += 1
        if kept[tag] > MOST_ADDRESSES:
            found.append((tag, address))
    return found
