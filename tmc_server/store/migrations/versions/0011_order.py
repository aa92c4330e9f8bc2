"""Order keys: lines of deliveries; order modes; pauses of topics and subscriptions; how often a delivery was extended.

Every step looks before it changes something, so a revision that was cut short is simply run again. Topics that are there
have no order keys; nothing is paused.
"""

import sqlalchemy as sa
from alembic import context, op

revision = "0011"
down_revision = "0010"

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


def small(name, default):
    return sa.Column(name, sa.SmallInteger, nullable=False, server_default=default)


def key(name, kind):
    return sa.Column(name, kind, primary_key=True, autoincrement=False)


def big(name):
    return sa.Column(name, sa.BigInteger, nullable=False)


def upgrade():
    if context.config.attributes["is_catalog"]:
        add("tmc_topic", small("ordered", "0"), small("paused", "0"))
        add("tmc_subscription", small("order_mode", "1"), small("paused", "0"))
    present = sa.inspect(op.get_bind()).get_table_names()
    for number in context.config.attributes["shards"]:
        add(
            f"tmc_consumption_{number:02d}",
            sa.Column("order_hash", sa.BigInteger),
            sa.Column("sequence", sa.BigInteger),
            sa.Column("extended", sa.Integer, nullable=False, server_default="0"),
        )
    if "tmc_order" not in present:
        op.create_table(
            "tmc_order",
            key("subscription_no", sa.Integer),
            key("order_hash", sa.BigInteger),
            big("head_id"),
            big("last_sequence"),
            sa.Column("shard", sa.SmallInteger, nullable=False),
            **OPTIONS,
        )
    if "tmc_waiting" not in present:
        op.create_table(
            "tmc_waiting",
            key("subscription_no", sa.Integer),
            key("order_hash", sa.BigInteger),
            key("sequence", sa.BigInteger),
            big("message_id"),
            big("due_ms"),
            sa.Column("shard", sa.SmallInteger, nullable=False),
            **OPTIONS,
        )
