"""Notices, which group alerts and are sent once over all servers; and what FAILED, so that it is counted without a scan.

Every step looks before it changes something, so a revision that was cut short is simply run again. What failed before is
read once from the shards' tables.
"""

import sqlalchemy as sa
from alembic import context, op

revision = "0006"
down_revision = "0005"

OPTIONS = {
    f"{family}_{name}": value
    for family in ("mysql", "mariadb")
    for name, value in {"engine": "InnoDB", "charset": "utf8mb4", "collate": "utf8mb4_bin"}.items()
}
FAILED, CHECK_FAILED = 3, 4
REPLACE = "REPLACE INTO tmc_failed (shard, topic_no, subscription_no, message_id, failed_ms)"


def notices():
    op.create_table(
        "tmc_notice",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
        sa.Column("sink", sa.String(32), nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("topic_no", sa.Integer, nullable=False),
        sa.Column("subscription_no", sa.Integer, nullable=False),
        sa.Column("shard", sa.SmallInteger, nullable=False),
        sa.Column("message_id", sa.BigInteger, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("detail", sa.String(500), nullable=False),
        sa.Column("samples", sa.String(500), nullable=False),
        sa.Column("alerts", sa.Integer, nullable=False),
        sa.Column("first_ms", sa.BigInteger, nullable=False),
        sa.Column("last_ms", sa.BigInteger, nullable=False),
        sa.Column("claim", sa.BigInteger, nullable=False),
        sa.Column("due_ms", sa.BigInteger),
        sa.Column("sent_ms", sa.BigInteger),
        sa.UniqueConstraint("kind", "topic_no", "subscription_no", "sink", "id", name="tmc_notice_group"),
        **OPTIONS,
    )


def index():
    present = {found["name"] for found in sa.inspect(op.get_bind()).get_indexes("tmc_notice")}
    if "tmc_notice_due" not in present:
        op.create_index("tmc_notice_due", "tmc_notice", ["sink", "due_ms"])


def failed():
    op.create_table(
        "tmc_failed",
        sa.Column("shard", sa.SmallInteger, primary_key=True, autoincrement=False),
        sa.Column("topic_no", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("subscription_no", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("message_id", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("failed_ms", sa.BigInteger, nullable=False),
        **OPTIONS,
    )


def upgrade():
    present = sa.inspect(op.get_bind()).get_table_names()
    if "tmc_notice" not in present:
        notices()
    index()
    if "tmc_failed" not in present:
        failed()
    for number in context.config.attributes["shards"]:
        message, consumption = f"tmc_message_{number:02d}", f"tmc_consumption_{number:02d}"
        op.execute(
            f"{REPLACE} SELECT {number}, m.topic_no, c.subscription_no, c.message_id,"
            f" COALESCE(c.closed_ms, c.created_ms)"
            f" FROM {consumption} c JOIN {message} m ON m.id = c.message_id WHERE c.state = {FAILED}"
        )
        op.execute(
            f"{REPLACE} SELECT {number}, topic_no, 0, id, created_ms FROM {message} WHERE state = {CHECK_FAILED}"
        )
