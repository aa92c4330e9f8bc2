"""Apps can be disabled, and have keys that work in one environment only.

Every step looks before it changes something, so a revision that was cut short is simply run again.
"""

import sqlalchemy as sa
from alembic import context, op
from sqlalchemy.dialects import mysql

revision = "0008"
down_revision = "0007"

OPTIONS = {
    f"{family}_{name}": value
    for family in ("mysql", "mariadb")
    for name, value in {"engine": "InnoDB", "charset": "utf8mb4", "collate": "utf8mb4_bin"}.items()
}


def upgrade():
    if not context.config.attributes["is_catalog"]:
        return
    tables = sa.inspect(op.get_bind())
    if "disabled" not in {column["name"] for column in tables.get_columns("tmc_app")}:
        op.add_column("tmc_app", sa.Column("disabled", sa.SmallInteger, nullable=False, server_default="0"))
    if "tmc_app_key" not in tables.get_table_names():
        hash_type = sa.LargeBinary(32).with_variant(mysql.BINARY(32), "mysql", "mariadb")
        op.create_table(
            "tmc_app_key",
            sa.Column("app_no", sa.Integer, primary_key=True, autoincrement=False),
            sa.Column("tag", sa.String(64), primary_key=True),
            sa.Column("key_hash", hash_type, nullable=False),
            sa.Column("old_key_hash", hash_type),
            sa.Column("created_ms", sa.BigInteger, nullable=False),
            **OPTIONS,
        )
