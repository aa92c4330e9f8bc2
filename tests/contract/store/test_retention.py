"""Retention: closed messages are removed with all that belongs to them, everything else stays, late callers are told."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from msgspec import structs

from tests.support.store import DONE, POLICY, StoreUnderTest
from tmc_server.archives.folder import ArchiveFolder
from tmc_server.domain.catalog import NewApp
from tmc_server.domain.consumption import ConsumptionState
from tmc_server.domain.manifest import ArchivedShard, Manifest, Place, manifest_name, removal_folder
from tmc_server.domain.message import MessageState
from tmc_server.domain.numbers import NO_MESSAGE, MessageNumber, Shard
from tmc_server.domain.operations import Stored
from tmc_server.domain.ports.catalog import NewSubscription
from tmc_server.domain.ports.retention import ListUnreadable, Position
from tmc_server.duties.retention import Retention
from tmc_server.errors import MessageGone, MessageUnknown, SubscriptionUnknown
from tmc_server.store.retention import ClosedMessages
from tmc_server.store.tables import lease, shard_tables, tombstone

DAY_MS = 86_400_000
_CENTER = "c" * 32


class Kept:
    """The duty over one store, and an archive as the pipeline leaves it."""

    def __init__(self, store: StoreUnderTest, folder: Path, keep_ms: int = DAY_MS) -> None:
        self.store = store
        self.folder = folder
        self.keep_ms = keep_ms
        self.slept: list[float] = []
        self.work = ClosedMessages(store.database, store.leases)

    def archive(self, run: str, numbers: Sequence[int], before_ms: int | None = None) -> None:
        """Publish a list of these, whatever they are; of none: a run that archived messages of another shard."""
        shard = self.store.shard if numbers else Shard((self.store.shard + 1) % 32)
        low, high = (min(numbers), max(numbers)) if numbers else (1, 1)
        listed = ArchivedShard(shard=shard, low=low, high=high, messages=len(numbers) or 1, consumptions=0, digest="00")
        before = self.store.clock() if before_ms is None else before_ms
        manifest = Manifest(
            number=int(run[1:]),
            run=run,
            since_ms=0,
            before_ms=before,
            written_ms=before,
            shards=(listed,),
            names={},
        )
        if numbers:
            folder = self.folder / removal_folder(run, shard)
            folder.mkdir(parents=True)
            (folder / "part-0").write_text("\n".join(map(str, numbers)) + "\n")
        path = self.folder / manifest.name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(manifest.to_json())

    def sweep(self, by_age: bool = False, work: Any = None) -> int:
        """Run until nothing moves. Returns: passes."""
        lists = None if by_age else ArchiveFolder(str(self.folder), center=_CENTER)
        duty = Retention([work or self.work], lists, self.keep_ms, rate=1000, sleep=self.slept.append)
        passes = 1
        while duty.run_once():
            passes += 1
        return passes

    def left(self) -> list[int]:
        table = shard_tables(self.store.shard).message
        with self.store.database.reading() as connection:
            return list(connection.execute(sa.select(table.c.id).order_by(table.c.id)).scalars())

    def belongings(self) -> set[int]:
        """Messages that consumption or attempt rows belong to."""
        tables = shard_tables(self.store.shard)
        with self.store.database.reading() as connection:
            return {
                number
                for table in (tables.consumption, tables.attempt)
                for number in connection.execute(sa.select(table.c.message_id)).scalars()
            }


@pytest.fixture
def kept(store: StoreUnderTest, tmp_path: Path) -> Kept:
    return Kept(store, tmp_path / "archive")


def _acked(store: StoreUnderTest) -> int:
    number = store.submitted(room=1)
    assert store.perform(store.nack_of(number, 1), store.ack_of(number)) == [DONE, DONE]
    return number


def _rolled_back(store: StoreUnderTest) -> int:
    prepared = store.prepared()
    store.perform(store.rollback_of(prepared.number))
    return prepared.number


def _failed(store: StoreUnderTest) -> int:
    number = store.submitted(room=1)
    store.perform(store.nack_of(number, 1, reject=True))
    assert store.consumption_state(number) is ConsumptionState.FAILED
    return number


def _check_failed(store: StoreUnderTest) -> int:
    number = store.prepared().number
    table = shard_tables(store.shard).message
    with store.database.transaction() as connection:
        values = {"state": int(MessageState.CHECK_FAILED), "due_ms": None, "decided_ms": None}
        connection.execute(table.update().where(table.c.id == number).values(values))
    return number


def _of_every_kind(store: StoreUnderTest) -> tuple[list[int], list[int]]:
    """(closed, not closed)"""
    closed = [_acked(store), _rolled_back(store), _acked(store)]
    return closed, [store.prepared().number, store.submitted(room=1), _failed(store), _check_failed(store)]


@pytest.mark.parametrize(("run", "wrong"), [("r1", ".."), ("r1", "../secret"), ("r1", ""), ("r1", "a/b")])
def test_no_manifest_leads_out_of_its_archive(kept: Kept, run: str, wrong: str) -> None:
    """Its checksum is right: anyone with write access to the archive can compute it."""
    kept.archive(run, [_acked(kept.store)])
    (path,) = (kept.folder / "manifests").iterdir()
    values = json.loads(path.read_text())
    del values["checksum"]
    values["run"] = wrong
    checksum = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({**values, "checksum": checksum}))
    with pytest.raises(ListUnreadable, match="no part of a path"):
        ArchiveFolder(str(kept.folder), center=_CENTER).removals()


@pytest.mark.parametrize(("field", "value"), [("day", "../.."), ("topic", "a/b"), ("topic", ""), ("run", "..")])
def test_no_folder_of_messages_is_outside_an_archive(field: str, value: str) -> None:
    with pytest.raises(ValueError, match="no part of a path"):
        Place(**{"run": "20260101T000000-abc", "day": "2026-01-01", "topic": "order.paid"} | {field: value})


def test_lists_longer_than_their_manifest_says_are_not_read(kept: Kept) -> None:
    number = _acked(kept.store)
    kept.archive("r1", [number])
    lists = ArchiveFolder(str(kept.folder), center=_CENTER)
    lists.removals()
    assert list(lists.numbers("r1", kept.store.shard)) == [number]
    (kept.folder / removal_folder("r1", kept.store.shard) / "part-1").write_text("7\n" * 1_000_000)
    with pytest.raises(ListUnreadable, match="are expected at most"):
        lists.numbers("r1", kept.store.shard)


@pytest.mark.parametrize("by_age", [False, True])
def test_what_is_closed_goes_and_everything_else_stays(kept: Kept, by_age: bool) -> None:
    closed, others = _of_every_kind(kept.store)
    kept.store.clock.advance(1)
    kept.archive("r1", closed + others)  # a list that says too much
    kept.store.clock.advance(DAY_MS / 1000 + 1)
    kept.sweep(by_age)
    assert kept.left() == sorted(others)
    assert kept.belongings() == {others[1], others[2]}
    kept.store.clock.advance(400 * DAY_MS / 1000)  # however old: nobody decided about these
    kept.sweep(by_age)
    assert kept.left() == sorted(others)


@pytest.mark.parametrize("by_age", [False, True])
def test_nothing_goes_inside_the_replay_window(kept: Kept, by_age: bool) -> None:
    number = _acked(kept.store)
    kept.store.clock.advance(1)
    kept.archive("r1", [number])
    kept.store.clock.advance(DAY_MS / 1000 - 2)
    kept.sweep(by_age)
    assert kept.left() == [number]
    kept.store.clock.advance(2)
    kept.sweep(by_age)
    assert kept.left() == []


def test_what_was_not_archived_stays(kept: Kept) -> None:
    first, second = _acked(kept.store), _acked(kept.store)
    kept.store.clock.advance(1)
    kept.archive("r1", [first])
    kept.store.clock.advance(10 * DAY_MS / 1000)
    kept.sweep()
    assert kept.left() == [second]


def test_a_row_that_moved_after_it_was_archived_survives(kept: Kept) -> None:
    """Closed again later, but after the moment that the run looked at: the archive has another state of it."""
    gone, moved = _acked(kept.store), _failed(kept.store)
    kept.store.clock.advance(1)
    kept.archive("r1", [gone, moved])
    kept.store.perform(kept.store.reactivate_of(moved))
    kept.store.clock.advance(5)
    assert kept.store.perform(kept.store.ack_of(moved)) == [DONE]
    kept.store.clock.advance(2 * DAY_MS / 1000)
    kept.sweep()
    assert kept.left() == [moved]
    assert kept.store.consumption_state(moved) is ConsumptionState.ACKED


def test_two_subscribers_one_of_them_late(kept: Kept) -> None:
    store = kept.store
    store.catalog_store.register_app("test", NewApp(id="mails", service_name="mails", biz_id="mails"))
    late = store.catalog_store.register_subscription(
        "test", NewSubscription(topic="order.paid", app="mails", tag="", policy=POLICY)
    )
    store.watch.run_once()
    number = _acked(store)
    store.clock.advance(DAY_MS / 1000 * 3)
    kept.archive("r1", [number])
    kept.sweep(by_age=True)
    assert kept.left() == [number]  # the second one has not acked
    assert store.perform(structs.replace(store.ack_of(number), subscription=late.number)) == [DONE]
    kept.sweep(by_age=True)
    assert kept.left() == [number]  # it was closed just now
    store.clock.advance(DAY_MS / 1000 + 1)
    kept.sweep(by_age=True)
    assert kept.left() == []


def test_late_calls_get_message_gone(kept: Kept) -> None:
    store = kept.store
    number = _acked(store)
    store.clock.advance(2 * DAY_MS / 1000)
    kept.sweep(by_age=True)
    store.clock.advance(DAY_MS / 1000)
    ack, submit, nack = store.perform(store.ack_of(number), store.submit_of(number), store.nack_of(number, 1))
    assert isinstance(ack, MessageGone)
    assert isinstance(nack, MessageGone)
    assert isinstance(submit, MessageGone)
    unborn = store.ids.next()
    ack, submit = store.perform(store.ack_of(unborn), store.submit_of(unborn))
    assert isinstance(ack, SubscriptionUnknown)
    assert isinstance(submit, MessageUnknown)


def test_without_retention_unknown_messages_are_not_called_gone(kept: Kept) -> None:
    (ack,) = kept.store.perform(kept.store.ack_of(5))
    assert isinstance(ack, SubscriptionUnknown)


def test_the_next_server_continues_where_the_last_one_stopped(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tmc_server.duties.retention._BATCH", 2)
    numbers = [_acked(kept.store) for _ in range(5)]
    kept.store.clock.advance(1)
    kept.archive("r1", numbers)
    kept.archive("r2", [])  # of other shards only
    kept.store.clock.advance(2 * DAY_MS / 1000)
    Retention([kept.work], ArchiveFolder(str(kept.folder), center=_CENTER), DAY_MS, 1000, kept.slept.append).run_once()
    assert kept.left() == numbers[2:]
    assert kept.work.position(kept.store.shard) == Position("r1", numbers[1])
    assert kept.sweep() == 4  # two batches, the second run, and one that finds nothing
    assert kept.left() == []
    assert kept.work.position(kept.store.shard) == Position("r2", -1)
    assert kept.slept == [0.002, 0.002, 0.001]  # a thousand a second


def test_an_archive_that_is_not_there_is_named_once(
    kept: Kept, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A typo, or a mount that is gone, must not look like nothing to do."""
    number = _acked(kept.store)
    kept.store.clock.advance(2 * DAY_MS / 1000)
    forgotten: list[int] = []
    monkeypatch.setattr(kept.work, "forget", lambda before_ms, _limit: forgotten.append(before_ms))
    duty = Retention([kept.work], ArchiveFolder(f"{kept.folder}/typo", center=_CENTER), DAY_MS, 1000, kept.slept.append)
    assert [duty.run_once() for _ in range(2)] == [False, False]
    assert [record.getMessage() for record in caplog.records] == [
        f"nothing is removed: {kept.folder / 'typo' / 'manifests'} cannot be read: No such file or directory. "
        "Is the archive mounted, and has a run published there?"
    ]
    assert len(forgotten) == 2
    assert kept.left() == [number]


def test_runs_are_worked_off_in_their_order(kept: Kept) -> None:
    """The lag was raised in between: the later run looked less far."""
    first, second = _acked(kept.store), _acked(kept.store)
    kept.store.clock.advance(1)
    kept.archive("r1", [first], before_ms=kept.store.clock() + 3_600_000)
    kept.archive("r2", [second])
    kept.store.clock.advance(DAY_MS / 1000 + 10)
    kept.sweep()
    assert kept.left() == [first, second]
    kept.store.clock.advance(3600)
    kept.sweep()
    assert kept.left() == []


def test_a_removal_that_is_repeated_changes_nothing(kept: Kept) -> None:
    number = _acked(kept.store)
    before = kept.store.clock() + 1
    assert [kept.work.remove(kept.store.shard, [number], before) for _ in range(2)] == [1, 0]


@pytest.mark.parametrize("damage", ["short", "no list", "words", "no manifest"])
def test_a_damaged_list_removes_nothing(kept: Kept, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    numbers = [_acked(kept.store) for _ in range(2)]
    kept.store.clock.advance(1)
    kept.archive("r1", numbers)
    part = kept.folder / removal_folder("r1", kept.store.shard) / "part-0"
    match damage:
        case "short":
            part.write_text(f"{numbers[0]}\n")
        case "no list":
            part.unlink()
        case "words":
            part.write_text("one\ntwo\n")
        case "no manifest":
            (kept.folder / manifest_name(1)).write_text(json.dumps({"format": 99}))
    kept.store.clock.advance(2 * DAY_MS / 1000)
    assert kept.sweep() == 1
    said = "nothing is removed: " if damage == "no manifest" else "waits: The list of run r1"  # the other shards go on
    assert said in caplog.text
    assert kept.left() == numbers


def test_a_run_that_ends_in_the_future_is_named_once(kept: Kept, caplog: pytest.LogCaptureFixture) -> None:
    number = _acked(kept.store)
    kept.archive("r1", [number], before_ms=kept.store.clock() + 365 * DAY_MS)
    kept.store.clock.advance(2 * DAY_MS / 1000)
    duty = Retention([kept.work], ArchiveFolder(str(kept.folder), center=_CENTER), DAY_MS, 1000, kept.slept.append)
    assert not duty.run_once()
    assert not duty.run_once()
    assert caplog.text.count("run r1 ends in the future") == 1
    assert kept.left() == [number]


@pytest.mark.parametrize("damage", ["edited", "copied under another name"])
def test_a_manifest_that_is_not_as_published_removes_nothing(
    kept: Kept, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    numbers = [_acked(kept.store) for _ in range(2)]
    kept.archive("r1", numbers)
    path = kept.folder / manifest_name(1)
    if damage == "edited":
        path.write_text(path.read_text().replace('"before_ms":', '"before_ms":1'))
    else:
        path.rename(kept.folder / manifest_name(2))
    kept.store.clock.advance(2 * DAY_MS / 1000)
    assert kept.sweep() == 1
    assert damage in caplog.text
    assert kept.left() == numbers


def test_tombstones_and_sent_alerts_are_removed_after_the_window(kept: Kept) -> None:
    store = kept.store
    prepared = store.a_prepare()
    store.perform(store.decide_attempt(prepared, commit=False))
    _failed(store)
    store.alerts.group([], 10)
    store.clock.advance(DAY_MS / 1000 - 1)
    kept.sweep(by_age=True)
    (refused,) = store.perform(prepared)
    assert not isinstance(refused, Stored)  # its tombstone is still there
    store.clock.advance(2)
    kept.sweep(by_age=True)
    with store.database.reading() as connection:
        assert connection.execute(sa.select(sa.func.count()).select_from(tombstone)).scalar_one() == 0
        assert connection.exec_driver_sql("SELECT COUNT(*) FROM tmc_alert").scalar_one() == 0


def test_a_shard_of_another_server_is_left_alone(kept: Kept) -> None:
    number = _acked(kept.store)
    kept.store.clock.advance(2 * DAY_MS / 1000)
    with kept.store.database.transaction() as connection:
        connection.execute(lease.update().values(expires_ms=kept.store.clock() + 60_000))
    nobodys = kept.store.new_leases(incarnation=99)  # the first one holds it
    kept.sweep(by_age=True, work=ClosedMessages(kept.store.database, nobodys))
    assert kept.left() == [number]


def test_a_list_that_another_server_finished_holds_up_no_other_shard(kept: Kept) -> None:
    """Half worked off here, the lease goes and comes back."""
    numbers = [_acked(kept.store) for _ in range(3)]
    kept.store.clock.advance(1)
    kept.archive("r1", numbers)
    kept.store.clock.advance(2 * DAY_MS / 1000)
    held, asked = [kept.store.shard], []

    class Here(ClosedMessages):
        def held_shards(self) -> Sequence[Shard]:
            return held

        def position(self, shard: Shard) -> Position:
            asked.append(shard)
            return super().position(shard)

    here, lists = Here(kept.store.database, kept.store.leases), ArchiveFolder(str(kept.folder), center=_CENTER)
    duty = Retention([here], lists, kept.keep_ms, rate=2, sleep=kept.slept.append)
    assert duty.run_once()  # one of them
    kept.sweep()
    assert kept.left() == []
    held.append(Shard(3))
    for _ in range(2):
        duty.run_once()
    assert Shard(3) in asked


def test_a_sweep_ends_when_each_shard_has_been_swept(kept: Kept) -> None:
    """Shards of two and three pages: one that is done does not begin again while another is under way."""
    pages = {Shard(1): 2, Shard(2): 3}
    looks: list[Shard] = []
    forgotten: list[int] = []

    class Pages(ClosedMessages):
        def held_shards(self) -> Sequence[Shard]:
            return list(pages)

        def old(self, shard: Shard, after: int, before_ms: int, limit: int, rows: int) -> Any:
            looks.append(shard)
            page = after + 1
            return [], None if page == pages[shard] else MessageNumber(page)

        def forget(self, before_ms: int, limit: int) -> int:
            forgotten.append(len(looks))
            return 0

    duty = Retention([Pages(kept.store.database, kept.store.leases)], None, kept.keep_ms, 100, kept.slept.append)
    assert [duty.run_once() for _ in range(6)] == [True, True, False] * 2
    assert looks == [1, 2, 1, 2, 2] * 2
    assert forgotten == [0, 5]


def test_millions_that_stay_are_passed_in_pages(kept: Kept) -> None:
    """Failed messages stay for ever, in front of all that may go."""
    failed = [_failed(kept.store) for _ in range(5)]
    gone = [_acked(kept.store) for _ in range(2)]
    kept.store.clock.advance(2 * DAY_MS / 1000)
    seen = []
    at: MessageNumber | None = NO_MESSAGE
    while at is not None:
        numbers, at = kept.work.old(kept.store.shard, at, kept.store.clock(), limit=10, rows=2)
        seen.append(numbers)
    assert seen == [[], [], [gone[0]], [gone[1]]]
    kept.sweep(by_age=True)
    assert kept.left() == failed


def test_a_manifest_that_another_one_replaced_is_read_again(kept: Kept) -> None:
    """As when the archive is brought back from a backup, and the next run gets the number of one that is gone."""
    numbers = [_acked(kept.store) for _ in range(3)]
    kept.archive("r1", numbers[:1])
    lists = ArchiveFolder(str(kept.folder), center=_CENTER)
    assert [sum(each.counts.values()) for each in lists.removals()] == [1]
    (path,) = (kept.folder / "manifests").iterdir()
    path.unlink()
    shutil.rmtree(kept.folder / "removal" / "r1")
    kept.archive("r1", numbers)
    assert [sum(each.counts.values()) for each in lists.removals()] == [3]
    assert len(lists.numbers("r1", kept.store.shard)) == 3


def test_the_archive_of_another_center_removes_nothing(kept: Kept) -> None:
    kept.archive("r1", [_acked(kept.store)])
    (path,) = (kept.folder / "manifests").iterdir()
    path.write_text(replace(Manifest.from_json(path.read_text(), path.name), center="another").to_json())
    kept.store.clock.advance(DAY_MS / 1000 + 1)
    kept.sweep()
    assert len(kept.left()) == 1
    with pytest.raises(ListUnreadable, match=r"is of another center \(another\), this is cccccccc"):
        ArchiveFolder(str(kept.folder), center=_CENTER).removals()
