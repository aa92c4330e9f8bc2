"""Shards are copied from any kind of database to any other, with all that belongs to them; one cut short is done over again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from tests.conftest import SERVERS
from tests.support.store import DONE, INCARNATION, StoreUnderTest, server_store, sqlite_store
from tmc_server.app import CannotStart, initialize
from tmc_server.config import Config
from tmc_server.domain.consumption import ConsumptionState
from tmc_server.domain.message import MessageState
from tmc_server.store import moving
from tmc_server.store.batch import ShardWriter
from tmc_server.store.engines import Database, ShardMap
from tmc_server.store.migrate import migrate
from tmc_server.store.moving import SHARED
from tmc_server.store.shard_map import identity_of, stored_map
from tmc_server.store.tables import DATABASE_TABLES, server, shard_tables

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
    store.perform(store.ack_of(numbers["acked"]), store.nack_of(numbers["failed"], 1, error="no\u00f6", reject=True))
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
    assert [line.partition(" messages")[0] for line in said] == [f"Shard {store.shard}: 1104"]
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
        assert (
            connection.execute(sa.select(tables.attempt.c.error).order_by(tables.attempt.c.id)).scalars().first()
            == "no\u00f6"
        )
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
    assert [line.partition(" messages")[0] for line in _copied(store, url)] == [f"Shard {store.shard}: 1104"]
    assert _copied(store, url) == []  # nothing is left to copy


def test_a_row_that_is_lost_on_the_way_is_noticed(
    pair: tuple[StoreUnderTest, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, url = pair
    _fill(store)
    whole = moving.InsertRows.run
    monkeypatch.setattr(
        moving.InsertRows, "run", lambda self, connection, rows: whole(self, connection, rows[1:] or rows)
    )
    with pytest.raises(CannotStart, match=r"differs after it was copied\. Repeat, with all servers stopped"):
        _copied(store, url)


def test_nothing_is_copied_beside_a_server(pair: tuple[StoreUnderTest, str]) -> None:
    store, url = pair
    with store.database.transaction() as connection:
        alive = {"name": "tmc1", "started_ms": 0, "expires_ms": 1 << 60, "incarnation": 7, "catalog_version": 1}
        connection.execute(server.insert().values(**alive, stale_ms=0, silenced=0, drained=0, seen_ms=0))
    with pytest.raises(CannotStart, match="Stop all servers before a shard is moved; alive are tmc1"):
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
    assert by_shard - {table.name for table in SHARED} == {"tmc_lease", "tmc_alert", "tmc_notice"}


def test_the_catalog_says_where_it_is_then(pair: tuple[StoreUnderTest, str]) -> None:
    store, url = pair
    _copied(store, url)
    target = Database(url)
    with store.database.reading() as connection:
        found = {each.shard: each.identity for each in stored_map(connection)}
    assert (found[store.shard], found[0]) == (identity_of(target), identity_of(store.database))
    target.close()
