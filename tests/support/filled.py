"""A center's tables and everybody's ledgers, filled with any number of rows by MariaDB's SEQUENCE engine: a million in seconds.

Message n of a shard (1 <= n <= `each`) belongs to topic 1 + n mod 3 of the producer with the same number. Consumers c1, c2, c3
subscribe to the topics 1, 2, 3, and c4, c5 to the topics 1 and 2. Everything is closed, one message a second from `start_ms` on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa

from tmc_client.producing.ledger import create_tables
from tmc_server.app.maintenance import initialize
from tmc_server.config import Config
from tmc_server.domain.ids import EPOCH_MS
from tmc_storm.services.mariadb import MariaDB

TOPICS = ("orders.paid", "orders.shipped", "stock.moved")
PRODUCERS = ("p1", "p2", "p3")
CONSUMERS = ("c1", "c2", "c3", "c4", "c5")
SUBSCRIPTIONS = ((1, 1), (2, 2), (3, 3), (1, 4), (2, 5))  # topic, consumer: numbered from 1
START_MS = 1_790_000_000_000
_IDS = "((%d + seq * 1000) << 22 | seq MOD 4096)"


class FilledCenter:
    """Two databases on one server hold 16 shards each; ledgers live in databases of their own."""

    def __init__(self, server: MariaDB, prefix: str = "tmc", databases: int = 2, start_ms: int = START_MS) -> None:
        self.server = server
        self.prefix = prefix
        self.start_ms = start_ms
        self._ledgers: set[str] = set()
        self._filled: set[int] = set()
        self.urls = [server.url(f"{prefix}_{number}") for number in range(databases)]
        per = 32 // databases
        shards = [{"url": url, "first": n * per, "last": n * per + per - 1} for n, url in enumerate(self.urls)]
        self.store = {"catalog": self.urls[0], "shards": shards}
        initialize(Config.model_validate({"store": self.store}))
        self._per = per
        self._catalog()
        self._kept = {url: self._contents(url) for url in self.urls}

    @property
    def identity(self) -> str:
        """Return the identity of its catalog."""
        with self.sql() as run:
            return str(run.exec_driver_sql("SELECT identity FROM tmc_database").scalar_one())

    def database_of(self, shard: int) -> str:
        return f"{self.prefix}_{shard // self._per}"

    def empty(self, start_ms: int = START_MS) -> None:
        """Take back all that was done to it since it was made, ledgers too: much faster than to make another."""
        self.start_ms = start_ms
        with self.sql() as run:
            for name in self._ledgers:
                run.exec_driver_sql(f"DROP DATABASE {self.ledger(name)}")
        self._ledgers.clear()
        self._filled.clear()
        for url, tables in self._kept.items():
            with self.sql(url.rpartition("/")[2]) as run:
                for table, rows in tables.items():
                    run.exec_driver_sql(f"DELETE FROM {table}")
                    for row in rows:
                        marks = ", ".join(["%s"] * len(row))
                        run.exec_driver_sql(
                            f"INSERT INTO {table} ({', '.join(row)}) VALUES ({marks})", tuple(row.values())
                        )

    def _contents(self, url: str) -> dict[str, list[dict[str, Any]]]:
        """Rows by table; only catalogs have any yet."""
        with self.sql(url.rpartition("/")[2]) as run:
            tables = [str(row[0]) for row in run.exec_driver_sql("SHOW TABLES")]
            return {
                table: [dict(row) for row in run.exec_driver_sql(f"SELECT * FROM {table}").mappings()]
                for table in tables
            }

    @contextmanager
    def sql(self, database: str = "") -> Iterator[sa.Connection]:
        """Statements that commit one by one."""
        engine = sa.create_engine(self.server.url(database or f"{self.prefix}_0"), isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            yield connection
        engine.dispose()

    def _catalog(self) -> None:
        with self.sql() as run:
            for number, name in enumerate((*PRODUCERS, *CONSUMERS), 1):
                run.exec_driver_sql(
                    "INSERT INTO tmc_app (app_no, id, service_name, biz_id, alert_email, alert_phone, key_hash, created_ms)"
                    f" VALUES ({number}, '{name}', '{name}', '{name}', '', '', REPEAT('x', 32), 0)"
                )
            for number, name in enumerate(TOPICS, 1):
                run.exec_driver_sql(
                    "INSERT INTO tmc_topic (topic_no, name, owner_no, default_tag, table_index, spread, transaction_time_ms,"
                    f" open_limit, effective_ms) VALUES ({number}, '{name}', {number}, 'default', 0, 32, 10000, 1000000, 0)"
                )
            for number, (topic, consumer) in enumerate(SUBSCRIPTIONS, 1):
                run.exec_driver_sql(
                    "INSERT INTO tmc_subscription (subscription_no, topic_no, app_no, tag, kind, interval_ms,"
                    " max_retry, cap_ms, effective_ms)"
                    f" VALUES ({number}, {topic}, {len(PRODUCERS) + consumer}, 'default', 1, 10000, 5, 60000, 1)"
                )

    def fill(
        self, each: int, shards: Sequence[int] = range(32), body_bytes: int = 256, subscribers: bool = True
    ) -> None:
        """So many messages for each of these shards. subscribers: False: exactly one consumption per message."""
        for shard in shards:
            if each:
                self.fill_shard(shard, each, body_bytes, subscribers)

    def fill_shard(self, shard: int, each: int, body_bytes: int = 256, subscribers: bool = True) -> None:
        nn, ids = f"{shard:02d}", _IDS % (self.start_ms - EPOCH_MS)
        body = f"REPEAT(MD5(seq * 32 + {shard}), {max(1, body_bytes // 32)})"
        at = f"{self.start_ms} + seq * 1000"
        self._filled.add(shard)
        with self.sql(self.database_of(shard)) as run:
            run.exec_driver_sql(
                f"INSERT INTO tmc_message_{nn} (id, topic_no, producer_no, producer_tag, message_key, live, attempt_id,"
                " ledger_id, digest, state, content_type, body, delay_ms, created_ms, decided_ms)"
                f" SELECT {ids}, 1 + seq MOD 3, 1 + seq MOD 3, 'default', CONCAT('k{nn}-', seq), 1, UNHEX(MD5(seq)),"
                f" UNHEX(MD5('ledger')), UNHEX(SHA2(CONCAT('0:', LENGTH({body}), ':', {body}, 'text/plain'), 256)), 2,"
                f" 'text/plain', {body}, 0, {at}, {at} + 5 FROM seq_1_to_{each}"
            )
            for number, (topic, _) in enumerate(SUBSCRIPTIONS[: None if subscribers else 3], 1):
                run.exec_driver_sql(
                    f"INSERT INTO tmc_consumption_{nn} (message_id, subscription_no, state, attempt, tried, incarnation,"
                    " created_ms, closed_ms, tried_ms)"
                    f" SELECT {ids}, {number}, 2, 1, 1, 1, {at} + 5, {at} + 30, {at} + 6 FROM seq_1_to_{each}"
                    f" WHERE 1 + seq MOD 3 = {topic}"
                )

    def fill_ledgers(self) -> None:
        """What honest producers and consumers would have noted of everything that is in the tables now."""
        for number, name in enumerate(PRODUCERS, 1):
            self._ledger(name)
            for shard in sorted(self._filled):
                self._copy(
                    name,
                    "tmc_ledger (message_id, state, topic, message_key, attempt_id, created_ms, settled_ms)",
                    f"{_public('m', shard)}, 1, '{TOPICS[number - 1]}', m.message_key, m.attempt_id, m.created_ms, m.decided_ms",
                    f"{self.database_of(shard)}.tmc_message_{shard:02d} m WHERE m.producer_no = {number} AND m.state = 2",
                )
        for number, (_, consumer) in enumerate(SUBSCRIPTIONS, 1):
            name = CONSUMERS[consumer - 1]
            self._ledger(name)
            for shard in sorted(self._filled):
                where = self.database_of(shard)
                self._copy(
                    name,
                    "tmc_inbox (subscriber, message_id, received_ms)",
                    f"'{name}.default', {_public('m', shard)}, c.closed_ms",
                    f"{where}.tmc_consumption_{shard:02d} c JOIN {where}.tmc_message_{shard:02d} m ON m.id = c.message_id"
                    f" WHERE c.subscription_no = {number} AND c.state = 2",
                )

    def _ledger(self, name: str) -> None:
        if name in self._ledgers:
            return
        self._ledgers.add(name)
        engine = sa.create_engine(self.server.create(self.ledger(name)))
        create_tables(engine)
        engine.dispose()

    def ledger(self, name: str) -> str:
        """The database of one app."""
        return f"{self.prefix}_{name}"

    def _copy(self, name: str, into: str, columns: str, source: str) -> None:
        with self.sql(self.ledger(name)) as run:
            run.exec_driver_sql(f"INSERT INTO {into} SELECT {columns} FROM {source}")

    def settings(self, folder: Any, *, ledgers: bool = True, **more: Any) -> dict[str, Any]:
        """As in pipeline.toml."""
        named = lambda names: [{"app": name, "url": self.server.url(self.ledger(name))} for name in names]  # noqa: E731
        return {
            "store": self.store,
            "archive": {"path": f"{folder}/archive", "lag_minutes": 1},
            "reconcile": {"path": f"{folder}/reconcile"},
            "report": {"path": f"{folder}/report"},
            "producers": named(PRODUCERS) if ledgers else [],
            "consumers": named(CONSUMERS) if ledgers else [],
            **more,
        }

    def rows(self, query: str, shards: Sequence[int] = range(32)) -> list[Any]:
        """Of a query over every shard; {nn} stands for its number."""
        found: list[Any] = []
        for shard in shards:
            with self.sql(self.database_of(shard)) as run:
                found += run.exec_driver_sql(query.format(nn=f"{shard:02d}")).fetchall()
        return found

    def change(self, shard: int, statement: str) -> int:
        """A statement over one shard; {nn} stands for its number. Returns: how many rows it touched."""
        with self.sql(self.database_of(shard)) as run:
            return int(run.exec_driver_sql(statement.format(nn=f"{shard:02d}")).rowcount)


def _public(alias: str, shard: int) -> str:
    """The public id of a message, in SQL."""
    return f"CONCAT({alias}.topic_no, '-', {alias}.producer_no, '-{shard:02d}-', {alias}.id)"
