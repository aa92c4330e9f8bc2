"""PostgreSQL as the store, where it differs from the others: its errors, settings, waits, plans, and text without U+0000."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa

from tests.support.asking import ScriptedAsking
from tests.support.pgbouncer import PgBouncer
from tests.support.store import StoreUnderTest, server_store
from tmc_server.domain.checks import CheckAnswer, CheckReason
from tmc_server.domain.message import MessageState
from tmc_server.errors import StoreUnavailable
from tmc_server.store.dialects import postgresql as dialect
from tmc_server.store.dialects import url_of
from tmc_server.store.dialects.contract import DatabaseTaken, Failure, Refusal
from tmc_server.store.dialects.postgresql import PostgreSQL as Dialect
from tmc_server.store.engines import Database, ShardMap
from tmc_server.store.fitness import examine
from tmc_server.store.migrate import migrate
from tmc_storm.services.postgresql import PostgreSQL

pytestmark = pytest.mark.postgresql


@pytest.fixture
def store(postgresql: PostgreSQL) -> Iterator[StoreUnderTest]:
    made = server_store(postgresql)
    yield made
    made.close()


@pytest.fixture
def own_server() -> Iterator[PostgreSQL]:
    """A server that the test stops, or whose settings it changes."""
    server = PostgreSQL()
    yield server
    server.stop()


class _Error(Exception):
    def __init__(self, sqlstate: str | None) -> None:
        super().__init__("said by the server")
        self.sqlstate = sqlstate


@pytest.mark.parametrize(
    ("sqlstate", "meaning"),
    [
        *((code, Failure.UNAVAILABLE) for code in ("08006", "28P01", "3D000", "25006", "25P03", "42501")),
        ("42P01", Failure.TABLE_MISSING),
        *((code, Failure.UNAVAILABLE) for code in ("53100", "53200", "53300", "57014", "57P01", "57P03", "58030")),
        ("55P03", Failure.ROW_WAITED),
        *((code, Failure.CONFLICT) for code in ("40001", "40P01")),
        *((code, Failure.FAULT) for code in ("22001", "22P05", "23505", "23502", "25P02", "42601", "42703")),
    ],
)
def test_what_an_error_means(sqlstate: str, meaning: Failure) -> None:
    assert Dialect().failure_of(sa.exc.OperationalError("UPDATE", {}, _Error(sqlstate))) is meaning


def test_an_error_of_the_driver_is_a_lost_connection_or_a_bug() -> None:
    lost, wrong = (kind("UPDATE", {}, _Error(None)) for kind in (sa.exc.OperationalError, sa.exc.ProgrammingError))
    assert (Dialect().failure_of(lost), Dialect().failure_of(wrong)) == (Failure.UNAVAILABLE, Failure.FAULT)


def test_who_is_refused_and_what_is_missing(own_server: PostgreSQL) -> None:
    def refusal(url: sa.URL) -> Refusal | None:
        with pytest.raises(sa.exc.OperationalError) as caught:
            sa.create_engine(url, poolclass=sa.NullPool).connect()
        return Dialect().refusal_of(caught.value)

    good = sa.make_url(own_server.url("postgres"))
    assert refusal(good.set(username="nobody")) is Refusal.USER
    assert refusal(good.set(database="nowhere")) is Refusal.DATABASE
    root = sa.create_engine(good, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    with root.connect() as connection:
        connection.exec_driver_sql("CREATE ROLE poor LOGIN")
        connection.exec_driver_sql("CREATE ROLE many LOGIN CONNECTION LIMIT 0")
        connection.exec_driver_sql("CREATE DATABASE closed")
        connection.exec_driver_sql("REVOKE CONNECT ON DATABASE closed FROM PUBLIC")
    assert refusal(good.set(username="poor", database="closed")) is Refusal.USER
    assert refusal(good.set(username="many")) is None  # too many connections: that passes
    rules = own_server.home / "data" / "pg_hba.conf"
    rules.write_text("host all all 127.0.0.1/32 scram-sha-256\n")
    own_server.reload()
    assert refusal(good.set(password="wrong")) is Refusal.USER
    own_server.stop()
    assert refusal(good) is None


def test_a_url_without_a_driver_is_psycopgs() -> None:
    assert url_of("postgresql://u:p@h/d").drivername == "postgresql+psycopg"
    assert url_of("sqlite:///x.db").drivername == "sqlite"


def test_a_server_that_says_nothing_is_given_up(own_server: PostgreSQL, monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot end a statement that takes too long while it is stopped, and its machine answers for it."""
    monkeypatch.setattr(dialect, "ANSWER_S", 1)
    database = Database(own_server.create("tmc_silent"))
    with pytest.raises(StoreUnavailable), database.connection() as connection:
        assert connection.exec_driver_sql("SELECT 1").scalar_one() == 1
        backend = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
        os.kill(backend, signal.SIGSTOP)
        connection.exec_driver_sql("SELECT 1")
    os.kill(backend, signal.SIGCONT)  # it would outlive its server
    own_server.kill()
    database.close()


def test_a_statement_that_takes_too_long_ends(own_server: PostgreSQL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialect, "ANSWER_S", 1)
    database = Database(own_server.create("tmc_slow"))
    with database.reading() as connection, pytest.raises(sa.exc.OperationalError, match="statement timeout"):
        connection.exec_driver_sql("SELECT pg_sleep(600)")
    patient = Database(own_server.url("tmc_slow"), patient=True)
    with patient.reading() as connection:
        assert connection.exec_driver_sql("SHOW statement_timeout").scalar_one() == "0"
    database.close()
    patient.close()


def test_text_with_nul_is_kept_without_it(store: StoreUnderTest) -> None:
    """Only free text may have one: errors of handlers, and what answers to checks say."""
    number = store.submitted(room=1)
    store.perform(store.nack_of(number, 1, error="a\0b'c\\"))
    with store.database.reading() as connection:
        query = f"SELECT error FROM tmc_attempt_{store.shard:02d}"
        assert connection.exec_driver_sql(query).scalars().all() == ["a\ufffdb'c\\"]
    store.catalog_store.pause_topic("test", store.topic.name, True, "a\0b")
    with store.database.reading() as connection:
        assert "a\ufffdb" in connection.exec_driver_sql("SELECT reason FROM tmc_audit").scalars().all()


def test_an_answer_with_nul_does_not_spoil_those_beside_it(store: StoreUnderTest) -> None:
    undecided, committed = store.prepared(key="1"), store.prepared(key="2")
    store.clock.advance(60)
    asking = ScriptedAsking()
    asking.by_key["1"] = CheckAnswer.unknown(CheckReason.ANSWERED, "not\0yet")
    store.checking(asking).run_once()
    assert store.state_of(committed.number) is MessageState.COMMITTED
    with store.database.reading() as connection:
        query = f"SELECT checked, check_answer FROM tmc_message_{store.shard:02d} WHERE id = {undecided.number}"
        found = connection.exec_driver_sql(query).one()
    assert (found.checked, "not\ufffdyet" in found.check_answer) == (1, True)


def test_servers_that_start_together_do_not_refuse_each_other(postgresql: PostgreSQL) -> None:
    """To see whether the lock of a single server is free, none of them takes it."""
    databases = [Database(postgresql.create("tmc_together")) for _ in range(2)]
    looked: list[int] = []

    def meanwhile(*_: object) -> None:
        if not looked:
            looked.append(1)
            databases[1].refuse_beside_another()

    sa.event.listen(databases[0].engine, "after_cursor_execute", meanwhile)
    databases[0].refuse_beside_another()
    assert looked
    databases[1].hold_exclusively()
    with pytest.raises(DatabaseTaken):
        databases[0].refuse_beside_another()
    for database in databases:
        database.close()


def test_a_connection_to_a_server_that_only_reads_is_given_up(own_server: PostgreSQL) -> None:
    """After a failover the next one may lead to the new primary."""
    url = own_server.create("tmc_standby")
    database = Database(url, pool_size=1)

    def change() -> None:
        with database.transaction() as connection:
            connection.exec_driver_sql("CREATE TABLE IF NOT EXISTS written (x INTEGER)")

    root = sa.create_engine(url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    with root.connect() as connection:
        connection.exec_driver_sql("ALTER DATABASE tmc_standby SET default_transaction_read_only = on")
        with pytest.raises(StoreUnavailable):
            change()
        connection.exec_driver_sql("SET default_transaction_read_only = off")
        connection.exec_driver_sql("ALTER DATABASE tmc_standby RESET default_transaction_read_only")
    change()
    database.close()


def test_a_user_who_may_not_create_tables_is_told_what_is_missing(own_server: PostgreSQL) -> None:
    root = sa.create_engine(own_server.url("postgres"), isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    with root.connect() as connection:
        connection.exec_driver_sql("CREATE ROLE shop LOGIN")
        connection.exec_driver_sql("CREATE DATABASE norights")
    database = Database(own_server.url("norights").replace("tmc@", "shop@"))
    with pytest.raises(StoreUnavailable, match="'shop' may not create tables in 'norights': make it the owner"):
        migrate(ShardMap(database, [database] * 32))
    database.close()


def test_a_database_in_another_encoding_is_refused_before_there_are_tables(own_server: PostgreSQL) -> None:
    root = sa.create_engine(own_server.url("postgres"), isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    with root.connect() as connection:
        connection.exec_driver_sql("CREATE DATABASE tmc_latin ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
    database = Database(own_server.url("tmc_latin"))
    with pytest.raises(StoreUnavailable, match="'tmc_latin' is encoded in LATIN1"):
        migrate(ShardMap(database, [database] * 32))
    database.close()


def test_bodies_and_texts_come_back_as_they_went_in(store: StoreUnderTest) -> None:
    body, key = bytes(range(256)) * 4, "it's 100 % \\' \u00e9\U0001f600 \"$1\" :x"
    prepared = store.prepared(body=body, key=key)
    with store.database.reading() as connection:
        found = connection.exec_driver_sql(f"SELECT body, message_key FROM tmc_message_{store.shard:02d}").one()
    assert (bytes(found.body), found.message_key) == (body, key)
    assert store.state_of(prepared.number) is MessageState.PREPARED


def _seq_scans(store: StoreUnderTest, statements: list[tuple[str, Any]]) -> list[str]:
    with store.database.reading() as connection:
        return [
            text
            for text, values in statements
            if text.split()[0] in ("SELECT", "UPDATE", "DELETE")
            and re.search(
                r"Seq Scan on tmc_(message|consumption)",
                str(connection.exec_driver_sql(f"EXPLAIN {text}", values).all()),
            )
        ]


def test_no_statement_of_a_message_scans_a_table(store: StoreUnderTest) -> None:
    """The statistics are those of empty tables, as in the first minute of a center."""
    asked: list[tuple[str, Any]] = []

    def keep(_connection: Any, _cursor: Any, statement: str, parameters: Any, *_: object) -> None:
        asked.append((statement, parameters))

    for engine in (store.database.engine, store.database.readers):
        sa.event.listen(engine, "before_cursor_execute", keep)
    numbers = [store.submitted(room=1) for _ in range(5)]
    store.perform(store.ack_of(numbers[0]), *(store.nack_of(each, 1) for each in numbers[1:3]))
    rolled_back = store.prepared()
    store.perform(
        store.decide_attempt(rolled_back, commit=False), store.decide_attempt(store.a_prepare(), commit=False)
    )
    store.perform(store.cancel_of(numbers[3]))
    store.clock.advance(3600)
    store.redeliver(room=5)
    for engine in (store.database.engine, store.database.readers):
        sa.event.remove(engine, "before_cursor_execute", keep)
    assert len(asked) > 50
    assert _seq_scans(store, asked) == []


def _bad(url: str) -> list[str]:
    database = Database(url)
    found = [finding.setting for finding in examine(database, 4 << 20) if not finding.ok]
    database.close()
    return found


def test_settings_that_lose_messages_are_named_and_a_relaxed_role_is_overruled(own_server: PostgreSQL) -> None:
    url = own_server.url("tmc_settings")
    database = Database(url)
    migrate(ShardMap(database, [database] * 32))
    database.close()
    assert _bad(url) == []
    engine = sa.create_engine(url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    with engine.connect() as connection:
        connection.exec_driver_sql("ALTER DATABASE tmc_settings SET synchronous_commit = off")
        relaxed = Database(url)
        with relaxed.connection() as ours:
            assert ours.exec_driver_sql("SHOW synchronous_commit").scalar_one() == "on"
        relaxed.close()
        for name in ("fsync", "full_page_writes"):
            connection.exec_driver_sql(f"ALTER SYSTEM SET {name} = off")
    own_server.kill()
    own_server.start()
    assert _bad(url) == ["fsync", "full_page_writes"]


@pytest.mark.parametrize("mode", ["session", "transaction"])
def test_a_pooler_in_between_is_named(postgresql: PostgreSQL, mode: Any) -> None:
    database = Database(postgresql.url("tmc_pooled"))
    migrate(ShardMap(database, [database] * 32))
    database.close()
    bouncer = PgBouncer(postgresql.port, mode)
    try:
        assert "connection" in _bad(bouncer.url("tmc_pooled"))
    finally:
        bouncer.stop()
