"""A database on two hosts, of which one takes writes: connections find it, leave the other, and notice what it has lost."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress

import pytest
import sqlalchemy as sa

import tmc_client as tmc
from tests.support.cluster import Cluster
from tmc_server.app.reaching import CannotStart, require_databases
from tmc_server.config import Config
from tmc_server.errors import StoreUnavailable
from tmc_server.store.dialects.contract import DatabaseTaken
from tmc_server.store.engines import Database
from tmc_server.store.fitness import examine_hosts
from tmc_server.store.move_hold import Held
from tmc_storm.eventually import eventually
from tmc_storm.services.replicated import HOSTS, Replicated, ReplicatedMariaDB, ReplicatedPostgreSQL

_TOPIC = "order.paid"


@pytest.fixture(
    params=[
        pytest.param(ReplicatedMariaDB, marks=pytest.mark.mariadb),
        pytest.param(ReplicatedPostgreSQL, marks=pytest.mark.postgresql),
    ]
)
def pair(request: pytest.FixtureRequest) -> Iterator[Replicated]:
    made = request.param()
    yield made
    made.stop()


@pytest.fixture
def database(pair: Replicated) -> Iterator[Database]:
    pair.primary.create("tmc")
    made = Database(pair.url("tmc"))
    with made.transaction() as connection:
        connection.exec_driver_sql("CREATE TABLE written (number INTEGER PRIMARY KEY)")
    replica = Database(pair.replica.url("tmc"))

    def has_it() -> bool:
        with suppress(StoreUnavailable), replica.reading() as connection:
            return sa.inspect(connection).has_table("written")
        return False

    eventually(has_it)  # it had the logs, and not yet what is in them
    replica.close()
    yield made
    made.close()


def _server(connection: sa.Connection) -> str:
    """Return what tells one server from the other."""
    is_mariadb = connection.dialect.name in ("mysql", "mariadb")
    return str(connection.exec_driver_sql(f"SELECT {'@@server_id' if is_mariadb else 'inet_server_addr()'}").scalar())


def _write(database: Database, number: int) -> str:
    with database.transaction() as connection:
        connection.exec_driver_sql(f"INSERT INTO written VALUES ({number})")
        return _server(connection)


def test_who_was_refused_a_write_follows_to_the_other_and_readers_with_it(
    pair: Replicated, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tmc_server.store.dialects.pools._REST_S", 3600.0)  # under load, no connection rests
    first = _write(database, 1)
    with database.reading() as connection:
        assert _server(connection) == first
    kept = database.connect()
    pair.demote()  # it is still up, and still answers who reads
    pair.promote()
    with pytest.raises(StoreUnavailable), database.writing(kept):
        kept.exec_driver_sql("INSERT INTO written VALUES (2)")
    kept.close()
    assert _write(database, 2) != first
    with database.reading() as connection:
        assert _server(connection) != first
        assert connection.exec_driver_sql("SELECT COUNT(*) FROM written").scalar_one() == 2


def test_a_reader_that_rested_leaves_a_server_that_takes_no_writes(
    pair: Replicated, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    with database.reading() as connection:
        first = _server(connection)
    pair.demote()
    pair.promote()
    monkeypatch.setattr("tmc_server.store.dialects.pools._REST_S", 0.0)
    with database.reading() as connection:
        assert _server(connection) != first


def test_the_lock_of_the_one_server_follows(
    pair: Replicated, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tmc_server.store.dialects.hosts._ASKED_FOR_S", -1.0)
    other = Database(pair.url("tmc"))
    database.hold_exclusively()
    pair.demote()
    pair.promote()
    database.hold_exclusively()
    with pytest.raises(DatabaseTaken):
        other.refuse_beside_another()
    other.close()


def test_while_no_host_takes_writes_the_database_is_away(pair: Replicated, database: Database) -> None:
    pair.demote()
    database.engine.dispose()
    with pytest.raises(StoreUnavailable) as away:
        _write(database, 1)
    assert str(away.value.__cause__) == f"None of {', '.join(HOSTS)} takes writes: promote one."
    pair.kill()
    with pytest.raises(StoreUnavailable):
        _write(database, 1)
    pair.promote()
    _write(database, 1)


def test_a_kept_connection_asks_for_the_role_again(
    pair: Replicated, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, other = database.connect(), database.connect()
    assert database.hosts.leads(kept)
    pair.demote()
    pair.promote()
    assert database.hosts.leads(kept)  # nobody has asked
    monkeypatch.setattr("tmc_server.store.dialects.hosts._ASKED_FOR_S", -1.0)
    assert not database.hosts.leads(kept)
    monkeypatch.setattr("tmc_server.store.dialects.hosts._ASKED_FOR_S", 3600.0)
    _write(database, 1)
    assert not database.hosts.leads(other)  # another one was found meanwhile
    for each in (kept, other):
        each.invalidate()
        each.close()


def test_a_hold_on_a_former_primary_counts_no_more(
    pair: Replicated, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(database)
    held.take()
    held.probe()
    pair.demote()
    pair.promote()
    monkeypatch.setattr("tmc_server.store.dialects.hosts._ASKED_FOR_S", -1.0)
    with pytest.raises(StoreUnavailable):
        held.probe()
    held.take_again()
    held.probe()
    held.close()


def test_the_doctor_says_who_is_what(pair: Replicated, database: Database) -> None:
    found = {each.setting: each.value for each in examine_hosts(database)}
    assert [found[f"host {host}"] for host in HOSTS] == ["primary", "replica"]
    assert [str(each) for each in examine_hosts(database) if not each.ok] == []
    pair.replica.kill()
    assert f"host {HOSTS[1]}" in [each.setting for each in examine_hosts(database) if not each.ok]


def test_an_operator_reads_that_the_hosts_do_not_answer(pair: Replicated) -> None:
    pair.kill()
    with pytest.raises(CannotStart, match=",".join(map(re.escape, HOSTS))):
        require_databases(Config.model_validate({"store": {"catalog": pair.url("tmc")}}))


def test_what_a_replica_lacks_is_said(pair: Replicated) -> None:
    with Cluster(replicated=pair) as cluster:
        cluster.register("orders", "coupons")
        cluster.in_effect(cluster.subscribe(_TOPIC, "coupons"))
        orders = tmc.connect(cluster.addresses, app="orders", key=cluster.keys["orders"])
        (server,) = cluster.servers
        orders.publish(_TOPIC, b"", key="before")
        pair.kill()
        pair.promote()
        assert server.terminate() == 0
        server.start()  # also while there is no other host yet
        pair.rebuild()
        orders.publish(_TOPIC, b"", key="between")
        pair.kill()
        pair.promote()
        pair.rebuild()
        orders.get_message(topic=_TOPIC, key="between")
        orders.publish(_TOPIC, b"", key="again")
        assert "commits_lost" not in server.log.read_text()
        pair.fall_behind()
        orders.publish(_TOPIC, b"", key="gone")
        pair.kill()
        pair.promote()
        orders.publish(_TOPIC, b"", key="after")
        orders.get_message(topic=_TOPIC, key="between")
        with pytest.raises(tmc.NotFound):
            orders.get_message(topic=_TOPIC, key="gone")
        eventually(lambda: server.log.read_text().count("commits_lost") == 1)
        orders.close()
