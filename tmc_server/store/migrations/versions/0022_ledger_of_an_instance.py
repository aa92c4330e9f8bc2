"""Which ledger an instance answers for: services that share an app may have a database each.

Every step looks before it changes something, so a revision that was cut short is simply run again.
"""

import sqlalchemy as sa
from alembic import context, op
from sqlalchemy.dialects import mysql

revision = "0022"
down_revision = "0021"


def upgrade():
    if not context.config.attributes["is_catalog"]:
        return
    if "ledger_id" not in {column["name"] for column in sa.inspect(op.get_bind()).get_columns("tmc_sender")}:
        kind = sa.LargeBinary(16).with_variant(mysql.VARBINARY(16), "mysql", "mariadb")
        op.add_column("tmc_sender", sa.Column("ledger_id", kind))
