"""SQL that makes many rows at once: MariaDB's SEQUENCE engine, PostgreSQL's generate_series."""

from __future__ import annotations

import sqlalchemy as sa

from tmc_common.clocks import CLOCK_MS


class Series:
    """Pieces of an INSERT ... SELECT; the number of a row is `seq`."""

    def __init__(self, engine: sa.Engine) -> None:
        self._is_postgresql = engine.dialect.name == "postgresql"
        self.now = CLOCK_MS[engine.dialect.name]
        self.body = self._bytes("REPEAT('x', 256)")

    def source(self, count: int) -> str:
        """Return the FROM clause."""
        return f"generate_series(0, {count - 1}) AS seq" if self._is_postgresql else f"seq_0_to_{count - 1}"

    def attempt_id(self, number: str) -> str:
        return self.hexadecimal(f"LPAD({'TO_HEX' if self._is_postgresql else 'HEX'}({number}), 32, '0')")

    def digest(self, number: str) -> str:
        if self._is_postgresql:
            return f"SHA256({self._bytes(f'CAST({number} AS text)')})"
        return f"UNHEX(SHA2({number}, 256))"

    def hexadecimal(self, text: str) -> str:
        """Bytes from their digits."""
        return f"DECODE({text}, 'hex')" if self._is_postgresql else f"UNHEX({text})"

    def _bytes(self, text: str) -> str:
        return f"CONVERT_TO({text}, 'UTF8')" if self._is_postgresql else text
