"""The consumer's inbox: the effect of a message and the note that it happened are one local transaction.

A copy that comes again finds the note and does nothing; so duplicates on the wire, which are normal after crashes, have
one effect. The note is the first statement of the transaction: of two copies at the same moment the second waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import sqlalchemy as sa

from tmc_client.tables import inbox

if TYPE_CHECKING:
    from sqlalchemy.orm import Session


class SqlInbox:
    """An inbox in the database of a session factory, e.g. sessionmaker(engine). Its table: ledger.create_tables(engine)."""

    def __init__(self, session_factory: Callable[[], Session]) -> None:
        self._session_factory = session_factory

    @contextmanager
    def once(self, subscriber: str, message_id: str) -> Iterator[Session | None]:
        """A session to make the effect in; committed at the end of the block. None: the effect happened before."""
        with self._session_factory() as session:
            try:
                session.execute(
                    inbox.insert().values(
                        subscriber=subscriber, message_id=message_id, received_ms=time.time_ns() // 1_000_000
                    )
                )
            except sa.exc.IntegrityError:
                session.rollback()
                note = sa.select(inbox).filter_by(subscriber=subscriber, message_id=message_id)
                if session.execute(note).one_or_none() is None:
                    raise  # refused for another reason: the effect did not happen
                yield None
                return
            yield session
            session.commit()
