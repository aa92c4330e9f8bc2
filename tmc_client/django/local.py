"""The outermost `atomic()` of a thread as the transaction of a block or a handler."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import django.db
from django.db import connections, transaction
from sqlalchemy import Table
from sqlalchemy.dialects import registry

from tmc_client import errors
from tmc_client.local import Recorder, causes
from tmc_client.local.connections import ConnectionTransaction
from tmc_client.local.drivers import Driver
from tmc_client.local.statements import Text

log = logging.getLogger("tmc_client.django")

_DIALECTS = {"sqlite": "sqlite", "mysql": "mysql.mysqldb", "postgresql": "postgresql.psycopg"}


VENDORS = frozenset(_DIALECTS)


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
        self._on_commit: list[Any] = []

    @property
    def is_of_a_test(self) -> bool:
        """Return whether it is inside the transaction of a django.test.TestCase."""
        blocks = self._connection.atomic_blocks
        return bool(blocks) and all(block._from_testcase for block in blocks)

    def _lacking(self, table: Table) -> str:
        sentence = super()._lacking(table)
        if sentence.startswith("There is no table"):
            return f"There is no table {table.name} in database {self._using!r}: run python manage.py migrate."
        return sentence

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
        """Functions of on_commit run at the end of all, when an error of theirs cannot hide that it is committed."""
        outermost, wrapper = self._outermost, self._connection
        ours = {id(hook) for block in (self, outermost) for _, hook in block._hooks}
        hooks = [hook for hook in wrapper.run_on_commit if id(hook[1]) not in ours]
        is_last = len(wrapper.atomic_blocks) == 1  # not in the transaction of a test case
        wrapper.run_on_commit = [] if is_last else hooks
        outermost._leave()
        if is_last:
            outermost._on_commit = hooks
        if outermost is not self:
            wrapper.execute_wrappers.append(outermost._refuse_statement)

    def _refuse_statement(self, *_: object) -> None:
        """Refuse a statement of a handler whose last step, a block, has committed:
        Django would commit each statement by itself.
        """
        raise errors.InvalidRequest(
            f"The transaction block in this {self._place} has committed for both: it must come last."
        )

    def stop(self) -> None:
        super().stop()
        wrapper = self._connection
        if self._refuse_statement in wrapper.execute_wrappers:
            wrapper.execute_wrappers.remove(self._refuse_statement)
        hooks, self._on_commit = self._on_commit, []
        for _, hook, *_rest in hooks:
            try:
                hook()
            except Exception:
                log.exception("a function of transaction.on_commit() failed after the commit")

    def _roll_back(self) -> None:
        self._outermost._leave(Undone())

    @property
    def _outermost(self) -> AtomicTransaction:
        return self._outer._outermost if isinstance(self._outer, AtomicTransaction) else self

    def _leave(self, exc: Exception | None = None) -> None:
        atomic, self._atomic = self._atomic, None
        if atomic is not None:
            atomic.__exit__(type(exc) if exc is not None else None, exc, None)

    @contextmanager
    def savepoint(self) -> Iterator[object]:
        """An inner `atomic()`: `check` sees what it takes with it."""
        with transaction.atomic(self._using):
            yield self.handle

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with transaction.atomic(self._using):
            yield

    def _is_open(self) -> bool | None:
        return None

    @property
    def _raw(self) -> Any:
        return self._connection.connection

    def is_lost(self, exc: BaseException) -> bool:
        raw = self._connection.connection
        dialect: Any = self.dialect
        module = dialect.loaded_dbapi if raw is None else self._connection.Database
        return any(
            isinstance(each, django.db.InterfaceError)
            or (isinstance(each, module.Error) and (raw is None or dialect.is_disconnect(each, raw, None)))
            for each in causes(exc)
        )

    def _returns(self) -> bool:
        return self._connection.vendor != "mysql" or bool(self._connection.mysql_is_mariadb)

    def _refuse_more(self) -> None:
        """Each statement after the block was refused when it was run."""

    def check(self) -> None:
        """Check, and forget the messages that went with an inner `atomic()`: those whose hooks Django has dropped."""
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
            """Do nothing: that it is there says that its savepoint is."""

        transaction.on_commit(hook, using=self._using)
        self._hooks.append((self._recorder.position(), hook))


class HandlerTransaction(AtomicTransaction):
    """For a handler's thread: a connection that broke is replaced with the next message."""

    def begin(self, place: str, *, recorder: Recorder | None = None, lends_commit: bool = False) -> None:
        if not self._connection.in_atomic_block:
            self._connection.close_if_unusable_or_obsolete()
        super().begin(place, recorder=recorder, lends_commit=lends_commit)


class Undone(Exception):
    """Makes `atomic()` roll back."""


@lru_cache
def _driver(vendor: str) -> Driver:
    kind: Any = registry.load(_DIALECTS[vendor])
    try:
        module = kind.import_dbapi()
    except ModuleNotFoundError as exc:
        raise errors.InvalidRequest(
            f"Transactions with messages need {exc.name} for this database: install it."
        ) from exc
    return Driver(
        name=f"django.{vendor}",
        module=django.db,
        text=Text(kind(dbapi=module, paramstyle="format")),
        in_transaction=lambda _connection: None,
        autocommit=lambda _connection: False,
    )
