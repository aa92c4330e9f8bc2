"""Episodes of alerts, silences, and the fingerprints of alerts.

Every step looks before it changes something, so a revision that was cut short is simply run again. Notices that wait to be
sent are sent; they belong to no episode.
"""

import sqlalchemy as sa
from alembic import context, op

revision = "0016"
down_revision = "0015"

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


def index(name, table, *columns):
    present = {each["name"] for each in sa.inspect(op.get_bind()).get_indexes(table)}
    if name not in present:
        op.create_index(name, table, list(columns))


def serial():
    kind = sa.BigInteger().with_variant(sa.Integer, "sqlite")
    return sa.Column("id", kind, primary_key=True, autoincrement=True)


def number(name, kind=sa.Integer, nullable=False):
    return sa.Column(name, kind, nullable=nullable)


def text(name, length):
    return sa.Column(name, sa.String(length), nullable=False)


def silence():
    op.create_table(
        "tmc_silence",
        serial(),
        text("kind", 32),
        number("topic_no"),
        number("subscription_no"),
        number("until_ms", sa.BigInteger),
        text("actor", 64),
        text("reason", 500),
        **OPTIONS,
    )


def episode():
    op.create_table(
        "tmc_episode",
        serial(),
        text("kind", 32),
        number("topic_no"),
        number("subscription_no"),
        text("fingerprint", 12),
        number("open", sa.SmallInteger, nullable=True),
        text("detail", 500),
        text("samples", 500),
        number("alerts", sa.BigInteger),
        number("first_ms", sa.BigInteger),
        number("last_ms", sa.BigInteger),
        number("acknowledged_ms", sa.BigInteger, nullable=True),
        sa.Column("acknowledged_by", sa.String(64), nullable=False, server_default=""),
        number("empty_ms", sa.BigInteger, nullable=True),
        number("resolved_ms", sa.BigInteger, nullable=True),
        sa.UniqueConstraint("kind", "topic_no", "subscription_no", "fingerprint", "open", name="tmc_episode_open"),
        **OPTIONS,
    )


def upgrade():
    present = sa.inspect(op.get_bind()).get_table_names()
    if context.config.attributes["is_catalog"] and "tmc_silence" not in present:
        silence()
    if not context.config.attributes["shards"]:
        return
    if "tmc_episode" not in present:
        episode()
    index("tmc_episode_still", "tmc_episode", "open", "id")
    add("tmc_alert", sa.Column("fingerprint", sa.String(12), nullable=False, server_default=""))
    add(
        "tmc_notice",
        sa.Column("episode_id", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("event", sa.SmallInteger, nullable=False, server_default="1"),
    )
    index("tmc_failed_fingerprint", "tmc_failed", "topic_no", "subscription_no", "fingerprint")
