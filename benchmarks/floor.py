"""The floor: the SQL that a full life of a message cannot avoid, in batches, with nothing around it.

Per message: insert; select for update, guarded update, insert consumption; update to acked. Three commits per batch.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from typing import Any

import MySQLdb
import psycopg

from tmc_storm.services.mariadb import MariaDB
from tmc_storm.services.postgresql import PostgreSQL

_SETUP = (
    "DROP TABLE IF EXISTS floor_message",
    "DROP TABLE IF EXISTS floor_consumption",
    "CREATE TABLE floor_message (id BIGINT PRIMARY KEY, message_key VARCHAR(128) NOT NULL, producer INT NOT NULL,"
    " topic INT NOT NULL, body {blob}, state SMALLINT NOT NULL, due BIGINT, created BIGINT NOT NULL,"
    " UNIQUE (topic, message_key))",
    "CREATE INDEX floor_message_due ON floor_message (state, due)",
    "CREATE TABLE floor_consumption (message_id BIGINT NOT NULL, subscription INT NOT NULL, state SMALLINT NOT NULL,"
    " attempts INT NOT NULL, due BIGINT, PRIMARY KEY (message_id, subscription))",
    "CREATE INDEX floor_consumption_due ON floor_consumption (state, due)",
)


def _connect(server: MariaDB | PostgreSQL) -> Any:
    if isinstance(server, PostgreSQL):
        return psycopg.connect(server.url("tmc_floor").replace("+psycopg", ""))
    return MySQLdb.connect(host="127.0.0.1", port=server.port, user="root", db="tmc_floor", autocommit=False)


def _set_up(server: MariaDB | PostgreSQL) -> None:
    server.create("tmc_floor")
    blob = "BYTEA" if isinstance(server, PostgreSQL) else "BLOB"
    setup = _connect(server)
    cursor = setup.cursor()
    for statement in _SETUP:
        cursor.execute(statement.format(blob=blob))
    setup.commit()
    setup.close()


class RawCommits:
    """One message after the other: what a caller who waits for both commits cannot avoid."""

    def __init__(self, server: MariaDB) -> None:
        _set_up(server)
        self._connection = _connect(server)
        self._body = os.urandom(256)

    def two_commits(self, number: int) -> None:
        """Insert a message; then decide it and insert its delivery."""
        cursor, now = self._connection.cursor(), int(time.time() * 1000)
        values = (number, f"k{number}", self._body, now + 10000, now)
        cursor.execute("INSERT INTO floor_message VALUES (%s, %s, 1, 1, _binary %s, 1, %s, %s)", values)
        self._connection.commit()
        cursor.execute("SELECT id, state, body FROM floor_message WHERE id = %s FOR UPDATE", (number,))
        cursor.fetchall()
        cursor.execute("UPDATE floor_message SET state = 2, due = NULL WHERE id = %s AND state = 1", (number,))
        cursor.execute("INSERT INTO floor_consumption VALUES (%s, 1, 1, 1, %s)", (number, now + 10000))
        self._connection.commit()

    def close(self) -> None:
        self._connection.close()


def messages_per_s(server: MariaDB | PostgreSQL, seconds: float, batch: int = 200, connections: int = 4) -> float:
    """Run the floor on a private server."""
    _set_up(server)
    binary = "" if isinstance(server, PostgreSQL) else "_binary "
    ids, lock, done, body = itertools.count(1 << 40), threading.Lock(), [], os.urandom(256)

    def lane(stop: float) -> None:
        connection = _connect(server)
        cursor, count = connection.cursor(), 0
        while time.monotonic() < stop:
            with lock:
                numbers = list(itertools.islice(ids, batch))
            listed, now = ",".join(map(str, numbers)), int(time.time() * 1000)
            cursor.executemany(
                f"INSERT INTO floor_message VALUES (%s, %s, 1, 1, {binary}%s, 1, %s, %s)",
                [(number, f"k{number}", body, now + 10000, now) for number in numbers],
            )
            connection.commit()
            cursor.execute(f"SELECT id, state, body FROM floor_message WHERE id IN ({listed}) FOR UPDATE")
            cursor.fetchall()
            cursor.execute(f"UPDATE floor_message SET state = 2, due = NULL WHERE id IN ({listed}) AND state = 1")
            cursor.executemany(
                "INSERT INTO floor_consumption VALUES (%s, 1, 1, 1, %s)", [(number, now + 10000) for number in numbers]
            )
            connection.commit()
            cursor.execute(
                f"UPDATE floor_consumption SET state = 3, due = NULL WHERE message_id IN ({listed})"
                " AND subscription = 1 AND state <> 3"
            )
            connection.commit()
            count += len(numbers)
        done.append(count)
        connection.close()

    began = time.monotonic()
    threads = [threading.Thread(target=lane, args=(began + seconds,)) for _ in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(done) / (time.monotonic() - began)
