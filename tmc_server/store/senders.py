"""Addresses that producers give with their calls, stored in the background so that calls are never delayed.

Tags and addresses are chosen by the senders, so each app has limits: 64 new places a second on the way to the table,
32 environments in it, and 16 addresses per environment. Known environments stay: a further one waits until one has
not been seen for an hour. The most recently seen addresses are kept, since instances come and go. No app can take
room from another. Services that share an app and have a database each say which ledger they have, and each has its own limit.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import sqlalchemy as sa

from tmc_server.domain.catalog import App
from tmc_server.domain.ports.checks import Instance
from tmc_server.errors import Retryable
from tmc_server.store.engines import Database, repeating
from tmc_server.store.tables import sender

SEEN_FOR_MS = 3_600_000
MOST_WAITING = 64
MOST_TAGS = 32
MOST_ADDRESSES = 16  # with one ledger
MOST_OF_ALL_LEDGERS = 256
_MOST_APPS = 1_000
_LONGEST_ADDRESS = 255  # as the table has it
_LONGEST_TAG = 64


class SqlSeenSenders:
    """domain.ports.checks.SeenSenders, and the duty that writes them down."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = threading.Lock()  # calls note places while the duty writes others down
        self._waiting: dict[
            int, dict[tuple[str, str], bytes]
        ] = {}  # ledgers by app and place, in the order they were seen in

    def saw(self, app: App, tag: str, instance: Instance) -> None:
        if len(tag) > _LONGEST_TAG or len(instance.address) > _LONGEST_ADDRESS:
            return
        with self._lock:
            if app.number not in self._waiting and len(self._waiting) >= _MOST_APPS:
                return
            places = self._waiting.setdefault(app.number, {})
            place = (tag, instance.address)
            if place in places or len(places) < MOST_WAITING:
                places[place] = instance.ledger_id or places.get(place, b"")

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
                self._write(app, places)
            except Retryable:
                self._put_back({**waiting, app: places})
                raise
        return False

    def _put_back(self, waiting: dict[int, dict[tuple[str, str], bytes]]) -> None:
        with self._lock:
            for app, places in waiting.items():
                both = places | self._waiting.get(app, {})
                self._waiting[app] = dict(itertools.islice(both.items(), MOST_WAITING))

    @repeating
    def _write(self, app: int, places: Mapping[tuple[str, str], bytes]) -> None:
        """One transaction per app: a flood of one is no burden of another."""
        with self._database.transaction() as connection:
            now = self._database.now(connection)
            connection.execute(sender.delete().where(sender.c.seen_ms < now - SEEN_FOR_MS))
            known = _places(connection, app)
            for tag, address in sorted(_admitted({tag for tag, _ in known}, places)):
                row = {"app_no": app, "tag": tag, "address": address}
                ledger_id = places[tag, address] or known.get((tag, address), b"")
                if (tag, address) in known:
                    connection.execute(sender.update().filter_by(**row).values(seen_ms=now, ledger_id=ledger_id))
                else:
                    connection.execute(sender.insert().values(**row, seen_ms=now, ledger_id=ledger_id))
            for tag, address in _surplus(_places(connection, app)):
                connection.execute(sender.delete().filter_by(app_no=app, tag=tag, address=address))

    def seen_at(self, app: int, tag: str) -> Sequence[Instance]:
        """Return all instances of an app and tag seen within the last hour, newest first."""
        query = sa.select(sender.c.address, sender.c.ledger_id).filter_by(app_no=app, tag=tag)
        with self._database.reading() as connection:
            fresh = sender.c.seen_ms >= self._database.now(connection) - SEEN_FOR_MS
            newest = query.where(fresh).order_by(sender.c.seen_ms.desc()).limit(MOST_OF_ALL_LEDGERS)
            return [Instance(row.address, row.ledger_id or b"") for row in connection.execute(newest)]


def _places(connection: sa.Connection, app: int) -> dict[tuple[str, str], bytes]:
    """The ledger of each place of an app, by tag and address, seen last first."""
    query = sa.select(sender.c.tag, sender.c.address, sender.c.ledger_id).filter_by(app_no=app)
    rows = connection.execute(query.order_by(sender.c.seen_ms.desc(), sender.c.tag, sender.c.address))
    return {(row.tag, row.address): row.ledger_id or b"" for row in rows}


def _admitted(tags: set[str], places: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Places whose environment is one of these, or finds room beside them."""
    found = []
    for tag, address in places:
        if tag in tags or len(tags) < MOST_TAGS:
            tags = tags | {tag}
            found.append((tag, address))
    return found


def _surplus(places: Mapping[tuple[str, str], bytes]) -> list[tuple[str, str]]:
    """Addresses beyond the bounds of their environment. places: with their ledgers, seen last first."""
    kept: Counter[str] = Counter()
    kept_of: Counter[tuple[str, bytes]] = Counter()
    found = []
    for (tag, address), ledger_id in places.items():
        if kept[tag] < MOST_OF_ALL_LEDGERS and kept_of[tag, ledger_id] < MOST_ADDRESSES:
            kept[tag] += 1
            kept_of[tag, ledger_id] += 1
        else:
            found.append((tag, address))
    return found
