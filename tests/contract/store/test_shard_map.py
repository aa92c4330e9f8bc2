"""Which database holds which shard: two configurations can never disagree about it unseen."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from tmc_server.app import maintenance
from tmc_server.app.maintenance import CannotStart, diagnose, initialize, open_shards
from tmc_server.config import Config
from tmc_server.store.catalog import CatalogStore
from tmc_server.store.catalog_watch import CatalogWatch
from tmc_server.store.engines import Database, ShardMap, wall_clock_ms
from tmc_server.store.migrate import migrate
from tmc_server.store.nodes import NodeSlots
from tmc_server.store.shard_map import ShardsElsewhere, accept, check
from tmc_server.store.tables import DATABASE_TABLES

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


def _copy_shard(tmp_path: Path, shard: int) -> None:
    """What the page on operating says, for SQLite: the shard's tables with all their rows, and its failed ones."""
    with sqlite3.connect(tmp_path / "two.db") as two:
        two.execute("ATTACH ? AS one", (str(tmp_path / "one.db"),))
        for kind in ("message", "consumption", "attempt"):
            name = f"tmc_{kind}_{shard:02d}"
            (made,) = two.execute("SELECT sql FROM one.sqlite_master WHERE name = ?", (name,)).fetchone()
            two.execute(made)
            two.execute(f"INSERT INTO {name} SELECT * FROM one.{name}")
        two.execute("REPLACE INTO tmc_failed SELECT * FROM one.tmc_failed WHERE shard = ?", (shard,))


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


def test_the_page_on_moving_a_shard_names_every_table_that_holds_rows_of_it() -> None:
    page = (Path(__file__).parents[3] / "docs" / "operating.md").read_text()
    section = page.split("## Moving a shard")[1].split("\n## ")[0]
    by_shard = [table.name for table in DATABASE_TABLES if "shard" in table.c]
    assert "tmc_failed" in by_shard
    assert [name for name in by_shard if name not in section] == []


def test_a_server_with_another_map_is_refused_with_the_shard_and_the_way_to_move_it(configured: Configured) -> None:
    initialize(configured(16))
    shards = open_shards(configured(8))
    with pytest.raises(ShardsElsewhere, match=r"Shard 8-15 is in database .*stop all servers.*--copy-from URL"):
        check(shards)
    shards.close()
    with pytest.raises(CannotStart, match="Shard 8-15"):
        initialize(configured(8))


def test_the_doctor_shows_the_map_and_says_when_the_configuration_differs(configured: Configured) -> None:
    initialize(configured(16))
    lines, well = diagnose(configured(16))
    assert well, lines
    assert "0-15 in" in lines[-1]
    lines, well = diagnose(configured(17))
    assert not well
    assert any("shard map" in line and line.startswith("BAD") for line in lines) or "BAD" in "\n".join(lines)


@pytest.mark.parametrize("apart_s", [-10_800, 301])
def test_the_doctor_refuses_a_clock_that_messages_would_be_missed_by(
    configured: Configured, monkeypatch: pytest.MonkeyPatch, apart_s: int
) -> None:
    initialize(configured())
    monkeypatch.setattr(maintenance, "wall_clock_ms", lambda: wall_clock_ms() + apart_s * 1000)
    lines, well = diagnose(configured())
    assert not well
    (line,) = [line for line in lines if "clock of this machine" in line]
    assert line.startswith(f"BAD  clock of this machine = {'+' if apart_s > 0 else '-'}")


def test_a_map_is_accepted_only_when_the_tables_were_copied(configured: Configured, tmp_path: Path) -> None:
    initialize(configured(16))
    with pytest.raises(CannotStart, match="Shard 15 has no tables"):
        initialize(configured(15), accept_shard_map=True)
    _copy_shard(tmp_path, 15)
    initialize(configured(15), accept_shard_map=True)
    with pytest.raises(CannotStart, match="Shard 15"):
        initialize(configured(16))
    initialize(configured(15))


def test_a_map_is_not_changed_under_a_server_that_is_alive(configured: Configured) -> None:
    initialize(configured())
    shards = open_shards(configured())
    nodes = NodeSlots(shards.catalog, "alive")
    nodes.acquire()
    with pytest.raises(ShardsElsewhere, match="alive are alive"):
        accept(shards)
    nodes.release()
    accept(shards)
    shards.close()


def test_a_running_server_sees_a_changed_map_with_its_next_look(configured: Configured, tmp_path: Path) -> None:
    initialize(configured(16))
    shards = open_shards(configured(16))
    watch = CatalogWatch(CatalogStore(shards.catalog, 5000))
    watch.run_once()
    started_with = check(shards)
    assert watch.current.shard_map == started_with
    _copy_shard(tmp_path, 15)
    initialize(configured(15), accept_shard_map=True)
    watch.run_once()
    assert [shard for shard in range(32) if watch.current.shard_map[shard] != started_with[shard]] == [15]
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
