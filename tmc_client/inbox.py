"""The consumer's inbox: the effect of a message and the note that it happened are one local transaction.

A copy that comes again finds the note and does nothing; so duplicates on the wire, which are normal after crashes, have
one effect. The note is the first statement of the transaction: of two copies at the same moment the second waits. That
note and effect are still in one transaction is verified before the commit: see tmc_client.one_transaction.
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
        """Raises InvalidRequest for what does not make blocking sessions."""
        kind = getattr(session_factory, "__name__", type(session_factory).__name__)
        if not callable(session_factory) or kind.lower().startswith("async"):
            raise errors.InvalidRequest(
                f"tmc.SqlInbox() takes what makes blocking sessions, not {kind}: give it "
                "sessionmaker(engine) of a blocking engine, also for handlers that are `async def`."
            )
        self._session_factory = session_factory

    @contextmanager
    def once(self, subscriber: str, message_id: str) -> Iterator[Session | None]:
        """A session to make the effect in; committed at the end of the block. None: the effect happened before.

        Raises InvalidRequest: note and effect are not in one transaction. Nothing of the current one is committed then.
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
    """Write the note. Returns False: it is there already."""
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
