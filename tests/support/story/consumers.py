"""Consumers for `tmc consume`: effects and inbox in one SQLite file per app. Settings: the environment's STORY_ variables."""

from __future__ import annotations

import os

import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

import tmc_client as tmc

APP = os.environ["STORY_APP"]
engine = sa.create_engine(f"sqlite:///{os.environ['STORY_FOLDER']}/{APP}.db", connect_args={"timeout": 60})
metadata = sa.MetaData()
effect = sa.Table("effect", metadata, sa.Column("key", sa.String(100)))  # no unique key: two effects would show
copies = sa.Table("copies", metadata, sa.Column("key", sa.String(100)))


@sa.event.listens_for(engine, "connect")
def _prepare(connection, _record) -> None:
    connection.isolation_level = None
    connection.execute("PRAGMA journal_mode=WAL").close()
    connection.execute("PRAGMA synchronous=OFF").close()


@sa.event.listens_for(engine, "begin")
def _begin(connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")


inbox = tmc.SqlInbox(sessionmaker(engine))
center = tmc.connect(os.environ["STORY_ADDRESS"], app=APP, key=os.environ["STORY_KEY"])
consumer = tmc.Consumer(center, concurrency=4, prefetch=100)


def note(table: sa.Table, session: Session, key: str) -> None:
    session.execute(table.insert().values(key=key))


class Everything:
    """The single queue's form, with the inbox by hand."""

    def consume(self, message: tmc.Message) -> None:
        with inbox.once(message) as session:
            if session is not None:
                note(effect, session, message.key)


def listen(topic: str) -> None:
    @consumer.listener(topic, inbox=inbox)
    def handle(body: dict, session: Session) -> None:
        note(effect, session, body["order"])


if os.environ.get("STORY_SINGLE"):
    consumer.attach(Everything())
else:
    for name in os.environ["STORY_TOPICS"].split(","):
        listen(name)
