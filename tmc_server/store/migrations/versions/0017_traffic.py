"""How many messages each server submits and acks, for the overview."""

import sqlalchemy as sa
from alembic import context, op

revision = "0017"
down_revision = "0016"

OPTIONS = {
    f"{family}_{name}": value
    for family in ("mysql", "mariadb")
    for name, value in {"engine": "InnoDB", "charset": "utf8mb4", "collate": "utf8mb4_bin"}.items()
}


def key(name, kind):
    return sa.Column(name, kind, primary_key=True, autoincrement=False)


def big(name):
    return sa.Column(name, sa.BigInteger, nullable=False)


def upgrade():
    present = sa.inspect(op.get_bind()).get_table_names()
    if context.config.attributes["is_catalog"] and "tmc_traffic" not in present:
        op.create_table(
            "tmc_traffic",
            key("incarnation", sa.BigInteger),
            key("topic_no", sa.Integer),
            key("subscription_no", sa.Integer),
            big("messages"),
            big("window_ms"),
            big("updated_ms"),
            **OPTIONS,
        )
