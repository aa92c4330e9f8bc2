"""The transaction block: it owns the commit of the local transaction, and the messages go with it.

At the end of the block, in this order: flush, prepare all records in one batch call, ledger rows, local commit, submit.
Before the commit anything may raise, and then nothing happened: the session is rolled back and what was prepared is
rolled back at the center, in the background. When the outcome of the commit is uncertain the block stays silent towards
the center: the ledger decides. After the commit nothing raises.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import sqlalchemy as sa

from tmc_client import errors
from tmc_client.codecs import Topic
from tmc_client.ledger import fenced, ledger_id_of, rows_for
from tmc_client.producer import Prepared, Producer, prepared_of, request_of, wait
from tmc_client.protocol import message_pb2
from tmc_client.tables import ledger

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

log = logging.getLogger("tmc_client.transaction")

T = TypeVar("T")
Settle = Callable[[sa.Engine, list[str]], None]
BACKGROUND = timedelta(seconds=60)  # submits and rollbacks go on trying this long after the block
_MARK = "tmc_transaction"
SUBMIT_WAIT = timedelta(seconds=2)  # the block waits so long for the submits' answers, then leaves them behind


class Records:
    """What was sent inside a block: recorded only."""

    def __init__(self) -> None:
        self.requests: list[message_pb2.PrepareRequest] = []
        self.messages: list[Prepared] = []

    def send(
        self,
        topic: Topic[T] | str,
        body: T,
        *,
        key: str,
        headers: Mapping[str, str] | None = None,
        delay: timedelta = timedelta(0),
    ) -> None:
        """Record a message: it is delivered if and only if the block's transaction commits."""
        self.requests.append(request_of(topic, body, key, headers, delay, None))


class Preparation:
    """The prepare calls of one block, under way."""

    def __init__(
        self, producer: Producer, requests: Sequence[message_pb2.PrepareRequest], ledger_id: bytes, limit: timedelta
    ):
        self._producer = producer
        self._requests = requests
        self.deadline = time.monotonic() + limit.total_seconds()
        for request in requests:
            request.ledger_id = ledger_id
        self.futures: list[Future[Any]] = [producer.prepare(request, limit) for request in requests]

    def collect(self) -> list[Prepared]:
        """All handles. Raises the first error."""
        return [
            prepared_of(request, wait(future, timedelta(seconds=max(0.0, self.deadline - time.monotonic()))))
            for request, future in zip(self._requests, self.futures, strict=True)
        ]

    def abandon(self) -> None:
        """Roll back at the center whatever was or may have been prepared, by attempt id, in the background."""
        for request in self._requests:
            attempt = Prepared("", request.topic, request.key, request.attempt_id)
            self._producer.rollback(attempt, BACKGROUND)


def begin_block(session: Session) -> None:
    """Refuse sessions whose commit would not be the block's own. Raises InvalidRequest."""
    bind = session.get_bind()
    foreign = isinstance(bind, sa.Connection) and bind.in_transaction()
    if session.in_nested_transaction() or foreign or _MARK in session.info:
        raise errors.InvalidRequest(
            "center.transaction() owns the commit: it cannot run inside a savepoint, another block, or a transaction of "
            "the connection that the session is bound to. Open it around those."
        )
    session.info[_MARK] = True


def end_block(session: Session) -> None:
    """The session may be used for another block."""
    session.info.pop(_MARK, None)


def may_be_fenced(exc: BaseException) -> bool:
    """A key that is taken; or, on SQLite, a snapshot that somebody else's write made too old."""
    return isinstance(exc, sa.exc.IntegrityError | sa.exc.OperationalError)


def raise_after(exc: BaseException, preparation: Preparation | None, markers: Sequence[str]) -> None:
    """The block failed before its commit and was rolled back: see that nothing of it stays prepared.

    markers: of its messages, read after the roll-back. Raises Fenced when there are any.
    """
    if preparation is not None:
        preparation.abandon()
    if markers:
        raise errors.Fenced(errors.Fenced.__doc__ or "") from exc


class Transaction(Records):
    """The block for a blocking SQLAlchemy session. Use it with `with`, once."""

    def __init__(self, producer: Producer, settle: Settle, session: Session, prepare_timeout: timedelta) -> None:
        super().__init__()
        self._producer = producer
        self._settle_in = settle
        self._session = session
        self._prepare_timeout = prepare_timeout

    def __enter__(self) -> Transaction:
        begin_block(self._session)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        end_block(self._session)
        if exc is not None:
            self._session.rollback()  # nothing was prepared, so there is nothing to tell the center
            return
        self._write()
        # From here on the outcome belongs to the database: an error of the commit itself may mean either.
        self._session.commit()
        self._submit()

    def _write(self) -> None:
        preparation: Preparation | None = None
        try:
            self._session.flush()
            if not self.requests:
                return
            connection = self._session.connection()
            preparation = Preparation(self._producer, self.requests, ledger_id_of(connection), self._prepare_timeout)
            self.messages = preparation.collect()
            connection.execute(ledger.insert(), rows_for(self.messages))
        except BaseException as exc:
            self._session.rollback()
            raise_after(exc, preparation, self._markers(exc))
            raise

    def _markers(self, exc: BaseException) -> Sequence[str]:
        """A row of a message that is taken is read, never guessed at."""
        if not (self.messages and may_be_fenced(exc)):
            return ()
        try:
            with self._session.get_bind().engine.connect() as connection:
                return connection.execute(fenced([m.message_id for m in self.messages])).scalars().all()
        except sa.exc.SQLAlchemyError:
            return ()

    def _submit(self) -> None:
        """Nothing raises here: what is not answered is submitted again by the sender, then by the next start."""
        if not self.messages:
            return
        try:
            futures = {m.message_id: self._producer.submit(m, BACKGROUND) for m in self.messages}
            engine = self._session.get_bind().engine
            deadline = time.monotonic() + SUBMIT_WAIT.total_seconds()
            for message_id, future in futures.items():
                future.add_done_callback(lambda done, id_=message_id: self._settle(engine, id_, done))  # type: ignore[misc]
            for future in futures.values():
                wait(future, timedelta(seconds=max(0.0, deadline - time.monotonic())))
        except Exception as exc:  # noqa: BLE001 - the transaction is committed: its caller must not see an error
            log.warning("committed, the center answers later: %s", exc)

    def _settle(self, engine: sa.Engine, message_id: str, done: Future[Any]) -> None:
        if done.cancelled() or done.exception() is not None:
            log.error("message %s is committed, its submit was not answered: %s", message_id, done.exception())
            return
        self._settle_in(engine, [message_id])
