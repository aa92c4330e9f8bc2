"""Start-up checks: is this database safe to keep messages in? `tmc doctor` shows all of them, a server refuses to start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from tmc_server.store.engines import Database
from tmc_server.store.migrate import head_revision, revision_of

_MARGIN = 2 << 20


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One checked setting. must: what it has to be, in words."""

    setting: str
    value: str
    must: str
    ok: bool

    def __str__(self) -> str:
        return f"{'ok  ' if self.ok else 'BAD '} {self.setting} = {self.value}" + (
            "" if self.ok else f", must {self.must}"
        )


def examine(database: Database, batch_bytes: int) -> list[Finding]:
    """batch_bytes: the largest transaction the server sends. Raises StoreUnavailable."""
    with database.connection() as connection:
        found = _sqlite(connection) if database.is_sqlite else _mysql(connection, batch_bytes)
    revision, head = revision_of(database), head_revision()
    return [
        *found,
        Finding(
            setting="schema revision", value=revision or "none", must=f"be {head}: run tmc init", ok=revision == head
        ),
    ]


def _sqlite(connection: sa.Connection) -> list[Finding]:
    def pragma(name: str) -> str:
        return str(connection.exec_driver_sql(f"PRAGMA {name}").scalar_one())

    version = str(connection.exec_driver_sql("SELECT sqlite_version()").scalar_one())
    return [
        Finding(setting="sqlite_version", value=version, must="be 3.35 or newer", ok=_version(version) >= (3, 35)),
        Finding(
            setting="journal_mode", value=pragma("journal_mode"), must="be wal", ok=pragma("journal_mode") == "wal"
        ),
        Finding(
            setting="synchronous",
            value=pragma("synchronous"),
            must="be 2 (FULL)",
            ok=pragma("synchronous") in ("2", "3"),
        ),
    ]


def _version(text: str) -> tuple[int, ...]:
    digits = text.split("-")[0].split(".")
    return tuple(int(part) for part in digits[:2] if part.isdigit())


def _mysql(connection: sa.Connection, batch_bytes: int) -> list[Finding]:
    variables: dict[str, Any] = dict(connection.exec_driver_sql("SHOW VARIABLES").fetchall())

    def check(name: str, must: str, ok: bool) -> Finding:
        return Finding(setting=name, value=str(variables.get(name, "absent")), must=must, ok=ok)

    def is_on(name: str) -> bool:
        return str(variables.get(name, "OFF")).upper() in ("ON", "1")

    version = str(variables["version"])
    oldest = (10, 6) if "MariaDB" in version else (8, 0)
    isolation = variables.get("transaction_isolation") or variables.get("tx_isolation")
    need = 2 * batch_bytes + _MARGIN  # a binary byte may take two in a statement
    return [
        check("version", "be MariaDB 10.6 or MySQL 8.0, or newer", _version(version) >= oldest),
        check(
            "innodb_flush_log_at_trx_commit",
            "be 1: an answered message must survive a power cut",
            str(variables.get("innodb_flush_log_at_trx_commit")) == "1",
        ),
        check(
            "sync_binlog",
            "be 1 while the binary log is on",
            not is_on("log_bin") or str(variables.get("sync_binlog")) == "1",
        ),
        check("innodb_doublewrite", "be ON", str(variables.get("innodb_doublewrite", "ON")).upper() != "OFF"),
        check("wsrep_on", "be OFF: Galera may lose or fork decisions", not is_on("wsrep_on")),
        check("sql_mode", "be strict", "STRICT_ALL_TABLES" in str(variables.get("sql_mode"))),
        check("max_allowed_packet", f"be at least {need}", int(variables["max_allowed_packet"]) >= need),
        check("character_set_connection", "be utf8mb4", variables.get("character_set_connection") == "utf8mb4"),
        Finding(
            setting="transaction isolation",
            value=str(isolation),
            must="be READ-COMMITTED",
            ok=isolation == "READ-COMMITTED",
        ),
    ]
