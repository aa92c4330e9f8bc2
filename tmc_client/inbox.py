"""The consumer's inbox: a message's effect and the row that records it are written in one local transaction.

A repeated copy finds the row and does nothing, so duplicate deliveries, which are normal after crashes, have one
effect. For messages with an order key, a second row keeps the last sequence, and what was overtaken has no effect. The
first statement of the transaction inserts the row: of two concurrent copies, the second waits. Before the commit it is
verified that row and effect are still in one transaction: see tmc_client.one_transaction.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import sqlalchemy as sa
from sqlalchemy.orm import Session

from tmc_client import errors
from tmc_client.one_transaction import OneTransaction
from tmc_client.received import Message
from tmc_client.tables import inbox, inbox_order, raise_if_lacking


class SqlInbox:
    """An inbox in the database of a session factory, e.g. sessionmaker(engine). Its table: ledger.create_tables(engine)."""

    def __init__(self, session_factory: Callable[[], Session]) -> None:
        """Raises InvalidRequest if `session_factory` does not make blocking sessions."""
        kind = getattr(session_factory, "__name__", type(session_factory).__name__)
        if not callable(session_factory) or kind.lower().startswith("async"):
            raise errors.InvalidRequest(
                f"tmc.SqlInbox() takes what makes blocking sessions, not {kind}: give it "
                "sessionmaker(engine) of a blocking engine, also for handlers that are `async def`."
            )
        self._session_factory = session_factory

    @contextmanager
    def once(self, message: Message) -> Iterator[Session | None]:
        """A session for the effect, committed at the end of the block. None: the effect has already happened.

        Raises InvalidRequest: row and effect are not in one transaction; nothing of the current one is committed.
        OutOfOrder: a later message of its order key has had its effect.
        """
        with self._session_factory() as session:
            watch = OneTransaction(session, "handler with an inbox", lends_commit=True)
            watch.begin()
            try:
                if not (_noted(session, watch, message) and _in_turn(session, watch, message)):
                    yield None
                    return
                yield session
                session.flush()
                if not watch.committed:
                    watch.verify()
                    watch.commit()
            except BaseException:
                watch.roll_back()
                raise
            finally:
                watch.stop()


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _noted(session: Session, watch: OneTransaction, message: Message) -> bool:
    """Insert the inbox row. Returns False: it already exists."""
    row = {"subscriber": message.subscriber, "message_id": message.id, "received_ms": _now_ms()}
    try:
        session.execute(inbox.insert().values(row))
    except sa.exc.IntegrityError:
        watch.roll_back()
        note = sa.select(inbox).filter_by(subscriber=message.subscriber, message_id=message.id)
        if session.execute(note).one_or_none() is None:
            raise  # refused for another reason: the effect did not happen
        return False
    except sa.exc.SQLAlchemyError as exc:
        watch.roll_back()
        raise_if_lacking(exc, session.get_bind().engine, inbox)
        raise
    return True


def _in_turn(session: Session, watch: OneTransaction, message: Message) -> bool:
    """Note that this is the last message of its order key. Returns False: it already was. Raises OutOfOrder.

    Read first, then insert or update: an update that finds no row locks the gap on MySQL, and the inserts of two new
    order keys would wait for each other.
    """
    if message.sequence is None:
        return True
    line = _line_of(message)
    values = {"sequence": message.sequence, "changed_ms": _now_ms()}
    try:
        last = session.execute(sa.select(inbox_order.c.sequence).filter_by(line=line)).scalar_one_or_none()
        if last is None:
            named = {"subscriber": message.subscriber, "topic": message.topic, "order_key": message.order_key}
            session.execute(inbox_order.insert().values(line=line, **named, **values))
            return True
        earlier = sa.update(inbox_order).filter_by(line=line).where(inbox_order.c.sequence < message.sequence)
        if session.connection().execute(earlier.values(**values)).rowcount == 1:
            return True
    except (sa.exc.OperationalError, sa.exc.ProgrammingError) as exc:
        watch.roll_back()
        raise_if_lacking(exc, session.get_bind().engine, inbox_order)
        raise
    if last == message.sequence:
        watch.roll_back()
        return False
    raise errors.OutOfOrder(
        f"A later message of order key {message.order_key!r} has had its effect: this one was skipped before."
    )


def _line_of(message: Message) -> str:
    """32 hexadecimal digits for subscriber, topic and order key."""
    named = "\0".join((message.subscriber, message.topic, message.order_key))
    return hashlib.blake2b(named.encode(), digest_size=16).hexdigest()
