"""The library form: the center inside the process that uses it. What it shares with a server: test_sdk.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import grpc
import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

import tmc_client as tmc
from tests.support.center import CenterInThisProcess
from tmc_common.protocol import (
    admin_pb2,
    admin_pb2_grpc,
    consumption_pb2,
    consumption_pb2_grpc,
    message_pb2,
    message_pb2_grpc,
)
from tmc_storm.eventually import eventually
from tmc_storm.services.mariadb import MariaDB
from tmc_storm.services.postgresql import PostgreSQL


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/center.db"


def test_a_message_of_a_block_is_delivered_and_its_check_is_answered_here(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMC_DEV__TRANSACTION_TIME_MS", "100")
    business = sa.create_engine(f"sqlite:///{tmp_path}/business.db")
    tmc.create_tables(business)
    asked: list[str] = []
    got: list[str] = []
    with CenterInThisProcess(url) as running, tmc.connect(running.address, app="shop") as center:
        consumer = tmc.Consumer(center)

        @center.check("order.asked")
        def outcome(question: tmc.Question) -> tmc.Verdict:
            asked.append(question.key)
            return tmc.Verdict.COMMIT

        @consumer.listener("order.paid")
        @consumer.listener("order.asked")
        def take(body: bytes, message: tmc.Message) -> None:
            got.append(message.key)

        center.checks(business)
        with consumer:
            eventually(lambda: len(running.server.store.watch.current.subscriptions) == 2)
            with Session(business) as session, center.transaction(session) as tx:
                tx.send("order.paid", b"", key="in a block")
            center.prepare("order.asked", b"", key="undecided")
            eventually(lambda: sorted(got) == ["in a block", "undecided"], seconds=40)
    assert asked == ["undecided"]
    business.dispose()


def test_who_does_not_show_the_secret_gets_in_nowhere(url: str) -> None:
    with CenterInThisProcess(url) as running, grpc.insecure_channel(running.listens_on) as channel:
        calls = [
            (message_pb2_grpc.MessageServiceStub(channel).Publish, message_pb2.PublishRequest(topic="a.b", key="1")),
            (
                consumption_pb2_grpc.ConsumptionServiceStub(channel).Ack,
                consumption_pb2.AckRequest(message_id="1-1-1-1"),
            ),
            (admin_pb2_grpc.AdminServiceStub(channel).ListApps, admin_pb2.ListAppsRequest()),
        ]
        for metadata in ([("tmc-app", "shop")], [("tmc-app", "shop"), ("authorization", "Bearer guessed")]):
            for call, request in calls:
                with pytest.raises(grpc.RpcError) as refused:
                    call(request, metadata=metadata)
                assert refused.value.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
        assert not running.server.store.watch.current.app_by_id


def test_centers_of_one_database_share_a_server_and_the_last_one_stops_it(url: str) -> None:
    before = set(threading.enumerate())
    one, two = (tmc.connect(f"embedded+{url}", app="shop") for _ in range(2))
    assert one.connection.address == two.connection.address
    one.publish("a.b", b"", key="1")
    one.close()
    two.publish("a.b", b"", key="2")
    one.close()
    two.publish("a.b", b"", key="3")
    two.close()
    left = [thread.name for thread in set(threading.enumerate()) - before]
    assert [name for name in left if "_poll_wrapper" not in name] == [], "gRPC keeps one thread of its own"
    with tmc.connect(f"embedded+{url}", app="shop") as again:
        assert again.get_message(topic="a.b", key="2").key == "2"


def test_forked_children_use_the_center_of_their_parent(url: str) -> None:
    with tmc.connect(f"embedded+{url}", app="shop") as center:
        center.publish("a.b", b"", key="parent")
        for child in range(5):
            if (pid := os.fork()) == 0:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)  # a child that hangs is a failure
                signal.alarm(10)
                try:
                    center.publish("a.b", b"", key=f"old {child}")
                    with tmc.connect(f"embedded+{url}", app="shop") as new:
                        new.publish("a.b", b"", key=f"new {child}")
                    os._exit(0)
                finally:
                    os._exit(1)
            assert os.waitpid(pid, 0)[1] == 0
        for child in range(5):
            assert center.get_message(topic="a.b", key=f"old {child}").producer == "shop"
            assert center.get_message(topic="a.b", key=f"new {child}").producer == "shop"


_PRELOADED = """
import os, sys, tmc_client as tmc
center = tmc.connect(sys.argv[1], app="shop")
if os.fork() == 0:
    center.publish("a.b", b"", key="child")
    sys.exit(0)
status = os.wait()[1]
print(status, center.get_message(topic="a.b", key="child").key)
"""


def _program(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_child_that_ends_as_programs_do_ends_nothing_of_its_parent(url: str) -> None:
    ran = _program(_PRELOADED, f"embedded+{url}")
    assert (ran.returncode, ran.stdout) == (0, "0 child\n"), ran.stderr


def test_a_child_that_lives_on_does_not_keep_the_database(url: str) -> None:
    center = tmc.connect(f"embedded+{url}", app="shop")
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    os.close(read)
    try:
        center.close()
        with tmc.connect(f"embedded+{url}", app="shop") as again:
            again.publish("a.b", b"", key="1")
    finally:
        os.close(write)
        assert os.waitpid(child, 0)[1] == 0


def test_a_file_is_the_same_by_every_name_and_from_everywhere(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with (
        tmc.connect("embedded+sqlite:///center.db", app="shop") as one,
        tmc.connect(f"embedded+{url}", app="shop") as two,
    ):
        assert one.connection.address == two.connection.address
        monkeypatch.chdir(elsewhere)
        with tmc.connect("embedded+sqlite:///center.db", app="shop") as another:
            assert another.connection.address != one.connection.address


def test_a_server_that_could_not_continue_is_replaced(url: str) -> None:
    with CenterInThisProcess(url) as running, tmc.connect(running.address, app="shop") as old:
        running.fail()
        with tmc.connect(running.address, app="shop") as new:
            assert new.connection.address != old.connection.address
            new.publish("a.b", b"", key="1")


def test_credentials_are_refused_and_a_failed_connect_leaves_nothing(url: str) -> None:
    before = set(threading.enumerate())
    with pytest.raises(tmc.InvalidRequest, match="needs neither key= nor tls="):
        tmc.connect(f"embedded+{url}", app="shop", key="mine")
    with pytest.raises(tmc.InvalidRequest, match="no timedelta"):
        tmc.connect(f"embedded+{url}", app="shop", timeout=5)  # type: ignore[arg-type]
    assert [each for each in set(threading.enumerate()) - before if each.name == "tmc-embedded"] == []


def test_settings_for_the_network_do_not_matter(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMC_TLS__CERTIFICATE", "/no/such/file")
    monkeypatch.setenv("TMC_TLS__KEY", "/no/such/file")
    monkeypatch.setenv("TMC_SERVER__LISTEN", "0.0.0.0:1")
    with tmc.connect(f"embedded+{url}", app="shop") as center:
        assert center.publish("a.b", b"", key="1")


_FORGETS = """
import sys, tmc_client as tmc
tmc.connect(sys.argv[1], app="shop").publish("a.b", b"", key=sys.argv[2])
"""


def test_a_program_that_does_not_close_it_ends_in_order(url: str) -> None:
    """Its leases are given back, so the next one starts at once, and all its messages are there."""
    for key in ("1", "2"):
        ended = _program(_FORGETS, f"embedded+{url}", key)
        assert (ended.returncode, ended.stderr) == (0, "")
    with CenterInThisProcess(url) as running, tmc.connect(running.address, app="shop") as center:
        assert {center.get_message(topic="a.b", key=key).key for key in ("1", "2")} == {"1", "2"}
        assert running.server.store.nodes.lease.epoch == 3


_FORGETS_TWO = """
import sys, tmc_client as tmc
for url in sys.argv[1:]:
    tmc.connect(url, app="shop").publish("a.b", b"", key="1")
"""


def test_two_that_were_not_closed_do_not_wait_for_each_other(url: str, tmp_path: Path) -> None:
    ended = _program(_FORGETS_TWO, f"embedded+{url}", f"embedded+sqlite:///{tmp_path}/second.db")
    assert (ended.returncode, ended.stderr) == (0, "")


def test_another_process_is_refused_while_one_runs(url: str) -> None:
    with tmc.connect(f"embedded+{url}", app="shop"):
        ended = _program(_FORGETS, f"embedded+{url}", "1")
    assert "Another server uses" in ended.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("database", "sentence"),
    [
        ("sqlite://", "In memory each connection would see another database: name a file, sqlite:///FILE."),
        ("sqlite:///:memory:", "In memory each connection would see another database: name a file, sqlite:///FILE."),
        (
            "sqlite:////no/such/folder/c.db",
            "Cannot open /no/such/folder/c.db: the folder /no/such/folder does not exist.",
        ),
        ("mysql://u:secret@127.0.0.1:1/c", "The database at 127.0.0.1:1 does not answer (error 2002)."),
        ("postgresql://u:secret@127.0.0.1:1/c", "The database at 127.0.0.1:1 does not answer (Connection refused)."),
    ],
)
def test_what_cannot_start_says_why_at_connect(database: str, sentence: str) -> None:
    with pytest.raises(tmc.InvalidRequest) as refused:
        tmc.connect(f"embedded+{database}", app="shop")
    assert str(refused.value).startswith(f"The center inside this process cannot start. {sentence}")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("database", ["oracle://u:secret@h/c", "nonsense"])
def test_what_cannot_hold_a_center_is_said_at_connect(database: str) -> None:
    with pytest.raises(
        tmc.InvalidRequest, match="The center keeps its messages in SQLite, PostgreSQL, MariaDB or MySQL: give"
    ):
        tmc.connect(f"embedded+{database}", app="shop")


def test_the_file_of_the_business_tables_is_refused(url: str) -> None:
    business = sa.create_engine(url)
    tmc.create_tables(business)
    with pytest.raises(tmc.InvalidRequest, match=r"has tables of your program \(the ledger\).* a file of its own"):
        tmc.connect(f"embedded+{url}", app="shop")
    with business.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE paid (number INTEGER)")
    business.dispose()
    with pytest.raises(tmc.InvalidRequest, match=r"has tables of your program \(paid\)"):
        tmc.connect(f"embedded+{url}", app="shop")


def test_settings_that_are_wrong_are_named(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMC_RETENTION__KEEP_HOURS", "soon")
    with pytest.raises(tmc.InvalidRequest, match="keep_hours"):
        tmc.connect(f"embedded+{url}", app="shop")


def test_on_a_server_the_schema_is_made_and_messages_stay(database_server: MariaDB | PostgreSQL) -> None:
    with pytest.raises(tmc.InvalidRequest, match=r"There is no database 'embedded' at .*: create it, or run tmc init"):
        tmc.connect(f"embedded+{database_server.url('embedded')}", app="shop")
    url = database_server.create("embedded").replace("+psycopg", "")
    for key in ("1", "2"):
        with tmc.connect(f"embedded+{url}", app="shop") as center:
            center.publish("a.b", b"", key=key)
            assert center.get_message(topic="a.b", key="1").key == "1"
