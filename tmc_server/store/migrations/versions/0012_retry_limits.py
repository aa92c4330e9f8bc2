"""Retry policies: a limit by age, and jitter; when a budget of attempts or checks began.

Every step looks before it changes something, so a revision that was cut short is simply run again. Policies that are there
have no limit by age and no jitter.
"""

import sqlalchemy as sa
from alembic import context, op

revision = "0012"
down_revision = "0011"


def add(table, *columns):
    present = {column["name"] for column in sa.inspect(op.get_bind()).get_columns(table)}
    for column in columns:
        if column.name not in present:
            op.add_column(table, column)


def number(name, kind):
    return sa.Column(name, kind, nullable=False, server_default="0")


def upgrade():
    if context.config.attributes["is_catalog"]:
        add("tmc_topic", number("check_max_age_ms", sa.BigInteger), number("check_jitter_percent", sa.SmallInteger))
        add("tmc_subscription", number("max_age_ms", sa.BigInteger), number("jitter_percent", sa.SmallInteger))
    for shard in context.config.attributes["shards"]:
        add(f"tmc_message_{shard:02d}", sa.Column("since_ms", sa.BigInteger))
        add(f"tmc_consumption_{shard:02d}", sa.Column("since_ms", sa.BigInteger))
