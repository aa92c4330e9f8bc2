"""The transaction block: it owns the commit of the local transaction and sends its messages with it.

At the end of the block, in this order: flush, verify that it is still one transaction, prepare all messages in one
batch call, insert the ledger rows, commit locally, submit. Any step before the commit may raise and then nothing
takes effect: the session is rolled back, and so, in the background, are the messages prepared at the center. If the
outcome of the commit is uncertain, the block tells the center nothing: the ledger decides. After the commit nothing
raises.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_all
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, NoReturn, Protocol, TypeVar

import sqlalchemy as sa
from sqlalchemy.orm import Session, scoped_session

from tmc_client import errors
from tmc_client.codecs import Topic
from tmc_client.ledger import fenced, ledger_id_of, rows_for
from tmc_client.one_transaction import OneTransaction
from tmc_client.producer import Prepared, Producer, duration, new_attempt_id, prepare_request, prepared_of, wait
from tmc_client.tables import ledger, ledger_info, outbox, raise_if_lacking
from tmc_common.protocol import message_pb2

log = logging.getLogger("tmc_client.transaction")

T = TypeVar("T")
Settle = Callable[[sa.Engine, list[str]], None]
BACKGROUND = timedelta(seconds=60)  # submits and rollbacks are repeated this long after the block
SUBMIT_WAIT = timedelta(seconds=2)  # the block waits this long for answers to its submits, which then continue


class Preparation:
    """The prepare calls of one block, in flight."""

    def __init__(
        self, producer: Producer, requests: Sequence[message_pb2.PrepareRequest], ledger_id: bytes, limit: timedelta
    ):
        self._producer = producer
        self._requests = requests
        for request in requests:
            request.ledger_id = ledger_id
        self.futures: list[Future[Any]] = [producer.prepare(request, limit) for request in requests]

    def collect(self) -> list[Prepared]:
        """Return all handles. Raises the first error; DeadlineExceeded if a call is not answered yet."""
        return [
            prepared_of(request, wait(future, timedelta(0)))
            for request, future in zip(self._requests, self.futures, strict=True)
        ]

    def abandon(self) -> None:
        """Roll back at the center, in the background and by attempt id, all messages that may have been prepared."""
        for request in self._requests:
            attempt = Prepared(message_id="", topic=request.topic, key=request.key, attempt_id=request.attempt_id)
            self._producer.rollback(attempt, BACKGROUND)


def may_be_fenced(exc: BaseException) -> bool:
    """Whether a fence may be the cause: a duplicate key or, on SQLite, a snapshot outdated by another write."""
    return isinstance(exc, sa.exc.IntegrityError | sa.exc.OperationalError)


class Fallback(Protocol):
    """An Outbox, for blocks that commit while the center is away."""

    def add_request(self, session: Session, request: message_pb2.PublishRequest) -> None: ...


class Block:
    """Base of the blocking and the asyncio block; asyncio runs its blocking code in SQLAlchemy's greenlet."""

    def __init__(
        self, producer: Producer, session: Session, prepare_timeout: timedelta, fallback: Fallback | None
    ) -> None:
        self.requests: list[message_pb2.PrepareRequest] = []
        self.messages: list[Prepared] = []
        self._producer = producer
        self._sync_session = session
        self._prepare_timeout = duration("prepare_timeout", prepare_timeout)
        self._fallback = fallback
        self._watch = OneTransaction(session, "transaction block", recorder=self)
        self._closed_because = "before its block: enter `with center.transaction(session) as tx` first."
        self._used = False

    def send(
        self,
        topic: Topic[T] | str,
        body: T,
        *,
        key: str,
        order_key: str = "",
        headers: Mapping[str, str] | None = None,
        delay: timedelta = timedelta(0),
    ) -> None:
        """Record a message: it is delivered if and only if the block's transaction commits.

        Messages recorded since a savepoint are discarded if it is rolled back. Raises InvalidRequest outside the
        block and after its transaction was rolled back. order_key: for ordered topics, see Center.prepare.
        """
        if self._closed_because:
            raise errors.InvalidRequest(f"tx.send() {self._closed_because}")
        self._watch.check()
        if order_key and self._fallback is not None:
            raise errors.InvalidRequest(
                "A block with a fallback takes no order_key: what goes to the outbox could be overtaken. Leave fallback= out, "
                "or use outbox.add() for all messages of this order key.",
                field="order_key",
            )
        self.requests.append(prepare_request(topic, body, key=key, order_key=order_key, headers=headers, delay=delay))

    def position(self) -> int:
        """See one_transaction.Recorder."""
        return len(self.requests)

    def forget_since(self, position: int) -> None:
        """See one_transaction.Recorder."""
        del self.requests[position:]

    def _until_done(self, futures: Sequence[Future[Any]], limit: timedelta) -> None:
        """Wait until all are done or the time is over."""
        raise NotImplementedError

    def _settle(self, engine: sa.Engine, submits: Mapping[str, Future[Any]]) -> None:
        """Settle these submits in the ledger as they are answered, also after the block ends."""
        raise NotImplementedError

    def _begin(self) -> None:
        """Start the block. Raises InvalidRequest if it was used before or cannot own the commit."""
        if self._used:
            raise errors.InvalidRequest("This transaction block was used before: call center.transaction() for each.")
        session = self._sync_session
        bind = session.get_bind()
        foreign = isinstance(bind, sa.Connection) and bind.in_transaction() and not session.in_transaction()
        if session.in_nested_transaction() or foreign:
            raise errors.InvalidRequest(
                "center.transaction() owns the commit: it cannot run inside a savepoint or a transaction of the "
                "connection that the session is bound to. Open it around those."
            )
        self._watch.begin()
        self._used, self._closed_because = True, ""

    def _end(self, exc: BaseException | None) -> None:
        try:
            if exc is not None:
                self._watch.roll_back()  # nothing was prepared, so there is nothing to tell the center
                return
            self._write()
            # From here on the database decides: an error of the commit itself leaves the outcome unknown.
            self._watch.commit()
        finally:
            self._close()
            self._watch.stop()
        self._submit()

    def _close(self) -> None:
        self._closed_because = "after the end of its block: send inside it, or use center.publish()."

    def _write(self) -> None:
        preparation: Preparation | None = None
        session = self._sync_session
        try:
            session.flush()
            self._watch.verify()
            self._close()
            if not self.requests:
                return
            connection = session.connection()
            preparation = Preparation(self._producer, self.requests, ledger_id_of(connection), self._prepare_timeout)
            self._until_done(preparation.futures, self._prepare_timeout)
            if self._prepared(preparation):
                connection.execute(ledger.insert(), rows_for(self.messages))
        except BaseException as exc:
            self._watch.roll_back()
            if preparation is not None:
                preparation.abandon()
            wanted = [ledger_info, ledger, *([outbox] if self._fallback is not None else ())]
            raise_if_lacking(exc, self._sync_session.get_bind().engine, *wanted)
            if self._markers(exc):
                raise errors.Fenced(errors.Fenced.__doc__ or "") from exc
            raise

    def _prepared(self, preparation: Preparation) -> bool:
        """Returns False: the center is away, and the messages are in the outbox instead."""
        try:
            self.messages = preparation.collect()
        except errors.Unavailable as exc:
            if self._fallback is None:
                raise
            log.warning("the center is away, %d messages go to the outbox: %s", len(self.requests), exc)
        else:
            return True
        preparation.abandon()
        for request in self.requests:
            self._fallback.add_request(self._sync_session, _published(request))
        self._sync_session.flush()
        return False

    def _markers(self, exc: BaseException) -> Sequence[str]:
        """Read which of our messages have a rollback marker: the error alone does not prove it."""
        if not (self.messages and may_be_fenced(exc)):
            return ()
        try:
            with self._sync_session.get_bind().engine.connect() as connection:
                return connection.execute(fenced([m.message_id for m in self.messages])).scalars().all()
        except sa.exc.SQLAlchemyError:
            return ()

    def _submit(self) -> None:
        """Submit the messages. Never raises: unanswered submits are retried by the sender, then at the next start."""
        if not self.messages:
            return
        try:
            engine = self._sync_session.get_bind().engine
            submits = self._submits()
            try:
                self._until_done(list(submits.values()), SUBMIT_WAIT)
            finally:
                self._settle(engine, submits)
        except Exception as exc:
            log.warning("committed, the center answers later: %s", exc, exc_info=True)

    def _submits(self) -> dict[str, Future[Any]]:
        """The submits under way, by message id; those of one order key one after another."""
        submits: dict[str, Future[Any]] = {}
        lines: dict[tuple[str, str], list[Prepared]] = {}
        for request, message in zip(self.requests, self.messages, strict=True):
            if request.order_key:
                lines.setdefault((request.topic, request.order_key), []).append(message)
            else:
                submits[message.message_id] = self._producer.submit(message, BACKGROUND)
        for line in lines.values():
            calls = self._producer.submit_in_turn(line, BACKGROUND)
            submits |= {message.message_id: call for message, call in zip(line, calls, strict=True)}
        return submits


def _published(request: message_pb2.PrepareRequest) -> message_pb2.PublishRequest:
    """The same message as another attempt: the center may have stored the first one, and rolls it back."""
    return message_pb2.PublishRequest(
        topic=request.topic,
        key=request.key,
        order_key=request.order_key,
        body=request.body,
        content_type=request.content_type,
        headers=request.headers,
        delay_ms=request.delay_ms,
        attempt_id=new_attempt_id(),
    )


def was_answered(message_id: str, submit: Future[Any]) -> bool:
    """Whether a finished submit was answered; logs an error if not."""
    failure = None if submit.cancelled() else submit.exception()
    if submit.cancelled() or failure is not None:
        log.error("message %s is committed, its submit was not answered: %s", message_id, failure or "cancelled")
        return False
    return True


class Transaction(Block):
    """The block for a blocking SQLAlchemy session. Use it with `with`, once."""

    def __init__(
        self,
        producer: Producer,
        settle: Settle,
        session: Session,
        prepare_timeout: timedelta,
        fallback: Fallback | None = None,
    ) -> None:
        """Raises InvalidRequest if `session` is not a Session."""
        if isinstance(session, scoped_session):
            session = session()
        if not isinstance(session, Session):
            raise errors.InvalidRequest(
                f"center.transaction() takes a Session, not {type(session).__name__}: for an AsyncSession connect with "
                "tmc_client.aio.connect(), of a sessionmaker make a session first."
            )
        super().__init__(producer, session, prepare_timeout, fallback)
        self._settle_in = settle

    async def __aenter__(self) -> NoReturn:
        raise TypeError("Write `with center.transaction(session) as tx`, without async: this center is a blocking one.")

    async def __aexit__(self, *_: object) -> None: ...

    def __enter__(self) -> Transaction:
        self._begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(exc)

    def _until_done(self, futures: Sequence[Future[Any]], limit: timedelta) -> None:
        wait_for_all(futures, limit.total_seconds())

    def _settle(self, engine: sa.Engine, submits: Mapping[str, Future[Any]]) -> None:
        for message_id, submit in submits.items():
            submit.add_done_callback(partial(self._settle_one, engine, message_id))

    def _settle_one(self, engine: sa.Engine, message_id: str, submit: Future[Any]) -> None:
        """Settle a submit that was answered. Called in the sender's thread as soon as it is done."""
        if was_answered(message_id, submit):
            self._settle_in(engine, [message_id])
