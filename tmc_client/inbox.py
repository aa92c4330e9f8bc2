"""The consumer's inbox: a message's effect and the row that records it are written in one local transaction.

A repeated copy finds the row and does nothing, so duplicate deliveries, which are normal after crashes, have one
effect. The first statement of the transaction inserts the row: of two concurrent copies, the second waits. Before the
commit it is verified that row and effect are still in one transaction: see tmc_client.one_transaction.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import sqlalchemy as sa
from sqlalchemy.orm import Session

from tmc_client import errors
from tmc_client.one_transaction import OneTransaction
from tmc_client.tables import inbox, raise_if_lacking


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
    def once(self, subscriber: str, message_id: str) -> Iterator[Session | None]:
        """A session for the effect, committed at the end of the block. None: the effect has already happened.

        Raises InvalidRequest: row and effect are not in one transaction; nothing of the current one is committed.
        """
        with self._session_factory() as session:
            watch = OneTransaction(session, "handler with an inbox", lends_commit=True)
            watch.begin()
            try:
                if not _noted(session, watch, subscriber, message_id):
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


def _noted(session: Session, watch: OneTransaction, subscriber: str, message_id: str) -> bool:
    """Insert the inbox row. Returns False: it already exists."""
    row = {"subscriber": subscriber, "message_id": message_id, "received_ms": time.time_ns() // 1_000_000}
    try:
        session.execute(inbox.insert().values(row))
    except sa.exc.IntegrityError:
        watch.roll_back()
        note = sa.select(inbox).filter_by(subscriber=subscriber, message_id=message_id)
        if session.execute(note).one_or_none() is None:
            raise  # refused for another reason: the effect did not happen
        return False
    except sa.exc.SQLAlchemyError as exc:
        watch.roll_back()
        raise_if_lacking(exc, session.get_bind().engine, inbox)
        raise
    return True
