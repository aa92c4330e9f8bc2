"""The schema: created whole, repeatable, safe when two start at once; later and unsafe ones are named."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.schema import CreateIndex, CreateTable

import tmc_client as tmc
from tests.conftest import SERVERS
from tests.support.center import RunningCenter
from tests.support.store import in_thread
from tmc_server.domain.numbers import Shard
from tmc_server.store import migrate as migrating
from tmc_server.store.engines import Database, ShardMap
from tmc_server.store.fitness import examine
from tmc_server.store.migrate import SERVES_FROM, VERSION_TABLE, CannotMigrate, head_revision, migrate, revision_of
from tmc_server.store.tables import FAMILY, database_identity, shard_tables
from tmc_storm.services.mariadb import MariaDB
from tmc_storm.services.postgresql import PostgreSQL

pytestmark = pytest.mark.mariadb


def _described(database: Database) -> dict[str, str]:
    with database.reading() as connection:
        names = sorted(set(sa.inspect(connection).get_table_names()) - {VERSION_TABLE})
        if database.url.get_backend_name() not in FAMILY:
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


def _database(kind: str, name: str, request: pytest.FixtureRequest, directory: Path) -> Database:
    return Database(f"sqlite:///{directory}/{name}.db" if kind == "sqlite" else request.getfixturevalue(kind).url(name))


@pytest.mark.parametrize("kind", ["sqlite", *SERVERS])
def test_a_creation_that_was_cut_short_is_completed(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    whole, cut = (_database(kind, name, request, tmp_path) for name in ("tmc_whole", "tmc_cut_creation"))
    for database in (whole, cut):
        migrate(ShardMap(database, [database] * 32))
    with cut.transaction() as connection:
        for table in (VERSION_TABLE, *sorted(_described(whole))[::2]):
            connection.exec_driver_sql(f"DROP TABLE {table}")
    migrate(ShardMap(cut, [cut] * 32))
    assert _described(cut) == _described(whole)
    whole.close()
    cut.close()


def test_text_of_postgresql_compares_by_bytes(postgresql: PostgreSQL) -> None:
    database = Database(postgresql.url("tmc_bytes"))
    migrate(ShardMap(database, [database] * 32))
    with database.reading() as connection:
        others = connection.exec_driver_sql(
            "SELECT table_name, column_name FROM information_schema.columns WHERE table_schema = 'public'"
            " AND data_type IN ('text', 'character varying') AND collation_name IS DISTINCT FROM 'C'"
        )
        assert others.all() == [(VERSION_TABLE, "version_num")]
    database.close()


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


def test_two_inits_at_once_and_one_afterwards(database_server: MariaDB | PostgreSQL) -> None:
    databases = [
        Database(database_server.url("tmc_twice"), patient=True) for _ in range(2)
    ]  # as `tmc init`: one waits for the other
    threads = [in_thread(lambda db=database: migrate(ShardMap(db, [db] * 32))) for database in databases]
    for thread, result in threads:
        thread.join(60)
        assert result == [None]
    migrate(ShardMap(databases[0], [databases[0]] * 32))
    assert all(finding.ok for finding in examine(databases[0], 4 << 20))
    for database in databases:
        database.close()


def test_a_creation_that_lacks_an_index_is_completed(database_server: MariaDB | PostgreSQL) -> None:
    database = Database(database_server.url("tmc_cut"))
    migrate(ShardMap(database, [database] * 32))
    with database.transaction() as connection:
        connection.exec_driver_sql("DROP TABLE tmc_message_31")
        (due,) = shard_tables(Shard(30)).consumption.indexes
        due.drop(connection)
        connection.exec_driver_sql(f"DELETE FROM {VERSION_TABLE}")
    migrate(ShardMap(database, [database] * 32))
    with database.reading() as connection:
        inspector = sa.inspect(connection)
        assert inspector.has_table("tmc_message_31")
        assert [i["name"] for i in inspector.get_indexes("tmc_consumption_30")] == ["tmc_consumption_30_due"]
    database.close()


@pytest.mark.parametrize("kind", ["sqlite", *SERVERS])
def test_older_tables_without_a_revision_are_refused(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    database = _database(kind, "tmc_revision_lost", request, tmp_path)
    migrate(ShardMap(database, [database] * 32))
    with database.transaction() as connection:
        connection.exec_driver_sql("ALTER TABLE tmc_topic DROP COLUMN open_limit")
        connection.exec_driver_sql(f"DELETE FROM {VERSION_TABLE}")
    with pytest.raises(CannotMigrate, match=f"tmc_topic lacks open_limit, and {VERSION_TABLE}"):
        migrate(ShardMap(database, [database] * 32))
    assert revision_of(database) is None
    database.close()


def test_shards_over_two_databases(database_server: MariaDB | PostgreSQL) -> None:
    one, two = Database(database_server.url("tmc_one")), Database(database_server.url("tmc_two"))
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


def _as_made_by_a_later_program(database: Database, *, serves_from: str) -> None:
    with database.transaction() as connection:
        connection.exec_driver_sql(f"UPDATE {VERSION_TABLE} SET version_num = '9999'")
        connection.execute(database_identity.update().values(serves_from=serves_from))
        connection.exec_driver_sql("ALTER TABLE tmc_topic ADD COLUMN later_column INTEGER NOT NULL DEFAULT 0")


@pytest.mark.parametrize("kind", ["sqlite", *SERVERS])
def test_tables_of_a_later_program_serve_this_one_if_they_say_so(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path}/a.db" if kind == "sqlite" else request.getfixturevalue(kind).url("tmc_later")
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


def _not_only_adding(migration: str) -> list[str]:
    """Find the calls of a migration that do more than add."""
    found = []
    for node in ast.walk(ast.parse(migration)):
        match node:
            case ast.Call(func=ast.Attribute(ast.Name("op"), name), args=arguments):
                adds = name in {"add_column", "create_table", "create_index", "get_bind"}
                if adds and name == "add_column":
                    text = ast.unparse(arguments[1])
                    adds = "server_default" in text or "nullable=False" not in text
                if not adds:
                    found.append(ast.unparse(node))
    return found


def test_migrations_only_add_since_programs_serve_later_tables() -> None:
    folder = Path(migrating.__file__).parent / "migrations" / "versions"
    files = [path for path in folder.glob("*.py") if path.name[:4] >= SERVES_FROM]
    assert files
    assert {path.name: _not_only_adding(path.read_text()) for path in files} == {path.name: [] for path in files}


@pytest.mark.parametrize(
    ("call", "only_adds"),
    [
        ("op.add_column('t', sa.Column('c', sa.Integer))", True),
        ("op.add_column('t', sa.Column('c', sa.Integer, nullable=False, server_default='0'))", True),
        ("op.add_column('t', sa.Column('c', sa.Integer, nullable=False))", False),
        ("op.create_index('i', 't', ['c'])", True),
        ("op.drop_column('t', 'c')", False),
        ("op.execute('DELETE FROM t')", False),
    ],
)
def test_what_only_adds(call: str, only_adds: bool) -> None:
    assert (_not_only_adding(call) == []) is only_adds
