"""Whether a handler has begun the current attempt of a delivery: an attempt that nobody began uses up no retry.

Every step looks before it changes something, so a revision that was cut short is simply run again.
"""

import sqlalchemy as sa
from alembic import context, op

revision = "0020"
down_revision = "0019"


def upgrade():
    for shard in context.config.attributes["shards"]:
        table = f"tmc_consumption_{shard:02d}"
        if "begun" not in {column["name"] for column in sa.inspect(op.get_bind()).get_columns(table)}:
            op.add_column(table, sa.Column("begun", sa.BigInteger, nullable=False, server_default="0"))
