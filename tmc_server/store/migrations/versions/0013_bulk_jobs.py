"""Bulk jobs: what operators do to many deliveries, how far they have come, what happened to each; fingerprints of errors.

Every step looks before it changes something, so a revision that was cut short is simply run again. What failed before has
no fingerprint.
"""

import sqlalchemy as sa
from alembic import context, op

revision = "0013"
down_revision = "0012"

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


def key(name, kind):
    return sa.Column(name, kind, primary_key=True, autoincrement=False)


def big(name, nullable=False):
    return sa.Column(name, sa.BigInteger, nullable=nullable)


def small(name):
    return sa.Column(name, sa.SmallInteger, nullable=False)


def upgrade():
    present = sa.inspect(op.get_bind()).get_table_names()
    if context.config.attributes["is_catalog"] and "tmc_bulk_job" not in present:
        op.create_table(
            "tmc_bulk_job",
            sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
            sa.Column("dry_run", sa.String(64), nullable=False, unique=True),
            small("action"),
            sa.Column("selection", sa.Text, nullable=False),
            big("agreed"),
            sa.Column("rate", sa.Integer, nullable=False),
            sa.Column("actor", sa.String(64), nullable=False),
            sa.Column("reason", sa.String(500), nullable=False),
            big("created_ms"),
            big("start_ms"),
            big("stopped_ms", nullable=True),
            big("finished_ms", nullable=True),
            **OPTIONS,
        )
    if "tmc_bulk_progress" not in present:
        op.create_table(
            "tmc_bulk_progress",
            key("job_id", sa.BigInteger),
            key("shard", sa.SmallInteger),
            sa.Column("subscription_no", sa.Integer, nullable=False),
            big("message_id"),
            big("done"),
            big("unchanged"),
            big("refused"),
            small("finished"),
            big("updated_ms"),
            **OPTIONS,
        )
    if "tmc_bulk_item" not in present:
        op.create_table(
            "tmc_bulk_item",
            key("job_id", sa.BigInteger),
            key("shard", sa.SmallInteger),
            key("message_id", sa.BigInteger),
            key("subscription_no", sa.Integer),
            small("outcome"),
            sa.Column("detail", sa.String(200), nullable=False),
            big("at_ms"),
            **OPTIONS,
        )
    add("tmc_failed", sa.Column("fingerprint", sa.String(12), nullable=False, server_default=""))
