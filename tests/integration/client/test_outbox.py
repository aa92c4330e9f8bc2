"""The outbox on SQLite, MariaDB and PostgreSQL: what commits is sent, what does not is not, by whom and when."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Session

import tmc_client as tmc
from tests.support.clock import ManualClock
from tmc_client import outbox as package
from tmc_client.outbox import direct
from tmc_client.outbox.entries import Draft, Entry, Failure, State, Trouble
from tmc_client.outbox.relay import IDLE_S, LEASE, MOST_FAILURES, REST_S, Limits, Relay
from tmc_client.outbox.store import OutboxStore
from tmc_client.tables import metadata
from tmc_storm.eventually import eventually
from tmc_storm.services.postgresql import PostgreSQL

TOPIC = "shop.paid"
REFUSED = Failure(trouble=Trouble.REFUSED, error="not that one")
LATER = Failure(trouble=Trouble.LATER, error="in progress")
AWAY = Failure(trouble=Trouble.AWAY, error="nobody there")


class Receiver:
    """A target that remembers. says: what it answers, by key; None: it takes the message."""

    delays = False

    def __init__(self) -> None:
        self.says: dict[str, Failure | None] = {}
        self.got: list[str] = []
        self.asked: list[str] = []

    def send(self, entries: Sequence[Entry]) -> Sequence[Failure | None]:
        answers = [self.says.get(entry.key) for entry in entries]
        self.asked += [entry.key for entry in entries]
        self.got += [entry.key for entry, answer in zip(entries, answers, strict=True) if answer is None]
        return answers

    def close(self) -> None: ...


@pytest.fixture(
    params=[
        "sqlite",
        pytest.param("mariadb", marks=pytest.mark.mariadb),
        pytest.param("postgresql", marks=pytest.mark.postgresql),
    ]
)
def engine(request: pytest.FixtureRequest, tmp_path) -> Iterator[sa.Engine]:
    if request.param == "sqlite":
        made = sa.create_engine(f"sqlite:///{tmp_path}/shop.db")
    else:
        made = sa.create_engine(request.getfixturevalue(request.param).create("tmc_outbox"))
        metadata.drop_all(made)
    tmc.create_tables(made)
    yield made
    made.dispose()


@pytest.fixture
def receiver() -> Receiver:
    return Receiver()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    made = ManualClock()
    monkeypatch.setattr(package, "now_ms", made)
    return made


@pytest.fixture
def store(engine: sa.Engine, clock: ManualClock) -> OutboxStore:
    return OutboxStore(engine, clock)


def relay_of(store: OutboxStore, receiver: Receiver, **limits: Any) -> Relay:
    return Relay(store, receiver, Limits(**limits))


def add(engine: sa.Engine, receiver: Receiver, *keys: str, order_key: str = "") -> None:
    """In one transaction each, for relays alone."""
    box = tmc.Outbox(engine, receiver, direct=False)
    for key in keys:
        with Session(engine) as session, session.begin():
            box.add(session, TOPIC, {"n": 1}, key=key, order_key=order_key)
    box.close()


def test_a_relay_survives_connections_that_cannot_be_made(
    store: OutboxStore, engine: sa.Engine, receiver: Receiver, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cloud's token that cannot be fetched: what makes connections for the engine raises errors of its own."""
    add(engine, receiver, "a")
    relay = relay_of(store, receiver)

    def no_token(*_: object) -> None:
        raise ConnectionError("no token")

    with monkeypatch.context() as away:
        away.setattr(store, "hold", no_token)
        away.setattr(store, "let_go", no_token)
        pauses = [relay.run_once() for _ in range(MOST_FAILURES)]
    assert pauses[-1] == REST_S
    clock.advance(10)
    relay.run_once()
    assert relay.counts.sent == 1


def test_headers_that_a_column_could_cut_off_are_refused(engine: sa.Engine, receiver: Receiver) -> None:
    with tmc.Outbox(engine, receiver) as box, Session(engine) as session:
        with pytest.raises(tmc.InvalidRequest, match="8192 bytes in all"):
            box.add(session, TOPIC, {}, key="a", headers={"trail": "x" * 9_000})


class TestWhatCommitsIsSent:
    def test_directly(self, engine: sa.Engine, receiver: Receiver) -> None:
        with tmc.Outbox(engine, receiver) as box, Session(engine) as session:
            box.add(session, TOPIC, {"n": 1}, key="a")
            box.add(session, TOPIC, {"n": 2}, key="b")
            assert receiver.got == []
            session.commit()
            assert box.flush()
            assert receiver.got == ["a", "b"]
            standing = box.store.standing()
        assert (standing.sent, standing.sent_directly, standing.unsent, standing.direct_share) == (2, 2, 0, 1.0)

    def test_what_waits_is_sent_without_a_pause(
        self, engine: sa.Engine, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Pages form for a moment only while there is room in them."""
        monkeypatch.setattr(direct, "_PAGE_S", 3600.0)
        count = 3 * direct.PAGE
        with tmc.Outbox(engine, receiver) as box, Session(engine) as session:
            for number in range(count):
                box.add(session, TOPIC, {}, key=f"k{number}")
            session.commit()
            assert box.flush(timedelta(seconds=60))
        assert len(receiver.got) == count

    def test_not_what_was_rolled_back(self, engine: sa.Engine, receiver: Receiver) -> None:
        with tmc.Outbox(engine, receiver) as box, Session(engine) as session:
            box.add(session, TOPIC, {}, key="a")
            session.rollback()
            box.add(session, TOPIC, {}, key="b")
            with pytest.raises(KeyError), session.begin_nested():
                box.add(session, TOPIC, {}, key="c")
                raise KeyError
            with session.begin_nested():
                box.add(session, TOPIC, {}, key="d")
            assert receiver.got == []
            session.commit()
            session.commit()
            assert box.flush()
        assert receiver.got == ["b", "d"]

    def test_not_what_the_session_takes_for_committed(self, engine: sa.Engine, receiver: Receiver) -> None:
        """Its commit was that of a savepoint, or the database rolled back without a word."""
        with tmc.Outbox(engine, receiver) as box:
            with engine.connect() as connection, connection.begin() as outer:
                if engine.dialect.name == "sqlite":
                    connection.exec_driver_sql("BEGIN")  # or its driver commits with the first savepoint
                with Session(connection, join_transaction_mode="create_savepoint") as session:
                    box.add(session, TOPIC, {}, key="a")
                    session.commit()
                outer.rollback()
            with Session(engine) as session:
                session.connection()
                savepoint = session.connection().begin_nested()
                box.add(session, TOPIC, {}, key="b")
                session.flush()
                savepoint.rollback()
                session.commit()
            with Session(engine) as session:
                box.add(session, TOPIC, {}, key="c")
                session.flush()
                with suppress(sa.exc.SQLAlchemyError):
                    session.execute(sa.text("SELECT * FROM there_is_no_such_table"))
                session.commit()
            assert box.flush()
        assert receiver.got == ([] if engine.dialect.name == "postgresql" else ["c"])

    def test_once_when_it_got_the_id_of_one_that_was_rolled_back(
        self, engine: sa.Engine, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """SQLite gives ids back: the direct send of the first one finds the second, whose own send is on its way."""
        asked, go, asked_again = threading.Event(), threading.Event(), threading.Event()

        with tmc.Outbox(engine, receiver) as box:
            find, mark = box.store.by_drafts, box.store.sent

            def find_late(drafts: Sequence[Draft]) -> list[Entry]:
                is_first = not asked.is_set()
                asked.set()
                go.wait()
                found = find(drafts)
                if not is_first:
                    asked_again.set()
                return found

            def mark_late(ids: Sequence[int], *, direct: bool) -> None:
                asked_again.wait()  # what is marked as sent is not found again
                mark(ids, direct=direct)

            monkeypatch.setattr(box.store, "by_drafts", find_late)
            monkeypatch.setattr(box.store, "sent", mark_late)
            with Session(engine) as session:
                savepoint = session.connection().begin_nested()
                box.add(session, TOPIC, {}, key="rolled back")
                session.flush()
                savepoint.rollback()
                session.commit()
            asked.wait()
            with Session(engine) as session:
                box.add(session, TOPIC, {}, key="committed")
                session.commit()
            go.set()
            assert box.flush()
        assert receiver.got == ["committed"]

    def test_of_an_async_session(self, engine: sa.Engine, receiver: Receiver) -> None:
        drivers = {"sqlite": "aiosqlite", "mariadb": "asyncmy", "postgresql": "asyncpg"}
        kind = engine.dialect.name

        async def story(box: Any) -> None:
            business = create_async_engine(engine.url.set(drivername=f"{kind}+{drivers[kind]}"))
            async with AsyncSession(business) as session:
                box.add(session, TOPIC, {}, key="a")
                await session.commit()
                box.add(session, TOPIC, {}, key="b")
                await session.rollback()
            await business.dispose()

        with tmc.Outbox(engine, receiver) as box:
            asyncio.run(story(box))
            assert box.flush()
        assert receiver.got == ["a"]

    def test_by_the_relay_what_was_not_sent_directly(self, engine: sa.Engine, receiver: Receiver) -> None:
        receiver.says = {"a": AWAY}
        box = tmc.Outbox(engine, receiver, untouched=timedelta(0))
        with Session(engine) as session, session.begin():
            box.add(session, TOPIC, {}, key="a")
        assert box.flush()
        assert (receiver.asked, receiver.got) == (["a"], [])
        receiver.says = {}
        with box:
            eventually(lambda: box.store.standing().sent)
            assert box.store.standing().sent_directly == 0

    def test_although_a_long_transaction_is_open(self, engine: sa.Engine, receiver: Receiver) -> None:
        """On MariaDB, marking what was sent waited for every row that was not committed."""
        box = tmc.Outbox(engine, receiver, direct=False, untouched=timedelta(0))
        for number in range(20):
            with Session(engine) as session, session.begin():
                box.add(session, TOPIC, {}, key=f"k{number}")
        with Session(engine) as long:
            if engine.dialect.name != "sqlite":  # which has one writer: nobody else commits meanwhile
                box.add(long, TOPIC, {}, key="long")
                long.flush()
            with box:
                eventually(lambda: box.store.standing().sent == 20, seconds=20)
        assert len(receiver.got) == 20

    def test_one_after_another_with_an_order_key(self, engine: sa.Engine, receiver: Receiver) -> None:
        with tmc.Outbox(engine, receiver) as box, Session(engine) as session:
            for number in range(50):
                box.add(session, TOPIC, {}, key=f"k{number}", order_key="one")
                session.commit()
            eventually(lambda: len(receiver.got) == 50)
        assert receiver.got == [f"k{number}" for number in range(50)]

    def test_not_directly_with_an_order_key(self, engine: sa.Engine, receiver: Receiver) -> None:
        box = tmc.Outbox(engine, receiver)
        with Session(engine) as session, session.begin():
            box.add(session, TOPIC, {}, key="a", order_key="one")
            box.add(session, TOPIC, {}, key="b")
        assert box.flush()
        box.close()
        assert receiver.got == ["b"]


@pytest.mark.postgresql
class TestNotify:
    """The relay works in one process, the commit happens in another: a second Outbox here."""

    @pytest.fixture
    def engine(self, postgresql: PostgreSQL) -> Iterator[sa.Engine]:
        made = sa.create_engine(postgresql.create("tmc_outbox"))
        metadata.drop_all(made)
        tmc.create_tables(made)
        yield made
        made.dispose()

    @pytest.fixture
    def working(self, engine: sa.Engine, receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> Iterator[tmc.Outbox]:
        """It would look again in ten minutes."""
        monkeypatch.setattr("tmc_client.outbox.relay.IDLE_S", 600.0)
        with tmc.Outbox(engine, receiver) as box:
            add(engine, receiver, "first", order_key="7")
            eventually(lambda: receiver.got == ["first"])
            yield box

    def test_a_message_with_an_order_key_wakes_the_relay_elsewhere(
        self, engine: sa.Engine, receiver: Receiver, working: tmc.Outbox
    ) -> None:
        for key in ("a", "b"):
            add(engine, receiver, key, order_key="7")
            eventually(lambda: receiver.got[-1:] == [key])  # noqa: B023 - called at once

    def test_a_listener_whose_connection_is_killed_listens_again(
        self, engine: sa.Engine, receiver: Receiver, working: tmc.Outbox, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tmc_client.outbox.bell._AGAIN_S", 0.01)
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            killed = connection.exec_driver_sql(
                "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE query LIKE 'LISTEN%%'"
            ).scalar_one()
            listening = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'LISTEN%%'"
            assert killed == 1
            eventually(lambda: connection.exec_driver_sql(listening).scalar_one() == 1)
        add(engine, receiver, "after", order_key="7")
        eventually(lambda: receiver.got == ["first", "after"])

    def test_nothing_is_notified_for_messages_that_are_sent_directly(
        self, engine: sa.Engine, receiver: Receiver, working: tmc.Outbox
    ) -> None:
        with engine.connect() as listening:
            raw: Any = listening.connection.driver_connection
            raw.rollback()
            raw.autocommit = True
            raw.execute("LISTEN tmc_outbox")
            with tmc.Outbox(engine, receiver, direct=True) as box, Session(engine) as session, session.begin():
                box.add(session, TOPIC, {"n": 1}, key="direct")
            eventually(lambda: "direct" in receiver.got)
            add(engine, receiver, "ordered", order_key="7")
            assert len(list(raw.notifies(timeout=20, stop_after=1))) == 1
            assert list(raw.notifies(timeout=0)) == []
            raw.autocommit = False


class TestTheRelay:
    def test_it_leaves_a_message_to_its_direct_send_for_three_seconds(
        self, engine: sa.Engine, store: OutboxStore, receiver: Receiver, clock: ManualClock
    ) -> None:
        add(engine, receiver, "a")
        relay = relay_of(store, receiver)
        clock.advance(2.999)
        assert (relay.run_once(), receiver.got) == (IDLE_S, [])
        clock.advance(0.001)
        assert (relay.run_once(), receiver.got) == (0.0, ["a"])
        assert relay.run_once() == IDLE_S

    def test_refusals_double_the_pause_until_it_is_given_up(
        self, engine: sa.Engine, store: OutboxStore, receiver: Receiver, clock: ManualClock
    ) -> None:
        add(engine, receiver, "a", "b")
        receiver.says = {"a": REFUSED}
        relay, began, tries = relay_of(store, receiver, max_tries=7), clock(), []
        for _ in range(200):
            before = len(receiver.asked)
            relay.run_once()
            tries += [clock() - began] * (receiver.asked[before:].count("a"))
            clock.advance(1)
        assert tries == [3_000, 6_000, 12_000, 24_000, 48_000, 96_000, 156_000]
        assert receiver.got == ["b"]
        (kept,) = store.by_key("a")
        assert (kept.state, kept.tries, kept.error) == (State.FAILED, 7, "not that one")
        assert (relay.counts.given_up, store.standing().failed_share) == (1, 0.5)
        receiver.says = {}
        assert store.retry([kept.id]) == 1
        relay.run_once()
        assert receiver.got == ["b", "a"]

    def test_what_is_not_taken_yet_is_tried_until_it_is_too_old(
        self, engine: sa.Engine, store: OutboxStore, receiver: Receiver, clock: ManualClock
    ) -> None:
        add(engine, receiver, "a")
        receiver.says = {"a": LATER}
        relay = relay_of(store, receiver, max_tries=2, max_age=timedelta(minutes=5))
        for _ in range(299):
            relay.run_once()
            clock.advance(1)
        assert store.by_key("a")[0].state is State.UNSENT
        clock.advance(60)
        relay.run_once()
        assert store.by_key("a")[0].state is State.FAILED

    def test_after_failures_in_a_row_it_rests_and_another_takes_over(
        self, engine: sa.Engine, store: OutboxStore, receiver: Receiver, clock: ManualClock
    ) -> None:
        add(engine, receiver, "a")
        clock.advance(3)
        receiver.says = {"a": AWAY}
        first, second = relay_of(store, receiver), relay_of(store, receiver)
        pauses = [first.run_once() for _ in range(MOST_FAILURES)]
        assert pauses == [IDLE_S] * (MOST_FAILURES - 1) + [REST_S]
        assert first.counts.failed_passes == MOST_FAILURES
        receiver.says = {}
        assert (second.run_once(), receiver.got) == (0.0, ["a"])
        assert first.run_once() == IDLE_S  # it competes again, and finds the other one at work

    def test_a_lease_of_a_clock_that_was_set_back_holds_up_nobody(self, store: OutboxStore, clock: ManualClock) -> None:
        clock.advance(3600)
        assert store.hold("killed", 10_000) is not None
        clock.advance(-3600)
        assert store.hold("next", 10_000) == clock()
        assert store.hold("third", 10_000) is None

    def test_one_works_until_its_lease_ends(
        self, engine: sa.Engine, store: OutboxStore, receiver: Receiver, clock: ManualClock
    ) -> None:
        first, second = relay_of(store, receiver), relay_of(store, receiver)
        assert first.run_once() == IDLE_S
        add(engine, receiver, "a")
        clock.advance(LEASE.total_seconds())
        assert (second.run_once(), receiver.got) == (IDLE_S, [])
        clock.advance(0.001)
        assert (second.run_once(), receiver.got) == (0.0, ["a"])

    def test_a_message_of_one_line_that_is_not_taken_holds_its_followers_only(
        self, engine: sa.Engine, store: OutboxStore, receiver: Receiver, clock: ManualClock
    ) -> None:
        add(engine, receiver, "a1", "a2", "a3", order_key="a")
        add(engine, receiver, "b1", "b2", order_key="b")
        add(engine, receiver, "c")
        clock.advance(3)
        receiver.says = {"a1": REFUSED}
        relay = relay_of(store, receiver, max_tries=2)
        relay.run_once()
        assert sorted(receiver.got) == ["b1", "b2", "c"]
        assert not {"a2", "a3"} & set(receiver.asked)
        for _ in range(10):
            clock.advance(1)
            relay.run_once()
        (given_up,) = store.given_up(10)
        assert (given_up.key, given_up.state) == ("a1", State.FAILED)
        clock.advance(120)
        relay.run_once()
        assert not {"a2", "a3"} & set(receiver.asked)  # they wait for a decision
        assert store.discard([given_up.id]) == 1
        clock.advance(120)
        relay.run_once()
        assert receiver.got[3:] == ["a2", "a3"]

    def test_the_first_of_a_line_is_sent_when_those_behind_it_fill_the_page(
        self, engine: sa.Engine, store: OutboxStore, receiver: Receiver, clock: ManualClock
    ) -> None:
        add(engine, receiver, "k000", order_key="one")
        receiver.says = {"k000": LATER}
        relay = relay_of(store, receiver)
        relay.run_once()
        assert receiver.got == []
        clock.advance(1)
        add(
            engine, receiver, *(f"k{number:03}" for number in range(1, 600)), order_key="one"
        )  # due before the first one
        receiver.says = {}
        clock.advance(60)
        while relay.run_once() == 0.0:
            pass
        assert receiver.got == [f"k{number:03}" for number in range(600)]

    def test_followers_of_a_message_that_was_given_up_delay_nobody(
        self, engine: sa.Engine, store: OutboxStore, receiver: Receiver, clock: ManualClock
    ) -> None:
        add(engine, receiver, *(f"a{number}" for number in range(1_200)), order_key="a")
        receiver.says = {"a0": REFUSED}
        relay = relay_of(store, receiver, max_tries=1)
        relay.run_once()
        add(engine, receiver, "fresh", order_key="b")
        for _ in range(8):
            relay.run_once()
        assert receiver.got == ["fresh"]
        assert store.due(clock(), 10) == []

    def test_a_target_that_breaks_on_one_message_gets_the_others(
        self, engine: sa.Engine, store: OutboxStore, receiver: Receiver, clock: ManualClock
    ) -> None:
        class Fragile(Receiver):
            def send(self, entries: Sequence[Entry]) -> Sequence[Failure | None]:
                if "poison" in [entry.key for entry in entries]:
                    raise LookupError("no route")
                return super().send(entries)

        fragile = Fragile()
        add(engine, fragile, "a", "poison", "b")
        clock.advance(3)
        assert relay_of(store, fragile).run_once() == 0.0
        assert fragile.got == ["a", "b"]
        assert store.by_key("poison")[0].error == "The target broke on it: LookupError('no route')"

    @pytest.mark.parametrize(
        "damaged", ['{"trail": "xxx', "[1]", '{"number": 1}'], ids=["cut off", "no names", "no texts"]
    )
    def test_a_row_that_cannot_be_read_fails_alone(
        self, engine: sa.Engine, store: OutboxStore, receiver: Receiver, clock: ManualClock, damaged: str
    ) -> None:
        add(engine, receiver, "a", "damaged", "b")
        with engine.begin() as connection:
            change = sa.text("UPDATE tmc_outbox SET headers = :damaged WHERE message_key = 'damaged'")
            connection.execute(change, {"damaged": damaged})
        clock.advance(3)
        assert relay_of(store, receiver).run_once() == 0.0
        assert receiver.got == ["a", "b"]
        (kept,) = store.given_up(10)
        assert (kept.key, kept.error[:26]) == ("damaged", "its headers in the outbox ")

    def test_it_lives_on_without_tables_and_a_wake_does_not_end_its_rest(
        self, engine: sa.Engine, store: OutboxStore, receiver: Receiver
    ) -> None:
        metadata.drop_all(engine)
        relay = relay_of(store, receiver)
        assert [relay.run_once() for _ in range(MOST_FAILURES)][-1] == REST_S
        tmc.create_tables(engine)
        relay.wake()
        assert relay.run_once() == IDLE_S
        assert relay.counts.failed_passes == MOST_FAILURES

    def test_one_refused_message_among_others_that_are_away_is_no_reason_to_rest(
        self, engine: sa.Engine, store: OutboxStore, receiver: Receiver, clock: ManualClock
    ) -> None:
        add(engine, receiver, "a", "b")
        clock.advance(3)
        receiver.says = {"a": AWAY}
        relay = relay_of(store, receiver)
        assert relay.run_once() == 0.0
        assert receiver.got == ["b"]
        assert relay.run_once() == IDLE_S  # "a" comes later
        assert relay.counts.failed_passes == 0


def test_cleaning_deletes_what_was_sent_and_nothing_else(
    engine: sa.Engine, store: OutboxStore, receiver: Receiver, clock: ManualClock
) -> None:
    add(engine, receiver, "old", "refused", "late")
    receiver.says = {"refused": REFUSED, "late": LATER}
    clock.advance(3)
    relay_of(store, receiver, max_tries=1).run_once()
    clock.advance(8 * 86_400)
    add(engine, receiver, "new")
    clock.advance(3)
    relay_of(store, receiver, max_age=timedelta(days=30)).run_once()
    assert store.clean(timedelta(days=7)) == 1
    assert [key for key in ("old", "refused", "late", "new") if store.by_key(key)] == ["refused", "late", "new"]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"key": ""}, "key must be 1 to 128 characters"),
        ({"key": "k", "order_key": "k" * 129}, "order_key must be 1 to 128 characters"),
        ({"key": 7}, "is no str"),
        ({"key": "k", "delay": timedelta(seconds=1)}, "knows no delays"),
    ],
)
def test_what_could_never_be_sent_is_refused_at_once(fields: dict[str, Any], sentence: str) -> None:
    box = tmc.Outbox(sa.create_engine("sqlite://"), Receiver(), direct=False)
    with pytest.raises(tmc.InvalidRequest, match=sentence):
        box.add(Session(), TOPIC, {}, **fields)


def test_a_session_of_another_database_is_refused(tmp_path) -> None:
    here, there = (sa.create_engine(f"sqlite:///{tmp_path}/{name}.db") for name in ("here", "there"))
    for each in (here, there):
        tmc.create_tables(each)
    box = tmc.Outbox(here, Receiver())
    with Session(there) as session:
        box.add(session, TOPIC, {}, key="k")
        with pytest.raises(tmc.InvalidRequest, match=r"of another database, or schema, than the outbox"):
            session.commit()
    with pytest.raises(tmc.InvalidRequest, match="no engine for our tables"):
        box.add(Session(binds={Mapped: here}), TOPIC, {}, key="k")
    box.close()
    with pytest.raises(tmc.InvalidRequest, match="was closed"):
        box.start()


class Mapped(DeclarativeBase):
    """A base class of some program."""


def test_mistakes_get_one_sentence(tmp_path) -> None:
    wrong_engine: Any = create_async_engine("sqlite+aiosqlite://")
    with pytest.raises(tmc.InvalidRequest, match="takes a blocking engine"):
        tmc.Outbox(wrong_engine, Receiver())
    blank = sa.create_engine(f"sqlite:///{tmp_path}/blank.db")
    with pytest.raises(tmc.InvalidRequest, match="not Connection"), blank.connect() as connection:
        wrong_session: Any = connection
        tmc.Outbox(blank, Receiver()).add(wrong_session, TOPIC, {}, key="k")
    with pytest.raises(tmc.InvalidRequest, match=r"no table tmc_outbox .*tmc.create_tables"):
        OutboxStore(blank).hold("me", 1)
    blank.dispose()
