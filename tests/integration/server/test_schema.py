"""The schema: migrated equals declared, repeatable, safe when two start at once, unsafe settings are named."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path

import alembic.command
import pytest
import sqlalchemy as sa
from sqlalchemy.schema import CreateIndex, CreateTable

import tmc_client as tmc
from tests.support.center import RunningCenter
from tests.support.eventually import eventually
from tests.support.mariadb import MariaDB
from tests.support.store import in_thread
from tmc_server.domain.consumption import ConsumptionState
from tmc_server.domain.message import MessageState
from tmc_server.store import migrate as migrating
from tmc_server.store import shard_map
from tmc_server.store.engines import Database, ShardMap
from tmc_server.store.fitness import examine
from tmc_server.store.migrate import SERVES_FROM, VERSION_TABLE, head_revision, migrate, revision_of
from tmc_server.store.tables import database_identity, shard_tables

pytestmark = pytest.mark.mariadb


def _described(database: Database) -> dict[str, str]:
    with database.reading() as connection:
        names = sorted(set(sa.inspect(connection).get_table_names()) - {VERSION_TABLE})
        if database.dialect.has_one_writer:
            look = sa.inspect(connection)  # SQLite keeps the text of CREATE TABLE, which differs after ADD COLUMN
            return {name: "\n".join(map(str, _parts(look, name))) for name in names}
        return {name: connection.exec_driver_sql(f"SHOW CREATE TABLE {name}").one()[1] for name in names}


def _parts(look: sa.Inspector, name: str) -> list[object]:
    columns = [{**column, "type": str(column["type"])} for column in look.get_columns(name)]
    return [
        *columns,
        look.get_pk_constraint(name),
        look.get_unique_constraints(name),
        sorted(look.get_indexes(name), key=str),
    ]


def _prepare_for_revisions(database: Database) -> None:
    """Not empty any more, so every revision runs: as after a first `tmc init` that was cut short."""
    database.dialect.create_database(database.url)
    with database.transaction() as connection:
        connection.exec_driver_sql(f"CREATE TABLE {VERSION_TABLE} (version_num VARCHAR(32) NOT NULL PRIMARY KEY)")


def _database(kind: str, name: str, server: MariaDB, directory: Path) -> Database:
    return Database(f"sqlite:///{directory}/{name}.db" if kind == "sqlite" else server.url(name))


@pytest.mark.parametrize("catalog_alone", [False, True], ids=["one database", "catalog alone"])
@pytest.mark.parametrize("kind", ["sqlite", "mariadb"])
def test_created_at_once_is_what_the_revisions_make(
    kind: str, catalog_alone: bool, mariadb: MariaDB, tmp_path: Path
) -> None:
    found = []
    for way in ("created", "upgraded"):
        names = [f"tmc_{way}_{catalog_alone}_{part}" for part in ("catalog", "shards")[: 1 + catalog_alone]]
        databases = [_database(kind, name, mariadb, tmp_path) for name in names]
        for database in databases:
            if way == "upgraded":
                _prepare_for_revisions(database)
        migrate(ShardMap(databases[0], [databases[-1]] * 32))
        found.append([_described(database) for database in databases])
        assert {revision_of(database) for database in databases} == {head_revision()}
        for database in databases:
            database.close()
    created, upgraded = found
    if not catalog_alone:
        assert created == upgraded
    for few, many in zip(created, upgraded, strict=True):  # old revisions made tables where nothing uses them
        assert few == {name: text for name, text in many.items() if name in few}


@pytest.mark.parametrize("kind", ["sqlite", "mariadb"])
def test_a_creation_that_was_cut_short_is_completed(kind: str, mariadb: MariaDB, tmp_path: Path) -> None:
    whole, cut = (_database(kind, name, mariadb, tmp_path) for name in ("tmc_whole", "tmc_cut_creation"))
    for database in (whole, cut):
        migrate(ShardMap(database, [database] * 32))
    with cut.transaction() as connection:
        for table in (VERSION_TABLE, *sorted(_described(whole))[::2]):
            connection.exec_driver_sql(f"DROP TABLE {table}")
    migrate(ShardMap(cut, [cut] * 32))
    assert _described(cut) == _described(whole)
    whole.close()
    cut.close()


def test_text_compares_by_bytes(mariadb: MariaDB) -> None:
    database = Database(mariadb.url("tmc_bytes"))
    migrate(ShardMap(database, [database] * 32))
    with database.reading() as connection:
        collations = connection.exec_driver_sql(
            "SELECT DISTINCT collation_name FROM information_schema.columns"
            " WHERE table_schema = 'tmc_bytes' AND collation_name IS NOT NULL AND table_name <> 'tmc_schema_version'"
        )
        assert collations.scalars().all() == ["utf8mb4_bin"]
    database.close()


def test_two_inits_at_once_and_one_afterwards(mariadb: MariaDB) -> None:
    databases = [
        Database(mariadb.url("tmc_twice"), patient=True) for _ in range(2)
    ]  # as `tmc init`: one waits for the other
    threads = [in_thread(lambda db=database: migrate(ShardMap(db, [db] * 32))) for database in databases]
    for thread, result in threads:
        thread.join(60)
        assert result == [None]
    migrate(ShardMap(databases[0], [databases[0]] * 32))
    assert all(finding.ok for finding in examine(databases[0], 4 << 20))
    for database in databases:
        database.close()


def test_a_revision_that_was_cut_short_is_run_again(mariadb: MariaDB) -> None:
    database = Database(mariadb.url("tmc_cut"))
    migrate(ShardMap(database, [database] * 32))
    with database.transaction() as connection:
        connection.exec_driver_sql("DROP TABLE tmc_message_31")
        connection.exec_driver_sql("DROP INDEX tmc_consumption_30_due ON tmc_consumption_30")
        connection.exec_driver_sql(f"DELETE FROM {VERSION_TABLE}")
    migrate(ShardMap(database, [database] * 32))
    with database.reading() as connection:
        inspector = sa.inspect(connection)
        assert inspector.has_table("tmc_message_31")
        assert [i["name"] for i in inspector.get_indexes("tmc_consumption_30")] == ["tmc_consumption_30_due"]
    database.close()


@pytest.mark.parametrize("kind", ["sqlite", "mariadb"])
def test_what_failed_before_the_upgrade_is_counted_after_it(kind: str, mariadb: MariaDB, tmp_path) -> None:
    database = Database(f"sqlite:///{tmp_path}/a.db" if kind == "sqlite" else mariadb.url("tmc_failed_before"))
    migrate(ShardMap(database, [database] * 32))
    message = (
        "INSERT INTO tmc_message_05 (id, topic_no, producer_no, producer_tag, message_key, attempt_id, digest, state,"
        " content_type, body, delay_ms, created_ms) VALUES ({0}, 7, 1, '', '{0}', '{0:016d}', '{0:032d}', {1}, '', '', 0, 10)"
    )
    consumption = (
        "INSERT INTO tmc_consumption_05 (message_id, subscription_no, state, attempt, tried, created_ms, closed_ms)"
        " VALUES ({}, 9, {}, 1, 1, 10, {})"
    )
    with database.transaction() as connection:
        for number, state in ((1, 2), (2, 2), (3, 4), (4, 1)):
            connection.exec_driver_sql(message.format(number, state))
        connection.exec_driver_sql(consumption.format(1, 3, 30))
        connection.exec_driver_sql(consumption.format(2, 2, 40))
        connection.exec_driver_sql(f"DELETE FROM {VERSION_TABLE}")
    for _ in range(2):  # one that was cut short is run again
        migrate(ShardMap(database, [database] * 32))
        with database.reading() as connection:
            rows = connection.exec_driver_sql(
                "SELECT shard, topic_no, subscription_no, message_id, failed_ms FROM tmc_failed ORDER BY message_id"
            ).fetchall()
        assert [tuple(row) for row in rows] == [(5, 7, 9, 1, 30), (5, 7, 0, 3, 10)]
    database.close()


def test_shards_over_two_databases(mariadb: MariaDB) -> None:
    one, two = Database(mariadb.url("tmc_one")), Database(mariadb.url("tmc_two"))
    migrate(ShardMap(one, [one] * 16 + [two] * 16))
    for database, present, absent in ((one, "tmc_message_15", "tmc_message_16"), (two, "tmc_message_16", "tmc_app")):
        with database.reading() as connection:
            inspector = sa.inspect(connection)
            assert inspector.has_table(present)
            assert not inspector.has_table(absent)
    one.close()
    two.close()


@pytest.mark.parametrize(
    ("setting", "unsafe", "safe"),
    [
        ("innodb_flush_log_at_trx_commit", "2", "1"),
        ("max_allowed_packet", "1048576", "16777216"),
    ],
)
def test_unsafe_settings_are_named(mariadb: MariaDB, setting: str, unsafe: str, safe: str) -> None:
    root = sa.create_engine(mariadb.url(""), isolation_level="AUTOCOMMIT")
    setup = Database(mariadb.url("tmc_unsafe"))
    migrate(ShardMap(setup, [setup] * 32))
    setup.close()
    with root.connect() as connection:
        connection.exec_driver_sql(f"SET GLOBAL {setting} = {unsafe}")
    try:
        database = Database(mariadb.url("tmc_unsafe"))
        bad = [finding.setting for finding in examine(database, 4 << 20) if not finding.ok]
        database.close()
        assert bad == [setting]
    finally:
        with root.connect() as connection:
            connection.exec_driver_sql(f"SET GLOBAL {setting} = {safe}")
        root.dispose()


def test_a_missing_schema_is_a_finding(tmp_path) -> None:
    database = Database(f"sqlite:///{tmp_path}/empty.db")
    assert [finding.setting for finding in examine(database, 1) if not finding.ok] == ["schema revision"]
    database.close()


def test_declared_tables_compile_for_mysql_too() -> None:
    from sqlalchemy.dialects import mysql

    for table in shard_tables(0).all:
        text = str(CreateTable(table).compile(dialect=mysql.dialect()))
        assert "COLLATE utf8mb4_bin" in text
        assert all(str(CreateIndex(index).compile(dialect=mysql.dialect())) for index in table.indexes)


def test_many_threads_may_be_the_first_to_use_a_shard() -> None:
    """Two that built the tables of one shard at once failed a call, now and then, right after a start."""
    program = """
import sys, threading
sys.setswitchinterval(1e-6)
from tmc_server.store.statements import statements_of
failed, barrier = [], threading.Barrier(8)
def use():
    for shard in range(16):
        barrier.wait()
        try:
            statements_of(shard)
        except Exception as exc:
            failed.append(exc)
threads = [threading.Thread(target=use) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(len(failed))
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "0"


class _Upgraded(RunningCenter):
    """On a database whose apps and topics are there already."""

    def _register(self) -> None:
        self.keys = dict(_KEYS)


_KEYS = {"orders": "key-of-orders", "coupons": "key-of-coupons"}


def _fill(database: Database) -> None:
    """As servers of revision 0004 left it: a message on its way, one undecided, one FAILED, a removed subscription."""
    tables = sa.MetaData()
    now = round(time.time() * 1000)
    with database.transaction() as connection:
        tables.reflect(connection)

        def insert(table: str, **values: object) -> None:
            for column in tables.tables[table].columns:
                if not (column.nullable or column.server_default is not None or column.autoincrement is True):
                    is_text = isinstance(column.type, sa.String | sa.LargeBinary)
                    values.setdefault(
                        column.name, (b"" if isinstance(column.type, sa.LargeBinary) else "") if is_text else 0
                    )
            connection.execute(tables.tables[table].insert().values(**values))

        for number, (app, key) in enumerate(_KEYS.items(), start=1):
            insert(
                "tmc_app", app_no=number, id=app, service_name=app, biz_id=app, key_hash=sha256(key.encode()).digest()
            )
        topic = {"name": "order.paid", "owner_no": 1, "default_tag": "default", "table_index": 5, "spread": 1}
        insert("tmc_topic", topic_no=7, **topic, transaction_time_ms=60_000, open_limit=1000)
        for number, tag, removed_ms in ((8, "gone", now - 1000), (9, "default", None)):
            policy = {"retry_kind": 1, "interval_ms": 1000, "max_retry": 3}
            insert(
                "tmc_subscription",
                subscription_no=number,
                topic_no=7,
                app_no=2,
                tag=tag,
                removed_ms=removed_ms,
                **policy,
            )
        for number, state in ((1, MessageState.COMMITTED), (2, MessageState.PREPARED), (3, MessageState.COMMITTED)):
            insert(
                "tmc_message_05",
                id=number,
                topic_no=7,
                producer_no=1,
                producer_tag="default",
                message_key=f"k{number}",
                attempt_id=bytes([number]) * 16,
                digest=bytes(32),
                state=int(state),
                body=b"body",
                content_type="text/plain",
                created_ms=now,
            )
        scheduled, failed = int(ConsumptionState.SCHEDULED), int(ConsumptionState.FAILED)
        insert("tmc_consumption_05", message_id=1, subscription_no=9, state=scheduled, due_ms=now, created_ms=now)
        insert("tmc_consumption_05", message_id=3, subscription_no=9, state=failed, attempt=4, tried=4, created_ms=now)


@pytest.mark.parametrize("kind", ["sqlite", "mariadb"])
def test_a_filled_database_of_revision_0004_goes_on_where_it_was(
    kind: str, mariadb: MariaDB, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"sqlite:///{tmp_path}/a.db" if kind == "sqlite" else mariadb.url("tmc_filled")
    database = Database(url)
    with monkeypatch.context() as patch:
        upgrade = alembic.command.upgrade
        patch.setattr(alembic.command, "upgrade", lambda config, _to: upgrade(config, "0004"))
        patch.setattr(shard_map, "identify", lambda _connection, _serves_from: None)
        patch.setattr(shard_map, "fill", lambda _shards: None)
        _prepare_for_revisions(database)
        migrate(ShardMap(database, [database] * 32))
    assert revision_of(database) == "0004"
    _fill(database)
    database.close()
    with _Upgraded(url) as center:
        got: list[str] = []
        with (
            tmc.connect(center.address, app="orders", key=_KEYS["orders"]) as orders,
            tmc.connect(center.address, app="coupons", key=_KEYS["coupons"]) as coupons,
        ):
            consumer = tmc.Consumer(coupons)

            @consumer.listener("order.paid")
            def handle(body: str, message: tmc.Message) -> None:
                got.append(message.key)

            with consumer:
                orders.submit("7-1-05-2")
                orders.publish("order.paid", "body", key="k4")
                eventually(lambda: sorted(got) == ["k1", "k2", "k4"])


def _as_made_by_a_later_program(database: Database, *, serves_from: str) -> None:
    with database.transaction() as connection:
        connection.exec_driver_sql(f"UPDATE {VERSION_TABLE} SET version_num = '9999'")
        connection.execute(database_identity.update().values(serves_from=serves_from))
        connection.exec_driver_sql("ALTER TABLE tmc_topic ADD COLUMN later_column INTEGER NOT NULL DEFAULT 0")


@pytest.mark.parametrize("kind", ["sqlite", "mariadb"])
def test_tables_of_a_later_program_serve_this_one_if_they_say_so(kind: str, mariadb: MariaDB, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/a.db" if kind == "sqlite" else mariadb.url("tmc_later")
    with RunningCenter(url) as made:
        keys = made.keys
    database = Database(url)
    _as_made_by_a_later_program(database, serves_from=head_revision())
    migrate(ShardMap(database, [database] * 32))
    assert revision_of(database) == "9999"
    with (
        RunningCenter(url, registered=(keys, made.token)) as center,
        tmc.connect(center.address, app="orders", key=keys["orders"]) as orders,
    ):
        center.subscribe("later.topic", "coupons")
        assert orders.publish("order.paid", b"x", key="1")
    _as_it_was_refused(database)
    database.close()


def _as_it_was_refused(database: Database) -> None:
    with database.transaction() as connection:
        connection.execute(database_identity.update().values(serves_from="9998"))
    (found,) = [each for each in examine(database, 1) if each.setting == "schema revision"]
    wanted = f"serve programs of {head_revision()}: upgrade this server"
    assert (found.value, found.must, found.ok) == ("9999", wanted, False)


def test_migrations_only_add_since_programs_serve_later_tables() -> None:
    folder = Path(migrating.__file__).parent / "migrations" / "versions"
    files = [path for path in folder.glob("*.py") if path.name[:4] >= SERVES_FROM]
    assert files
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Attribute(ast.Name("op"), name), args=arguments):
                    assert name in {"add_column", "create_table", "create_index", "get_bind"}, f"{path.name}: op.{name}"
                    if name == "add_column":
                        text = ast.unparse(arguments[1])
                        assert "server_default" in text or "nullable=False" not in text or text == "identities", text
