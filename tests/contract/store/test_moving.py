"""Shards are copied from any kind of database to any other, with all that belongs to them; one cut short is done over again."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from tests.conftest import SERVERS
from tests.support.clock import ManualClock
from tests.support.dose import LONG
from tests.support.store import DONE, INCARNATION, StoreUnderTest
from tmc_server.app import CannotStart, initialize
from tmc_server.app.moves import confirm_moves, move_shards, undo_moves
from tmc_server.config import Config
from tmc_server.domain.consumption import ConsumptionState
from tmc_server.domain.message import MessageState
from tmc_server.domain.numbers import Shard
from tmc_server.store import moving
from tmc_server.store.batch import ShardWriter
from tmc_server.store.dialects.postgresql import without_nul
from tmc_server.store.engines import Database, ShardMap
from tmc_server.store.migrate import migrate
from tmc_server.store.moving import SHARED
from tmc_server.store.shard_map import check, place_of
from tmc_server.store.tables import shard_tables, tombstone

PAIRS = [("sqlite", "postgresql"), ("postgresql", "mariadb"), ("mariadb", "postgresql"), ("mariadb", "sqlite")]


@pytest.fixture(params=PAIRS, ids=[f"{one} to {other}" for one, other in PAIRS])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[StoreUnderTest, str]]:
    """A store with one shard in use, and the URL of an empty database."""
    source, target = request.param
    clock = ManualClock()
    urls = [
        _emptied(request.getfixturevalue(kind), name) if kind in SERVERS else f"sqlite:///{tmp_path}/{name}.db"
        for kind, name in ((source, "tmc_moving"), (target, "tmc_moved"))
    ]
    database = Database(urls[0], clock=clock)
    migrate(ShardMap(database, [database] * 32))
    store = StoreUnderTest(database, clock)
    url = urls[1]
    yield store, url
    store.close()


def _emptied(server: Any, name: str) -> str:
    """The URL of a database without tables."""
    url: str = server.create(name)
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    with engine.begin() as connection:
        left = sa.MetaData()
        left.reflect(connection)
        left.drop_all(connection)
    return url


def _configured(store: StoreUnderTest, target: str) -> Config:
    """All shards where the catalog is, and a spare database."""
    return Config.model_validate({"store": {"catalog": _url(store), "spare": [target]}})


def _url(store: StoreUnderTest) -> str:
    return store.database.url.render_as_string(hide_password=False)


def _fill(store: StoreUnderTest) -> dict[str, int]:
    """Messages in many states, with what is written beside them. Returns: their numbers."""
    texts = {"key": "it's 100 % \u00e9\U0001f600", "body": bytes(range(256)) * 3000, "headers": {"a": "b"}}
    numbers = {"acked": store.submitted(room=1), "failed": store.submitted(room=1), "waiting": store.submitted(**texts)}
    numbers["prepared"] = store.prepared().number
    store.perform(store.ack_of(numbers["acked"]), store.nack_of(numbers["failed"], 1, error="no\u00f6\0", reject=True))
    store.perform(store.decide_attempt(store.a_prepare(), commit=False))
    store.perform(*(store.a_prepare(publish=True) for _ in range(1_100)))
    return numbers


def _moved(store: StoreUnderTest, target: str, to: str | None = None) -> list[str]:
    said: list[str] = []
    initialize(_configured(store, target))
    move_shards(_configured(store, target), str(store.shard), to or place_of(Database(target)), said.append)
    return said


def test_what_was_moved_goes_on_where_it_is(pair: tuple[StoreUnderTest, str]) -> None:
    store, url = pair
    numbers = _fill(store)
    (said,) = _moved(store, url)
    assert re.fullmatch(rf"Shard {store.shard} is in .* now; callers waited for \d+\.\d\d s\.", said)
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
    with store.database.reading() as connection:
        left = {
            t.name: connection.execute(sa.select(sa.func.count()).where(t.c.shard == store.shard)).scalar()
            for t in SHARED
        }
    assert set(left.values()) == {0}
    target.close()


class Killed(BaseException):
    """In place of a SIGKILL."""


STEPS = [("run", number) for number in (1, 3, 8)] + [
    (name, 1)
    for name in (
        "_begin",
        "_record",
        "_copy",
        "_compare",
        "_follow",
        "_freeze_and_switch",
        "_drain",
        "_switch_once",
        "_forget",
    )
]


def _dying(patch: pytest.MonkeyPatch, name: str, number: int, after: bool) -> None:
    """The command is killed at the n-th call of this, before or after it."""
    kind: Any = moving.InsertRows if name == "run" else moving.ShardMove
    whole = getattr(kind, name)
    calls: list[int] = []

    def die(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == number and not after:
            raise Killed
        found = whole(*arguments)
        if len(calls) == number:
            raise Killed
        return found

    patch.setattr(kind, name, die)
    patch.setattr(moving.ShardMove, "_thaw", lambda *_: None)  # who is killed mends nothing


def _rows_of(database: Database, shard: int) -> dict[str, list[str]]:
    """All that belongs to a shard, as every database can hold it; but for numbers of rows."""
    tables = shard_tables(Shard(shard))
    found = {}
    with database.reading() as connection:
        for table in (*tables.all, *SHARED, tombstone):
            query = sa.select(*(column for column in table.c if column.autoincrement is not True))
            if table in SHARED:
                query = query.where(table.c.shard == shard)
            rows = connection.execute(query).all()
            found[table.name] = sorted(str([without_nul(v) if isinstance(v, str) else v for v in row]) for row in rows)
    return found


@pytest.mark.parametrize("pair", PAIRS if LONG else PAIRS[1:3], indirect=True, ids=" to ".join)
@pytest.mark.parametrize("ending", ["continued", "undone"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("name", "number"), STEPS, ids=[f"{name} {number}" for name, number in STEPS])
def test_one_that_is_killed_can_be_continued_or_undone(
    pair: tuple[StoreUnderTest, str], name: str, number: int, after: bool, ending: str
) -> None:
    store, url = pair
    numbers = _fill(store)
    before = _rows_of(store.database, store.shard)
    with pytest.MonkeyPatch.context() as patch:
        _dying(patch, name, number, after)
        with pytest.raises(Killed):
            _moved(store, url)
    target = Database(url, clock=store.clock)
    shards = ShardMap(store.database, [store.database] * 32, [target])
    check(shards)
    if ending == "continued":
        _moved(store, url)
        check(shards)
        assert shards.holder(store.shard) is target
        assert _rows_of(target, store.shard) == before
        confirm_moves(_configured(store, url), str(store.shard), str)
    elif shards.holder(store.shard) is target:
        with pytest.raises(CannotStart, match="moved already"):
            undo_moves(_configured(store, url), str(store.shard), str)
        _moved(store, url)
    else:
        with suppress(CannotStart):  # it may not have begun
            undo_moves(_configured(store, url), str(store.shard), str)
        assert _rows_of(store.database, store.shard) == before
        store.perform(store.ack_of(numbers["waiting"]))
        with target.reading() as connection:
            assert not sa.inspect(connection).has_table(shard_tables(store.shard).message.name)
    with store.database.reading() as connection:
        names = sa.inspect(connection).get_table_names()
    assert [each for each in names if each.startswith("tmc_change")] == []
    target.close()


def test_several_shards_move_one_after_another(pair: tuple[StoreUnderTest, str]) -> None:
    store, url = pair
    _fill(store)
    config = _configured(store, url)
    initialize(config)
    target = Database(url)
    move_shards(config, "4-6,9", place_of(target), str)
    shards = ShardMap(store.database, [store.database] * 32, [target])
    check(shards)
    assert shards.shards_in(target) == [4, 5, 6, 9]
    with pytest.raises(
        CannotStart, match=r"Shard 5 is on its way to .*: finish that move, confirm it or undo it first"
    ):
        move_shards(config, "5", place_of(store.database), str)
    confirm_moves(config, "4-6,9", str)
    move_shards(config, "5", place_of(store.database), str)
    check(shards)
    assert shards.shards_in(target) == [4, 6, 9]
    target.close()


def test_two_commands_do_not_move_at_once(pair: tuple[StoreUnderTest, str], monkeypatch: pytest.MonkeyPatch) -> None:
    store, url = pair
    if store.database.dialect.has_one_writer or url.startswith("sqlite"):
        said = "SQLite serves one server"
    else:
        said = "Another shard is being moved from or to"
    whole: Any = vars(moving.ShardMove)["_copy"]

    def beside(self: Any, *arguments: Any) -> None:
        with pytest.raises(CannotStart, match=said):
            move_shards(_configured(store, url), "6", place_of(Database(url)), str)
        whole(self, *arguments)

    monkeypatch.setattr(moving.ShardMove, "_copy", beside)
    _moved(store, url)


def test_what_changes_meanwhile_is_changed_there_too(
    pair: tuple[StoreUnderTest, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, url = pair
    numbers = _fill(store)
    changes: list[Any] = [
        lambda: store.perform(store.ack_of(numbers["waiting"])),
        lambda: store.perform(store.submit_of(numbers["prepared"])),
        lambda: store.perform(store.reactivate_of(numbers["failed"])),
        lambda: store.perform(store.decide_attempt(store.a_prepare(), commit=False)),
        lambda: store.perform(*(store.a_prepare(publish=True) for _ in range(700))),
    ]
    for name in ("_copy", "_compare", "_follow", "_drain", "_note"):
        method: Any = vars(moving.ShardMove)[name]

        def beside(self: Any, *arguments: Any, whole: Any = method) -> Any:
            if changes:
                changes.pop()()
            return whole(self, *arguments)

        monkeypatch.setattr(moving.ShardMove, name, beside)
    expected: list[dict[str, list[str]]] = []
    freeze: Any = vars(moving.ShardMove)["_freeze_and_switch"]

    def freezing(self: Any, *arguments: Any) -> None:
        store.perform(store.a_prepare(publish=True))
        expected.append(_rows_of(store.database, store.shard))
        freeze(self, *arguments)

    monkeypatch.setattr(moving.ShardMove, "_freeze_and_switch", freezing)
    _moved(store, url)
    target = Database(url)
    assert not changes
    assert _rows_of(target, store.shard) == expected[0]
    target.close()
