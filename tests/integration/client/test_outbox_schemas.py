"""An outbox over connections of a driver: its table is compared once per connection, and named with its schema from then on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import MySQLdb
import psycopg
import pymysql
import pytest
import sqlalchemy as sa

import tmc_client as tmc
from tests.support.producing import FakeTarget
from tmc_client.local.connections import ConnectionTransaction
from tmc_client.producing.ledger import ledger_id_of
from tmc_client.tables import outbox

Place = tuple[sa.Engine, Callable[[], Any], str]


@pytest.fixture(params=["mysqlclient", "pymysql", "psycopg"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """An engine, how to connect, and the statement that leads a connection to another schema with tables of its own."""
    if request.param == "psycopg":
        server = request.getfixturevalue("postgresql")
        url = sa.make_url(server.create("outbox_schemas"))
        engine = sa.create_engine(url)
        with engine.begin() as connection:
            connection.exec_driver_sql("CREATE SCHEMA IF NOT EXISTS tenant")
        other = sa.create_engine(url.update_query_dict({"options": "-csearch_path=tenant"}))
        named = url.set(drivername="postgresql").render_as_string(hide_password=False)
        connect, leave = (lambda: psycopg.connect(named)), "SET search_path TO tenant"
    else:
        server = request.getfixturevalue("mariadb")
        engine = sa.create_engine(server.create("outbox_schemas"))
        other = sa.create_engine(server.create("outbox_others"))
        module: Any = MySQLdb if request.param == "mysqlclient" else pymysql
        url = engine.url
        options = {"host": url.host, "port": url.port, "user": url.username, "password": url.password or ""}
        connect, leave = (lambda: module.connect(database=url.database, **options)), f"USE {other.url.database}"
    for each in (engine, other):
        tmc.create_tables(each)
        with each.begin() as connection:
            connection.execute(outbox.delete())
            ledger_id_of(connection.execute)
    other.dispose()
    yield engine, connect, leave
    engine.dispose()


def _execute(connection: Any, statement: str) -> None:
    cursor = connection.cursor()
    cursor.execute(statement)
    cursor.close()


def _keys(engine: sa.Engine) -> list[str]:
    with engine.connect() as connection:
        return list(connection.execute(sa.select(outbox.c.message_key).order_by(outbox.c.id)).scalars())


def test_messages_go_into_the_outbox_wherever_the_connection_is(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, connect, leave = place
    asked: list[object] = []
    run = ConnectionTransaction.run
    monkeypatch.setattr(ConnectionTransaction, "run", lambda *a: (asked.append(a), run(*a))[1])
    with closing(tmc.Outbox(engine, FakeTarget(), direct=False)) as box, closing(connect()) as connection:
        for key in ("a", "b"):
            with box.transaction(connection) as tx:
                tx.send("t", {}, key=key)
        once = len(asked)
        _execute(connection, leave)
        with box.transaction(connection) as tx:
            tx.send("t", {}, key="c")
            tx.send("t", {}, key="d", order_key="o")
        with closing(connect()) as elsewhere, pytest.raises(tmc.InvalidRequest, match="another database, or schema"):
            _execute(elsewhere, leave)
            elsewhere.commit()
            with box.transaction(elsewhere) as tx:
                tx.send("t", {}, key="e")
    assert (once, len(asked)) == (2, 3)  # the ledger, and the schema; the ledger of the last connection
    assert _keys(engine) == ["a", "b", "c", "d"]
