"""Django: blocks around atomic(), handlers, the outbox, migrations, commands and checks, on three databases."""

from __future__ import annotations

import io
import unittest
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from django.conf import settings
from django.core import checks
from django.core.management import CommandError, call_command
from django.db import DatabaseError, IntegrityError, connections, transaction
from django.test import TestCase

import tmc_client as tmc
from tests.support import django_site
from tests.support.messages import a_message
from tests.support.producing import FakeProducer, FakeTarget, verdicts
from tmc_client import django as tmc_django
from tmc_client.django.local import AtomicTransaction
from tmc_client.producing.answered import Answered
from tmc_client.producing.transaction import Transaction
from tmc_storm.services.mariadb import MariaDB
from tmc_storm.services.postgresql import PostgreSQL

ALIAS = "default"
_TABLES = ("effect", "taken", "tmc_ledger", "tmc_inbox", "tmc_inbox_order", "tmc_outbox")


@pytest.fixture(params=["sqlite", "mariadb", "postgresql"])
def alias(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        django_site.sqlite(ALIAS, tmp_path)
    elif request.param == "mariadb":
        mariadb: MariaDB = request.getfixturevalue("mariadb")
        url = sa.make_url(mariadb.create("tmc_django"))
        django_site.database(
            ALIAS, ENGINE="django.db.backends.mysql", NAME="tmc_django", HOST="127.0.0.1", PORT=url.port, USER="root"
        )
    else:
        postgresql: PostgreSQL = request.getfixturevalue("postgresql")
        url = sa.make_url(postgresql.create("tmc_django"))
        django_site.database(
            ALIAS,
            ENGINE="django.db.backends.postgresql",
            NAME="tmc_django",
            HOST="127.0.0.1",
            PORT=url.port,
            USER=url.username,
        )
    call_command("migrate", verbosity=0)
    _run("CREATE TABLE IF NOT EXISTS effect (number INTEGER)")
    _run("CREATE TABLE IF NOT EXISTS taken (id INTEGER PRIMARY KEY)")
    for table in _TABLES:
        _run(f"DELETE FROM {table}")
    _run("INSERT INTO taken VALUES (1)")
    yield ALIAS
    connections[ALIAS].close()


def _run(text: str) -> None:
    with connections[ALIAS].cursor() as cursor:
        cursor.execute(text)


def _ask(query: str) -> list[Any]:
    with closing(tmc_django.connect(ALIAS)()) as connection, closing(connection.cursor()) as cursor:
        cursor.execute(query)
        return [tuple(row) for row in cursor.fetchall()]


def _effects() -> list[int]:
    return [number for (number,) in _ask("SELECT number FROM effect ORDER BY number")]


def _effect(number: int) -> None:
    _run(f"INSERT INTO effect VALUES ({number})")


def _block(producer: FakeProducer, answered: Answered | None = None) -> Transaction:
    return Transaction(
        producer,  # type: ignore[arg-type]
        lambda *_: None,
        AtomicTransaction(ALIAS),
        timedelta(seconds=2),
        answered=answered,
    )


def _work(tx: Transaction, number: int, key: str) -> None:
    _effect(number)
    tx.send("t", {}, key=key)


class Refusal(Exception):
    """The program's own error."""


def plain(tx: Transaction) -> None:
    _work(tx, 1, "a")


def exception(tx: Transaction) -> None:
    _work(tx, 1, "a")
    raise Refusal


def inner_rolled_back(tx: Transaction) -> None:
    _work(tx, 1, "a")
    with suppress(Refusal), transaction.atomic():
        _work(tx, 2, "b")
        with transaction.atomic():
            _work(tx, 3, "c")
        raise Refusal
    _work(tx, 4, "d")


def inner_rolled_back_last(tx: Transaction) -> None:
    _work(tx, 1, "a")
    with suppress(Refusal), transaction.atomic():
        _work(tx, 2, "b")
        raise Refusal


def inner_kept(tx: Transaction) -> None:
    with transaction.atomic():
        _work(tx, 1, "a")


def savepoint_of_the_block(tx: Transaction) -> None:
    _work(tx, 1, "a")
    with suppress(Refusal), tx.savepoint():
        _work(tx, 2, "b")
        raise Refusal


def swallowed_error_in_atomic(tx: Transaction) -> None:
    with suppress(IntegrityError), transaction.atomic():
        _work(tx, 2, "b")
        _run("INSERT INTO taken VALUES (1)")
    _work(tx, 1, "a")


def rollback_marked(tx: Transaction) -> None:
    _work(tx, 1, "a")
    transaction.set_rollback(True)


def rollback_as_text(tx: Transaction) -> None:
    _work(tx, 1, "a")
    _run("ROLLBACK")


def commit_inside(tx: Transaction) -> None:
    _work(tx, 1, "a")
    transaction.commit()


def block_inside(tx: Transaction) -> None:
    _work(tx, 1, "a")
    with _block(FakeProducer()):
        pass


@dataclass(frozen=True, kw_only=True)
class Way:
    """One row: what is done inside, and how it comes out."""

    inside: Callable[[Transaction], None]
    effects: Sequence[int] = ()
    sent: Sequence[str] = ()
    error: str = ""


WAYS = [
    Way(inside=plain, effects=[1], sent=["a"]),
    Way(inside=exception, error="Refusal"),
    Way(inside=inner_rolled_back, effects=[1, 4], sent=["a", "d"]),
    Way(inside=inner_rolled_back_last, effects=[1], sent=["a"]),
    Way(inside=inner_kept, effects=[1], sent=["a"]),
    Way(inside=savepoint_of_the_block, effects=[1], sent=["a"]),
    Way(inside=swallowed_error_in_atomic, effects=[1], sent=["a"]),
    Way(inside=rollback_marked, error="InvalidRequest: An error inside this transaction block was swallowed"),
    Way(inside=rollback_as_text, error="InvalidRequest: The transaction of this transaction block was ended"),
    Way(inside=commit_inside, error="TransactionManagementError"),
    Way(inside=block_inside, error="InvalidRequest: A transaction block inside a transaction block"),
]


@pytest.mark.parametrize("way", [pytest.param(way, id=way.inside.__name__) for way in WAYS])
def test_a_block_sends_what_it_commits_and_nothing_else(way: Way, alias: str) -> None:
    producer, seen = FakeProducer(), ""
    try:
        with _block(producer) as tx:
            way.inside(tx)
    except (Refusal, tmc.TmcError, DatabaseError) as exc:
        seen = f"{type(exc).__name__}: {exc}"
    assert seen.startswith(way.error) if way.error else seen == "", seen
    assert not connections[alias].in_atomic_block
    assert (_effects(), producer.submitted) == (list(way.effects), list(way.sent))
    assert verdicts(tmc_django.connect(alias), producer) == dict.fromkeys(way.sent, tmc.Verdict.COMMIT)


def test_a_block_inside_atomic_is_refused(alias: str) -> None:
    with transaction.atomic(), pytest.raises(tmc.InvalidRequest, match=r"ATOMIC_REQUESTS.*non_atomic_requests"):
        _block(FakeProducer()).__enter__()
    assert not connections[alias].in_atomic_block


def test_in_a_test_case_messages_are_only_recorded(alias: str) -> None:
    """It wraps each test in atomic(), and never commits."""
    tmc_django.sent.clear()

    class UserTest(TestCase):
        def test(self) -> None:
            with tmc_django.transaction() as tx:
                _effect(1)
                tx.send("order.paid", {"order": 1}, key="paid-1")
            with suppress(Refusal), tmc_django.transaction() as tx:
                tx.send("order.paid", {}, key="never")
                raise Refusal
            with tmc_django.outbox_transaction(tmc.Outbox(tmc_django.connect(), FakeTarget())) as tx:
                tx.send("order.paid", {}, key="by the outbox")

    result = unittest.TestResult()
    unittest.TestSuite([UserTest("test")]).run(result)
    assert (result.testsRun, result.errors, result.failures) == (1, [], [])
    assert [(message.topic, message.key) for message in tmc_django.sent] == [
        ("order.paid", "paid-1"),
        ("order.paid", "by the outbox"),
    ]
    assert _effects() == []


def test_connections_beside_djangos_pool_do_not_empty_it(postgresql: PostgreSQL) -> None:
    url = sa.make_url(postgresql.create("tmc_django_pool"))
    pool = {"min_size": 0, "max_size": 1, "timeout": 2}
    where = {"HOST": url.host, "PORT": str(url.port), "USER": url.username, "NAME": url.database}
    django_site.database(ALIAS, ENGINE="django.db.backends.postgresql", OPTIONS={"pool": pool}, **where)
    wrapper: Any = connections[ALIAS]
    call_command("migrate", verbosity=0)
    made = [tmc_django.connect()() for _ in range(3)]
    with _block(FakeProducer()) as tx:
        tx.send("t", {}, key="a")
    for connection in made:
        connection.close()
    wrapper.close()
    wrapper.close_pool()


def test_earlier_messages_are_settled_by_later_blocks(alias: str) -> None:
    producer, answered = FakeProducer(), Answered()
    for number in range(17):
        with _block(producer, answered) as tx:
            tx.send("t", {}, key=f"k{number}")
    assert _ask("SELECT COUNT(*) FROM tmc_ledger WHERE settled_ms IS NULL") == [(1,)]


def test_a_handlers_effect_happens_once(alias: str) -> None:
    for _ in range(2):
        with tmc_django.inbox().once(a_message()) as handle:
            if handle is not None:
                _effect(1)
    assert _effects() == [1]
    with suppress(Refusal), tmc_django.inbox().once(a_message(2)):
        _effect(2)
        raise Refusal
    assert _effects() == [1]


def test_an_inbox_without_its_table_is_found_before_the_first_message(alias: str) -> None:
    tmc_django.inbox().check()
    _run("ALTER TABLE tmc_inbox_order RENAME TO tmc_elsewhere")
    try:
        with pytest.raises(tmc.InvalidRequest, match=r"no table tmc_inbox_order .* run python manage.py migrate"):
            tmc_django.inbox().check()
    finally:
        _run("ALTER TABLE tmc_elsewhere RENAME TO tmc_inbox_order")
    tmc_django.inbox().check()


def test_a_handler_sends_with_a_block_as_its_last_step(alias: str) -> None:
    producer = FakeProducer()
    with tmc_django.inbox().once(a_message()):
        _effect(1)
        with _block(producer) as tx:
            tx.send("t", {}, key="a")
    assert (_effects(), producer.submitted) == ([1], ["a"])
    assert _ask("SELECT COUNT(*) FROM tmc_inbox") == [(1,)]


def test_what_follows_a_block_in_a_handler_is_refused(alias: str) -> None:
    """Django would commit each statement by itself."""
    with pytest.raises(tmc.InvalidRequest, match="must come last"), tmc_django.inbox().once(a_message()):
        _effect(1)
        with _block(FakeProducer()) as tx:
            tx.send("t", {}, key="a")
        _effect(2)
    assert _effects() == [1]
    _effect(3)  # the connection is as before


def test_a_function_of_on_commit_that_fails_hides_nothing(alias: str, caplog: pytest.LogCaptureFixture) -> None:
    producer, seen = FakeProducer(), []

    def fail() -> None:
        raise Refusal

    with _block(producer) as tx:
        _work(tx, 1, "a")
        transaction.on_commit(fail)
        transaction.on_commit(lambda: seen.append(connections[alias].in_atomic_block))
    assert (producer.submitted, seen) == (["a"], [False])
    assert "failed after the commit" in caplog.text


def test_a_connection_that_was_lost_does_not_block_the_thread(alias: str) -> None:
    wrapper: Any = connections[alias]
    if wrapper.vendor == "sqlite":
        return  # nothing to lose
    with wrapper.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()" if wrapper.vendor == "postgresql" else "SELECT connection_id()")
        (number,) = cursor.fetchone()
    with closing(tmc_django.connect(alias)()) as other, closing(other.cursor()) as cursor:
        cursor.execute(f"SELECT pg_terminate_backend({number})" if wrapper.vendor == "postgresql" else f"KILL {number}")
    with pytest.raises(DatabaseError), _block(FakeProducer()):
        pass
    assert not wrapper.in_atomic_block
    wrapper.close_if_unusable_or_obsolete()
    producer = FakeProducer()
    with _block(producer) as tx:
        _work(tx, 1, "a")
    assert (_effects(), producer.submitted) == ([1], ["a"])


def test_the_outbox(alias: str) -> None:
    target = FakeTarget()
    with tmc.Outbox(tmc_django.connect(alias), target) as outbox:
        with tmc_django.outbox_transaction(outbox) as tx:
            _effect(1)
            tx.send("t", {"number": 1}, key="a")
            tx.send("t", {"number": 2}, key="b")
        with suppress(Refusal), tmc_django.outbox_transaction(outbox) as tx:
            tx.send("t", {}, key="c")
            raise Refusal
        assert outbox.flush(timedelta(seconds=30))
    assert [entry.key for entry in target.taken] == ["a", "b"]
    assert _ask("SELECT message_key, state, direct FROM tmc_outbox ORDER BY id") == [("a", 2, 1), ("b", 2, 1)]


def test_commands(alias: str) -> None:
    out = io.StringIO()
    call_command("tmc_resume", stdout=out)
    call_command("tmc_clean", "--days", "30", stdout=out)
    assert out.getvalue() == "0 messages were submitted\n0 rows of the ledger and 0 of the inbox were deleted\n"
    with pytest.raises(CommandError, match="keep the ledger for 7 days at least"):
        call_command("tmc_clean", "--days", "1")
    with pytest.raises(CommandError, match="names no consumer"):
        call_command("tmc_consume", "shop")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (None, "settings.TMC lacks ADDRESS"),
        ({"ADDRESS": "x:1"}, "settings.TMC lacks APP"),
        ({"ADDRESS": "x:1", "APP": "orders", "PASSWORD": "x"}, "settings.TMC has PASSWORD, which is unknown"),
    ],
)
def test_settings_are_checked(given: Any, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    django_site.set_up()
    monkeypatch.setattr(settings, "TMC", given)
    tmc_django.forget_center()
    found = [message for message in checks.run_checks() if message.id == "tmc.E001"]
    assert [message.msg[: len(sentence)] for message in found] == [sentence]


def test_settings_that_get_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    django_site.sqlite(ALIAS, tmp_path)
    tmc_django.forget_center()
    monkeypatch.setitem(settings.DATABASES["default"], "ATOMIC_REQUESTS", True)
    assert {message.id for message in checks.run_checks()} == {"tmc.W001", "tmc.W002"}  # in no order
