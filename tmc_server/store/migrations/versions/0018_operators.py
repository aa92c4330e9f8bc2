"""Roles, limits and second tokens of operators; origin, changes and seals of the audit trail."""

import sqlalchemy as sa
from alembic import context, op
from sqlalchemy.dialects import mysql

revision = "0018"
down_revision = "0017"

OPTIONS = {
    f"{family}_{name}": value
    for family in ("mysql", "mariadb")
    for name, value in {"engine": "InnoDB", "charset": "utf8mb4", "collate": "utf8mb4_bin"}.items()
}


def add(table, *columns):
    present = {column["name"] for column in sa.inspect(op.get_bind()).get_columns(table)}
    for column in columns:
        if column.name not in present:
            op.add_column(table, column)


def hash_column(name, nullable=True):
    kind = sa.LargeBinary(32).with_variant(mysql.BINARY(32), "mysql", "mariadb")
    return sa.Column(name, kind, nullable=nullable)


def upgrade():
    look = sa.inspect(op.get_bind())
    if context.config.attributes["is_catalog"]:
        add(
            "tmc_operator",
            sa.Column("role", sa.SmallInteger, nullable=False, server_default="3"),
            sa.Column("topics", sa.String(1000), nullable=False, server_default="[]"),
            sa.Column("reads_bodies", sa.SmallInteger, nullable=False, server_default="1"),
            sa.Column("expires_ms", sa.BigInteger),
            hash_column("old_token_hash"),
            sa.Column("old_expires_ms", sa.BigInteger),
        )
    add(
        "tmc_audit",
        sa.Column("origin", sa.String(64), nullable=False, server_default=""),
        sa.Column("change_text", sa.String(2000), nullable=False, server_default=""),
        sa.Column("seal_no", sa.BigInteger),
        hash_column("seal"),
    )
    if "tmc_audit_seal_no" not in {each["name"] for each in look.get_indexes("tmc_audit")}:
        op.create_index("tmc_audit_seal_no", "tmc_audit", ["seal_no"], unique=True)
    if "tmc_audit_head" not in look.get_table_names():
        op.create_table(
            "tmc_audit_head",
            sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
            sa.Column("seal_no", sa.BigInteger, nullable=False),
            hash_column("seal", nullable=False),
            **OPTIONS,
        )
