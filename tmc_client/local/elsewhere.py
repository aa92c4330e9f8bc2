"""Which of a session's connections writes our rows, and whether the session writes through another one too.

A session may work with several databases: by `binds=`, or by a `get_bind` that sends reads to a replica. Their connections
commit one after the other, so what is written through a second one is not in the transaction of our rows: refused. Others may
read.
"""

from __future__ import annotations

import re
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.orm import Session, SessionTransaction

from tmc_client import errors
from tmc_client.tables import ledger

_KEY = "tmc_elsewhere"
_OURS: dict[str, Any] = {"clause": ledger.update()}  # a `get_bind` sends it where it sends the program's own changes
_READS = frozenset(
    ("SELECT", "SHOW", "EXPLAIN", "SET", "SAVEPOINT", "RELEASE", "ROLLBACK", "PRAGMA", "VALUES", "TABLE")
)
_ASIDE = re.compile(r"""'[^']*'|"[^"]*"|`[^`]*`|--[^\n]*|/\*.*?\*/""", re.DOTALL)  # literals, names in quotes, comments
_FIRST = re.compile(r"[\s(]*(\w*)")
_CHANGE = re.compile(  # in a WITH ... SELECT
    r"(?<!FOR )(?<!FOR NO KEY )\b(?:INSERT|UPDATE|DELETE|MERGE|REPLACE)\b(?!\s*\()"
)
_WROTE: WeakKeyDictionary[sa.Connection, bool] = WeakKeyDictionary()  # only those that do not write our rows
_ENGINES: WeakSet[sa.Engine] = WeakSet()  # with our listener


def writer_of(session: Session) -> sa.Engine | sa.Connection:
    """Return where this session writes our rows. Raises InvalidRequest: it does not know."""
    try:
        return session.get_bind(**_OURS)
    except sa.exc.UnboundExecutionError as exc:
        raise errors.InvalidRequest(
            "This session has no engine for our tables, such as tmc_ledger: give its sessionmaker bind= besides binds=."
        ) from exc


def connection_of(session: Session) -> sa.Connection:
    """The connection that writes our rows; begins the transaction if there is none."""
    return session.connection(bind_arguments=_OURS)


def refuse_elsewhere(session: Session, place: str) -> None:
    """Raise InvalidRequest if the transaction of this session has written to a second database. place: for the message."""
    for connection in session.info.get(_KEY, ()):
        if _WROTE.get(connection):
            raise errors.InvalidRequest(
                f"This session writes to two databases, {writer_of(session).engine.url!r} and {connection.engine.url!r}, which "
                f"commit one after the other: {place} has one. Write to the other one in a session of its own."
            )


@event.listens_for(Session, "after_begin")
def _after_begin(session: Session, _transaction: SessionTransaction, connection: sa.Connection) -> None:
    try:
        writer = session.get_bind(**_OURS)
    except Exception:  # noqa: BLE001 - of a session that may have nothing to do with us, and chooses as it likes
        return
    if connection.engine is writer.engine or connection in _WROTE:
        return
    _WROTE[connection] = False
    session.info.setdefault(_KEY, []).append(connection)
    if connection.engine not in _ENGINES:
        event.listen(connection.engine, "before_cursor_execute", _before_cursor_execute)
        _ENGINES.add(connection.engine)


@event.listens_for(Session, "after_transaction_end")
def _after_transaction_end(session: Session, transaction: SessionTransaction) -> None:
    if transaction.parent is None:
        for connection in session.info.pop(_KEY, ()):
            _WROTE.pop(connection, None)


def _before_cursor_execute(
    connection: sa.Connection, _cursor: Any, statement: str, _parameters: Any, _context: Any, _many: bool
) -> None:
    if connection in _WROTE and may_write(statement):
        _WROTE[connection] = True


def may_write(statement: str) -> bool:
    """Return whether it may change something."""
    words = _ASIDE.sub(" ", statement).upper()
    first = _FIRST.match(words)
    if first is None or first[1] != "WITH":
        return first is None or first[1] not in _READS
    return _CHANGE.search(words) is not None
