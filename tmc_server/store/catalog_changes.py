"""A change of the catalog: one transaction that raises the version and leaves an audit row."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import sqlalchemy as sa

from tmc_server.errors import StoreUnavailable
from tmc_server.store.auditing import act, record
from tmc_server.store.engines import Database
from tmc_server.store.tables import meta


def new_key() -> str:
    """256 random bits, as text that can be pasted anywhere."""
    return secrets.token_urlsafe(32)


def hash_of(key: str) -> bytes:
    """Keys are random, so one fast hash is enough to store them."""
    return hashlib.sha256(key.encode()).digest()


class CatalogChanges:
    """The base of the stores that change the catalog.

    change_delay_ms: greatest age of a copy that submits are made with; 0 for a center of one process.
    """

    def __init__(self, database: Database, change_delay_ms: int) -> None:
        self._database = database
        self.change_delay_ms = change_delay_ms

    @contextmanager
    def _change(
        self, actor: str, action: str, subject: str, reason: str = "", changed: Sequence[str] = ()
    ) -> Iterator[tuple[sa.Connection, int]]:
        """Yields: connection, its time. changed: for the audit row, may be filled while the transaction is open."""
        with self._database.transaction() as connection:
            raised = connection.execute(meta.update().values(catalog_version=meta.c.catalog_version + 1)).rowcount
            if raised != 1:
                raise StoreUnavailable("The catalog has no tables yet: run tmc init.")
            now = self._database.now(connection)
            yield connection, now
            record(connection, act(now, actor, action, subject, reason=reason, change=changed))
