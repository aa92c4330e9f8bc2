"""The consumer's inbox: a handler's effect is committed together with one row that says it happened.

A second copy of the message conflicts with the primary key of that row, and its effect does not happen. Before the
commit it is verified that row and effect are still in one transaction: see tmc_client.local. A batch has one
transaction for its messages; those that had their effect before are left out.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import (
    AbstractContextManager,
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
    closing,
    contextmanager,
    nullcontext,
)
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import sqlalchemy as sa

from tmc_client import errors
from tmc_client.consuming.received import Message
from tmc_client.local import LocalTransaction
from tmc_client.local.choosing import is_async_session, is_of_asyncio, local_of
from tmc_client.local.drivers import driver_of
from tmc_client.local.loops import on_one_loop
from tmc_client.local.sessions import SessionTransaction
from tmc_client.tables import inbox, inbox_order, inexact

_PLACE = "handler with an inbox"
_LAST = sa.select(inbox_order.c.sequence).where(inbox_order.c.line == sa.bindparam("named"))
_MOVE = (
    sa.update(inbox_order)
    .where(inbox_order.c.line == sa.bindparam("named"), inbox_order.c.sequence < sa.bindparam("next"))
    .values(sequence=sa.bindparam("next"), changed_ms=sa.bindparam("now"))
)


@dataclass(frozen=True, kw_only=True)
class Effects:
    """What a handler does now. handle: what it writes with.  messages: those that have not had their effect before."""

    handle: Any
    messages: Sequence[Message]


class SqlInbox:
    """An inbox in the database that `connect` connects to. Its tables: tmc.create_tables(engine).

    connect: makes what handlers write with: sessionmaker(engine), async_sessionmaker(engine) for handlers that are
    `async def`, or a function that returns a connection of sqlite3, mysqlclient, PyMySQL or psycopg. Closed after each.
    stays_in_thread: handlers are `def`, since what they write with belongs to the thread.
    """

    def __init__(self, connect: Callable[[], Any], *, stays_in_thread: bool = False) -> None:
        """Raises InvalidRequest if `connect` cannot be called, e.g. an engine or a session."""
        if not callable(connect) or is_async_session(connect) or driver_of(connect) is not None:
            raise errors.InvalidRequest(
                f"tmc.SqlInbox() takes what makes sessions, not {type(connect).__name__}: give it sessionmaker(engine), or a "
                "function that returns a connection."
            )
        self._connect = connect
        self._compares_exactly = False  # seen once, of whatever database
        self.stays_in_thread = stays_in_thread
        self.is_async: bool = is_of_asyncio(connect)

    def check(self) -> None:
        """Raises InvalidRequest: no transaction of a handler is possible, or a table is missing or of an older version.

        And what the database raises.
        """
        with _closed(self._connect()) as source:
            _check(_local(source))
        self._compares_exactly = True

    async def check_async(self) -> None:
        """Do what `check` does, for an inbox that makes AsyncSessions."""
        with on_one_loop("the consumer"):
            async with self._connect() as session:
                await session.run_sync(lambda _: _check(SessionTransaction(session.sync_session)))
        self._compares_exactly = True

    @contextmanager
    def once(self, message: Message) -> Iterator[Any]:
        """Yield what to write the effect with, committed at the end of the block. None: the effect has already happened.

        Raises InvalidRequest: row and effect are not in one transaction; nothing of the current one is committed.
        OutOfOrder: a later message of its order key has had its effect.
        """
        with self.once_each([message]) as effects:
            yield effects.handle if effects.messages else None

    @contextmanager
    def once_each(self, messages: Sequence[Message]) -> Iterator[Effects]:
        """Do what `once` does for several messages in one transaction."""
        with ExitStack() as stack:
            handling, effects = self._begun(stack, messages)
            self._compares_exactly = True
            try:
                yield effects
            except BaseException as exc:
                handling.fail(exc)
                raise
            handling.end()

    def _begun(
        self, stack: ExitStack, messages: Sequence[Message], *, again: bool = False
    ) -> tuple[_Handling, Effects]:
        """Begin, once more if the first connection turns out to be lost: a pool keeps those that a server has closed."""
        source = stack.enter_context(_closed(self._connect()))
        handling = _Handling(partial(_local, source), messages, checks=not self._compares_exactly)
        try:
            return handling, handling.begin()
        except Exception as exc:
            if again or not handling.is_lost(exc):
                raise
        stack.close()
        return self._begun(stack, messages, again=True)

    @asynccontextmanager
    async def once_async(self, messages: Sequence[Message]) -> AsyncIterator[Effects]:
        """Do what `once_each` does, with an inbox that makes AsyncSessions."""
        async with AsyncExitStack() as stack:
            with on_one_loop("the consumer"):
                handling, effects = await self._begun_async(stack, messages)
            self._compares_exactly = True
            try:
                yield effects
            except BaseException as exc:
                lost = exc
                await effects.handle.run_sync(lambda _: handling.fail(lost))
                raise
            await effects.handle.run_sync(lambda _: handling.end())

    async def _begun_async(
        self, stack: AsyncExitStack, messages: Sequence[Message], *, again: bool = False
    ) -> tuple[_Handling, Effects]:
        session = await stack.enter_async_context(self._connect())
        local = partial(SessionTransaction, session.sync_session)
        handling = _Handling(local, messages, checks=not self._compares_exactly)
        try:
            effects = await session.run_sync(lambda _: handling.begin())
            return handling, replace(effects, handle=session)
        except Exception as exc:
            if again or not handling.is_lost(exc):
                raise
        await stack.aclose()
        return await self._begun_async(stack, messages, again=True)


def _closed(source: Any) -> AbstractContextManager[Any]:
    """Connections of drivers end a `with` in different ways: with commits, or without closing. A LocalTransaction has no end."""
    return closing(source) if hasattr(source, "close") else nullcontext(source)


def _local(source: Any) -> LocalTransaction:
    """Raises InvalidRequest: handlers cannot write with it."""
    if is_async_session(source):
        raise errors.InvalidRequest("This inbox makes AsyncSessions: its handlers must be `async def`.")
    return local_of(source, "tmc.SqlInbox()")


def _check(local: LocalTransaction) -> None:
    """Begin as a handler does, read nothing, and roll back."""
    if isinstance(local, SessionTransaction) and local.is_shared:
        return  # one of the threads may be in its transaction
    local.begin(_PLACE)
    try:
        for table in (inbox, inbox_order):
            local.run(sa.select(table).where(sa.false()), {}).fetchall()
        _demand_exact(local)
    except Exception as exc:
        local.roll_back()
        local.explain(exc, inbox, inbox_order)
        raise
    else:
        local.roll_back()
    finally:
        local.stop()


def _demand_exact(local: LocalTransaction) -> None:
    """Raises InvalidRequest: the table takes different subscribers for the same."""
    dialect = getattr(local, "dialect", None)
    if dialect is not None and (sentence := inexact(local.run, dialect.name, inbox)):
        raise errors.InvalidRequest(sentence)


class _Handling:
    """One transaction with the inbox rows of these messages. local: begins another one on the same connection."""

    def __init__(self, local: Callable[[], LocalTransaction], messages: Sequence[Message], *, checks: bool) -> None:
        """checks: whether to look at how the table compares first."""
        self._new = local
        self._checks = checks
        self._local: Any = None
        # Of an order key in their order; a single message and those without an order key stay where they are.
        self._messages = sorted(messages, key=lambda message: message.sequence or 0)

    def begin(self) -> Effects:
        """Insert the inbox rows. Raises OutOfOrder and what the database raises: nothing is open any more."""
        while True:
            self._local = self._new()
            self._local.begin(_PLACE, lends_commit=True)
            try:
                if self._checks:
                    _demand_exact(self._local)
                happened = self._note() or {
                    message.id for message in _by_line(self._messages) if not self._in_turn(message)
                }
                if not happened and self._messages:
                    return Effects(handle=self._local.handle, messages=tuple(self._messages))
            except BaseException:
                self._undo()
                raise
            self._undo()
            self._messages = [message for message in self._messages if message.id not in happened]
            if not self._messages:
                return Effects(handle=None, messages=())

    def is_lost(self, exc: BaseException) -> bool:
        return self._local is not None and self._local.is_lost(exc)

    def end(self) -> None:
        """Commit, unless a block inside has committed for both. Raises InboxDown: the connection is lost."""
        if not self._messages:
            return
        try:
            self._local.verify()
            if not self._local.committed:
                self._local.commit()
        except BaseException as exc:
            self.fail(exc)
            raise
        else:
            self._local.stop()

    def fail(self, exc: BaseException) -> None:
        """Roll back. Raises InboxDown if it is over because the connection is lost, which is no failure of the handler."""
        if self._messages:
            lost = isinstance(exc, Exception) and self.is_lost(exc)
            self._undo()
            if lost:
                raise errors.InboxDown(f"{type(exc).__name__}: {exc}") from exc

    def _undo(self) -> None:
        self._local.roll_back()
        self._local.stop()

    def _note(self) -> set[str]:
        """Insert the rows. Returns: which messages have had their effect; if any, nothing is inserted."""
        now = _now_ms()
        rows = [
            {"subscriber": message.subscriber, "message_id": message.id, "received_ms": now}
            for message in sorted(self._messages, key=lambda message: message.id)  # so that two batches cannot deadlock
        ]
        try:
            self._local.insert(inbox, rows)
        except Exception as exc:
            self._local.roll_back()
            self._local.explain(exc, inbox)
            if not self._local.is_duplicate(exc):
                raise
            happened = self._known()
            if not happened:
                raise  # refused for another reason: the effect did not happen
            return happened
        return set()

    def _known(self) -> set[str]:
        keys = sa.tuple_(inbox.c.subscriber, inbox.c.message_id)
        ours = [(message.subscriber, message.id) for message in self._messages]
        return {row[0] for row in self._local.read(sa.select(inbox.c.message_id).where(keys.in_(ours)), {})}

    def _in_turn(self, message: Message) -> bool:
        """Note that this is the last message of its order key. Returns False: it already was. Raises OutOfOrder.

        Read first, then insert or update: an update that finds no row locks the gap on MySQL, and the inserts of two new
        order keys would wait for each other.
        """
        if message.sequence is None:
            return True
        line = _line_of(message)
        try:
            last = self._local.run(_LAST, {"named": line}).fetchone()
            if last is None:
                self._local.insert(inbox_order, [_first(message, line)])
                return True
            moved = self._local.run(_MOVE, {"named": line, "next": message.sequence, "now": _now_ms()})
        except Exception as exc:
            self._local.roll_back()
            self._local.explain(exc, inbox_order)
            raise
        if moved.rowcount == 1:
            return True
        if last[0] == message.sequence:
            return False
        raise errors.OutOfOrder(
            f"A later message of order key {message.order_key!r} has had its effect: this one was skipped before."
        )


def _by_line(messages: Sequence[Message]) -> list[Message]:
    """Sort messages in the order in which every batch takes their locks."""
    return sorted(messages, key=lambda message: (message.topic, message.order_key, message.sequence or 0))


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _first(message: Message, line: str) -> dict[str, Any]:
    return {
        "line": line,
        "subscriber": message.subscriber,
        "topic": message.topic,
        "order_key": message.order_key,
        "sequence": message.sequence,
        "changed_ms": _now_ms(),
    }


def _line_of(message: Message) -> str:
    """32 hexadecimal digits for subscriber, topic and order key."""
    named = "\0".join((message.subscriber, message.topic, message.order_key))
    return hashlib.blake2b(named.encode(), digest_size=16).hexdigest()
