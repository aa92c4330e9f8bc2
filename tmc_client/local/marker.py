"""The rollback marker: a ledger row which says that a message's transaction did not commit, and by its key sees to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import sqlalchemy as sa

from tmc_client.tables import ledger

COMMITTED = 1
ROLLED_BACK = 2

# PostgreSQL shows no uncommitted row: that a key is in flight is learned by waiting for it. LOCAL: a pooler like PgBouncer
# gives the connection to somebody else afterwards.
_BRIEFLY = sa.text("SET LOCAL lock_timeout = '100ms'")

STATE = sa.select(ledger.c.state).where(ledger.c.message_id == sa.bindparam("of"))
_NOW = STATE.with_for_update(nowait=True)

Run = Callable[[Any, Mapping[str, Any]], Any]


def marker(message_id: str, topic: str, key: str, attempt_id: bytes) -> dict[str, Any]:
    """Return the row of a rollback marker."""
    now = time.time_ns() // 1_000_000
    return {
        "message_id": message_id,
        "state": ROLLED_BACK,
        "topic": topic,
        "message_key": key,
        "attempt_id": attempt_id,
        "created_ms": now,
        "settled_ms": now,
    }


def insert_marker(run: Run, dialect: str, row: Mapping[str, Any]) -> bool:
    """Insert it, first in its transaction. Returns False: an open transaction holds its key.

    run: see LocalTransaction. Raises the library's error: if its key is taken, the ledger has a row already.
    """
    if dialect in ("mysql", "mariadb"):
        try:
            run(_NOW, {"of": row["message_id"]}).fetchall()
        except Exception:  # noqa: BLE001 - each library has its own; on a lost connection nothing is known either
            return False
    elif dialect == "postgresql":
        run(_BRIEFLY, {})
    # On SQLite there is one writer at a time, and nobody else in flight. On MariaDB a block may insert its row between these two
    # statements: this one then waits for a commit that is under way.
    run(ledger.insert(), row)
    return True
