"""Seals of the audit trail: a row that is changed or deleted later is detected.

Each row's seal is an HMAC over the row and the seal before it, so the rows of a database form a chain. A row is sealed
within seconds after its change, not in its transaction: otherwise all changes of a database would wait for one lock.
Seal numbers have no gaps; row ids do, and commit in any order.
Source: docs/decisions/0027-operators.md.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Iterator, Sequence
from typing import Any

import sqlalchemy as sa

from tmc_common.eventlog import EventLog
from tmc_server.domain.views import SealReport
from tmc_server.metrics import METRICS
from tmc_server.store.engines import Database, StoreConflict, repeating
from tmc_server.store.shard_map import place_of
from tmc_server.store.tables import audit, audit_head

log = EventLog("tmc.audit")

_PAGE = 500
_NOTHING = bytes(32)  # before the first seal
_THE_HEAD = 1


class AuditSeals:
    """Of one database. keys: the first one seals; any of them may have sealed. Without one, seals are made without a secret.

    If the last seal that this server saw has disappeared, the trail was rewound: this server stops sealing.
    """

    def __init__(self, database: Database, keys: Sequence[str]) -> None:
        self._database = database
        self._keys = [key.encode() for key in keys]
        self._seen = (0, _NOTHING)
        self.is_rewound = False

    @repeating
    def seal(self) -> bool:
        """Seal a page of rows. Returns: there may be more."""
        waiting = sa.select(audit).where(audit.c.seal_no.is_(None)).order_by(audit.c.id).limit(_PAGE)
        with self._database.reading() as connection:
            if connection.execute(waiting.limit(1)).first() is None:
                return False
        with self._database.transaction() as connection:
            number, seal = _lock_head(connection)
            if not self._is_continuous(connection, number):
                return False
            rows = connection.execute(waiting).fetchall()
            for row in rows:
                number, seal = number + 1, _seal_of((self._keys or [b""])[0], number + 1, row, seal)
                mine = audit.update().where(audit.c.id == row.id, audit.c.seal_no.is_(None))
                connection.execute(mine.values(seal_no=number, seal=seal))
            connection.execute(audit_head.update().filter_by(id=_THE_HEAD).values(seal_no=number, seal=seal))
        self._seen = (number, seal)
        return len(rows) == _PAGE

    def _is_continuous(self, connection: sa.Connection, number: int) -> bool:
        """Return whether the last seal that this server saw is still there."""
        seen, seal = self._seen
        then = sa.select(audit.c.seal).where(audit.c.seal_no == seen)
        well = number >= seen and (not seen or connection.execute(then).scalar_one_or_none() == seal)
        if not well and not self.is_rewound:
            log.critical(
                "audit_rewound",
                "the audit trail in %s was rewound: seal %d is gone or another one; nothing is sealed until this server "
                "starts again, see docs/operators.md",
                place_of(self._database),
                seen,
            )
        self.is_rewound = not well
        METRICS.audit_rewound.labels(place_of(self._database)).set(self.is_rewound)
        return well

    def verify(self) -> SealReport:
        """Read all of it, and say what is wrong first."""
        with self._database.snapshot() as connection:
            head = connection.execute(sa.select(audit_head).filter_by(id=_THE_HEAD)).one_or_none()
            end, head_seal = (head.seal_no, head.seal) if head is not None else (0, _NOTHING)
            count = sa.select(sa.func.count()).select_from(audit).where(audit.c.seal_no.is_(None))
            unsealed = int(connection.execute(count).scalar_one())
            verified, unkeyed, fault = self._follow(connection, end, head_seal)
        if self.is_rewound and not fault:
            fault = "Seals that this server saw have disappeared: the trail was rewound."
        return SealReport(
            database=place_of(self._database),
            verified=verified,
            unkeyed=unkeyed,
            unsealed=unsealed,
            fault=fault,
            head=head_seal,
            head_number=end,
        )

    def _follow(self, connection: sa.Connection, end: int, head_seal: bytes) -> tuple[int, int, str]:
        """Returns: how many rows are right, how many of them without a key, and what is wrong with the next one."""
        number, unkeyed, seal = 0, 0, _NOTHING
        for row in _sealed(connection):
            if row.seal_no != number + 1:
                return number, unkeyed, f"Row {number + 1} is missing: it was deleted or renumbered."
            # Rows from before there was a key are at the beginning.
            keys = [*self._keys, *([b""] if unkeyed == number else [])]
            key = next((key for key in keys if _is_sealed_with(key, row, seal)), None)
            if key is None:
                what = f"{row.action!r} of {row.actor!r}"
                why = "was changed after it was sealed, or sealed with an unknown key"
                return number, unkeyed, f"Row {row.seal_no} ({what}) {why}."
            number, seal, unkeyed = row.seal_no, row.seal, unkeyed + (not key)
        if number != end or seal != head_seal:
            return (
                number,
                unkeyed,
                f"The last sealed row is {number}, but the chain ends at {end}: rows were deleted or added.",
            )
        return number, unkeyed, ""


def _is_sealed_with(key: bytes, row: Any, before: bytes) -> bool:
    return hmac.compare_digest(_seal_of(key, row.seal_no, row, before), row.seal or b"")


def _lock_head(connection: sa.Connection) -> tuple[int, bytes]:
    """The last seal. Who holds the lock seals."""
    head = connection.execute(sa.select(audit_head).filter_by(id=_THE_HEAD).with_for_update()).one_or_none()
    if head is not None:
        return head.seal_no, head.seal
    try:
        connection.execute(audit_head.insert().values(id=_THE_HEAD, seal_no=0, seal=_NOTHING))
    except sa.exc.IntegrityError as exc:
        raise StoreConflict("another server sealed the first row at the same moment") from exc
    return 0, _NOTHING


def _sealed(connection: sa.Connection) -> Iterator[Any]:
    after = -(1 << 63)
    while True:
        page = sa.select(audit).where(audit.c.seal_no > after).order_by(audit.c.seal_no).limit(_PAGE)
        rows = connection.execute(page).fetchall()
        yield from rows
        if len(rows) < _PAGE:
            return
        after = rows[-1].seal_no


def _seal_of(key: bytes, number: int, row: Any, before: bytes) -> bytes:
    content = [
        number,
        row.id,
        row.at_ms,
        row.actor,
        row.action,
        row.subject,
        row.reason,
        row.origin,
        row.change_text,
    ]
    return hmac.digest(key, before + json.dumps(content).encode(), "sha256")
