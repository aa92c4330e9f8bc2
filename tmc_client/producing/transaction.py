"""The transaction block: it owns the commit of the local transaction and sends its messages with it.

At the end of the block, in this order: flush, verify that it is still one transaction, prepare all messages in one
batch call, insert the ledger rows, commit locally, submit. Any step before the commit may raise and then nothing
takes effect: the transaction is rolled back, and so, in the background, are the messages prepared at the center. If the
commit itself raises, the block fences its ledger row in a transaction of its own and thus knows whether it took effect; if
even that is not known, it sends the center nothing: the ledger decides. After the commit nothing raises.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_all
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import sqlalchemy as sa

from tmc_client import errors
from tmc_client.codecs import Topic
from tmc_client.local import LocalTransaction
from tmc_client.local.marker import COMMITTED, ROLLED_BACK, marker
from tmc_client.producing.answered import SETTLE_BATCH, Answered
from tmc_client.producing.block import Block, Blocking, Writer
from tmc_client.producing.ledger import fenced, ledger_id_of, rows_for, settle_batch
from tmc_client.producing.producer import (
    Prepared,
    Producer,
    duration,
    new_attempt_id,
    prepare_request,
    prepared_of,
    wait,
)
from tmc_client.tables import ledger, ledger_info, outbox
from tmc_common.protocol import message_pb2

log = logging.getLogger("tmc_client.transaction")

T = TypeVar("T")
Settle = Callable[[sa.Engine, list[str]], None]
BACKGROUND = timedelta(seconds=60)  # submits and rollbacks are repeated this long after the block
SUBMIT_WAIT = timedelta(seconds=2)  # the block waits this long for answers to its submits, which then continue


class Preparation:
    """The prepare calls of one block, in flight."""

    def __init__(self, producer: Producer, ledger_id: bytes, limit: timedelta, lasts: timedelta = timedelta(0)) -> None:
        """lasts: how long the block may take until its commit, if longer than the topics' transaction time."""
        self._lasts_ms = round(lasts.total_seconds() * 1000)
        self._producer = producer
        self._ledger_id = ledger_id
        self._limit = limit
        self._requests: list[message_pb2.PrepareRequest] = []
        self.futures: list[Future[Any]] = []

    def add(self, request: message_pb2.PrepareRequest) -> None:
        """Call prepare. Raises Unavailable if the connection was closed."""
        request.ledger_id = self._ledger_id
        request.transaction_time_ms = self._lasts_ms
        self.futures.append(self._producer.prepare(request, self._limit))
        self._requests.append(request)

    def collect(self) -> list[Prepared]:
        """Return all handles. Raises the first error; DeadlineExceeded if a call is not answered yet."""
        try:
            return [_collected(*each) for each in zip(self._requests, self.futures, strict=True)]
        except errors.DeadlineExceeded as exc:
            prepared, all_of_them = sum(map(_is_answered, self.futures)), len(self.futures)
            # With none, the center is away, or hangs.
            advice = ": give more time, or send fewer in one block" if prepared else ""
            raise errors.DeadlineExceeded(
                f"{prepared:,} of {all_of_them:,} messages were prepared within prepare_timeout="
                f"{self._limit.total_seconds():g} s{advice}. {exc}",
                reason=exc.reason,
            ) from exc

    def abandon(self, since: int = 0) -> None:
        """Roll back at the center, in the background and by attempt id, all messages that may have been prepared."""
        abandoned = self._requests[since:]
        del self._requests[since:], self.futures[since:]
        for request in abandoned:
            attempt = Prepared(message_id="", topic=request.topic, key=request.key, attempt_id=request.attempt_id)
            self._producer.rollback(attempt, BACKGROUND)


def _collected(request: message_pb2.PrepareRequest, future: Future[Any]) -> Prepared:
    """Return one handle. Its error says which message of the block it is about."""
    try:
        return prepared_of(request, wait(future, timedelta(0)))
    except errors.TmcError as exc:
        about = f"topic {request.topic!r}, key {request.key!r}"
        if exc.reason == "ALREADY_ROLLED_BACK":  # its first answer was lost, and a check came before the repeat
            fenced = errors.Fenced(errors.Fenced.text, reason=exc.reason)
            fenced.add_note(about)
            raise fenced from exc
        exc.add_note(about)
        raise


def _is_answered(future: Future[Any]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None


class CenterBlock(Block[message_pb2.PrepareRequest]):
    """Base of the blocking and the asyncio block; asyncio runs its blocking code in SQLAlchemy's greenlet."""

    def __init__(
        self,
        producer: Producer,
        local: LocalTransaction,
        prepare_timeout: timedelta,
        fallback: Writer | None,
        answered: Answered | None,
        prepare_first: bool | timedelta,
    ) -> None:
        super().__init__(local)
        if isinstance(prepare_first, timedelta):
            duration("prepare_first", prepare_first)
        self._prepare_first = prepare_first
        self._ahead: Preparation | None = None
        self.messages: list[Prepared] = []
        self._producer = producer
        self._prepare_timeout = duration("prepare_timeout", prepare_timeout)
        self._fallback = fallback
        self._answered = answered or Answered()
        self._settling: Sequence[str] = ()
        self._engine: sa.Engine | None = None
        self._ledger_id = b""
        self._keys: set[tuple[str, str]] = set()
        self._sent_by_outbox: Callable[[], None] | None = None

    def _request(self, topic: Topic[T] | str, body: T, **content: Any) -> message_pb2.PrepareRequest:
        if content["order_key"] and self._fallback is not None:
            raise errors.InvalidRequest(
                "A block with a fallback takes no order_key: what goes to the outbox could be overtaken. Leave fallback= out, "
                "or use outbox.add() for all messages of this order key.",
                field="order_key",
            )
        request = prepare_request(topic, body, **content)
        if self._fallback is not None:
            self._fallback.check(_published(request))
        return request

    def _begin(self) -> None:
        super()._begin()
        if not self._prepare_first:
            return
        try:
            self._ledger_id = ledger_id_of(self._local.run)
        except BaseException as exc:
            try:
                self._local.roll_back()
            finally:
                self._close()
                self._local.stop()
            self._local.explain(exc, ledger_info)
            raise
        lasts = self._prepare_first if isinstance(self._prepare_first, timedelta) else timedelta(0)
        self._ahead = Preparation(self._producer, self._ledger_id, self._prepare_timeout, lasts)

    def _record(self, request: message_pb2.PrepareRequest) -> None:
        name = (request.topic, request.key)
        if name in self._keys:
            raise errors.InvalidRequest(
                f"key {request.key!r} was sent to {request.topic} in this block already: give each message a key of its own.",
                field="key",
            )
        if self._ahead is not None:
            self._ahead.add(request)
        self._keys.add(name)

    def forget_since(self, position: int) -> None:
        super().forget_since(position)
        self._keys = {(request.topic, request.key) for request in self.requests}
        if self._ahead is not None:
            self._ahead.abandon(since=position)

    def _abandon(self) -> None:
        if self._ahead is not None:
            self._ahead.abandon()

    @abstractmethod
    def _until_done(self, futures: Sequence[Future[Any]], limit: timedelta) -> None:
        """Wait until all are done or the time is over."""

    @abstractmethod
    def _settle(self, submits: Mapping[str, Future[Any]]) -> None:
        """Settle these submits in the ledger as they are answered, also after the block ends."""

    @abstractmethod
    def _settle_in(self, engine: sa.Engine, message_id: str) -> None:
        """Settle a submit that was answered after the block ended. Called in the sender's thread."""

    def _settle_one(self, message_id: str, submit: Future[Any]) -> None:
        """Settle one, in the sender's thread, as soon as it is done."""
        if not was_answered(message_id, submit):
            return
        if self._engine is not None:
            self._settle_in(self._engine, message_id)
        else:
            self._answered.add(self._ledger_id, [message_id])

    def _write(self) -> None:
        preparation = self._ahead
        try:
            self._local.verify()
            self._close()
            if not self.requests:
                return
            if preparation is None:
                self._ledger_id = ledger_id_of(self._local.run)
                preparation = Preparation(self._producer, self._ledger_id, self._prepare_timeout)
                for request in self.requests:
                    preparation.add(request)
            self._until_done(preparation.futures, self._prepare_timeout)
            if self._prepared(preparation):
                self._settle_earlier()
                self._local.insert(ledger, rows_for(self.messages))
        except BaseException as exc:
            self._local.roll_back()
            self._answered.add(self._ledger_id, self._settling)
            if preparation is not None:
                preparation.abandon()
            self._local.explain(exc, ledger_info, ledger, *([outbox] if self._fallback is not None else ()))
            if self._markers(exc):
                longer = " If it takes longer than its transaction time, give prepare_first= that time."
                raise errors.Fenced(errors.Fenced.text + (longer if self._prepare_first else "")) from exc
            raise

    def _settle_earlier(self) -> None:
        """Mark what earlier blocks have submitted, where nothing can be written over another connection."""
        self._engine = self._local.engine
        if self._engine is None:
            self._settling = self._answered.take(self._ledger_id, at_least=len(self.messages))
            for first in range(0, len(self._settling), SETTLE_BATCH):
                self._local.run(*settle_batch(self._settling[first : first + SETTLE_BATCH]))

    def _prepared(self, preparation: Preparation) -> bool:
        """Returns False: the center takes nothing now, and the messages are in the outbox instead."""
        try:
            self.messages = preparation.collect()
        except (errors.Unavailable, errors.Overloaded) as exc:
            is_full = exc.reason == "UNACKED_LIMIT"  # until consumers have caught up
            if self._fallback is None or not (is_full or isinstance(exc, errors.Unavailable)):
                raise
            log.warning("the center takes nothing now, %d messages go to the outbox: %s", len(self.requests), exc)
        else:
            return True
        preparation.abandon()
        self._sent_by_outbox = self._fallback.write(self._local, [_published(request) for request in self.requests])
        return False

    def _markers(self, exc: BaseException) -> Sequence[Any]:
        """Read which of our messages have a rollback marker: the error alone does not prove it."""
        if not (self.messages and self._local.is_duplicate(exc)):
            return ()
        try:
            return self._local.read(fenced([message.message_id for message in self.messages]), {})
        except Exception as failure:
            log.warning("whether a check was answered ROLLBACK cannot be read: %s", failure, exc_info=True)
            return ()

    def _commit(self) -> None:
        """Commit; if that raises, ask the ledger, in a way that makes its answer final."""
        try:
            super()._commit()
        except BaseException as failure:
            state = self._fence()
            if state == ROLLED_BACK:
                self._give_up()
            if state != COMMITTED:
                raise
            log.warning("the commit of a block took effect although it raised", exc_info=True)
            if not isinstance(failure, Exception):
                self._after_commit()
                raise

    def _fence(self) -> int | None:
        """Read the state of the block in the ledger; its rows were written together. None: it is not known yet."""
        if not self.messages:
            return None
        first = self.messages[0]
        try:
            return self._local.fence(marker(first.message_id, first.topic, first.key, first.attempt_id))
        except Exception:  # it must not hide what the commit raised
            log.warning("whether the commit took effect is not known yet", exc_info=True)
            return None

    def _give_up(self) -> None:
        """Roll back at the center, and wait a little: then their keys are free when the program runs the block again."""
        self._until_done([self._producer.rollback(message, BACKGROUND) for message in self.messages], SUBMIT_WAIT)

    def _after_commit(self) -> None:
        """Submit the messages. Never raises: unanswered submits are retried by the sender, then at the next start."""
        try:
            if self._sent_by_outbox is not None:
                self._sent_by_outbox()
            if self.messages:
                self._submit()
        except Exception as exc:
            log.warning("committed, the center answers later: %s", exc, exc_info=True)

    def _submit(self) -> None:
        submits = self._submits()
        try:
            self._until_done(list(submits.values()), SUBMIT_WAIT)
        finally:
            self._settle(submits)

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
    """Return whether a finished submit was answered; logs an error if not."""
    failure = None if submit.cancelled() else submit.exception()
    if submit.cancelled() or failure is not None:
        log.error("message %s is committed, its submit was not answered: %s", message_id, failure or "cancelled")
        return False
    return True


class Transaction(Blocking[message_pb2.PrepareRequest], CenterBlock):
    """The block of a blocking program. Use it with `with`, once. settle: marks messages whose submit was answered."""

    def __init__(
        self,
        producer: Producer,
        settle: Settle,
        local: LocalTransaction,
        prepare_timeout: timedelta,
        fallback: Writer | None = None,
        answered: Answered | None = None,
        prepare_first: bool | timedelta = False,
    ) -> None:
        super().__init__(producer, local, prepare_timeout, fallback, answered, prepare_first)
        self._settler = settle

    def _until_done(self, futures: Sequence[Future[Any]], limit: timedelta) -> None:
        wait_for_all(futures, limit.total_seconds())

    def _settle(self, submits: Mapping[str, Future[Any]]) -> None:
        for message_id, submit in submits.items():
            submit.add_done_callback(partial(self._settle_one, message_id))

    def _settle_in(self, engine: sa.Engine, message_id: str) -> None:
        self._settler(engine, [message_id])
