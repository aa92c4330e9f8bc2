"""A service that gets messages, for `tmc consume tmc_storm.shop.consumer:consumer`; TMC_STORM_SETTINGS names its file.

Stock handles them one by one, mail those without an order in batches and the others on an event loop. Now and then a handler
fails at the first copy of a message, and some messages are refused for good, which is noted in APP.refused.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session, sessionmaker

import tmc_client as tmc
from tmc_storm.shop import books
from tmc_storm.shop.settings import SETTINGS, ShopSettings

_settings = ShopSettings.read(os.environ[SETTINGS])
_engine = books.engine_of(_settings.database)
_inbox = tmc.SqlInbox(sessionmaker(_engine))
_center = _settings.connect()
_refused = Path(_settings.folder) / f"{_settings.app}.refused"
consumer = tmc.Consumer(_center, concurrency=4, prefetch=100)


class _Moody(Exception):
    """The handler's own failure."""


def _effect(message: tmc.Message, body: dict[str, Any]) -> sa.Insert:
    """Return the statement that books one message. Raises what a handler raises."""
    if body.get("refuse"):
        _note_refused(message)
        raise tmc.Reject("the customer is unknown")
    if message.key.endswith("77") and message.attempt == 1:
        raise _Moody
    return books.effect.insert().values(
        message_key=message.key,
        order_key=message.order_key,
        number=body.get("number", 0),
        at_ms=round(time.time() * 1000),
        is_intact=books.is_intact(message.topic, message.key, body),
    )


def _note_refused(message: tmc.Message) -> None:
    """Write to a file, since the transaction of the handler is rolled back."""
    with _refused.open("a") as file:
        file.write(message.id + "\n")


if _settings.app == books.STOCK_APP:

    @consumer.listener(books.ACCOUNT, inbox=_inbox)
    def _put_account(body: dict[str, Any], message: tmc.Message, session: Session) -> None:
        session.execute(_effect(message, body))

    @consumer.listener(books.PAID, inbox=_inbox)
    def _put_paid(body: dict[str, Any], message: tmc.Message, session: Session) -> None:
        session.execute(_effect(message, body))

    @consumer.listener(books.SHIPPED, inbox=_inbox)
    def _put_shipped(body: dict[str, Any], message: tmc.Message, session: Session) -> None:
        session.execute(_effect(message, body))

else:
    _async_inbox = tmc.SqlInbox(async_sessionmaker(books.async_engine_of(_settings.database)))

    @consumer.listener(books.ACCOUNT, inbox=_async_inbox)
    async def _put_account_async(body: dict[str, Any], message: tmc.Message, session: AsyncSession) -> None:
        await session.execute(_effect(message, body))

    @consumer.batch_listener(books.PAID, inbox=_inbox, max_messages=20)
    def _put_batch(bodies: list[dict[str, Any]], messages: list[tmc.Message], session: Session) -> None:
        for body, message in zip(bodies, messages, strict=True):
            session.execute(_effect(message, body))
