"""Several servers: heartbeats, leases, the time of the last try; queue modes and forwarding; senders' addresses.

Every step looks before it changes something, so a revision that was cut short is simply run again.
"""

import sqlalchemy as sa
from alembic import context, op

revision = "0002"
down_revision = "0001"

OPTIONS = {
    f"{family}_{name}": value
    for family in ("mysql", "mariadb")
    for name, value in {"engine": "InnoDB", "charset": "utf8mb4", "collate": "utf8mb4_bin"}.items()
}


def key(name, kind):
    return sa.Column(name, kind, primary_key=True, autoincrement=False)


def big(name, **keywords):
    return sa.Column(name, sa.BigInteger, **({"nullable": False} | keywords))


def create(name, *parts):
    if name not in sa.inspect(op.get_bind()).get_table_names():
        op.create_table(name, *parts, **OPTIONS)


def add(table, *columns):
    present = {column["name"] for column in sa.inspect(op.get_bind()).get_columns(table)}
    for column in columns:
        if column.name not in present:
            op.add_column(table, column)


def text(name, length):
    return sa.Column(name, sa.String(length), nullable=False, server_default="")


def catalog():
    create(
        "tmc_server",
        key("incarnation", sa.BigInteger),
        sa.Column("name", sa.String(128), nullable=False),
        big("started_ms"),
        big("expires_ms"),
    )
    create(
        "tmc_sender",
        key("app_no", sa.Integer),
        sa.Column("tag", sa.String(64), primary_key=True),
        sa.Column("address", sa.String(255), primary_key=True),
        big("seen_ms"),
    )
    add("tmc_topic", sa.Column("queue_mode", sa.SmallInteger, nullable=False, server_default="2"))
    add("tmc_subscription", text("forward_kind", 32), text("forward_target", 255), text("forward_key", 255))


def upgrade():
    if context.config.attributes["is_catalog"]:
        catalog()
    shards = context.config.attributes["shards"]
    if shards:
        create("tmc_lease", key("shard", sa.SmallInteger), big("owner"), big("epoch"), big("expires_ms"))
    for number in shards:
        add(f"tmc_consumption_{number:02d}", big("tried_ms", nullable=True))
