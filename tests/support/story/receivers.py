"""A consumer for `tmc consume` that fails every tenth message once. Settings: STORY_ variables of the environment."""

from __future__ import annotations

import os

import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

import tmc_client as tmc

engine = sa.create_engine(os.environ["STORY_DATABASE"])
center = tmc.connect(os.environ["STORY_ADDRESS"], app="coupons", key=os.environ["STORY_KEY"])
consumer = tmc.Consumer(center, concurrency=4, prefetch=50)


@consumer.listener("shop.paid", inbox=tmc.SqlInbox(sessionmaker(engine)))
def handle(body: dict, message: tmc.Message, session: Session) -> None:
    if message.attempt == 1 and int(message.key.rpartition("-")[2]) % 10 == 0:
        raise RuntimeError("a second attempt is needed")
    session.execute(sa.text("INSERT INTO effect VALUES (:key)"), {"key": message.key})
