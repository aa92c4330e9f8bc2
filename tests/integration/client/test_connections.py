"""Blocks, inboxes, outboxes and checks over connections of DB-API drivers, without a session."""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import MySQLdb
import psycopg
import pymysql
import pytest
import sqlalchemy as sa

import tmc_client as tmc
from tests.support.messages import a_message, in_line
from tests.support.producing import FakeProducer, FakeTarget, verdicts
from tmc_client.local.choosing import local_of
from tmc_client.local.engines import engine_of
from tmc_client.producing.answered import SETTLE_BATCH, Answered
from tmc_client.producing.ledger import resume, rows_for
from tmc_client.producing.transaction import Transaction
from tmc_client.tables import ledger as tmc_ledger
from tmc_common.protocol import message_pb2
from tmc_storm.eventually import eventually
from tmc_storm.services.mariadb import MariaDB
from tmc_storm.services.postgresql import PostgreSQL

_numbers = itertools.count(1)
_TABLES = ("effect", "taken", "tmc_ledger", "tmc_inbox", "tmc_inbox_order", "tmc_outbox")


@dataclass(kw_only=True)
class Database:
    """connect: a new connection.  autocommit: one that commits by itself.  locks: a block locks everybody else out."""

    connect: Callable[[], Any]
    autocommit: Callable[[], Any]
    locks: bool = False

    def ask(self, query: str) -> list[Any]:
        with closing(self.connect()) as connection, closing(connection.cursor()) as cursor:
            cursor.execute(query)
            return list(cursor.fetchall())

    def effects(self) -> list[int]:
        return [number for (number,) in self.ask("SELECT number FROM effect ORDER BY number")]

    def engine(self) -> sa.Engine:
        return engine_of(self.connect, "a test")


def _mysql(module: Any, server: MariaDB, **options: Any) -> Any:
    return module.connect(host="127.0.0.1", port=server.port, user="root", database="tmc_connections", **options)


@pytest.fixture(params=["sqlite3", "mysqlclient", "pymysql", "psycopg"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Database:
    if request.param == "sqlite3":
        path = tmp_path / "shop.db"
        with closing(sqlite3.connect(path)) as connection:
            connection.execute(
                "PRAGMA journal_mode = WAL"
            )  # a check can come between a block's first read and its commit
        made = Database(
            connect=lambda: sqlite3.connect(path),
            autocommit=lambda: sqlite3.connect(path, isolation_level=None),
            locks=True,
        )
    elif request.param == "psycopg":
        postgresql: PostgreSQL = request.getfixturevalue("postgresql")
        url = sa.make_url(postgresql.create("tmc_connections")).set(drivername="postgresql")
        made = Database(
            connect=lambda: psycopg.connect(url.render_as_string()),
            autocommit=lambda: psycopg.connect(url.render_as_string(), autocommit=True),
        )
    else:
        server: MariaDB = request.getfixturevalue("mariadb")
        server.create("tmc_connections")
        module = MySQLdb if request.param == "mysqlclient" else pymysql
        made = Database(
            connect=lambda: _mysql(module, server),
            autocommit=lambda: _mysql(module, server, autocommit=True),
        )
    tmc.create_tables(made.connect)
    with closing(made.connect()) as connection, closing(connection.cursor()) as cursor:
        cursor.execute("CREATE TABLE IF NOT EXISTS effect (number INTEGER)")
        cursor.execute("CREATE TABLE IF NOT EXISTS taken (id INTEGER PRIMARY KEY)")
        for table in _TABLES:
            cursor.execute(f"DELETE FROM {table}")
        cursor.execute("INSERT INTO taken VALUES (1)")
        connection.commit()
    return made


@dataclass
class Scene:
    """Inside a block."""

    database: Database
    connection: Any
    tx: Any

    def run(self, text: str) -> None:
        with closing(self.connection.cursor()) as cursor:
            cursor.execute(text)

    def effect(self, number: int) -> None:
        self.run(f"INSERT INTO effect VALUES ({number})")

    def work(self, number: int, key: str) -> None:
        self.effect(number)
        self.tx.send("t", {}, key=key)


# Every way a block can end ------------------------------------------------------------------------------------------


class Refusal(Exception):
    """The program's own error."""


def plain(scene: Scene) -> None:
    scene.work(1, "a")


def nothing(scene: Scene) -> None:
    pass


def no_message(scene: Scene) -> None:
    scene.effect(1)


def several(scene: Scene) -> None:
    scene.work(1, "a")
    scene.work(2, "b")


def exception(scene: Scene) -> None:
    scene.work(1, "a")
    raise Refusal


def savepoint_rolled_back(scene: Scene) -> None:
    scene.work(1, "a")
    with suppress(Refusal), scene.tx.savepoint():
        scene.work(2, "b")
        raise Refusal
    scene.work(3, "c")


def savepoint_released(scene: Scene) -> None:
    with scene.tx.savepoint():
        scene.work(1, "a")


def swallowed_in_savepoint(scene: Scene) -> None:
    with suppress(Exception), scene.tx.savepoint():
        scene.tx.send("t", {}, key="b")
        scene.run("INSERT INTO taken VALUES (1)")
    scene.work(1, "a")


def commit_inside(scene: Scene) -> None:
    scene.work(1, "a")
    scene.connection.commit()
    scene.effect(2)


def commit_as_text(scene: Scene) -> None:
    scene.work(1, "a")
    scene.run("COMMIT")


def rollback_inside(scene: Scene) -> None:
    scene.work(1, "a")
    scene.connection.rollback()
    scene.effect(2)


def rollback_then_send(scene: Scene) -> None:
    scene.work(1, "a")
    scene.connection.rollback()
    scene.work(2, "b")


def block_inside(scene: Scene) -> None:
    scene.effect(1)
    with _block(FakeProducer(), scene.connection) as tx:
        tx.send("t", {}, key="inner")


ENDED = "InvalidRequest: The transaction of this transaction block was ended inside it"


@dataclass(frozen=True, kw_only=True)
class Way:
    """One row: what is done inside, and how it comes out."""

    inside: Callable[[Scene], None]
    effects: Sequence[int] = ()
    sent: Sequence[str] = ()
    error: str = ""


WAYS = [
    Way(inside=plain, effects=[1], sent=["a"]),
    Way(inside=nothing),
    Way(inside=no_message, effects=[1]),
    Way(inside=several, effects=[1, 2], sent=["a", "b"]),
    Way(inside=exception, error="Refusal"),
    Way(inside=savepoint_rolled_back, effects=[1, 3], sent=["a", "c"]),
    Way(inside=savepoint_released, effects=[1], sent=["a"]),
    Way(inside=swallowed_in_savepoint, effects=[1], sent=["a"]),
    Way(inside=commit_inside, effects=[1], error=ENDED),
    Way(inside=commit_as_text, effects=[1], error=ENDED),
    Way(inside=rollback_inside, error=ENDED),
    Way(inside=rollback_then_send, error=ENDED),
    Way(inside=block_inside, error="InvalidRequest: A transaction block inside a transaction block"),
]


def _block(
    producer: FakeProducer, connection: Any, answered: Answered | None = None, prepare_first: bool | timedelta = False
) -> Transaction:
    local = local_of(connection, "center.transaction()")
    return Transaction(
        producer,  # type: ignore[arg-type]
        lambda *_: None,
        local,
        timedelta(seconds=2),
        answered=answered,
        prepare_first=prepare_first,
    )


@pytest.mark.parametrize("prepare_first", [False, True], ids=["prepare last", "prepare first"])
@pytest.mark.parametrize("way", [pytest.param(way, id=way.inside.__name__) for way in WAYS])
def test_a_block_sends_what_it_commits_and_nothing_else(way: Way, prepare_first: bool, database: Database) -> None:
    producer, seen = FakeProducer(), ""
    with closing(database.connect()) as connection:
        try:
            with _block(producer, connection, prepare_first=prepare_first) as tx:
                way.inside(Scene(database, connection, tx))
        except (Refusal, tmc.TmcError) as exc:
            seen = f"{type(exc).__name__}: {exc}"
        with closing(connection.cursor()) as cursor:  # it is of use afterwards
            cursor.execute("SELECT 1")
    assert seen.startswith(way.error) if way.error else seen == "", seen
    assert (database.effects(), producer.submitted) == (list(way.effects), list(way.sent))
    found = verdicts(database.connect, producer)
    assert {key for key, verdict in found.items() if verdict is tmc.Verdict.COMMIT} == set(way.sent)
    assert sorted(producer.abandoned) == sorted(set(found) - set(way.sent))
    assert prepare_first or not producer.abandoned


def test_a_key_that_could_not_be_sent_is_free(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    producer = FakeProducer()
    prepare, away = producer.prepare, [tmc.Unavailable("nobody there")]

    def refuse_once(*values: Any) -> Any:
        if away:
            raise away.pop()
        return prepare(*values)

    monkeypatch.setattr(producer, "prepare", refuse_once)
    with closing(database.connect()) as connection, _block(producer, connection, prepare_first=True) as tx:
        with suppress(tmc.Unavailable):
            tx.send("t", {"n": 1}, key="a")
        tx.send("t", {"n": 1}, key="a")
    assert producer.submitted == ["a"]


def test_prepare_first_holds_no_lock_meanwhile(database: Database) -> None:
    """The call is under way before the program writes anything."""
    producer, seen = FakeProducer(), list[list[int]]()
    producer.before_prepared = lambda _id: seen.append(database.effects())
    with closing(database.connect()) as connection, _block(producer, connection, prepare_first=True) as tx:
        tx.send("t", {}, key="a")
        Scene(database, connection, tx).effect(1)
    assert (seen, producer.submitted, database.effects()) == ([[]], ["a"], [1])


def test_a_block_that_takes_long_says_so_with_its_prepare(database: Database) -> None:
    asked: list[int] = []

    class Noting(FakeProducer):
        def prepare(self, request: message_pb2.PrepareRequest, timeout: timedelta) -> Future[Any]:
            asked.append(request.transaction_time_ms)
            return super().prepare(request, timeout)

    for first in (False, True, timedelta(minutes=5)):
        with closing(database.connect()) as connection, _block(Noting(), connection, prepare_first=first) as tx:
            tx.send("t", {}, key=str(first))
    assert asked == [0, 0, 300_000]


def test_what_was_written_before_the_block_is_committed_with_it(database: Database) -> None:
    producer = FakeProducer()
    with closing(database.connect()) as connection:
        with closing(connection.cursor()) as cursor:
            cursor.execute("INSERT INTO effect VALUES (1)")
        with _block(producer, connection) as tx:
            tx.send("t", {}, key="a")
    assert (database.effects(), producer.submitted) == ([1], ["a"])


def test_a_fenced_block_is_rolled_back(database: Database) -> None:
    """A check that came between prepare and commit was answered ROLLBACK. SQLite's block has locked the database before."""
    producer = FakeProducer()
    producer.before_prepared = lambda message_id: _marker(database, message_id)
    with closing(database.connect()) as connection:
        if database.locks:
            with _block(producer, connection) as tx:
                Scene(database, connection, tx).work(1, "a")
        else:
            with pytest.raises(tmc.Fenced), _block(producer, connection) as tx:
                Scene(database, connection, tx).work(1, "a")
    expected = ([1], ["a"]) if database.locks else ([], [])
    assert (database.effects(), producer.submitted) == expected


def _marker(database: Database, message_id: str) -> None:
    producer = FakeProducer(prepared={message_id: "asked"})
    expected = tmc.Verdict.UNKNOWN if database.locks else tmc.Verdict.ROLLBACK
    assert verdicts(database.connect, producer) == {"asked": expected}


def test_a_connection_that_commits_by_itself_is_refused(database: Database) -> None:
    """What came after a rollback that was swallowed would be committed."""
    with (
        closing(database.autocommit()) as connection,
        pytest.raises(tmc.InvalidRequest, match=r"AUTOCOMMIT.*turn that off"),
    ):
        _block(FakeProducer(), connection).__enter__()


def test_a_block_cannot_own_the_commit_of_an_outer_transaction(postgresql: PostgreSQL) -> None:
    url = sa.make_url(postgresql.create("tmc_connections")).set(drivername="postgresql")
    with closing(psycopg.connect(url.render_as_string())) as connection, connection.transaction():
        with pytest.raises(tmc.InvalidRequest, match=r"cannot run inside connection\.transaction\(\)"):
            _block(FakeProducer(), connection).__enter__()


def test_connections_of_a_pool_are_taken(database: Database) -> None:
    producer, engine = FakeProducer(), database.engine()
    with closing(engine.raw_connection()) as connection, _block(producer, connection) as tx:
        Scene(database, connection, tx).work(1, "a")
    with engine.connect() as connection, _block(producer, connection) as tx:
        connection.execute(sa.text("INSERT INTO effect VALUES (2)"))
        tx.send("t", {}, key="b")
    engine.dispose()
    assert (database.effects(), producer.submitted) == ([1, 2], ["a", "b"])


def test_engine_begin_owns_its_commit(database: Database) -> None:
    engine = database.engine()
    with engine.begin() as connection, pytest.raises(tmc.InvalidRequest, match=r"cannot run inside engine\.begin\(\)"):
        _block(FakeProducer(), connection).__enter__()
    engine.dispose()


def test_missing_tables_get_a_sentence(database: Database) -> None:
    with closing(database.connect()) as connection:
        Scene(database, connection, None).run("DROP TABLE tmc_ledger")
        connection.commit()
        with (
            pytest.raises(tmc.InvalidRequest, match="There is no table tmc_ledger"),
            _block(FakeProducer(), connection) as tx,
        ):
            Scene(database, connection, tx).work(1, "a")
    assert database.effects() == []


def test_blocks_settle_what_earlier_ones_have_submitted(database: Database) -> None:
    producer, answered = FakeProducer(), Answered()
    count = 2 * SETTLE_BATCH + 1
    with closing(database.connect()) as connection:
        for number in range(count):
            with _block(producer, connection, answered) as tx:
                tx.send("t", {}, key=f"k{number}")
    assert database.ask("SELECT COUNT(*) FROM tmc_ledger WHERE settled_ms IS NULL") == [(count - 2 * SETTLE_BATCH,)]


def test_a_block_that_fails_leaves_the_settling_to_the_next(database: Database) -> None:
    producer, answered = FakeProducer(), Answered()
    with closing(database.connect()) as connection:
        for number in range(SETTLE_BATCH):
            with _block(producer, connection, answered) as tx:
                tx.send("t", {}, key=f"k{number}")
        _break(database, "tmc_ledger")
        with pytest.raises(tmc.InvalidRequest), _block(producer, connection, answered) as tx:
            tx.send("t", {}, key="failed")
        _mend(database, "tmc_ledger")
        with _block(producer, connection, answered) as tx:
            tx.send("t", {}, key="last")
    assert database.ask("SELECT COUNT(*) FROM tmc_ledger WHERE settled_ms IS NULL") == [(1,)]


def _break(database: Database, table: str) -> None:
    _alter(database, f"ALTER TABLE {table} RENAME COLUMN settled_ms TO gone")


def _mend(database: Database, table: str) -> None:
    _alter(database, f"ALTER TABLE {table} RENAME COLUMN gone TO settled_ms")


def _alter(database: Database, text: str) -> None:
    with closing(database.connect()) as connection:
        Scene(database, connection, None).run(text)
        connection.commit()


# Inbox --------------------------------------------------------------------------------------------------------------


def _handle(database: Database, message: tmc.Message, inside: Callable[[Scene], None] = lambda _: None) -> bool:
    """Returns: whether its effect happened now."""
    with tmc.SqlInbox(database.connect).once(message) as connection:
        if connection is not None:
            scene = Scene(database, connection, None)
            scene.effect(1)
            inside(scene)
        return connection is not None


def test_a_handlers_effect_happens_once(database: Database) -> None:
    assert [_handle(database, a_message()) for _ in range(3)] == [True, False, False]
    assert database.effects() == [1]


def test_effects_of_an_order_key_happen_in_order(database: Database) -> None:
    assert [_handle(database, in_line(n, sequence=n)) for n in (1, 2, 5)] == [True, True, True]
    assert not _handle(database, in_line(5, sequence=5, attempt=2))
    with pytest.raises(tmc.OutOfOrder):
        _handle(database, in_line(4, sequence=4))
    assert database.ask("SELECT sequence FROM tmc_inbox_order") == [(5,)]


def _refuse(_scene: Scene) -> None:
    raise Refusal


def _commit(scene: Scene) -> None:
    scene.connection.commit()


def _roll_back(scene: Scene) -> None:
    scene.connection.rollback()


def _block_and_more(scene: Scene) -> None:
    _block_last(scene)
    scene.effect(2)


def _block_last(scene: Scene) -> None:
    with _block(FakeProducer(), scene.connection) as tx:
        tx.send("t", {}, key="inside")


@pytest.mark.parametrize(
    ("inside", "effects", "error"),
    [
        (_refuse, [], Refusal),
        (_commit, [1], tmc.InvalidRequest),  # by the program: row and effect stay, and a copy does nothing
        (_roll_back, [], tmc.InvalidRequest),
        (_block_and_more, [1], tmc.InvalidRequest),
        (_block_last, [1], None),
    ],
)
def test_a_handler_that_ends_its_transaction(
    inside: Callable[[Scene], None], effects: list[int], error: type[Exception] | None, database: Database
) -> None:
    if error is None:
        _handle(database, a_message(), inside)
    else:
        with pytest.raises(error):
            _handle(database, a_message(), inside)
    assert database.effects() == effects
    assert database.ask("SELECT COUNT(*) FROM tmc_inbox") == [(len(effects),)]


def test_a_batch_leaves_out_what_had_its_effect(database: Database) -> None:
    _handle(database, a_message(2))
    with tmc.SqlInbox(database.connect).once_each([a_message(number) for number in (1, 2, 3)]) as effects:
        assert [message.id for message in effects.messages] == ["1-1-0-1", "1-1-0-3"]
    assert database.ask("SELECT COUNT(*) FROM tmc_inbox") == [(3,)]


# Outbox -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def target() -> FakeTarget:
    return FakeTarget()


def _states(database: Database) -> list[tuple[str, int, int]]:
    return [tuple(row) for row in database.ask("SELECT message_key, state, direct FROM tmc_outbox ORDER BY id")]


def test_a_block_of_the_outbox_is_sent_directly(database: Database, target: FakeTarget) -> None:
    with tmc.Outbox(database.connect, target) as outbox, closing(database.connect()) as connection:
        with outbox.transaction(connection) as tx:
            Scene(database, connection, tx).work(1, "a")
            tx.send("t", b"\x00\xff'\\", key="b", headers={"h": "\u2603"})
            with suppress(Refusal), tx.savepoint():
                tx.send("t", {}, key="rolled back")
                raise Refusal
        assert outbox.flush(timedelta(seconds=30))
        assert [(entry.key, entry.body) for entry in target.taken] == [("a", b"{}"), ("b", b"\x00\xff'\\")]
        assert dict(target.taken[1].headers) == {"h": "\u2603"}
        assert _states(database) == [("a", 2, 1), ("b", 2, 1)]
    assert database.effects() == [1]
    assert sorted(entry.id for entry in target.taken) == [
        n for (n,) in database.ask("SELECT id FROM tmc_outbox ORDER BY id")
    ]


def test_messages_with_an_order_key_are_left_to_the_relay(database: Database, target: FakeTarget) -> None:
    with tmc.Outbox(database.connect, target) as outbox, closing(database.connect()) as connection:
        with outbox.transaction(connection) as tx:
            tx.send("t", {}, key="a", order_key="o")
            tx.send("t", {}, key="b", order_key="o")
        eventually(lambda: _states(database) == [("a", 2, 0), ("b", 2, 0)])
    assert [entry.key for entry in target.taken] == ["a", "b"]


def test_what_is_rolled_back_is_not_sent(database: Database, target: FakeTarget) -> None:
    with tmc.Outbox(database.connect, target) as outbox, closing(database.connect()) as connection:
        for inside in (exception, commit_inside, rollback_inside):
            with suppress(Refusal, tmc.InvalidRequest), outbox.transaction(connection) as tx:
                inside(Scene(database, connection, tx))
        outbox.flush()
    assert (target.taken, _states(database)) == ([], [])


def test_a_transaction_of_another_database_is_refused(database: Database, target: FakeTarget, tmp_path: Path) -> None:
    def connect() -> sqlite3.Connection:
        return sqlite3.connect(tmp_path / "other.db")

    tmc.create_tables(connect)
    with tmc.Outbox(database.connect, target) as outbox, closing(connect()) as connection:
        with pytest.raises(tmc.InvalidRequest, match="another database"), outbox.transaction(connection) as tx:
            tx.send("t", {}, key="a")


def test_ledger_rows_are_resumed_over_connections(database: Database) -> None:
    message = tmc.Prepared(message_id="1-1-06-000000000000", topic="t", key="k", attempt_id=b"a" * 16)
    with closing(database.connect()) as connection:
        local = local_of(connection, "a test")
        local.begin("test")
        local.insert(tmc_ledger, rows_for([message]))
        local.verify()
        local.commit()
        local.stop()
    producer = FakeProducer()
    assert resume(producer, database.connect) == 1  # type: ignore[arg-type]
    assert resume(producer, database.connect) == 0  # type: ignore[arg-type]
    assert producer.submitted == [message.key]


# What a reader with fresh eyes found -----------------------------------------------------------------------------------


def _dicts(database: Database) -> Callable[[], Any]:
    """Connections whose rows are dicts."""

    def connect() -> Any:
        connection = database.connect()
        if isinstance(connection, sqlite3.Connection):
            connection.row_factory = lambda cursor, row: {
                column[0]: value for column, value in zip(cursor.description, row, strict=True)
            }
        elif isinstance(connection, psycopg.Connection):
            connection.row_factory = psycopg.rows.dict_row  # type: ignore[assignment]
        else:
            module = MySQLdb if isinstance(connection, MySQLdb.connections.Connection) else pymysql
            connection.cursorclass = module.cursors.DictCursor
        return connection

    return connect


def test_rows_may_be_dicts(database: Database, target: FakeTarget) -> None:
    connect, producer = _dicts(database), FakeProducer()
    with closing(connect()) as connection, _block(producer, connection) as tx:
        tx.send("t", {}, key="a")
    for _ in range(2):
        with tmc.SqlInbox(connect).once(in_line(1, sequence=1)):
            pass
    with tmc.Outbox(connect, target) as outbox, closing(connect()) as connection:
        with outbox.transaction(connection) as tx:
            for key in ("b", "c"):
                tx.send("t", {}, key=key)
        assert outbox.flush(timedelta(seconds=30))
    assert producer.submitted == ["a"]
    assert _states(database) == [("b", 2, 1), ("c", 2, 1)]


def test_a_large_block_is_written_in_pages(database: Database, target: FakeTarget) -> None:
    with tmc.Outbox(database.connect, target, direct=False) as outbox, closing(database.connect()) as connection:
        with outbox.transaction(connection) as tx:
            for number in range(4_500):
                tx.send("t", {}, key=f"k{number}")
    assert database.ask("SELECT COUNT(*), COUNT(DISTINCT id) FROM tmc_outbox") == [(4_500, 4_500)]


def test_large_blocks_settle_faster_than_they_add(database: Database) -> None:
    producer, answered = FakeProducer(), Answered()
    with closing(database.connect()) as connection:
        for block in range(8):
            with _block(producer, connection, answered) as tx:
                for number in range(50):
                    tx.send("t", {}, key=f"k{block}-{number}")
    ((unsettled,),) = database.ask("SELECT COUNT(*) FROM tmc_ledger WHERE settled_ms IS NULL")
    assert unsettled < 50 + SETTLE_BATCH


def test_a_commit_that_fails_leaves_nothing_open(tmp_path: Path) -> None:
    """SQLite keeps the transaction open, and the next block would commit it."""

    def connect() -> sqlite3.Connection:
        made = sqlite3.connect(tmp_path / "shop.db")
        made.execute("PRAGMA foreign_keys = ON")
        return made

    tmc.create_tables(connect)
    with closing(connect()) as connection:
        connection.execute("CREATE TABLE shop (id INTEGER PRIMARY KEY)")
        connection.execute("CREATE TABLE sale (shop INTEGER REFERENCES shop DEFERRABLE INITIALLY DEFERRED)")
        producer = FakeProducer()
        with pytest.raises(sqlite3.IntegrityError), _block(producer, connection) as tx:
            connection.execute("INSERT INTO sale VALUES (7)")
            tx.send("t", {}, key="failed")
        with _block(producer, connection) as tx:
            tx.send("t", {}, key="next")
        assert connection.execute("SELECT COUNT(*) FROM sale").fetchone() == (0,)
    assert producer.submitted == ["next"]


def test_a_block_in_a_block_over_a_connection_of_sqlalchemy_is_refused(database: Database) -> None:
    engine, producer = database.engine(), FakeProducer()
    with engine.connect() as connection, pytest.raises(tmc.InvalidRequest, match="inside a transaction block"):
        with _block(producer, connection) as tx:
            connection.execute(sa.text("INSERT INTO effect VALUES (1)"))
            tx.send("t", {}, key="outer")
            with _block(producer, connection):
                pass
    engine.dispose()
    assert (database.effects(), producer.submitted) == ([], [])


def test_a_block_is_the_last_step_of_a_handler_over_a_connection_of_sqlalchemy(database: Database) -> None:
    engine, producer = database.engine(), FakeProducer()
    with tmc.SqlInbox(engine.connect).once(a_message()) as connection:
        connection.execute(sa.text("INSERT INTO effect VALUES (1)"))
        with _block(producer, connection) as tx:
            tx.send("t", {}, key="a")
    engine.dispose()
    assert (database.effects(), producer.submitted) == ([1], ["a"])
    assert database.ask("SELECT COUNT(*) FROM tmc_inbox") == [(1,)]


def test_a_savepoint_outside_its_block_is_refused(database: Database) -> None:
    with closing(database.connect()) as connection:
        with _block(FakeProducer(), connection) as tx:
            pass
        with pytest.raises(tmc.InvalidRequest, match=r"tx\.savepoint\(\) after the end"), tx.savepoint():
            pass


def test_a_deadlock_in_a_savepoint_keeps_its_error(database: Database) -> None:
    with closing(database.connect()) as connection, pytest.raises(tmc.InvalidRequest, match="was ended inside it"):
        with _block(FakeProducer(), connection) as tx, suppress(Refusal), tx.savepoint():
            connection.rollback()  # as the database does it
            raise Refusal


def test_an_asyncio_handler_cannot_have_an_inbox_of_one_thread() -> None:
    with tmc.connect("127.0.0.1:1", app="coupons") as center, pytest.raises(TypeError, match="belongs to one thread"):

        @tmc.Consumer(center).listener("t", inbox=tmc.SqlInbox(lambda: None, stays_in_thread=True))
        async def handle(body: dict[str, Any]) -> None: ...


@pytest.mark.parametrize(
    "call", [tmc.create_tables, tmc.SqlInbox, lambda source: tmc.clean_inbox(source, timedelta(days=30))]
)
def test_a_connection_is_no_function(call: Callable[[Any], Any]) -> None:
    """One of sqlite3 can be called."""
    with (
        closing(sqlite3.connect(":memory:")) as connection,
        pytest.raises(tmc.InvalidRequest, match="function that returns"),
    ):
        call(connection)


def test_a_child_process_does_not_use_the_connections_of_its_parent(database: Database, target: FakeTarget) -> None:
    outbox = tmc.Outbox(database.connect, target)
    before = outbox.store.engine.pool
    outbox.store.now()
    outbox.after_fork()
    assert outbox.store.engine.pool is not before
    outbox.close()
    before.dispose()  # as the parent does
