"""Shards move between databases of any kinds, with all that belongs to them, whatever is killed, lost or suspended meanwhile."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
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
from tmc_server.domain.numbers import MessageNumber, Shard
from tmc_server.domain.placement import MoveStep
from tmc_server.errors import StoreUnavailable
from tmc_server.store import moving
from tmc_server.store.batch import ShardWriter
from tmc_server.store.dialects.postgresql import without_nul
from tmc_server.store.engines import Database, ShardMap, wall_clock_ms
from tmc_server.store.migrate import migrate
from tmc_server.store.moving import SHARED
from tmc_server.store.nodes import NodeSlots
from tmc_server.store.reading import Reader
from tmc_server.store.shard_map import check, identity_of, place_of
from tmc_server.store.tables import server as server_table
from tmc_server.store.tables import shard_move, shard_tables, tombstone

PAIRS = [
    pytest.param(pair, id=" to ".join(pair), marks=[getattr(pytest.mark, kind) for kind in pair if kind in SERVERS])
    for pair in (("sqlite", "postgresql"), ("postgresql", "mariadb"), ("mariadb", "postgresql"), ("mariadb", "sqlite"))
]
SOME_PAIRS = pytest.mark.parametrize("pair", PAIRS if LONG else PAIRS[1:2], indirect=True)
SERVER_PAIRS = pytest.mark.parametrize("pair", PAIRS[1:3], indirect=True)


@pytest.fixture(params=PAIRS)
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
    assert re.fullmatch(rf"Shard {store.shard} is in .* already: confirm that with --confirm\.", *_moved(store, url))
    with pytest.raises(StoreUnavailable) as refused:
        store.perform(store.a_prepare())  # by a server that has heard of nothing
    assert refused.value.lacks_table
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


MOVING = [
    ("InsertRows.run", 1),
    ("InsertRows.run", 8),
    ("Held.create", 1),
    ("ShardMove._begin", 1),
    ("ShardMove._record", 1),
    ("ShardMove._copy", 1),
    ("ShardMove._compare", 1),
    ("ShardMove._follow", 1),
    ("Held.rename", 1),
    ("ShardMove._freeze", 1),
    ("ShardMove._drain", 1),
    ("Held.rename", 2),
    ("ShardMove._switch_once", 1),
    ("ShardMove._forget", 1),
    ("ShardMove._clear", 1),
]
UNDOING = [
    "ShardMove._record_no_more",
    "ShardMove._record_no_more",
    "Held.rename",
    "Held.rename",
    "Held.drop",
    "ShardMove._clear",
    "ShardMove._end",
    "ShardMove._end",
]


def _dying(patch: pytest.MonkeyPatch, name: str, number: int, after: bool) -> None:
    """The command is killed at the n-th call of this, before or after it."""
    *owners, method = name.split(".")
    owner: Any = getattr(moving, owners[0]) if owners else moving
    whole = getattr(owner, method)
    calls: list[int] = []

    def die(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == number and not after:
            raise Killed
        found = whole(*arguments)
        if len(calls) == number:
            raise Killed
        return found

    patch.setattr(owner, method, die)
    patch.setattr(moving.ShardMove, "_give_back", lambda *_: None)  # who is killed mends nothing


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


def _nothing_is_left(*databases: Database) -> None:
    """No log, no copy, and nothing that was kept."""
    for database in databases:
        with database.reading() as connection:
            names = sa.inspect(connection).get_table_names()
        assert [each for each in names if each.startswith("tmc_change") or each.endswith(("_copy", "_moved"))] == []


def _points(steps: Sequence[tuple[str, int]]) -> Sequence[tuple[str, int, bool]]:
    """Return where to kill: before and after each step; in a short run before every other one, and after the rest."""
    every = [(name, number, after) for name, number in steps for after in (False, True)]
    return every if LONG else [*every[::4], *every[3::4]]


class _Moving:
    """A shard that moves between two databases, and is now in one of them."""

    def __init__(self, store: StoreUnderTest, url: str) -> None:
        self._config = _configured(store, url)
        initialize(self._config)
        self._databases = [store.database, Database(url, clock=store.clock)]
        self._shard = store.shard
        self._map = ShardMap(store.database, [store.database] * 32, self._databases[1:])
        check(self._map)

    @property
    def here(self) -> Database:
        check(self._map)
        return self._map.holder(self._shard)

    @property
    def other(self) -> Database:
        return next(each for each in self._databases if each is not self.here)

    def move(self, there: Database) -> None:
        move_shards(self._config, str(self._shard), place_of(there), str)

    def move_killed(self, name: str, number: int, after: bool) -> None:
        there = self.other
        with pytest.MonkeyPatch.context() as patch:
            _dying(patch, name, number, after)
            with pytest.raises(Killed):
                self.move(there)

    def undo(self) -> None:
        undo_moves(self._config, str(self._shard), str)

    def undo_killed(self, name: str, after: bool) -> None:
        with pytest.MonkeyPatch.context() as patch:
            _dying(patch, name, 1, after)
            with pytest.raises(Killed):
                self.undo()

    def confirm(self) -> None:
        """Be content with where the shard is."""
        confirm_moves(self._config, str(self._shard), str)
        _nothing_is_left(*self._databases)

    def rows(self, database: Database) -> dict[str, list[str]]:
        return _rows_of(database, self._shard)

    def is_open(self, database: Database) -> bool:
        with database.reading() as connection:
            return sa.inspect(connection).has_table(shard_tables(self._shard).message.name)

    def close(self) -> None:
        self._databases[1].close()


@pytest.fixture
def moved(pair: tuple[StoreUnderTest, str]) -> Iterator[_Moving]:
    store, url = pair
    _fill(store)
    made = _Moving(store, url)
    yield made
    made.close()


@SOME_PAIRS
def test_one_that_is_killed_can_be_continued(moved: _Moving) -> None:
    before = moved.rows(moved.here)
    for point in _points(MOVING):
        there = moved.other
        moved.move_killed(*point)
        moved.move(there)
        assert moved.here is there, point
        assert moved.rows(there) == before, point
        moved.confirm()


@SOME_PAIRS
def test_one_that_is_killed_can_be_undone_until_it_is_open(moved: _Moving) -> None:
    before = moved.rows(moved.here)
    opened = 0
    for point in _points(MOVING):
        here, there = moved.here, moved.other
        moved.move_killed(*point)
        if moved.is_open(there):
            with pytest.raises(CannotStart, match="moved already"):
                moved.undo()
            opened += 1
            moved.move(there)
            assert moved.rows(there) == before, point
            moved.confirm()
        else:
            with suppress(CannotStart):  # it may not have begun
                moved.undo()
            assert moved.here is here, point
            assert moved.rows(here) == before, point
            _nothing_is_left(here, there)
    assert opened >= 3


@SOME_PAIRS
def test_an_undo_that_is_killed_is_finished_before_anything_else(moved: _Moving) -> None:
    before = moved.rows(moved.here)
    for name, _, after in _points([(name, 1) for name in UNDOING]):
        here, there = moved.here, moved.other
        moved.move_killed("ShardMove._freeze", 1, True)
        moved.undo_killed(name, after)
        if name == "Held.rename":
            moved.undo()  # nothing was undone yet, and the move could go on as well
        elif not (name == "ShardMove._end" and after):
            with pytest.raises(CannotStart, match="is being undone: finish that with --undo"):
                moved.move(there)
            moved.undo()
        _nothing_is_left(here, there)
        moved.move(there)
        assert moved.rows(there) == before, name
        moved.confirm()


@SOME_PAIRS
def test_a_copy_whose_indexes_were_not_made_gets_them(pair: tuple[StoreUnderTest, str]) -> None:
    store, url = pair
    _fill(store)
    with pytest.MonkeyPatch.context() as patch:
        _dying(patch, "ShardMove._copy", 1, after=False)
        with pytest.raises(Killed):
            _moved(store, url)
    target = Database(url)
    tables = shard_tables(store.shard).all
    with target.transaction() as connection:
        for copy in (table.to_metadata(sa.MetaData(), name=f"{table.name}_copy") for table in tables):
            for index in copy.indexes:
                index.drop(connection)
    target.close()
    _moved(store, url)
    target = Database(url)  # SQLite's pragmas tell an older connection what it knew
    with target.reading() as connection:
        look = sa.inspect(connection)
        made = {index["name"] for table in tables for index in look.get_indexes(table.name)}
    assert made >= {index.name for table in tables for index in table.indexes}
    target.close()


@SOME_PAIRS
def test_a_row_that_is_lost_on_the_way_is_noticed(
    pair: tuple[StoreUnderTest, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, url = pair
    _fill(store)
    whole: Any = vars(moving)["_statements"]
    monkeypatch.setattr(moving, "_statements", lambda rows: whole(rows[:-1] if len(rows) == 500 else rows))
    with pytest.raises(CannotStart, match=r"the rows of .* differ after the copy, and nothing has changed them. Undo"):
        _moved(store, url)
    undo_moves(_configured(store, url), str(store.shard), str)
    target = Database(url)
    _nothing_is_left(store.database, target)
    target.close()


def test_a_target_of_another_center_is_refused(pair: tuple[StoreUnderTest, str]) -> None:
    store, url = pair
    initialize(Config.model_validate({"store": {"catalog": url}}))
    with pytest.raises(CannotStart, match="is of another center: give an empty one"):
        initialize(_configured(store, url))


@SOME_PAIRS
def test_nobody_can_write_into_a_copy(pair: tuple[StoreUnderTest, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A server may still believe that the shard is where it was long ago."""
    store, url = pair
    _fill(store)
    target = Database(url, clock=store.clock)
    stale = ShardWriter(target, store.watch, store.outlet, lambda: INCARNATION)
    compare: Any = vars(moving.ShardMove)["_compare"]
    refused: list[StoreUnavailable] = []

    def comparing(self: Any) -> None:
        with pytest.raises(StoreUnavailable) as caught, target.engine.connect() as connection:
            stale.run(connection, store.shard, [store.a_prepare()])
        refused.append(caught.value)
        compare(self)

    monkeypatch.setattr(moving.ShardMove, "_compare", comparing)
    before = _rows_of(store.database, store.shard)
    _moved(store, url)
    assert [each.lacks_table for each in refused] == [True]
    assert _rows_of(target, store.shard) == before
    target.close()


def _step(store: StoreUnderTest) -> MoveStep:
    with store.database.reading() as connection:
        return MoveStep(connection.execute(sa.select(shard_move.c.step)).scalar_one())


@SOME_PAIRS
def test_little_is_left_to_the_freeze_whatever_the_bodies_are(
    pair: tuple[StoreUnderTest, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are copied by bytes, so that a turn copies a few of them: that does not mean that little is left."""
    store, url = pair
    _fill(store)
    monkeypatch.setattr(moving, "_PAGE_BYTES", 10_000)
    body = b"x" * 1_000
    _changing(
        monkeypatch, "_compare", lambda: store.perform(*(store.a_prepare(publish=True, body=body) for _ in range(400)))
    )
    left: list[int] = []

    def look() -> None:
        with store.database.reading() as connection:
            query = sa.text(f"SELECT COUNT(*) FROM tmc_change_message_{store.shard:02d}")
            left.append(int(connection.execute(query).scalar_one()))

    _changing(monkeypatch, "_freeze", look)
    _moved(store, url)
    assert left[0] <= 300


@SOME_PAIRS
def test_timelines_know_what_operators_did_before_the_move(pair: tuple[StoreUnderTest, str]) -> None:
    store, url = pair
    number = _fill(store)["failed"]
    store.perform(store.reactivate_of(number))
    _moved(store, url)
    target = Database(url)
    shards = ShardMap(store.database, [store.database] * 32, [target])
    check(shards)
    message = Reader(shards).message(store.shard, MessageNumber(number))
    assert message is not None
    acts = Reader(shards).acts(message, [store.subscription.number])
    assert [act.action for act in acts] == ["reactivate consumption"]
    target.close()


def _losing(patch: pytest.MonkeyPatch, then: Callable[[], None]) -> None:
    """Within the freeze the command loses its connection to where the shard was."""
    drain: Any = vars(moving.ShardMove)["_drain"]

    def draining(self: Any, part: Any, last: int | None = None) -> int:
        if last is not None:
            then()
            vars(vars(self)["_source"])["_connection"].connection.dbapi_connection.close()
        found: int = drain(self, part, last)
        return found

    patch.setattr(moving.ShardMove, "_drain", draining)


@SERVER_PAIRS
def test_a_command_that_loses_its_connection_gives_the_shard_back(pair: tuple[StoreUnderTest, str]) -> None:
    store, url = pair
    numbers = _fill(store)
    with pytest.MonkeyPatch.context() as patch:
        _changing(patch, "_freeze", lambda: store.perform(store.a_prepare(publish=True)))
        _losing(patch, lambda: None)
        rename: Any = vars(vars(moving)["Held"])["rename"]
        steps: list[MoveStep] = []

        def renaming(self: Any, *arguments: Any) -> float:
            steps.append(_step(store))
            held_up_s: float = rename(self, *arguments)
            return held_up_s

        patch.setattr("tmc_server.store.moving.Held.rename", renaming)
        with pytest.raises(CannotStart, match="Then run this again"):
            _moved(store, url)
    assert [*steps, _step(store)] == [MoveStep.FROZEN, MoveStep.FROZEN, MoveStep.FOLLOWING]
    store.perform(store.ack_of(numbers["waiting"]))
    before = _rows_of(store.database, store.shard)
    _moved(store, url)
    target = Database(url)
    assert _rows_of(target, store.shard) == before
    target.close()


@SERVER_PAIRS
def test_a_command_that_lost_its_move_to_another_one_changes_nothing(pair: tuple[StoreUnderTest, str]) -> None:
    store, url = pair
    _fill(store)
    said: list[str] = []

    def take_over() -> None:
        with store.database.transaction() as connection:
            connection.execute(shard_move.update().values(run="another"))

    initialize(_configured(store, url))
    with pytest.MonkeyPatch.context() as patch:
        _changing(patch, "_freeze", lambda: store.perform(store.a_prepare(publish=True)))
        _losing(patch, take_over)
        with pytest.raises(CannotStart):
            move_shards(_configured(store, url), str(store.shard), place_of(Database(url)), said.append)
    assert re.match(f"Shard {store.shard} may be frozen, and callers refused: run this again", said[-1])
    with store.database.reading() as connection:
        assert not sa.inspect(connection).has_table(shard_tables(store.shard).message.name)
    _moved(store, url)


@SERVER_PAIRS
def test_a_command_that_loses_its_connection_while_it_opens_the_copy_goes_on(pair: tuple[StoreUnderTest, str]) -> None:
    store, url = pair
    _fill(store)
    before = _rows_of(store.database, store.shard)
    whole: Any = vars(moving.ShardMove)["_open"]
    lost: list[int] = []

    def opening(self: Any) -> None:
        if not lost:
            lost.append(1)
            vars(vars(self)["_target"])["_connection"].connection.dbapi_connection.close()
        whole(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moving.ShardMove, "_open", opening)
        said = _moved(store, url)
    assert [re.sub(r": .*", "", each) for each in said[:-1]] == [
        f"A database does not answer, and shard {store.shard} is frozen until it does"
    ]
    target = Database(url)
    assert _rows_of(target, store.shard) == before
    target.close()


@SERVER_PAIRS
@pytest.mark.parametrize("paused", ["_take_over", "_end"])
def test_an_undo_that_was_taken_for_dead_changes_nothing(pair: tuple[StoreUnderTest, str], paused: str) -> None:
    """It is suspended at that place, and its locks are gone; another command finishes the undo and moves the shard."""
    store, url = pair
    _fill(store)
    before = _rows_of(store.database, store.shard)
    with pytest.MonkeyPatch.context() as patch:
        _dying(patch, "ShardMove._freeze", 1, after=False)
        with pytest.raises(Killed):
            _moved(store, url)
    whole: Any = vars(moving.ShardMove)[paused]

    def waiting(self: Any, *arguments: Any) -> None:
        patch.undo()
        for held in ("_source", "_target"):
            vars(self)[held].close()
        if paused == "_end":
            undo_moves(_configured(store, url), str(store.shard), str)
        _moved(store, url)
        whole(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moving.ShardMove, paused, waiting)
        with pytest.raises(CannotStart, match="Another command works on the move of shard"):
            undo_moves(_configured(store, url), str(store.shard), str)
    target = Database(url)
    shards = ShardMap(store.database, [store.database] * 32, [target])
    check(shards)
    assert shards.holder(store.shard) is target
    assert _rows_of(target, store.shard) == before
    confirm_moves(_configured(store, url), str(store.shard), str)
    _nothing_is_left(store.database, target)
    target.close()


@SOME_PAIRS
def test_a_shard_does_not_move_to_where_a_server_would_not_find_it(pair: tuple[StoreUnderTest, str]) -> None:
    store, url = pair
    initialize(_configured(store, url))
    target = Database(url)
    here, there = (str(identity_of(each)) for each in (store.database, target))
    old = NodeSlots(store.database, "old:1", store.clock, databases=[here])
    new = NodeSlots(store.database, "new:2", store.clock, databases=[here, there])
    for server in (old, new):
        server.acquire()
    with store.database.transaction() as connection:  # the command reads the time of the database
        connection.execute(server_table.update().values(expires_ms=wall_clock_ms() + 60_000))
    with pytest.raises(CannotStart, match=r"^old:1 would stop when the shard arrives: .* Add the URL"):
        _moved(store, url)
    old.release()
    _moved(store, url)
    target.close()


def _changing(patch: pytest.MonkeyPatch, name: str, change: Callable[[], object]) -> None:
    """Something changes just before this."""
    whole: Any = vars(moving.ShardMove)[name]

    def beside(self: Any) -> Any:
        change()
        return whole(self)

    patch.setattr(moving.ShardMove, name, beside)


@SOME_PAIRS
def test_operators_see_how_far_it_is(pair: tuple[StoreUnderTest, str], monkeypatch: pytest.MonkeyPatch) -> None:
    store, url = pair
    _fill(store)
    target = Database(url)
    initialize(_configured(store, url))
    shards = ShardMap(store.database, [store.database] * 32, [target])
    check(shards)
    seen: list[tuple[MoveStep, str, bool]] = []

    def look() -> None:
        place = Reader(shards).shard_places()[store.shard]
        assert place.move is not None
        seen.append((place.move.step, place.move.address, place.move.copied_rows == place.move.expected_rows > 2_000))

    _changing(monkeypatch, "_record", look)
    _changing(monkeypatch, "_compare", look)
    _changing(monkeypatch, "_switch", look)
    _moved(store, url)
    look()
    there = place_of(target)
    assert seen == [
        (MoveStep.COPYING, there, False),
        (MoveStep.FOLLOWING, there, True),
        (MoveStep.FROZEN, there, True),
        (MoveStep.MOVED, there, True),
    ]
    confirm_moves(_configured(store, url), str(store.shard), str)
    assert {place.move for place in Reader(shards).shard_places()} == {None}
    target.close()


@SOME_PAIRS
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

    def last() -> None:
        store.perform(store.a_prepare(publish=True))
        expected.append(_rows_of(store.database, store.shard))

    _changing(monkeypatch, "_freeze", last)
    _moved(store, url)
    target = Database(url)
    assert not changes
    assert _rows_of(target, store.shard) == expected[0]
    target.close()
