"""Engines as programs set them up: our statements are seen, changed and handled as the program's own."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import MySQLdb
import pytest
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.dialects import registry
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite
from sqlalchemy.orm import Session, sessionmaker

import tmc_client as tmc
from tests.support.messages import a_message
from tests.support.producing import FakeProducer, FakeTarget
from tmc_client.local.sessions import SessionTransaction
from tmc_client.producing.transaction import Transaction
from tmc_client.tables import inbox, ledger, outbox
from tmc_storm.services.mariadb import MariaDB


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[sa.Engine]:
    made = sa.create_engine(f"sqlite:///{tmp_path}/shop.db")
    tmc.create_tables(made)
    yield made
    made.dispose()


@pytest.fixture(params=["sqlite", "mariadb", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> sa.URL:
    if request.param == "sqlite":
        made = sa.make_url(f"sqlite:///{tmp_path}/shop.db")
    else:
        made = sa.make_url(request.getfixturevalue(request.param).create("tmc_programs"))
    fresh = sa.create_engine(made)
    _drop(fresh)
    tmc.create_tables(fresh)
    fresh.dispose()
    return made


def _drop(engine: sa.Engine) -> None:
    ledger.metadata.drop_all(engine)


def _handle(engine: sa.Engine, number: int) -> bool:
    """Returns: whether the effect of this message happened now."""
    with tmc.SqlInbox(sessionmaker(engine)).once(a_message(number)) as session:
        return session is not None


def _noted(engine: sa.Engine, table: sa.Table = inbox) -> int:
    with engine.connect() as connection:
        return int(connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one())


def test_events_and_log_show_our_statements(url: sa.URL) -> None:
    engine, seen = sa.create_engine(url), list[str]()
    event.listen(engine, "before_cursor_execute", lambda _c, _k, text, *_: seen.append(text))
    assert [_handle(engine, 1), _handle(engine, 1)] == [True, False]
    engine.dispose()
    assert sum("INSERT INTO tmc_inbox " in text for text in seen) == 2


def test_a_listener_that_changes_text_decides_where_our_rows_go(tmp_path: Path) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path}/main.db")
    current = ["none"]
    for name in ("main", "a", "b"):
        tenants = sa.create_engine(f"sqlite:///{tmp_path}/{name}.db")
        tmc.create_tables(tenants)
        tenants.dispose()

    @event.listens_for(engine, "connect")
    def attach(connection: sqlite3.Connection, _record: object) -> None:
        for name in ("a", "b"):
            connection.execute(f"ATTACH '{tmp_path}/{name}.db' AS {name}")

    @event.listens_for(engine, "before_cursor_execute", retval=True)
    def of_tenant(_connection: object, _cursor: object, text: str, values: Any, *_: object) -> tuple[str, Any]:
        return text.replace("tmc_inbox", f"{current[0]}.tmc_inbox"), values

    found = []
    for tenant in ("a", "b", "a"):
        current[0] = tenant
        found.append(_handle(engine, 1))
    engine.dispose()
    assert found == [True, True, False]


def test_a_listener_that_changes_expressions_gets_expressions(engine: sa.Engine) -> None:
    seen = []

    @event.listens_for(engine, "before_execute", retval=True)
    def look(_c: object, clause: Any, values: Any, more: Any, _options: object) -> tuple[Any, Any, Any]:
        seen.append(getattr(clause, "table", None))
        return clause, values, more

    assert _handle(engine, 1)
    assert inbox in seen


def test_tables_in_a_schema_of_the_engine(tmp_path: Path) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path}/empty.db")
    filled = sa.create_engine(f"sqlite:///{tmp_path}/shop.db")
    tmc.create_tables(filled)
    event.listen(engine, "connect", lambda raw, _: raw.execute(f"ATTACH '{tmp_path}/shop.db' AS shop"))
    translated = engine.execution_options(schema_translate_map={None: "shop"})
    assert [_handle(translated, 1), _handle(translated, 1)] == [True, False]
    assert _noted(filled) == 1
    for each in (engine, filled):
        each.dispose()


def test_errors_of_our_statements_pass_the_programs_listener(url: sa.URL) -> None:
    engine, seen = sa.create_engine(url), list[str]()
    event.listen(engine, "handle_error", lambda context: seen.append(type(context.original_exception).__name__))
    _handle(engine, 1)
    assert not _handle(engine, 1)
    engine.dispose()
    assert len(seen) == 1


def test_a_listener_that_raises_an_error_of_its_own(url: sa.URL) -> None:
    class Duplicate(Exception):
        """As libraries over SQLAlchemy raise them."""

    engine = sa.create_engine(url)

    @event.listens_for(engine, "handle_error")
    def translate(context: Any) -> None:
        if isinstance(context.sqlalchemy_exception, sa.exc.IntegrityError):
            raise Duplicate

    assert [_handle(engine, 1), _handle(engine, 1)] == [True, False]
    engine.dispose()


def test_an_engine_made_from_another(url: sa.URL) -> None:
    """Both are watched: what listens once to each hears each statement twice."""
    engine = sa.create_engine(url)
    derived = engine.execution_options(isolation_level="SERIALIZABLE")
    producer: Any = FakeProducer()
    for number, made in enumerate((engine, derived, engine, derived)):
        assert _handle(made, number)
        with Session(made) as session, _block(producer, session) as tx:
            tx.send("t", {"n": 1}, key=f"k{number}")
    assert [_noted(engine, inbox), _noted(engine, ledger)] == [4, 4]
    engine.dispose()


def _block(producer: Any, session: Session) -> Transaction:
    """Its first statement reads: the id of the ledger."""
    local = SessionTransaction(session)
    return Transaction(producer, lambda *_: None, local, timedelta(seconds=2), prepare_first=True)


def test_a_connection_that_was_lost_clears_the_pool(mariadb: MariaDB) -> None:
    """As SQLAlchemy does: the others are as old."""
    engine = sa.create_engine(mariadb.create("tmc_programs"), pool_size=5)
    _drop(engine)
    tmc.create_tables(engine)
    several = [engine.connect() for _ in range(5)]
    ids = [connection.exec_driver_sql("SELECT CONNECTION_ID()").scalar_one() for connection in several]
    for connection in several:
        connection.close()
    other = sa.create_engine(mariadb.url("tmc_programs"), isolation_level="AUTOCOMMIT")
    with other.connect() as connection:
        for number in ids:
            connection.exec_driver_sql(f"KILL {number}")
    other.dispose()
    refused = 0
    for number in range(1, 6):
        try:
            _handle(engine, number)
        except sa.exc.OperationalError:
            refused += 1
    engine.dispose()
    assert refused == 0  # the first one has begun once more


@pytest.mark.parametrize("driver", ["mysqldb", "pymysql"])
def test_a_driver_that_marks_binary_values_itself(driver: str, mariadb: MariaDB) -> None:
    mariadb.create("tmc_programs")
    url = sa.make_url(mariadb.url("tmc_programs")).set(drivername=f"mysql+{driver}")
    engine = sa.create_engine(url.update_query_dict({"charset": "utf8mb4", "binary_prefix": "true"}))
    _drop(engine)
    tmc.create_tables(engine)
    with Session(engine) as session, _block(FakeProducer(), session) as tx:
        tx.send("t", {"n": 1}, key="a")
    with Session(engine) as session, tmc.Outbox(engine, FakeTarget()).transaction(session) as queued:
        queued.send("t", {"n": 1}, key="a")
    found = [_noted(engine, ledger), _noted(engine, outbox)]
    engine.dispose()
    assert found == [1, 1]


def test_a_connection_that_takes_one_statement_at_a_time(mariadb: MariaDB) -> None:
    engine = sa.create_engine(mariadb.create("tmc_programs"), connect_args={"multi_statements": False})
    _drop(engine)
    tmc.create_tables(engine)
    assert [_handle(engine, 1), _handle(engine, 1)] == [True, False]
    engine.dispose()


def test_what_fails_of_two_statements_in_one_packet_is_an_error(mariadb: MariaDB) -> None:
    engine = sa.create_engine(mariadb.create("tmc_programs"))
    _drop(engine)
    with pytest.raises(tmc.InvalidRequest, match="tmc_inbox"):
        _handle(engine, 1)
    engine.dispose()


class OwnSavepoints(SQLiteDialect_pysqlite):
    """As those of Oracle and SQL Server: no standard statement releases a savepoint."""

    name = "oracle"
    supports_statement_cache = True

    def do_release_savepoint(self, connection: sa.Connection, name: str) -> None:
        """Nothing to do."""

    def detect_autocommit_setting(self, dbapi_conn: Any) -> bool:
        return False


def _refuse_release(_c: object, _k: object, text: str, *_: object) -> None:
    if text.startswith("RELEASE"):
        raise sqlite3.OperationalError("no such statement")


def test_a_database_with_savepoints_of_its_own(tmp_path: Path) -> None:
    registry.register("ownsavepoints", __name__, "OwnSavepoints")
    plain = sa.create_engine(f"sqlite:///{tmp_path}/shop.db")
    tmc.create_tables(plain)
    plain.dispose()
    engine = sa.create_engine(f"ownsavepoints:///{tmp_path}/shop.db")
    event.listen(engine, "before_cursor_execute", _refuse_release)
    assert [_handle(engine, 1), _handle(engine, 1)] == [True, False]
    engine.dispose()


def test_more_rows_than_an_old_sqlite_takes_in_one_statement(engine: sa.Engine) -> None:
    @event.listens_for(engine, "connect")
    def old(connection: sqlite3.Connection, _record: object) -> None:
        connection.setlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER, 999)

    engine.dispose()
    with tmc.SqlInbox(sessionmaker(engine)).once_each([a_message(number) for number in range(400)]) as effects:
        assert len(effects.messages) == 400
    assert _noted(engine) == 400


def test_a_driver_connection_that_marks_binary_values_itself(mariadb: MariaDB) -> None:
    engine = sa.create_engine(mariadb.create("tmc_programs"))
    _drop(engine)
    tmc.create_tables(engine)
    options: dict[str, Any] = {"charset": "utf8mb4", "binary_prefix": True}
    raw = MySQLdb.connect(host="127.0.0.1", port=mariadb.port, user="root", database="tmc_programs", **options)
    with closing(raw) as connection, tmc.Outbox(engine, FakeTarget()).transaction(connection) as queued:
        queued.send("t", {"n": 1}, key="a")
    found = _noted(engine, outbox)
    engine.dispose()
    assert found == 1
