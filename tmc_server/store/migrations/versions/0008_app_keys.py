"""Apps can be disabled.

Every step looks before it changes something, so a revision that was cut short is simply run again.
"""

import sqlalchemy as sa
from alembic import context, op

revision = "0008"
down_revision = "0007"


def upgrade():
    if not context.config.attributes["is_catalog"]:
        return
    if "disabled" not in {column["name"] for column in sa.inspect(op.get_bind()).get_columns("tmc_app")}:
        op.add_column("tmc_app", sa.Column("disabled", sa.SmallInteger, nullable=False, server_default="0"))
