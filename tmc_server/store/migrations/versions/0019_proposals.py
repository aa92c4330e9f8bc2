"""Calls that wait for a second operator; what identifies operators besides tokens; which programs the tables serve."""

import sqlalchemy as sa
from alembic import context, op
from sqlalchemy.dialects import mysql

revision = "0019"
down_revision = "0018"

OPTIONS = {
    f"{family}_{name}": value
    for family in ("mysql", "mariadb")
    for name, value in {"engine": "InnoDB", "charset": "utf8mb4", "collate": "utf8mb4_bin"}.items()
}


def upgrade():
    look = sa.inspect(op.get_bind())
    if "serves_from" not in {column["name"] for column in look.get_columns("tmc_database")}:
        op.add_column("tmc_database", sa.Column("serves_from", sa.String(32), nullable=False, server_default=""))
    if not context.config.attributes["is_catalog"]:
        return
    if "identities" not in {column["name"] for column in look.get_columns("tmc_operator")}:
        identities = sa.Column("identities", sa.String(1000), nullable=False, server_default="[]")
        op.add_column("tmc_operator", identities)
    if "tmc_proposal" not in look.get_table_names():
        op.create_table(
            "tmc_proposal",
            sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
            sa.Column("action", sa.String(32), nullable=False),
            sa.Column("topic", sa.String(128), nullable=False),
            sa.Column("subject", sa.String(500), nullable=False),
            sa.Column("request", sa.LargeBinary, nullable=False),
            sa.Column("digest", sa.LargeBinary(32).with_variant(mysql.BINARY(32), "mysql", "mariadb"), nullable=False),
            sa.Column("actor", sa.String(64), nullable=False),
            sa.Column("reason", sa.String(500), nullable=False),
            sa.Column("created_ms", sa.BigInteger, nullable=False),
            sa.Column("expires_ms", sa.BigInteger, nullable=False),
            sa.Column("state", sa.SmallInteger, nullable=False),
            sa.Column("decided_by", sa.String(64), nullable=False, server_default=""),
            sa.Column("decided_ms", sa.BigInteger, nullable=False, server_default="0"),
            sa.Column("decision_reason", sa.String(500), nullable=False, server_default=""),
            **OPTIONS,
        )
        op.create_index("tmc_proposal_pending", "tmc_proposal", ["state", "expires_ms"])
