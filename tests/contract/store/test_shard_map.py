"""Which database holds which shard: two configurations can never disagree about it unseen."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from pydantic import SecretStr

from tmc_server.app import doctor
from tmc_server.app.doctor import diagnose
from tmc_server.app.maintenance import CannotStart, initialize, open_shards
from tmc_server.app.moves import move_shards
from tmc_server.config import Config
from tmc_server.domain.numbers import Shard
from tmc_server.domain.placement import MoveStep
from tmc_server.store.catalog import CatalogStore
from tmc_server.store.catalog_watch import CatalogWatch
from tmc_server.store.engines import Database, ShardMap, wall_clock_ms
from tmc_server.store.migrate import VERSION_TABLE, migrate
from tmc_server.store.shard_map import Following, ShardsElsewhere, check
from tmc_server.store.tables import DATABASE_TABLES, meta, shard_move

Configured = Callable[..., Config]


@pytest.fixture
def configured(tmp_path: Path) -> Configured:
    """A configuration with the shards from `first` on in a second database."""

    def make(first: int = 32) -> Config:
        one, two = (f"sqlite:///{tmp_path}/{name}.db" for name in ("one", "two"))
        ranges: list[dict[str, Any]] = [{"url": one, "first": 0, "last": first - 1}]
        if first < 32:
            ranges.append({"url": two, "first": first, "last": 31})
        return Config.model_validate({"store": {"catalog": one, "shards": ranges}})

    return make


def test_a_catalog_of_its_own_can_take_its_first_shard(tmp_path: Path) -> None:
    catalog, shards = Database(f"sqlite:///{tmp_path}/c.db"), Database(f"sqlite:///{tmp_path}/s.db")
    migrate(ShardMap(catalog, [shards] * 32))
    migrate(ShardMap(catalog, [catalog] + [shards] * 31))
    with catalog.reading() as connection:
        present = set(sa.inspect(connection).get_table_names())
    assert {table.name for table in DATABASE_TABLES} <= present
    assert "tmc_message_00" not in present  # it is copied: an empty one would hide that it was not
    for database in (catalog, shards):
        database.close()


def _moved(configuration: Config, shard: int, to: str) -> None:
    move_shards(configuration, str(shard), to, str)


def test_the_catalog_wins_over_the_ranges_of_a_configuration(configured: Configured) -> None:
    initialize(configured(16))
    shards = open_shards(configured(8))
    check(shards)
    assert shards.shards_in(shards.homes[1]) == list(range(16, 32))
    shards.close()
    initialize(configured(8))


def test_a_database_that_nobody_configured_is_named_and_the_way_out_said(configured: Configured) -> None:
    initialize(configured(16))
    only = configured(32)
    shards = open_shards(only)
    said = r"Shard 16-31 is in .*, and this configuration knows no such database: add its URL to \[store\] spare"
    with pytest.raises(ShardsElsewhere, match=said):
        check(shards)
    shards.close()
    with pytest.raises(CannotStart, match=said):
        initialize(only)
    store = only.store.model_copy(update={"spare": (SecretStr("postgresql://tmc@127.0.0.1:1/away"),)})
    with pytest.raises(CannotStart, match=rf"{said}.* 127\.0\.0\.1:1/away does not answer"):
        initialize(only.model_copy(update={"store": store}))


def test_a_copy_of_a_database_beside_it_is_refused(configured: Configured, tmp_path: Path) -> None:
    """Such as a snapshot that was to become another shard's home: nobody can say which one is meant."""
    initialize(configured(16))
    shutil.copy(tmp_path / "two.db", tmp_path / "three.db")
    store = configured(16).store.model_copy(update={"spare": (SecretStr(f"sqlite:///{tmp_path}/three.db"),)})
    both = configured(16).model_copy(update={"store": store})
    said = r"three\.db and .*two\.db say that they are the same database: .* Name each database by one address"
    with pytest.raises(CannotStart, match=said):
        initialize(both)
    with pytest.raises(CannotStart, match=said):
        move_shards(both, "16", "three.db", str)


def test_tables_are_not_upgraded_beside_a_move(configured: Configured) -> None:
    initialize(configured())
    shards = open_shards(configured())
    places = {"shard": 7, "source": "s", "target": "t", "run": "", "position": "{}", "copied": 0, "expected": 0}
    with shards.catalog.transaction() as connection:
        connection.execute(shard_move.insert().values(**places, step=MoveStep.FROZEN, started_ms=1, updated_ms=1))
    initialize(configured())
    with shards.catalog.transaction() as connection:
        connection.exec_driver_sql(f"UPDATE {VERSION_TABLE} SET version_num = '0001'")
        connection.exec_driver_sql("ALTER TABLE tmc_server DROP COLUMN known_databases")
    with pytest.raises(CannotStart, match="Shard 7 is being moved: finish that with tmc move-shard --to, or undo it"):
        initialize(configured())
    with shards.catalog.transaction() as connection:
        connection.execute(shard_move.update().values(step=MoveStep.MOVED))
    initialize(configured())
    shards.close()


def test_the_doctor_shows_the_map_and_says_when_a_database_is_missing(configured: Configured) -> None:
    initialize(configured(16))
    lines, well = diagnose(configured(16))
    assert well, lines
    (shown,) = [line for line in lines if "shard map" in line]
    assert "0-15 in" in shown
    lines, well = diagnose(configured(32))
    assert not well
    assert any("shard map" in line and line.startswith("BAD") for line in lines) or "BAD" in "\n".join(lines)


@pytest.mark.parametrize("apart_s", [-10_800, 301])
def test_the_doctor_refuses_a_clock_that_messages_would_be_missed_by(
    configured: Configured, monkeypatch: pytest.MonkeyPatch, apart_s: int
) -> None:
    initialize(configured())
    monkeypatch.setattr(doctor, "wall_clock_ms", lambda: wall_clock_ms() + apart_s * 1000)
    lines, well = diagnose(configured())
    assert not well
    (line,) = [line for line in lines if "clock of this machine" in line]
    assert line.startswith(f"BAD  clock of this machine = {'+' if apart_s > 0 else '-'}")


def test_a_running_server_follows_a_changed_map_with_its_next_look(configured: Configured) -> None:
    initialize(configured(16))
    shards = open_shards(configured(16))
    check(shards)
    watch = CatalogWatch(CatalogStore(shards.catalog, 5000))
    watch.run_once()
    _moved(configured(16), 15, "two.db")
    one, two = shards.homes
    following = Following(shards, watch)
    assert following.look(Shard(15), one) is two
    with (
        shards.catalog.transaction() as connection
    ):  # and back again: who has not heard of the first move is sent there
        connection.execute(meta.update().values(catalog_version=meta.c.catalog_version + 1))
        connection.execute(shard_move.update().values(step=MoveStep.COPYING))
    assert (following.look(Shard(15), one), following.look(Shard(15), two)) == (two, None)
    assert shards.usable_in(two) == list(range(15, 32))
    with shards.catalog.transaction() as connection:
        connection.execute(meta.update().values(catalog_version=meta.c.catalog_version + 1))
        connection.execute(shard_move.update().values(step=MoveStep.FROZEN))
    following.look(Shard(15), two)
    assert shards.usable_in(two) == list(range(16, 32))  # duties go on for the others
    assert shards.shards_in(shards.homes[1]) == list(range(15, 32))
    shards.close()


def test_a_database_keeps_its_identity_at_another_address(configured: Configured, tmp_path: Path) -> None:
    initialize(configured(16))
    shutil.move(tmp_path / "two.db", tmp_path / "moved.db")
    changed = configured(16).model_dump(mode="python")
    ranges = [
        {"url": f"sqlite:///{tmp_path}/one.db", "last": 15},
        {"url": f"sqlite:///{tmp_path}/moved.db", "first": 16},
    ]
    store = {"catalog": changed["store"]["catalog"].get_secret_value(), "shards": ranges}
    initialize(Config.model_validate({"store": store}))
