"""Servers share what they saw come out of the broker's queues.

Every step looks before it changes something, so a revision that was cut short is simply run again.
"""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"

OPTIONS = {
    f"{family}_{name}": value
    for family in ("mysql", "mariadb")
    for name, value in {"engine": "InnoDB", "charset": "utf8mb4", "collate": "utf8mb4_bin"}.items()
}


def upgrade():
    if "tmc_queue_progress" not in sa.inspect(op.get_bind()).get_table_names():
        op.create_table(
            "tmc_queue_progress",
            sa.Column("queue", sa.String(255), primary_key=True),
            sa.Column("incarnation", sa.BigInteger, primary_key=True, autoincrement=False),
            sa.Column("passed_ms", sa.BigInteger, nullable=False),
            sa.Column("moves", sa.BigInteger, nullable=False),
            sa.Column("updated_ms", sa.BigInteger, nullable=False),
            **OPTIONS,
        )
