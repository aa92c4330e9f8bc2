"""The inbox keeps the order of effects: what was overtaken has none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import sessionmaker

import tmc_client as tmc
from tests.support.messages import a_message, in_line
from tmc_client.tables import inbox, inbox_order


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[sa.Engine]:
    engine = sa.create_engine(f"sqlite:///{tmp_path}/consumer.db")
    tmc.create_tables(engine)
    yield engine
    engine.dispose()


def _handle(engine: sa.Engine, message: tmc.Message, fail: bool = False) -> bool:
    """Returns: whether its effect happened now."""
    with tmc.SqlInbox(sessionmaker(engine)).once(message) as session:
        if fail:
            raise RuntimeError("the handler failed")
        return session is not None


def _sequences(engine: sa.Engine) -> dict[str, int]:
    with engine.connect() as connection:
        return {row.order_key: row.sequence for row in connection.execute(sa.select(inbox_order))}


def _noted(engine: sa.Engine) -> set[str]:
    with engine.connect() as connection:
        return set(connection.execute(sa.select(inbox.c.message_id)).scalars())


def test_messages_of_a_key_have_their_effects_in_turn(engine: sa.Engine) -> None:
    assert [_handle(engine, in_line(n, sequence=n)) for n in (1, 2, 5)] == [True, True, True]
    assert _sequences(engine) == {"a": 5}


def test_a_connection_that_all_threads_share_is_left_alone() -> None:
    """A rollback would end the transaction of another thread."""
    engine = sa.create_engine("sqlite://", poolclass=sa.StaticPool, connect_args={"check_same_thread": False})
    tmc.create_tables(engine)
    with engine.begin() as connection:
        connection.execute(inbox.insert(), {"subscriber": "s", "message_id": "1", "received_ms": 1})
        tmc.SqlInbox(sessionmaker(engine)).check()
    assert _noted(engine) == {"1"}
    engine.dispose()


def test_a_copy_of_the_last_message_is_a_duplicate(engine: sa.Engine) -> None:
    assert _handle(engine, in_line(1, sequence=1))
    assert not _handle(engine, in_line(1, sequence=1, attempt=2))


def test_what_was_overtaken_has_no_effect(engine: sa.Engine) -> None:
    """A copy of a message that was skipped is still in a queue: its ack would say that the effect happened."""
    _handle(engine, in_line(2, sequence=2))
    with pytest.raises(tmc.OutOfOrder, match="order key 'a'"):
        _handle(engine, in_line(1, sequence=1))
    assert _noted(engine) == {in_line(2, sequence=2).id}
    assert _sequences(engine) == {"a": 2}


def test_what_is_delivered_out_of_order_has_its_effect(engine: sa.Engine) -> None:
    _handle(engine, in_line(2, sequence=2))
    assert _handle(engine, in_line(1, sequence=None))
    assert _sequences(engine) == {"a": 2}


def test_lines_are_kept_by_subscriber_topic_and_key(engine: sa.Engine) -> None:
    _handle(engine, in_line(1, sequence=9))
    others = (
        in_line(2, sequence=1, order_key="b"),
        in_line(3, sequence=1, topic="other"),
        in_line(4, sequence=1, subscriber="stock.default"),
    )
    assert all(_handle(engine, message) for message in others)


def test_a_failed_handler_takes_no_turn(engine: sa.Engine) -> None:
    with pytest.raises(RuntimeError):
        _handle(engine, in_line(2, sequence=2), fail=True)
    assert _sequences(engine) == {}
    assert _handle(engine, in_line(1, sequence=1))


def test_the_last_message_of_a_key_is_known_when_its_note_is_gone(engine: sa.Engine) -> None:
    _handle(engine, in_line(1, sequence=1))
    with engine.begin() as connection:
        connection.execute(inbox.delete())
    assert not _handle(engine, in_line(1, sequence=1, attempt=2))
    assert _noted(engine) == set()


def test_keys_that_differ_in_case_are_different_keys(engine: sa.Engine) -> None:
    assert _handle(engine, in_line(1, sequence=9, order_key="alice"))
    assert _handle(engine, in_line(2, sequence=1, order_key="Alice"))


def test_messages_without_an_order_key_need_no_line(engine: sa.Engine) -> None:
    assert _handle(engine, a_message(1))
    assert _sequences(engine) == {}


def test_an_older_database_is_told_what_it_lacks(engine: sa.Engine) -> None:
    inbox_order.drop(engine)
    assert _handle(engine, a_message(1))
    with pytest.raises(tmc.InvalidRequest, match=r"tmc\.create_tables\(engine\)"):
        _handle(engine, in_line(2, sequence=1))


def test_a_message_knows_its_place() -> None:
    assert (in_line(1, sequence=7).order_key, in_line(1, sequence=7).sequence) == ("a", 7)
    assert (a_message().order_key, a_message().sequence) == ("", None)
    assert a_message(headers={"tmc-sequence": "x"}).sequence is None
