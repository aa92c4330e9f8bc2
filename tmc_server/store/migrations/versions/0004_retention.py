"""Retention: how far closed messages were removed, by shard.

Every step looks before it changes something, so a revision that was cut short is simply run again.
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

OPTIONS = {
    f"{family}_{name}": value
    for family in ("mysql", "mariadb")
    for name, value in {"engine": "InnoDB", "charset": "utf8mb4", "collate": "utf8mb4_bin"}.items()
}


def upgrade():
    if "tmc_retention" not in sa.inspect(op.get_bind()).get_table_names():
        op.create_table(
            "tmc_retention",
            sa.Column("shard", sa.SmallInteger, primary_key=True, autoincrement=False),
            sa.Column("horizon_ms", sa.BigInteger, nullable=False),
            sa.Column("run", sa.String(64), nullable=False),
            sa.Column("position", sa.BigInteger, nullable=False),
            **OPTIONS,
        )
