"""The books of the services. No key of what is counted is unique: what happens twice is to be seen."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

import tmc_client as tmc

ORDERS_APP, STOCK_APP, MAIL_APP, WEB_APP = "storm-orders", "storm-stock", "storm-mail", "storm-web"
PAID, SHIPPED, ACCOUNT = "storm.paid", "storm.shipped", "storm.account"
TOPICS = (PAID, SHIPPED, ACCOUNT)
SUBSCRIPTIONS = {STOCK_APP: (PAID, SHIPPED, ACCOUNT), MAIL_APP: (PAID, ACCOUNT)}
"""The topics of which each service gets messages."""
WEBHOOKS = {WEB_APP: (PAID, ACCOUNT)}
"""The same for a service that gets them as webhooks, at a center of the storm's own."""

REPLAY = "replay."
"""The beginning of the keys of messages that an operator sent again."""

_ASYNC_DRIVERS = {
    "sqlite": "sqlite+aiosqlite",
    "mariadb+mysqldb": "mariadb+asyncmy",
    "postgresql+psycopg": "postgresql+psycopg_async",
}
_books = sa.MetaData()

begun = sa.Table(
    "storm_begun",
    _books,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("message_key", sa.String(100), nullable=False),
)
"""Messages without a transaction: the call that published each may have been heard, or not."""

sent = sa.Table(
    "storm_sent",
    _books,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("message_key", sa.String(100), nullable=False),
    sa.Column("topic", sa.String(100), nullable=False),
    sa.Column("is_refused", sa.Boolean, nullable=False),  # by its handlers, always
    sa.Column("due_ms", sa.BigInteger, nullable=False),  # not to be handled before; 0: at once
)
"""The messages that must arrive: written in the transactions that send them."""

effect = sa.Table(
    "storm_effect",
    _books,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("message_key", sa.String(100), nullable=False),
    sa.Column("order_key", sa.String(100), nullable=False),  # "": in no order
    sa.Column("number", sa.Integer, nullable=False),  # within its order key, from 1
    sa.Column("at_ms", sa.BigInteger, nullable=False),
    sa.Column("is_intact", sa.Boolean, nullable=False),  # topic, key and body are what was sent
)
"""The effects: written in the transactions of the handlers."""

seen = sa.Table("storm_seen", _books, sa.Column("message_id", sa.String(100), primary_key=True))
"""Messages that a service without an inbox of the SDK has handled."""


def sealed(topic: str, key: str, content: dict[str, Any]) -> dict[str, Any]:
    """Return the content with a digest over it, its topic and its key."""
    return content | {"seal": _digest(topic, key, content)}


def is_intact(topic: str, key: str, body: dict[str, Any]) -> bool:
    """Return whether a body is what `sealed` returned for this topic and key. A replay has a key of its own."""
    key = str(body.get("key")) if key.startswith(REPLAY) else key
    content = {name: value for name, value in body.items() if name != "seal"}
    return bool(body.get("seal") == _digest(topic, key, content))


def _digest(topic: str, key: str, content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps([topic, key, content], sort_keys=True).encode()).hexdigest()


def engine_of(url: str) -> sa.Engine:
    """Connect a service to its database."""
    engine = sa.create_engine(url, pool_pre_ping=True)
    _prepare(engine)
    return engine


def async_engine_of(url: str) -> AsyncEngine:
    """Connect a service that is written for asyncio, by the driver that SQLAlchemy has for it."""
    blocking = sa.make_url(url)
    engine = create_async_engine(blocking.set(drivername=_ASYNC_DRIVERS[blocking.drivername]), pool_pre_ping=True)
    _prepare(engine.sync_engine)
    return engine


def _prepare(engine: sa.Engine) -> None:
    if engine.dialect.name == "sqlite":
        sa.event.listen(engine, "connect", _set_up)
        sa.event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))


def _set_up(connection: Any, _record: object) -> None:
    """Let other processes write, too, and begin transactions where SQLAlchemy does."""
    connection.isolation_level = None
    for pragma in ("busy_timeout=60000", "journal_mode=WAL"):
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA {pragma}")
        cursor.close()


def open_books(url: str) -> None:
    """Create the tables of a service, ours and those of the SDK."""
    engine = engine_of(url)
    tmc.create_tables(engine)
    _books.create_all(engine)
    engine.dispose()
