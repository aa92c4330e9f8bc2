"""Start-up checks: is this database safe to keep messages in? `tmc doctor` shows all of them, a server refuses to start."""

from __future__ import annotations

from tmc_server.store.dialects.contract import Finding
from tmc_server.store.engines import Database
from tmc_server.store.migrate import head_revision, revision_of, serves_this_program


def examine(database: Database, batch_bytes: int) -> list[Finding]:
    """batch_bytes: the largest transaction the server sends. Raises StoreUnavailable."""
    with database.connection() as connection:
        found = database.dialect.settings(connection, batch_bytes)
    revision, head = revision_of(database), head_revision()
    is_later = revision is not None and revision > head
    return [
        *found,
        Finding(
            setting="schema revision",
            value=revision or "none",
            must=f"serve programs of {head}: upgrade this server" if is_later else f"be {head}: run tmc init",
            ok=revision == head or serves_this_program(database),
        ),
    ]
