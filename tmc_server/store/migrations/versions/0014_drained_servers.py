"""Servers that an operator has drained."""

import sqlalchemy as sa
from alembic import context, op

revision = "0014"
down_revision = "0013"


def upgrade():
    if context.config.attributes["is_catalog"]:
        present = {column["name"] for column in sa.inspect(op.get_bind()).get_columns("tmc_server")}
        if "drained" not in present:
            op.add_column("tmc_server", sa.Column("drained", sa.SmallInteger, nullable=False, server_default="0"))
