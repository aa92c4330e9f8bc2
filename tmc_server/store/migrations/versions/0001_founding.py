"""The founding schema: catalog, 32 pairs of shard tables, tombstones, alerts, audit.

Written out in full, not taken from store/tables.py: a revision must not change when the tables do. Every step looks
before it creates, so a revision that was cut short is simply run again.
"""

import sqlalchemy as sa
from alembic import context, op
from sqlalchemy.dialects import mysql

revision = "0001"
down_revision = None

FAMILY = ("mysql", "mariadb")
OPTIONS = {
    f"{family}_{name}": value
    for family in ("mysql", "mariadb")
    for name, value in {"engine": "InnoDB", "charset": "utf8mb4", "collate": "utf8mb4_bin"}.items()
}


def binary(length):
    return sa.LargeBinary(length).with_variant(mysql.BINARY(length), *FAMILY)


def number(name, nullable=False, **keywords):
    return sa.Column(name, sa.Integer, nullable=nullable, **keywords)


def big(name, nullable=False, **keywords):
    return sa.Column(name, sa.BigInteger, nullable=nullable, **keywords)


def small(name, nullable=False):
    return sa.Column(name, sa.SmallInteger, nullable=nullable)


def text(name, length, **keywords):
    return sa.Column(name, sa.String(length), **({"nullable": False} | keywords))


def serial():
    return sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True)


def key(column):
    column.primary_key = True
    column.autoincrement = False
    return column


def create(existing, name, *parts, indexes=()):
    if name not in existing:
        op.create_table(name, *parts, **OPTIONS)
    present = {index["name"] for index in sa.inspect(op.get_bind()).get_indexes(name)}
    for index, columns in indexes:
        if index not in present:
            op.create_index(index, name, columns)


def audit(existing):
    create(
        existing,
        "tmc_audit",
        serial(),
        big("at_ms"),
        text("actor", 64),
        text("action", 64),
        text("subject", 300),
        text("reason", 500),
    )


def catalog(existing):
    create(existing, "tmc_meta", key(number("id")), big("catalog_version"))
    create(
        existing,
        "tmc_operator",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("token_hash", binary(32), nullable=False),
        big("created_ms"),
    )
    create(
        existing,
        "tmc_app",
        key(number("app_no")),
        text("id", 64, unique=True),
        text("service_name", 128),
        text("biz_id", 128),
        text("alert_email", 255),
        text("alert_phone", 64),
        sa.Column("key_hash", binary(32), nullable=False),
        sa.Column("old_key_hash", binary(32)),
        big("created_ms"),
    )
    create(
        existing,
        "tmc_topic",
        key(number("topic_no")),
        text("name", 128, unique=True),
        number("owner_no"),
        text("default_tag", 64),
        small("table_index"),
        small("spread"),
        big("transaction_time_ms"),
        big("open_limit"),
        big("effective_ms"),
    )
    create(
        existing,
        "tmc_subscription",
        key(number("subscription_no")),
        number("topic_no"),
        number("app_no"),
        text("tag", 64),
        small("retry_kind"),
        big("interval_ms"),
        number("max_retry"),
        big("cap_ms"),
        big("effective_ms"),
        big("removed_ms", nullable=True),
        sa.UniqueConstraint("topic_no", "app_no", "tag", name="tmc_subscription_name"),
    )
    create(
        existing,
        "tmc_node_slot",
        key(number("slot")),
        big("epoch"),
        text("owner", 128),
        big("expires_ms"),
        big("high_ms"),
    )


def database(existing):
    create(
        existing,
        "tmc_tombstone",
        sa.Column("attempt_id", binary(16), primary_key=True),
        key(number("topic_no")),
        sa.Column("producer_tag", sa.String(64), primary_key=True),
        sa.Column("message_key", sa.String(128), primary_key=True),
        big("created_ms"),
    )
    create(
        existing,
        "tmc_alert",
        serial(),
        text("kind", 32),
        number("topic_no"),
        small("shard"),
        big("message_id"),
        number("subscription_no"),
        number("attempt"),
        text("detail", 500),
        big("created_ms"),
        big("sent_ms", nullable=True),
        sa.UniqueConstraint("kind", "message_id", "subscription_no", "attempt", name="tmc_alert_episode"),
        indexes=[("tmc_alert_unsent", ["sent_ms", "id"])],
    )


def shard(existing, nn):
    create(
        existing,
        f"tmc_message_{nn}",
        key(big("id")),
        number("topic_no"),
        number("producer_no"),
        text("producer_tag", 64),
        text("message_key", 128),
        small("live", nullable=True),
        sa.Column("attempt_id", binary(16), nullable=False),
        sa.Column("ledger_id", binary(16)),
        sa.Column("digest", binary(32), nullable=False),
        small("state"),
        text("content_type", 100),
        sa.Column("headers", sa.Text),
        sa.Column("body", sa.LargeBinary().with_variant(mysql.MEDIUMBLOB(), *FAMILY), nullable=False),
        big("delay_ms"),
        big("due_ms", nullable=True),
        big("created_ms"),
        big("decided_ms", nullable=True),
        sa.UniqueConstraint("topic_no", "producer_tag", "message_key", "live", name=f"tmc_message_{nn}_key"),
        indexes=[(f"tmc_message_{nn}_due", ["topic_no", "due_ms"])],
    )
    create(
        existing,
        f"tmc_consumption_{nn}",
        key(big("message_id")),
        key(number("subscription_no")),
        small("state"),
        number("attempt"),
        number("tried"),
        big("due_ms", nullable=True),
        big("incarnation", nullable=True),
        big("created_ms"),
        big("closed_ms", nullable=True),
        indexes=[(f"tmc_consumption_{nn}_due", ["subscription_no", "due_ms"])],
    )
    create(
        existing,
        f"tmc_attempt_{nn}",
        serial(),
        big("message_id"),
        number("subscription_no"),
        number("attempt"),
        big("at_ms"),
        big("incarnation"),
        text("error", 500),
        indexes=[(f"tmc_attempt_{nn}_message", ["message_id"])],
    )


def upgrade():
    existing = set(sa.inspect(op.get_bind()).get_table_names())
    audit(existing)
    if context.config.attributes["is_catalog"]:
        catalog(existing)
    shards = context.config.attributes["shards"]
    if shards:
        database(existing)
    for number_ in shards:
        shard(existing, f"{number_:02d}")
