"""The newest time that servers have read from a database's clock: who starts after it was set back goes on from there.

Every step looks before it changes something, so a revision that was cut short is simply run again.
"""

import sqlalchemy as sa
from alembic import context, op

revision = "0021"
down_revision = "0020"


def upgrade():
    inspector = sa.inspect(op.get_bind())
    tables = ["tmc_server"] if context.config.attributes["is_catalog"] else []
    tables += ["tmc_lease"] if context.config.attributes["shards"] else []
    for table in tables:
        if "seen_ms" not in {column["name"] for column in inspector.get_columns(table)}:
            op.add_column(table, sa.Column("seen_ms", sa.BigInteger, nullable=False, server_default="0"))
