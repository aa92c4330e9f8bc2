"""The outermost `atomic()` of a thread as the transaction of a block or a handler."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import django.db
import sqlalchemy as sa
from django.db import connections, transaction
from sqlalchemy.dialects import registry

from tmc_client import errors
from tmc_client.django import connect
from tmc_client.local import Recorder
from tmc_client.local.connections import ConnectionTransaction
from tmc_client.local.drivers import Driver
from tmc_client.local.engines import engine_of
from tmc_client.local.statements import Text

_DIALECTS = {"sqlite": "sqlite", "mysql": "mysql.mysqldb", "postgresql": "postgresql.psycopg"}


class AtomicTransaction(ConnectionTransaction):
    """See LocalTransaction. Messages that were recorded in an inner `atomic()` are discarded with it."""

    def __init__(self, using: str) -> None:
        """Raises InvalidRequest: a database that we do not know."""
        wrapper: Any = connections[using]
        if wrapper.vendor not in _DIALECTS:
            raise errors.InvalidRequest(
                f"The database {using!r} is {wrapper.vendor}: transactions with messages work on SQLite, MariaDB, MySQL and "
                "PostgreSQL."
            )
        super().__init__(wrapper, _driver(wrapper.vendor))
        self._using = using
        self._atomic: Any = None
        self._hooks: list[tuple[int, object]] = []

    def begin(self, place: str, *, recorder: Recorder | None = None, lends_commit: bool = False) -> None:
        self._hooks = []
        super().begin(place, recorder=recorder, lends_commit=lends_commit)

    def _begin_transaction(self) -> None:
        wrapper = self._connection
        inside = [block for block in wrapper.atomic_blocks if not block._from_testcase]
        if inside or not (wrapper.atomic_blocks or wrapper.get_autocommit()):
            raise errors.InvalidRequest(
                f"A {self._place} owns the commit: it cannot run inside transaction.atomic(). Open it around that. In a view "
                "with ATOMIC_REQUESTS, decorate the view with @transaction.non_atomic_requests."
            )
        self._atomic = transaction.atomic(self._using)
        self._atomic.__enter__()

    def _commit(self) -> None:
        self._outermost._leave()

    def _roll_back(self) -> None:
        self._outermost._leave(Undone())

    @property
    def _outermost(self) -> AtomicTransaction:
        return self._outer._outermost if isinstance(self._outer, AtomicTransaction) else self

    def _leave(self, exc: Exception | None = None) -> None:
        atomic, self._atomic = self._atomic, None
        if atomic is not None:
            atomic.__exit__(type(exc) if exc is not None else None, exc, None)

    def _physical(self) -> Any:
        return self._connection.connection

    def _is_open(self) -> bool | None:
        return None

    def _is_lost(self, exc: BaseException) -> bool:
        raw, cause = self._connection.connection, exc.__cause__
        dialect: Any = self.dialect
        return raw is None or (isinstance(cause, Exception) and dialect.is_disconnect(cause, raw, None))

    def _engine(self) -> sa.Engine:
        return engine_of(connect(self._using), "transaction()")

    def _refuse_more(self) -> None:
        """What comes after the block is in no `atomic()` any more: Django commits it, statement by statement."""

    def check(self) -> None:
        """Also looks which messages went with an inner `atomic()`: those whose hooks Django has dropped."""
        if self._connection.needs_rollback:
            raise errors.InvalidRequest(
                f"An error inside this {self._place} was swallowed, and Django will roll it back: put transaction.atomic() "
                "around what may fail, or let the error out."
            )
        super().check()
        if self._recorder is None:
            return
        kept = {id(function) for _, function, *_ in self._connection.run_on_commit}
        gone = [position for position, hook in self._hooks if id(hook) not in kept]
        if gone:
            self._recorder.forget_since(gone[0])
            self._hooks = [(position, hook) for position, hook in self._hooks if position < gone[0]]
        self._note()

    def _note(self) -> None:
        """A hook for the message that may be recorded next."""
        assert self._recorder is not None

        def hook() -> None:
            """Does nothing: that it is there says that its savepoint is."""

        transaction.on_commit(hook, using=self._using)
        self._hooks.append((self._recorder.position(), hook))


class HandlerTransaction(AtomicTransaction):
    """For a handler's thread: a connection that broke in between is replaced."""

    def begin(self, place: str, *, recorder: Recorder | None = None, lends_commit: bool = False) -> None:
        if not self._connection.in_atomic_block:
            self._connection.close_if_unusable_or_obsolete()
        super().begin(place, recorder=recorder, lends_commit=lends_commit)


class Undone(Exception):
    """Makes `atomic()` roll back."""


@lru_cache
def _driver(vendor: str) -> Driver:
    kind: Any = registry.load(_DIALECTS[vendor])
    return Driver(
        name=f"django.{vendor}",
        module=django.db,
        text=Text(kind(dbapi=kind.import_dbapi(), paramstyle="format")),
        in_transaction=lambda _connection: None,
        autocommit=lambda _connection: False,
    )
