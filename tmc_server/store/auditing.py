"""Rows of the audit trail, written in the transaction of the change that they are about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from tmc_server.domain.views import OperatorAct
from tmc_server.origin import ORIGIN
from tmc_server.store.records import record_of
from tmc_server.store.tables import audit

_LONGEST_CHANGE = 2_000


def act(
    now: int, actor: str, action: str, subject: str, *, reason: str = "", change: Sequence[str] = ()
) -> dict[str, Any]:
    """A row. change: one line per field that changed."""
    return {
        "at_ms": now,
        "actor": actor,
        "action": action,
        "subject": subject,
        "reason": reason,
        "origin": ORIGIN.get(),
        "change_text": "\n".join(change)[:_LONGEST_CHANGE],
    }


def act_of(row: Any) -> OperatorAct:
    return record_of(OperatorAct, row, change=row.change_text)


def record(connection: sa.Connection, row: Mapping[str, Any]) -> None:
    connection.execute(audit.insert().values(row))


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return what an update changes. after: values by column."""
    return [f"{name}: {before[name]} -> {value}" for name, value in after.items() if before[name] != value]
