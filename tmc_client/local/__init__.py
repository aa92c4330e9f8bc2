"""The local transaction that a block or a handler owns, in whatever library the program uses for its database.

    sessions.SessionTransaction          SQLAlchemy: Session, Connection, and AsyncSession through its greenlet
    connections.ConnectionTransaction    a connection of a DB-API driver: sqlite3, mysqlclient, PyMySQL, psycopg
    django.AtomicTransaction             Django

For another library, write a class with these methods and give an object of it to `center.transaction(...)`,
`outbox.transaction(...)` or, from a factory, to `tmc.SqlInbox(...)`. Our statements are SQLAlchemy's; `statements.Text` makes
text and parameters of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from sqlalchemy import Dialect, Engine, Executable, Table


def causes(exc: BaseException) -> Iterator[BaseException]:
    """Yield the error, and each one behind it."""
    cause: BaseException | None = exc
    while cause is not None:
        yield cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


class Recorder(Protocol):
    """Holds records that belong to the transaction and are discarded when their savepoint is rolled back."""

    def position(self) -> int: ...

    def forget_since(self, position: int) -> None: ...


class Rows(Protocol):
    """What a statement found and changed."""

    @property
    def rowcount(self) -> int: ...

    def fetchone(self) -> Any: ...

    def fetchall(self) -> Sequence[Any]: ...


class LocalTransaction(Protocol):
    """One transaction, from `begin` to `stop`, in one thread.

    handle: what the program writes its rows with, e.g. the session; passed to handlers with an inbox.
    """

    handle: Any

    @property
    def dialect(self) -> Dialect: ...

    @property
    def engine(self) -> Engine | None:
        """Return an engine of the same database, for what is written in the background. None: later blocks write it."""

    def begin(self, place: str, *, recorder: Recorder | None = None, lends_commit: bool = False) -> None:
        """Start; what the program did before in the same transaction belongs to it. Raises InvalidRequest: not possible.

        place: its name in errors.  lends_commit: a block may be opened inside, which then commits for both.
        """

    def check(self) -> None:
        """Raise InvalidRequest if the transaction is known to have ended."""

    def verify(self) -> None:
        """Write what the program left to write. Raises InvalidRequest unless the next commit belongs to what `begin` began."""

    @property
    def committed(self) -> bool:
        """Return whether a block inside has committed for both."""

    def commit(self) -> None:
        """Raises the library's error: the outcome is unknown."""

    def roll_back(self) -> None: ...

    def stop(self) -> None:
        """End it. Called last, whatever happened."""

    def savepoint(self) -> AbstractContextManager[object]:
        """Open a savepoint, which is rolled back alone, with the messages recorded in it, if its body raises."""

    def run(self, statement: Executable, parameters: Mapping[str, Any]) -> Rows:
        """One of our statements. Raises the library's error."""

    def insert(self, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
        """Insert all of these. Raises the library's error."""

    @property
    def lasting(self) -> Any:
        """Return the driver's connection, if the program gave that; None if a pool chooses one for each transaction."""

    def insert_outbox(self, rows: Sequence[Mapping[str, Any]], schema: str = "") -> Sequence[int]:
        """Write messages into tmc_outbox. schema: its; "": where the connection finds it. Returns: their ids, in order."""

    def is_duplicate(self, exc: BaseException) -> bool:
        """Return whether a row was refused because of its key, or for a reason that this library cannot tell from that."""

    def is_lost(self, exc: BaseException) -> bool:
        """Return whether this error, or what caused it, says that the connection is gone."""

    def explain(self, exc: BaseException, *tables: Table) -> None:
        """Raise InvalidRequest, after `roll_back`, if a statement failed because one of these is missing or too old."""

    def fence(self, row: Mapping[str, Any]) -> int | None:
        """Insert, after `roll_back` of a commit that raised, this rollback marker, unless the ledger has the message's row.

        In a transaction of its own: see marker.insert_marker. Returns: the state in the ledger; None: it is not known yet.
        Must not raise.
        """

    def read(self, statement: Executable, parameters: Mapping[str, Any]) -> Sequence[Any]:
        """Read in a transaction of its own, after `roll_back`. Raises the library's error."""
