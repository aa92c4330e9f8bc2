"""Two banks that send each other money: north on MariaDB with sessions, south on PostgreSQL with connections of psycopg.

usage: bank.py send|receive north|south ADDRESS KEY URL FOLDER [PORT]. A sender takes money from an account and sends a message in
one transaction, in four threads, until FOLDER/enough exists, and answers checks at PORT. A receiver puts it into an account; in
the north in batches. Both run until they are killed or get SIGTERM.
"""

from __future__ import annotations

import logging
import random
import sys
import threading
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

import tmc_client as tmc

log = logging.getLogger("bank")

ACCOUNTS, FIRST = 20, 1_000_000
_OTHER = {"north": "south", "south": "north"}
_bank = sa.MetaData()
account = sa.Table(
    "account",
    _bank,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("money", sa.BigInteger, nullable=False),
)
# No unique key: what happens twice is to be seen.
taken, put = (
    sa.Table(name, _bank, sa.Column("transfer", sa.String(50)), sa.Column("money", sa.BigInteger))
    for name in ("taken", "put")
)


class NoMoney(Exception):
    """The transfer is rolled back."""


def open_bank(engine: sa.Engine) -> None:
    tmc.create_tables(engine)
    _bank.drop_all(engine)
    _bank.create_all(engine)
    with engine.begin() as connection:
        connection.execute(account.insert(), [{"id": number, "money": FIRST} for number in range(ACCOUNTS)])


def _connect(url: sa.URL) -> Callable[[], psycopg.Connection]:
    dsn = url.set(drivername="postgresql").render_as_string(hide_password=False)
    return lambda: psycopg.connect(dsn)


def _change(execute: Callable[[str, dict[str, Any]], object], table: str, transfer: str, money: int, sign: int) -> None:
    """The rows of one transfer. execute: takes :name parameters."""
    values = {"number": random.randrange(ACCOUNTS), "money": money, "change": sign * money, "transfer": transfer}
    execute("UPDATE account SET money = money + :change WHERE id = :number", values)
    execute(f"INSERT INTO {table} (transfer, money) VALUES (:transfer, :money)", values)


def _by_session(session: Session) -> Callable[[str, dict[str, Any]], object]:
    return lambda text, values: session.execute(sa.text(text), values)


def _by_connection(connection: psycopg.Connection) -> Callable[[str, dict[str, Any]], object]:
    def execute(text: str, values: dict[str, Any]) -> object:
        for name in values:
            text = text.replace(f":{name}", f"%({name})s")
        return connection.execute(text, values)

    return execute


def send(center: tmc.Center, name: str, url: sa.URL, enough: Path) -> None:
    """One transfer after the other; every eighth is rolled back."""
    engine = sa.create_engine(url)
    number = 0
    while not enough.exists():
        number += 1
        transfer, money = f"{name}-{uuid.uuid4()}", random.randrange(1, 100)
        body = {"transfer": transfer, "money": money}

        def work(tx: Any, execute: Callable[[str, dict[str, Any]], object]) -> None:
            _change(execute, "taken", transfer, money, -1)  # noqa: B023 - called at once
            tx.send(f"{name}.sent", body, key=transfer)  # noqa: B023 - called at once
            if number % 8 == 0:  # noqa: B023 - called at once
                raise NoMoney

        try:
            if name == "north":
                with Session(engine) as session, center.transaction(session) as tx:
                    work(tx, _by_session(session))
            else:
                with _connect(url)() as connection, center.transaction(connection) as tx:
                    work(tx, _by_connection(connection))
        except NoMoney:
            continue
        except (tmc.TmcError, sa.exc.SQLAlchemyError, psycopg.Error) as exc:
            log.warning("transfer %s: %r", transfer, exc)  # the truth is in the tables


def receive(center: tmc.Center, name: str, url: sa.URL) -> None:
    consumer = tmc.Consumer(center, concurrency=4, prefetch=80)
    topic = f"{_OTHER[name]}.sent"
    if name == "north":

        @consumer.batch_listener(
            topic,
            inbox=tmc.SqlInbox(sessionmaker(sa.create_engine(url))),
            max_messages=20,
            max_wait=timedelta(milliseconds=20),
        )
        def put_many(transfers: list[dict[str, Any]], session: Session) -> None:
            for each in transfers:
                _change(_by_session(session), "put", each["transfer"], each["money"], 1)
    else:

        @consumer.listener(topic, inbox=tmc.SqlInbox(_connect(url)))
        def put_one(each: dict[str, Any], connection: psycopg.Connection) -> None:
            _change(_by_connection(connection), "put", each["transfer"], each["money"], 1)

    consumer.run()


def main(what: str, name: str, address: str, key: str, url: str, folder: str, port: str = "") -> None:
    logging.basicConfig(level=logging.WARNING)
    named = sa.make_url(url)
    with tmc.connect(address, app=name, key=key) as center:
        if what == "receive":
            receive(center, name, named)
            return
        source = sa.create_engine(named) if name == "north" else _connect(named)
        center.checks(source).serve(f"127.0.0.1:{port}")
        try:
            center.resume(source)
        except tmc.TmcError:
            logging.warning("the center is away: checks say what was committed")
        enough = Path(folder) / "enough"
        threads = [threading.Thread(target=send, args=(center, name, named, enough)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        threading.Event().wait()  # answers checks


if __name__ == "__main__":
    main(*sys.argv[1:])
