"""The clock of a database."""

from __future__ import annotations

_SINCE_1970 = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(3)) DIV 1000"

CLOCK_MS = {
    "sqlite": "CAST(ROUND((julianday('now') - 2440587.5) * 86400000) AS INTEGER)",
    # Not UNIX_TIMESTAMP(NOW(3)): in a zone with summer time it leaps by an hour when that ends.
    "mysql": _SINCE_1970,
    "mariadb": _SINCE_1970,
    "postgresql": "CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000 AS BIGINT)",
}
"""Expressions by SQLAlchemy's name of the dialect: milliseconds since the epoch, whatever the zone of the session."""
