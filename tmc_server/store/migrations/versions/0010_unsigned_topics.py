"""Whether the copies of a topic are signed.

It looks before it changes something, so a revision that was cut short is simply run again. Topics that are there stay signed.
"""

import sqlalchemy as sa
from alembic import context, op

revision = "0010"
down_revision = "0009"


def upgrade():
    if not context.config.attributes["is_catalog"]:
        return
    present = {column["name"] for column in sa.inspect(op.get_bind()).get_columns("tmc_topic")}
    if "signed" not in present:
        op.add_column("tmc_topic", sa.Column("signed", sa.SmallInteger, nullable=False, server_default="1"))
