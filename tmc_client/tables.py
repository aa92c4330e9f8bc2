"""The SDK's tables in the users' own databases, as SQLAlchemy metadata: add it to your migrations or use create_tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import mysql
from sqlalchemy.schema import CreateColumn

from tmc_client import errors

metadata: sa.MetaData = sa.MetaData()

FAMILY = ("mysql", "mariadb")
_EXACT = {"charset": "utf8mb4", "collation": "utf8mb4_bin"}


def _text(length: int) -> sa.types.TypeEngine[str]:
    """Text that is compared exactly: MariaDB and MySQL otherwise take "Stock" and "stock" for the same name."""
    return sa.String(length).with_variant(mysql.VARCHAR(length, **_EXACT), *FAMILY)


# One row per message; the primary key is what a check's rollback marker will collide with.
ledger: sa.Table = sa.Table(
    "tmc_ledger",
    metadata,
    sa.Column("message_id", _text(64), primary_key=True),
    sa.Column("state", sa.SmallInteger, nullable=False),
    sa.Column("topic", _text(128), nullable=False),
    sa.Column("message_key", _text(128), nullable=False),
    sa.Column("attempt_id", sa.LargeBinary(16), nullable=False),
    sa.Column("created_ms", sa.BigInteger, nullable=False),
    sa.Column("settled_ms", sa.BigInteger),
    sa.Index("tmc_ledger_unsettled", "settled_ms", "message_id"),
)

ledger_info: sa.Table = sa.Table(
    "tmc_ledger_info",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("ledger_id", sa.LargeBinary(16), nullable=False),
    # Rows of messages prepared before this, milliseconds since the epoch, may have been cleaned away.
    sa.Column("horizon_ms", sa.BigInteger, nullable=False, server_default="0"),
)

# One row per message and subscriber, written in the transaction of the effect: a second copy finds it and does nothing.
inbox: sa.Table = sa.Table(
    "tmc_inbox",
    metadata,
    sa.Column("subscriber", _text(160), primary_key=True),
    sa.Column("message_id", _text(64), primary_key=True),
    sa.Column("received_ms", sa.BigInteger, nullable=False),
)

inbox_horizon: sa.Table = sa.Table(
    "tmc_inbox_horizon",
    metadata,
    sa.Column("subscriber", _text(160), primary_key=True),
    # Rows of its effects before this, milliseconds since the epoch, may have been cleaned away.
    sa.Column("horizon_ms", sa.BigInteger, nullable=False),
)

# The last message of each order key that had its effect. Written beside the inbox row, for copies that have a sequence.
inbox_order: sa.Table = sa.Table(
    "tmc_inbox_order",
    metadata,
    # A hash of the next three: databases may compare text without regard to case and accents.
    sa.Column("line", _text(32), primary_key=True),
    sa.Column("subscriber", _text(160), nullable=False),
    sa.Column("topic", _text(128), nullable=False),
    sa.Column("order_key", _text(128), nullable=False),
    sa.Column("sequence", sa.BigInteger, nullable=False),
    sa.Column("changed_ms", sa.BigInteger, nullable=False),
)

# One row per message to send, written in the business transaction.
outbox: sa.Table = sa.Table(
    "tmc_outbox",
    metadata,
    sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
    sa.Column("topic", _text(128), nullable=False),
    sa.Column("message_key", _text(128), nullable=False),
    sa.Column("order_key", _text(128), nullable=False),
    # A hash of topic and order key while the message is not sent; NULL: nothing has to wait for it.
    sa.Column("line", _text(32)),
    sa.Column("body", sa.LargeBinary((1 << 24) - 1), nullable=False),
    sa.Column("content_type", _text(128), nullable=False),
    sa.Column("headers", sa.Text, nullable=False),
    sa.Column("delay_ms", sa.BigInteger, nullable=False),
    sa.Column("attempt_id", sa.LargeBinary(16), nullable=False),
    sa.Column("state", sa.SmallInteger, nullable=False),
    # How often the target refused it.
    sa.Column("tries", sa.Integer, nullable=False),
    # When a relay sends it, milliseconds since the epoch; NULL: it is sent or failed.
    sa.Column("due_ms", sa.BigInteger),
    sa.Column("created_ms", sa.BigInteger, nullable=False),
    sa.Column("sent_ms", sa.BigInteger),
    # 1: by the process that committed it; 0: by a relay.
    sa.Column("direct", sa.SmallInteger, nullable=False),
    sa.Column("error", _text(500), nullable=False),
    sa.Index("tmc_outbox_due", "due_ms", "id"),
    sa.Index("tmc_outbox_line", "line", "id"),
    sa.Index("tmc_outbox_key", "message_key"),
    sa.Index("tmc_outbox_state", "state", "direct", "created_ms"),
)

# One row: which relay works, and until when it may, milliseconds since the epoch by the database's clock.
outbox_relay: sa.Table = sa.Table(
    "tmc_outbox_relay",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("owner", _text(64), nullable=False),
    sa.Column("until_ms", sa.BigInteger, nullable=False),
)


def lacking(connection: sa.Connection, *wanted: sa.Table) -> str:
    """One sentence about the first missing table or column and how to add it; "" if nothing is missing."""
    inspector = sa.inspect(connection)
    for table in wanted:
        if not inspector.has_table(table.name):
            return no_table(table)
        there = {column["name"] for column in inspector.get_columns(table.name)}
        for column in table.columns:
            if column.name not in there:
                return no_column(column, connection.dialect)
    return ""


INEXACT = sa.text(
    "SELECT table_name, column_name, collation_name FROM information_schema.columns WHERE table_schema = DATABASE()"
    " AND table_name IN ('tmc_ledger', 'tmc_inbox', 'tmc_inbox_horizon', 'tmc_inbox_order', 'tmc_outbox')"
    " AND collation_name IS NOT NULL AND RIGHT(collation_name, 4) <> '_bin' ORDER BY table_name, ordinal_position"
)
"""Columns of our tables that MariaDB or MySQL compare without regard to case or accents."""


def inexact(run: Callable[[sa.Executable, dict[str, Any]], Any], dialect: str, *wanted: sa.Table) -> str:
    """One sentence about the first of these tables that takes different names for the same, and how to mend it; "": none.

    run: see LocalTransaction.
    """
    if dialect not in FAMILY:
        return ""
    names = {table.name for table in wanted}
    for name, column, collation in run(INEXACT, {}).fetchall():
        if name in names:
            return (
                f"Table {name} compares {column} without regard to case ({collation}), so that two subscribers may be taken "
                f"for one: call tmc.create_tables(engine), or ALTER TABLE {name} {CONVERT}"
            )
    return ""


def compare_exactly(connection: sa.Connection) -> None:
    """Convert tables of earlier versions on MariaDB and MySQL, which compared text by the database's own collation."""
    if connection.dialect.name in FAMILY:
        for name in dict.fromkeys(row[0] for row in connection.execute(INEXACT)):
            connection.exec_driver_sql(f"ALTER TABLE {name} {CONVERT}")


_CHARSET = sa.text("SELECT @@character_set_client")
CONVERT = "CONVERT TO CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"


def no_table(table: sa.Table) -> str:
    return (
        f"There is no table {table.name} in this database: call tmc.create_tables(engine) once, or put "
        "tmc_client.tables.metadata into your migrations."
    )


def no_column(column: sa.Column[Any], dialect: sa.Dialect) -> str:
    ddl = str(CreateColumn(column).compile(dialect=dialect)).strip()
    return f"Table {column.table.name} is of an older version: ALTER TABLE {column.table.name} ADD COLUMN {ddl}"


def demand_wide(run: Callable[[Any, dict[str, Any]], Any], *texts: str) -> None:
    """Raise InvalidRequest if this connection cannot carry one of these texts: without strict mode MariaDB changes it silently.

    run: see LocalTransaction.
    """
    if all(text.isascii() or max(text) <= "\uffff" for text in texts):
        return
    (charset,) = run(_CHARSET, {}).fetchone()
    if charset != "utf8mb4":
        raise errors.InvalidRequest(
            f"This connection speaks {charset}, which does not have every character of {texts!r}: add charset=utf8mb4 to the "
            "address of its engine."
        )


@contextmanager
def looking(bind: sa.Engine | sa.Connection) -> Iterator[sa.Connection]:
    """A connection to read with; one that was given is left as it was."""
    if isinstance(bind, sa.Engine):
        with bind.connect() as connection:
            yield connection
        return
    was_open = bind.in_transaction()
    try:
        yield bind
    finally:
        if not was_open:
            bind.rollback()


def raise_if_lacking(exc: BaseException, bind: sa.Engine | sa.Connection, *wanted: sa.Table) -> None:
    """Raise InvalidRequest if a statement failed because one of our tables or columns is missing.

    bind: where to look; a connection that the program holds might be the only one of its pool.
    """
    if not isinstance(exc, sa.exc.ProgrammingError | sa.exc.OperationalError):
        return
    try:
        with looking(bind) as connection:
            sentence = lacking(connection, *wanted)
    except sa.exc.SQLAlchemyError:
        return  # the database is away: its own error says so
    if sentence:
        raise errors.InvalidRequest(sentence) from exc


def include_object(item: Any, name: str | None, kind: str, reflected: bool, compare_to: Any) -> bool:
    """Serve Alembic's `context.configure(include_object=...)`: autogenerate leaves our tables and their indexes alone."""
    table = name if kind == "table" else getattr(getattr(item, "table", None), "name", None)
    return table not in metadata.tables
