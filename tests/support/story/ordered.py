"""A consumer of ordered messages that fails now and then; effects in the order of their commits. Settings: STORY_ variables."""

from __future__ import annotations

import os
import random

import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

import tmc_client as tmc

engine = sa.create_engine(os.environ["STORY_DATABASE"], connect_args={"timeout": 60})


@sa.event.listens_for(engine, "connect")
def _prepare(connection, _record) -> None:
    connection.isolation_level = None
    connection.execute("PRAGMA journal_mode=WAL").close()
    connection.execute("PRAGMA synchronous=OFF").close()


@sa.event.listens_for(engine, "begin")
def _begin(connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")


center = tmc.connect(os.environ["STORY_ADDRESS"], app="coupons", key=os.environ["STORY_KEY"])
consumer = tmc.Consumer(center, concurrency=8, prefetch=100)


@consumer.listener("account", inbox=tmc.SqlInbox(sessionmaker(engine)))
def handle(body: bytes, session: Session, message: tmc.Message) -> None:
    if message.attempt == 1 and random.random() < 0.03:
        raise RuntimeError("it fails now and then")
    session.execute(
        sa.text("INSERT INTO effect (line, message) VALUES (:line, :message)"),
        {"line": message.order_key, "message": message.key},
    )
