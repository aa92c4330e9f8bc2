"""The timeline of a message: who handed an attempt over and when, unanswered attempts, what operators did to it.

Every step looks before it changes something, so a revision that was cut short is simply run again.
"""

import sqlalchemy as sa
from alembic import context, op

revision = "0015"
down_revision = "0014"


def add(table, *columns):
    present = {column["name"] for column in sa.inspect(op.get_bind()).get_columns(table)}
    for column in columns:
        if column.name not in present:
            op.add_column(table, column)


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
            sa.Column("tried_ms", sa.BigInteger),
            sa.Column("tried_by", sa.BigInteger),
            sa.Column("unanswered", sa.SmallInteger, nullable=False, server_default="0"),
        )
