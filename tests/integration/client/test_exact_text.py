"""Names that differ in case only are different names on every database."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

import tmc_client as tmc
from tests.support.messages import a_message
from tests.support.producing import FakeTarget
from tmc_client.tables import inbox, metadata
from tmc_storm.services.mariadb import MariaDB

pytestmark = pytest.mark.mariadb
OLD = (
    "CREATE TABLE tmc_inbox (subscriber VARCHAR(160), message_id VARCHAR(64), received_ms BIGINT NOT NULL,"
    " PRIMARY KEY (subscriber, message_id)) COLLATE utf8mb4_general_ci"
)


@pytest.fixture
def engine(mariadb: MariaDB) -> Iterator[sa.Engine]:
    """A database whose own collation takes no regard to case, as most do."""
    root = sa.create_engine(mariadb.url("mysql"))
    with root.begin() as connection:
        connection.exec_driver_sql("DROP DATABASE IF EXISTS exact_text")
        connection.exec_driver_sql("CREATE DATABASE exact_text COLLATE utf8mb4_general_ci")
    root.dispose()
    made = sa.create_engine(mariadb.url("exact_text"))
    yield made
    metadata.drop_all(made)
    made.dispose()


def _handle(made: tmc.SqlInbox, subscriber: str) -> bool:
    """Whether the effect happens now."""
    with made.once(a_message(subscriber=subscriber)) as session:
        return session is not None


def test_subscribers_that_differ_in_case_have_their_own_effects(engine: sa.Engine) -> None:
    tmc.create_tables(engine)
    made = tmc.SqlInbox(sessionmaker(engine))
    names = ["Stock.default", "stock.default", "stöck.default", "stock.DEFAULT"]
    assert [_handle(made, name) for name in names] == [True] * 4
    assert [_handle(made, name) for name in names] == [False] * 4


def test_a_table_of_an_earlier_version_is_refused_before_a_handler_begins_and_mended_by_create_tables(
    engine: sa.Engine,
) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql(OLD)
        connection.execute(inbox.insert(), {"subscriber": "stock.default", "message_id": "1-1-0-1", "received_ms": 1})
    metadata.create_all(engine)
    made = tmc.SqlInbox(sessionmaker(engine))
    with pytest.raises(tmc.InvalidRequest, match="without regard to case"):
        made.check()
    with pytest.raises(tmc.InvalidRequest, match=r"tmc\.create_tables\(engine\)"):
        _handle(made, "Stock.default")
    tmc.create_tables(engine)
    made.check()
    assert [_handle(made, name) for name in ("stock.default", "Stock.default")] == [False, True]


def test_it_is_looked_at_once(engine: sa.Engine) -> None:
    tmc.create_tables(engine)
    made, seen = tmc.SqlInbox(sessionmaker(engine)), []
    sa.event.listen(engine, "before_cursor_execute", lambda *args: seen.append(args[2]))
    for number in range(3):
        with made.once(a_message(number, subscriber="stock.default")) as session:
            assert isinstance(session, Session)
    assert sum("information_schema" in statement for statement in seen) == 1


def test_the_other_text_keys_of_ours_are_exact_too(engine: sa.Engine) -> None:
    tmc.create_tables(engine)
    with engine.connect() as connection:
        query = (
            "SELECT table_name, column_name FROM information_schema.columns"
            " WHERE table_schema = DATABASE() AND collation_name <> 'utf8mb4_bin'"
        )
        loose = connection.exec_driver_sql(query).fetchall()
    assert [tuple(row) for row in loose if row[1] != "headers"] == []


@pytest.mark.parametrize("driver", ["mysqldb", "pymysql"])
def test_a_connection_that_lacks_characters_of_a_key_is_refused(mariadb: MariaDB, driver: str) -> None:
    """Without strict mode MariaDB would write question marks, and the outbox would send them."""
    url = sa.make_url(mariadb.create("tmc_narrow")).set(drivername=f"mysql+{driver}")
    narrow = sa.create_engine(
        url.update_query_dict({"charset": "utf8mb3"}), connect_args={"init_command": "SET sql_mode=''"}
    )
    metadata.drop_all(narrow)
    tmc.create_tables(narrow)
    with tmc.Outbox(narrow, FakeTarget(), direct=False) as box:
        with Session(narrow) as session:
            box.add(session, "t", {}, key="party-🎉")
            with pytest.raises(tmc.InvalidRequest, match=r"speaks utf8mb3.*add charset=utf8mb4"):
                session.commit()
        with Session(narrow) as session, pytest.raises(tmc.InvalidRequest, match="utf8mb3"):
            with box.transaction(session) as tx:
                tx.send("t", {}, key="party-🎉")
        with Session(narrow) as session:
            box.add(session, "t", {}, key="订单-7", headers={"who": "李🎉"})  # headers travel in ASCII
            session.commit()
        assert [kept.key for kept in box.store.by_key("订单-7")] == ["订单-7"]
    narrow.dispose()
