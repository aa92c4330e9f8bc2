"""What exactly-once effects cost, per business database, sides alternating in one run; a center over MariaDB.

ledger_cost_ratio: a transaction block with one business row and one message, against the same row with plain prepare and submit
around its commit; time, one thread.  inbox_cost_ratio: a consumer whose handler writes one row with an inbox, against one that
commits that row by itself; time per message, eight handlers.  batch_listener_gain: messages per second of a batch listener
with 100 messages and an inbox, against the listener with an inbox.  connection_cost_ratio: as ledger_cost_ratio, of a block
over a connection of the driver.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import MySQLdb
import psycopg
import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

import tmc_client as tmc
from benchmarks.serving import TOPIC, Served, serving
from tmc_storm.services.mariadb import MariaDB
from tmc_storm.services.postgresql import PostgreSQL

_SLICES, _BLOCKS, _MESSAGES, _BATCHED = 16, 25, 3_000, 6_000
_BODY = {"order": 7}
_INSERT = sa.text("INSERT INTO effect (number) VALUES (1)")


class Database:
    """connect: a connection of the driver."""

    def __init__(self, url: str, connect: Callable[[], Any]) -> None:
        self.engine = sa.create_engine(url, pool_size=16)
        self.connect = connect
        tmc.create_tables(self.engine)
        with self.engine.begin() as connection:
            connection.execute(sa.text("CREATE TABLE effect (number INTEGER)"))


def databases(mariadb: MariaDB, postgresql: PostgreSQL, folder: Path) -> dict[str, Database]:
    path = folder / "shop.db"
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
    url = sa.make_url(postgresql.create("shop")).set(drivername="postgresql+psycopg")
    dsn = url.set(drivername="postgresql").render_as_string()
    return {
        "sqlite": Database(f"sqlite:///{path}", lambda: sqlite3.connect(path)),
        "mariadb": Database(
            mariadb.create("shop"),
            lambda: MySQLdb.connect(host="127.0.0.1", port=mariadb.port, user="root", database="shop"),
        ),
        "postgresql": Database(url.render_as_string(), lambda: psycopg.connect(dsn)),
    }


class Keys:
    """Keys that were not used before."""

    def __init__(self) -> None:
        self._number = 0

    def next(self) -> str:
        self._number += 1
        return f"k{self._number}"


def _per_block_s(*sides: Callable[[], None]) -> dict[str, float]:
    """Seconds of one call, by side, in many short turns: what else the machine does then meets all of them."""
    spent = dict.fromkeys((side.__name__ for side in sides), 0.0)
    for _ in range(_SLICES):
        for side in sides:
            began = time.monotonic()
            for _ in range(_BLOCKS):
                side()
            spent[side.__name__] += time.monotonic() - began
    return {name: seconds / (_SLICES * _BLOCKS) for name, seconds in spent.items()}


def ledger(center: tmc.Center, database: Database, keys: Keys) -> dict[str, float]:
    """Seconds per message of plain calls, of a block, and of both over a connection of the driver."""
    connection = database.connect()

    def plain() -> None:
        with Session(database.engine) as session:
            message = center.prepare(TOPIC, _BODY, key=keys.next())
            session.execute(_INSERT)
            session.commit()
            center.submit(message)

    def block() -> None:
        with Session(database.engine) as session, center.transaction(session) as tx:
            session.execute(_INSERT)
            tx.send(TOPIC, _BODY, key=keys.next())

    def plain_connection() -> None:
        message = center.prepare(TOPIC, _BODY, key=keys.next())
        cursor = connection.cursor()
        cursor.execute(str(_INSERT))
        connection.commit()
        center.submit(message)

    def connection_block() -> None:
        with center.transaction(connection) as tx:
            cursor = connection.cursor()
            cursor.execute(str(_INSERT))
            tx.send(TOPIC, _BODY, key=keys.next())

    try:
        return _per_block_s(plain, block, plain_connection, connection_block)
    finally:
        connection.close()


def handled_per_s(served: Served, database: Database, kind: str, count: int, keys: Keys) -> float:
    """From the first handled message to the last. kind: own, inbox, batch."""
    make = sessionmaker(database.engine)
    times: list[float] = []
    done = threading.Event()

    def handled(messages: int) -> None:
        times.extend([time.monotonic()] * messages)
        if len(times) >= count:
            done.set()

    with tmc.connect(served.address, app="coupons", key=served.coupons_key) as center:
        consumer = tmc.Consumer(center, concurrency=8, prefetch=500)
        if kind == "own":

            @consumer.listener(TOPIC)
            def commit_by_itself(_: dict[str, int]) -> None:
                with make() as session:
                    session.execute(_INSERT)
                    session.commit()
                handled(1)
        elif kind == "inbox":

            @consumer.listener(TOPIC, inbox=tmc.SqlInbox(make))
            def with_inbox(_: dict[str, int], session: Session) -> None:
                session.execute(_INSERT)
                handled(1)
        else:

            @consumer.batch_listener(
                TOPIC, inbox=tmc.SqlInbox(make), max_messages=100, max_wait=timedelta(milliseconds=20)
            )
            def batched(bodies: list[dict[str, int]], session: Session) -> None:
                session.execute(_INSERT, [{} for _ in bodies])
                handled(len(bodies))

        _publish(served, count, keys)
        with consumer:
            if not done.wait(120):
                raise TimeoutError(f"{len(times)} of {count} messages were handled")
    return (count - 1) / (max(times) - min(times))


def _publish(served: Served, count: int, keys: Keys) -> None:
    named = [keys.next() for _ in range(count)]
    with tmc.connect(served.address, app="orders", key=served.orders_key, timeout=timedelta(seconds=60)) as center:

        def work(part: list[str]) -> None:
            for key in part:
                center.publish(TOPIC, _BODY, key=key)

        threads = [threading.Thread(target=work, args=(named[number::32],)) for number in range(32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def measured(served: Served, found: dict[str, Database], rounds: int) -> dict[str, float]:
    """Medians of all rounds."""
    keys, runs = Keys(), dict[str, list[float]]()
    with tmc.connect(served.address, app="orders", key=served.orders_key) as center:
        for _ in range(rounds):
            for name, database in found.items():
                for side, seconds in ledger(center, database, keys).items():
                    runs.setdefault(f"{name}_{side}", []).append(seconds)
    for _ in range(rounds):
        for name, database in found.items():
            _drain(served)
            for kind, count in (("own", _MESSAGES), ("inbox", _MESSAGES), ("batch", _BATCHED)):
                per_s = handled_per_s(served, database, kind, count, keys)
                runs.setdefault(f"{name}_{kind}", []).append(per_s)
    return {name: statistics.median(values) for name, values in runs.items()}


def _drain(served: Served) -> None:
    """What the blocks sent is not part of the next figure."""
    arrived = threading.Event()
    with tmc.connect(served.address, app="coupons", key=served.coupons_key) as center:
        consumer = tmc.Consumer(center, prefetch=500)

        @consumer.listener(TOPIC)
        def handle(_: dict[str, int]) -> None:
            arrived.set()

        with consumer:
            while arrived.wait(2):
                arrived.clear()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    mariadb, postgresql = MariaDB(pool_mb=1024), PostgreSQL()
    try:
        with tempfile.TemporaryDirectory() as folder, serving(mariadb.create("tmc")) as served:
            found = databases(mariadb, postgresql, Path(folder))
            middle = measured(served, found, options.rounds)
    finally:
        postgresql.stop()
        mariadb.stop()
    figures: dict[str, float] = {}
    for name in found:
        figures[f"ledger_cost_ratio_{name}"] = round(middle[f"{name}_block"] / middle[f"{name}_plain"], 3)
        over_connection = middle[f"{name}_connection_block"] / middle[f"{name}_plain_connection"]
        figures[f"connection_cost_ratio_{name}"] = round(over_connection, 3)
        figures[f"inbox_cost_ratio_{name}"] = round(middle[f"{name}_own"] / middle[f"{name}_inbox"], 3)
        figures[f"batch_listener_gain_{name}"] = round(middle[f"{name}_batch"] / middle[f"{name}_inbox"], 3)
    for name in found:
        figures |= {f"{name}_{kind}_per_s": round(middle[f"{name}_{kind}"]) for kind in ("own", "inbox", "batch")}
        figures[f"{name}_block_ms"] = round(1000 * middle[f"{name}_block"], 2)
    print(json.dumps(figures) if options.json else "\n".join(f"{name}: {value}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
