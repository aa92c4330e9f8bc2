"""Shards are copied from any kind of database to any other, with all that belongs to them; one cut short is done over again."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from tests.conftest import SERVERS
from tests.support.store import DONE, INCARNATION, StoreUnderTest, server_store, sqlite_store
from tmc_server.app import CannotStart, initialize, maintenance
from tmc_server.config import Config
from tmc_server.domain.consumption import ConsumptionState
from tmc_server.domain.message import MessageState
from tmc_server.store import moving
from tmc_server.store.batch import ShardWriter
from tmc_server.store.dialects.postgresql import without_nul
from tmc_server.store.engines import Database, ShardMap
from tmc_server.store.migrate import migrate
from tmc_server.store.moving import SHARED
from tmc_server.store.shard_map import identity_of, stored_map
from tmc_server.store.tables import (
    CATALOG_TABLES,
    DATABASE_TABLES,
    METADATA,
    alert,
    failed,
    node_slot,
    server,
    shard_tables,
)

PAIRS = [("sqlite", "postgresql"), ("postgresql", "mariadb"), ("mariadb", "postgresql"), ("mariadb", "sqlite")]


@pytest.fixture(params=PAIRS, ids=[f"{one} to {other}" for one, other in PAIRS])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[StoreUnderTest, str]]:
    """A store with one shard in use, and the URL of an empty database."""
    source, target = request.param
    folder = tmp_path / "source"
    folder.mkdir()
    store = server_store(request.getfixturevalue(source), "tmc_moving") if source in SERVERS else sqlite_store(folder)
    url = f"sqlite:///{tmp_path}/target.db"
    if target in SERVERS:
        made = request.getfixturevalue(target)
        url = made.create("tmc_moved")
        engine = sa.create_engine(url, poolclass=sa.NullPool)
        with engine.begin() as connection:
            left = sa.MetaData()
            left.reflect(connection)
            left.drop_all(connection)
    migrate(ShardMap(store.database, [store.database] * 32))  # the identity and the map were emptied with the rest
    yield store, url
    store.close()


def _configured(store: StoreUnderTest, target: str) -> Config:
    """The test's shard in the other database."""
    catalog, shard = store.database.url.render_as_string(hide_password=False), store.shard
    ranges: list[dict[str, Any]] = [{"url": target, "first": shard, "last": shard}]
    ranges += [{"url": catalog, "first": 0, "last": shard - 1}, {"url": catalog, "first": shard + 1, "last": 31}]
    return Config.model_validate({"store": {"catalog": catalog, "shards": ranges}})


def _fill(store: StoreUnderTest) -> dict[str, int]:
    """Messages in many states, with what is written beside them. Returns: their numbers."""
    texts = {"key": "it's 100 % \u00e9\U0001f600", "body": bytes(range(256)) * 3000, "headers": {"a": "b"}}
    numbers = {"acked": store.submitted(room=1), "failed": store.submitted(room=1), "waiting": store.submitted(**texts)}
    numbers["prepared"] = store.prepared().number
    store.perform(store.ack_of(numbers["acked"]), store.nack_of(numbers["failed"], 1, error="no\u00f6\0", reject=True))
    store.perform(store.decide_attempt(store.a_prepare(), commit=False))
    store.perform(*(store.a_prepare(publish=True) for _ in range(1_100)))
    return numbers


def _copied(store: StoreUnderTest, target: str) -> list[str]:
    said: list[str] = []
    source = store.database.url.render_as_string(hide_password=False)
    store.database.close()  # one file has one server
    initialize(_configured(store, target), copy_from=source, say=said.append)
    return said


def test_what_was_copied_goes_on_where_it_is(pair: tuple[StoreUnderTest, str]) -> None:
    store, url = pair
    numbers = _fill(store)
    said = _copied(store, url)
    assert [line.partition(" messages")[0] for line in said] == [
        f"Shard {store.shard}: 1104",
        f"Shard {store.shard} is moved, and the catalog knows it: start the servers.",
    ]
    target = Database(url, clock=store.clock)
    moved = ShardWriter(target, store.watch, store.outlet, lambda: INCARNATION)
    with target.engine.connect() as connection:

        def perform(*operations: Any) -> list[Any]:
            return moved.run(connection, store.shard, operations)

        assert perform(store.submit_of(numbers["prepared"])) == [
            store.stored(numbers["prepared"], MessageState.COMMITTED)
        ]
        assert perform(store.ack_of(numbers["waiting"])) == [DONE]
        assert perform(store.reactivate_of(numbers["failed"])) == [DONE]
        perform(store.nack_of(numbers["failed"], 1, error="once more"))  # a new row behind the copied ones
    tables = shard_tables(store.shard)
    with target.reading() as connection:
        body = connection.execute(sa.select(tables.message.c.body).filter_by(id=numbers["waiting"])).scalar_one()
        states = sa.select(tables.consumption.c.state).filter_by(message_id=numbers["acked"])
        assert (bytes(body), connection.execute(states).scalar_one()) == (
            bytes(range(256)) * 3000,
            ConsumptionState.ACKED,
        )
        errors = connection.execute(sa.select(tables.attempt.c.error).order_by(tables.attempt.c.id)).scalars().all()
        assert [without_nul(each) for each in errors] == ["no\u00f6\ufffd", "once more"]
        assert connection.execute(sa.select(sa.func.count()).select_from(alert)).scalar_one() == 1
    with store.database.reading() as connection:
        left = {
            t.name: connection.execute(sa.select(sa.func.count()).where(t.c.shard == store.shard)).scalar()
            for t in SHARED
        }
    assert set(left.values()) == {0}
    target.close()


def test_a_copy_that_was_cut_short_is_done_over_again(
    pair: tuple[StoreUnderTest, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, url = pair
    _fill(store)
    whole = moving.InsertRows.run
    runs: list[int] = []

    def cut(self: Any, *arguments: Any) -> None:
        runs.append(1)
        if len(runs) == 4:
            raise KeyboardInterrupt
        whole(self, *arguments)

    monkeypatch.setattr(moving.InsertRows, "run", cut)
    with pytest.raises(KeyboardInterrupt):
        _copied(store, url)
    assert _copied(store, url)[0].startswith(f"Shard {store.shard}: 1104 messages")
    with pytest.raises(CannotStart, match="nothing is copied"):
        _copied(store, url)


def test_a_target_whose_indexes_an_earlier_copy_did_not_make_gets_them(pair: tuple[StoreUnderTest, str]) -> None:
    store, url = pair
    tables = shard_tables(store.shard)
    target = Database(url)
    migrate(ShardMap(target, [target] * 32))
    with target.transaction() as connection:
        for table in (each for each in CATALOG_TABLES if each not in DATABASE_TABLES):
            table.drop(connection, checkfirst=True)
        for table in tables.all:
            for index in table.indexes:
                index.drop(connection)
    _copied(store, url)
    with target.reading() as connection:
        look = sa.inspect(connection)
        made = {index["name"] for table in tables.all for index in look.get_indexes(table.name)}
    assert made >= {index.name for table in tables.all for index in table.indexes}
    target.close()


def test_there_and_back(pair: tuple[StoreUnderTest, str]) -> None:
    store, url = pair
    number = _fill(store)["waiting"]
    _copied(store, url)
    target = Database(url)
    with target.transaction() as connection:
        connection.execute(shard_tables(store.shard).message.update().values(check_answer="changed there"))
    target.close()
    catalog = store.database.url.render_as_string(hide_password=False)
    store.database.close()
    initialize(Config.model_validate({"store": {"catalog": catalog}}), copy_from=url)
    with store.database.reading() as connection:
        query = sa.select(shard_tables(store.shard).message.c.check_answer).filter_by(id=number)
        assert connection.execute(query).scalar_one() == "changed there"
    assert _copied(store, url)[0].startswith(f"Shard {store.shard}: 1104 messages")


def _all_rows(url: str) -> dict[str, list[Any]]:
    database = Database(url)
    with database.reading() as connection:
        names = set(sa.inspect(connection).get_table_names())
        tables = [table for table in METADATA.sorted_tables if table.name in names]
        rows = {table.name: sorted(map(str, connection.execute(sa.select(table)))) for table in tables}
    database.close()
    return rows


def test_a_source_that_does_not_have_the_shards_is_refused_and_nothing_is_changed(
    pair: tuple[StoreUnderTest, str], tmp_path: Path
) -> None:
    store, url = pair
    _fill(store)
    others = f"sqlite:///{tmp_path}/other.db"
    initialize(Config.model_validate({"store": {"catalog": others}}))
    other = Database(others)
    row = {
        "shard": store.shard,
        "topic_no": 1,
        "subscription_no": 1,
        "message_id": 1,
        "failed_ms": 1,
        "fingerprint": "",
    }
    with other.transaction() as connection:
        connection.execute(failed.insert().values(row))
    other.close()
    catalog = store.database.url.render_as_string(hide_password=False)
    store.database.close()
    sqlite3.connect(tmp_path / "empty.db").close()
    before = _all_rows(others), _all_rows(catalog)
    for source in (others, f"sqlite:///{tmp_path}/empty.db", url):
        with pytest.raises(CannotStart, match=r"Shard 5 is in .*, not in .*: give the URL of the database that has"):
            initialize(_configured(store, url), copy_from=source)
    with pytest.raises(CannotStart, match="There is no SQLite file"):
        initialize(_configured(store, url), copy_from=f"sqlite:///{tmp_path}/missing.db")
    assert not (tmp_path / "missing.db").exists()
    assert (_all_rows(others), _all_rows(catalog)) == before


def test_a_target_of_another_center_is_refused(pair: tuple[StoreUnderTest, str]) -> None:
    store, url = pair
    _fill(store)
    initialize(Config.model_validate({"store": {"catalog": url}}))
    before = _all_rows(url)
    with pytest.raises(CannotStart, match="is of another center: give an empty one"):
        _copied(store, url)
    assert _all_rows(url) == before


def test_a_server_that_ran_meanwhile_is_noticed(
    pair: tuple[StoreUnderTest, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It started and stopped while the shards were copied, as a supervisor's restart does."""
    store, url = pair
    _fill(store)
    catalog = store.database.url.render_as_string(hide_password=False)
    store.database.close()
    whole = maintenance.copy_tombstones

    def with_a_server(source: Database, target: Database) -> None:
        whole(source, target)
        with source.transaction() as connection:
            connection.execute(node_slot.insert().values(slot=1, epoch=1, owner="tmc1", expires_ms=0, high_ms=0))

    monkeypatch.setattr(maintenance, "copy_tombstones", with_a_server)
    before = _all_rows(catalog)["tmc_shard_map"]
    with pytest.raises(CannotStart, match="A server ran while the shards were copied"):
        _copied(store, url)
    assert _all_rows(catalog)["tmc_shard_map"] == before


def test_a_row_that_is_lost_on_the_way_is_noticed(
    pair: tuple[StoreUnderTest, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, url = pair
    _fill(store)
    whole = moving.InsertRows.run
    monkeypatch.setattr(
        moving.InsertRows, "run", lambda self, connection, rows: whole(self, connection, rows[1:] or rows)
    )
    with pytest.raises(CannotStart, match=r"after the copy\. Repeat, with all servers stopped"):
        _copied(store, url)


def test_nothing_is_copied_beside_a_server(pair: tuple[StoreUnderTest, str]) -> None:
    store, url = pair
    with store.database.transaction() as connection:
        alive = {"name": "tmc1", "started_ms": 0, "expires_ms": 1 << 60, "incarnation": 7, "catalog_version": 1}
        connection.execute(server.insert().values(**alive, stale_ms=0, silenced=0, drained=0, seen_ms=0))
    with pytest.raises(CannotStart, match=r"Stop all servers before a shard is moved .*alive are tmc1"):
        _copied(store, url)
    target = Database(url)
    with target.reading() as connection:
        assert not sa.inspect(connection).has_table(shard_tables(store.shard).message.name)
    target.close()


@pytest.mark.parametrize("url", ["nonsense", "oracle://u:p@h/d"])
def test_a_source_that_is_no_database_of_ours(tmp_path: Path, url: str) -> None:
    config = Config.model_validate({"store": {"catalog": f"sqlite:///{tmp_path}/one.db"}})
    with pytest.raises(CannotStart, match="No database of the center has such a URL"):
        initialize(config, copy_from=url)


def test_every_table_with_rows_of_a_shard_is_copied_or_said_to_stay() -> None:
    by_shard = {table.name for table in DATABASE_TABLES if "shard" in table.c}
    assert by_shard - {table.name for table in SHARED} == {"tmc_lease", "tmc_notice"}


def test_the_catalog_says_where_it_is_then(pair: tuple[StoreUnderTest, str]) -> None:
    store, url = pair
    _copied(store, url)
    target = Database(url)
    with store.database.reading() as connection:
        found = {each.shard: each.identity for each in stored_map(connection)}
    assert (found[store.shard], found[0]) == (identity_of(target), identity_of(store.database))
    target.close()
