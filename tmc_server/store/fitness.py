"""Start-up checks: is this database safe to keep messages in? `tmc doctor` shows all of them, a server refuses to start."""

from __future__ import annotations

import sqlalchemy as sa

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


def examine_hosts(database: Database) -> list[Finding]:
    """Return findings about its hosts, if there are several: their roles, and whether one can take over without a loss."""
    if not database.hosts.has_several:
        return []
    roles = [_role(database, host) for host in database.hosts.names]
    with database.reading() as connection:
        return [*roles, *database.dialect.replication(connection)]


def _role(database: Database, host: str) -> Finding:
    try:
        with database.dialect.once(database.url.set(host=host)).connect() as connection:
            takes_writes = database.hosts.takes_writes(connection.connection.dbapi_connection)
    except (sa.exc.DBAPIError, database.engine.dialect.loaded_dbapi.Error) as exc:
        return Finding(setting=f"host {host}", value=f"away ({exc})", must="answer", ok=False)
    return Finding(setting=f"host {host}", value="primary" if takes_writes else "replica", must="answer", ok=True)
