"""Poolers and pools of other people: what we leave on their connections, and how many we take."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

import tmc_client as tmc
from tests.support.pgbouncer import PgBouncer
from tests.support.producing import FakeProducer, FakeTarget
from tmc_client.checks.fence import LedgerAnswers
from tmc_client.local.choosing import local_of
from tmc_client.local.marker import marker
from tmc_client.producing.ledger import ledger_id_of
from tmc_client.producing.transaction import Transaction
from tmc_client.tables import ledger
from tmc_storm.eventually import eventually
from tmc_storm.services.postgresql import PostgreSQL

UNPREPARED: dict[str, Any] = {"prepare_threshold": None}
STATE = sa.text(
    "SELECT current_setting('lock_timeout'), current_setting('transaction_isolation'), "
    "(SELECT count(*) FROM pg_listening_channels())"
)


@pytest.fixture
def direct(postgresql: PostgreSQL) -> Iterator[sa.Engine]:
    engine = sa.create_engine(postgresql.create("tmc_pooled"))
    ledger.metadata.drop_all(engine)
    tmc.create_tables(engine)
    yield engine
    engine.dispose()


@pytest.fixture
def pooled(postgresql: PostgreSQL, direct: sa.Engine) -> Iterator[sa.Engine]:
    """Through one connection of PgBouncer, which everybody gets in turn."""
    bouncer = PgBouncer(postgresql.port, "transaction", size=1)
    engine = sa.create_engine(bouncer.url("tmc_pooled"), connect_args=UNPREPARED)
    yield engine
    engine.dispose()
    bouncer.stop()


def _question(engine: sa.Engine, message_id: str) -> tmc.Question:
    with engine.begin() as connection:
        ledger_id = ledger_id_of(connection.execute)
    now = time.time_ns() // 1_000_000
    return tmc.Question(message_id=message_id, topic="t", key="k", ledger_id=ledger_id, created_ms=now)


def _state(engine: sa.Engine) -> tuple[str, str, int]:
    with engine.begin() as connection:
        timeout, isolation, channels = connection.execute(STATE).one()
        return timeout, isolation, channels


def test_a_check_leaves_nothing_on_the_connection(pooled: sa.Engine) -> None:
    before, question = _state(pooled), _question(pooled, "1-1-05-1")
    with closing(LedgerAnswers(pooled)) as answers:
        assert [answer.verdict for answer in answers.answer([question], fences=True)] == [tmc.Verdict.ROLLBACK]
        assert _state(pooled) == before == ("0", "read committed", 0)


def test_a_fence_through_a_pooler_does_not_wait_for_a_transaction_that_is_open(
    direct: sa.Engine, pooled: sa.Engine
) -> None:
    question = _question(pooled, "1-1-05-2")
    row = {
        "message_id": "1-1-05-2",
        "state": 1,
        "topic": "t",
        "message_key": "k",
        "attempt_id": b"0" * 16,
        "created_ms": 1,
    }
    with closing(LedgerAnswers(pooled)) as answers:
        with direct.begin() as connection:
            connection.execute(ledger.insert(), row)
            (answer,) = answers.answer([question], fences=True)
            assert (answer.verdict, answer.detail[:9]) == (tmc.Verdict.UNKNOWN, "IN_FLIGHT")
        (answer,) = answers.answer([question], fences=True)
        assert answer.verdict is tmc.Verdict.COMMIT


def test_a_relay_behind_a_pooler_does_not_listen(
    direct: sa.Engine, pooled: sa.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tmc_client.outbox")
    target = FakeTarget()
    with tmc.Outbox(pooled, target, direct=False, untouched=timedelta(0)) as box:
        eventually(lambda: "behind a pooler" in caplog.text)
        with Session(pooled) as session:
            box.add(session, "t", {}, key="a")
            session.commit()
        eventually(lambda: len(target.taken) == 1)
        assert _state(pooled)[2] == 0


def test_an_outbox_sees_that_its_sessions_are_in_another_schema(
    postgresql: PostgreSQL, caplog: pytest.LogCaptureFixture
) -> None:
    """What a transaction over its own pool says is believed until a connection is free."""
    engine = sa.create_engine(postgresql.create("tmc_search_path"))
    tmc.create_tables(engine)
    with engine.begin() as connection:
        ledger_id_of(connection.execute)
        connection.exec_driver_sql("CREATE SCHEMA IF NOT EXISTS tenant")
    tenant = engine.execution_options(schema_translate_map={None: "tenant"})
    ledger.metadata.create_all(tenant)
    with tenant.begin() as connection:
        ledger_id_of(connection.execute)
    path = sa.text("SET LOCAL search_path TO tenant")
    with closing(tmc.Outbox(engine, FakeTarget())) as box:
        with Session(engine) as session:
            session.execute(path)
            box.add(session, "t", {}, key="a")
            session.commit()
        eventually(lambda: "in another schema" in caplog.text)
        with Session(engine) as session:
            session.execute(path)
            box.add(session, "t", {}, key="b")
            with pytest.raises(tmc.InvalidRequest, match="another database, or schema"):
                session.commit()
    engine.dispose()


def test_a_search_path_is_judged_in_each_transaction_of_a_connection(postgresql: PostgreSQL) -> None:
    """One connection of the driver serves one tenant after another, and one session too."""
    engine = sa.create_engine(postgresql.create("tmc_search_path_again"), pool_size=1, max_overflow=0)
    tmc.create_tables(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE SCHEMA IF NOT EXISTS tenant")
    tmc.create_tables(engine.execution_options(schema_translate_map={None: "tenant"}))
    path = sa.text("SET LOCAL search_path TO tenant")
    with closing(tmc.Outbox(engine, FakeTarget())) as box, Session(engine) as session:
        for key in ("a", "b"):
            box.add(session, "t", {}, key=key)
            session.commit()
            session.execute(path)
            box.add(session, "t", {}, key="other")
            with pytest.raises(tmc.InvalidRequest, match="another database, or schema"):
                session.commit()
            session.rollback()
            with box.transaction(session) as tx:
                tx.send("t", {}, key=f"block-{key}")
            with (
                pytest.raises(tmc.InvalidRequest, match="another database, or schema"),
                box.transaction(session) as tx,
            ):
                session.execute(path)
                tx.send("t", {}, key="other")
    engine.dispose()


def test_what_went_wrong_is_read_over_the_connection_that_is_held(postgresql: PostgreSQL) -> None:
    """The only one of its pool: a missing table, and a marker that a check wrote between prepare and commit."""
    engine = sa.create_engine(postgresql.create("tmc_held"), pool_size=1, max_overflow=0, pool_timeout=3)
    ledger.metadata.drop_all(engine)
    producer = FakeProducer()
    with engine.connect() as connection:
        with (
            pytest.raises(tmc.InvalidRequest, match="There is no table tmc_ledger"),
            _block(producer, connection) as tx,
        ):
            tx.send("t", {}, key="a")
    tmc.create_tables(engine)
    beside = sa.create_engine(engine.url, poolclass=sa.NullPool)

    def fence(message_id: str) -> None:
        with beside.begin() as connection:
            connection.execute(ledger.insert(), marker(message_id, "t", "b", b"0" * 16))

    producer.before_prepared = fence
    with engine.connect() as connection, pytest.raises(tmc.Fenced), _block(producer, connection) as tx:
        tx.send("t", {}, key="b")
    engine.dispose()


def _block(producer: FakeProducer, connection: sa.Connection) -> Transaction:
    local = local_of(connection, "center.transaction()")
    return Transaction(producer, lambda *_: None, local, timedelta(seconds=2))  # type: ignore[arg-type]
