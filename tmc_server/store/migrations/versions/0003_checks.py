"""Checks: targets and policies of topics, check tokens of apps, progress of messages.

Every step looks before it changes something, so a revision that was cut short is simply run again.
"""

import secrets

import sqlalchemy as sa
from alembic import context, op

revision = "0003"
down_revision = "0002"

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


def column(name, kind, default):
    return sa.Column(name, kind, nullable=False, server_default=default)


def catalog():
    if "tmc_check_target" not in sa.inspect(op.get_bind()).get_table_names():
        op.create_table(
            "tmc_check_target",
            sa.Column("topic_no", sa.Integer, primary_key=True, autoincrement=False),
            sa.Column("name", sa.String(32), primary_key=True),
            sa.Column("kind", sa.String(32), nullable=False),
            sa.Column("address", sa.String(255), nullable=False),
            sa.Column("options", sa.Text, nullable=False),
            sa.Column("deadline_ms", sa.Integer, nullable=False),
            sa.Column("concurrency", sa.Integer, nullable=False),
            sa.Column("batch", sa.Integer, nullable=False),
            sa.Column("tls", sa.SmallInteger, nullable=False),
            **OPTIONS,
        )
    add(
        "tmc_topic",
        column("check_retry_kind", sa.SmallInteger, "1"),
        column("check_interval_ms", sa.BigInteger, "10000"),
        column("check_max_retry", sa.Integer, "15"),
        column("check_cap_ms", sa.BigInteger, "3600000"),
    )
    add("tmc_app", column("check_token", sa.String(64), ""))
    app = sa.table("tmc_app", sa.column("app_no"), sa.column("check_token"))
    without = op.get_bind().execute(sa.select(app.c.app_no).where(app.c.check_token == "")).scalars().all()
    for number in without:
        op.execute(app.update().where(app.c.app_no == number).values(check_token=secrets.token_hex(32)))


def upgrade():
    if context.config.attributes["is_catalog"]:
        catalog()
    for number in context.config.attributes["shards"]:
        add(
            f"tmc_message_{number:02d}",
            column("check_target", sa.String(32), ""),
            column("check_attempt", sa.Integer, "0"),
            column("checked", sa.Integer, "0"),
            sa.Column("unreached_ms", sa.BigInteger),
            column("check_answer", sa.String(500), ""),
        )
