"""The timeline of a message: who handed an attempt over and when, unanswered attempts, what operators did to it.

Every step looks before it changes something, so a revision that was cut short is simply run again.
"""

import sqlalchemy as sa
from alembic import context, op

revision = "0015"
down_revision = "0014"


def add(table, **columns):
    """In one statement where the database can: it has to be made for 32 tables."""
    present = {column["name"] for column in sa.inspect(op.get_bind()).get_columns(table)}
    parts = [f"ADD COLUMN {name} {kind}" for name, kind in columns.items() if name not in present]
    at_once = op.get_bind().dialect.name != "sqlite"
    for part in [", ".join(parts)] * bool(parts) if at_once else parts:
        op.execute(f"ALTER TABLE {table} {part}")


def index(name, table, *columns):
    present = {each["name"] for each in sa.inspect(op.get_bind()).get_indexes(table)}
    if name not in present:
        op.create_index(name, table, list(columns))


def upgrade():
    index("tmc_audit_subject", "tmc_audit", "subject")
    if context.config.attributes["shards"]:
        index("tmc_bulk_item_message", "tmc_bulk_item", "message_id")
    for shard in context.config.attributes["shards"]:
        add(
            f"tmc_attempt_{shard:02d}",
            tried_ms="BIGINT",
            tried_by="BIGINT",
            unanswered="SMALLINT NOT NULL DEFAULT '0'",
        )
