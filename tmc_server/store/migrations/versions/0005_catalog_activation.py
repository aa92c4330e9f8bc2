"""Acknowledged catalog versions, one number per life of a subscription, the shard map, identities of databases.

Every step looks before it changes something, so a revision that was cut short is simply run again. Stop all servers
first: those of older revisions take a subscription for removed, or in effect, by the time in its row.
"""

import sqlalchemy as sa
from alembic import context, op

revision = "0005"
down_revision = "0004"

OPTIONS = {
    f"{family}_{name}": value
    for family in ("mysql", "mariadb")
    for name, value in {"engine": "InnoDB", "charset": "utf8mb4", "collate": "utf8mb4_bin"}.items()
}
NAME = "tmc_subscription_name"
COLUMNS = ["topic_no", "app_no", "tag", "live"]


def create(name, *parts):
    if name not in sa.inspect(op.get_bind()).get_table_names():
        op.create_table(name, *parts, **OPTIONS)


def add(table, *columns):
    present = {column["name"] for column in sa.inspect(op.get_bind()).get_columns(table)}
    for column in columns:
        if column.name not in present:
            op.add_column(table, column)


def catalog():
    add(
        "tmc_server",
        sa.Column("catalog_version", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("stale_ms", sa.BigInteger, nullable=False, server_default="60000"),
        sa.Column("silenced", sa.SmallInteger, nullable=False, server_default="0"),
    )
    add(
        "tmc_subscription",
        sa.Column("live", sa.SmallInteger, server_default="1"),
        sa.Column("leaving_ms", sa.BigInteger),
    )
    op.execute("UPDATE tmc_subscription SET live = NULL WHERE removed_ms IS NOT NULL")
    unique_among_the_living()
    create(
        "tmc_shard_map",
        sa.Column("shard", sa.SmallInteger, primary_key=True, autoincrement=False),
        sa.Column("identity", sa.String(32), nullable=False),
        sa.Column("place", sa.String(255), nullable=False),
    )


def unique_among_the_living():
    connection = op.get_bind()
    known = {
        each["name"]: each["column_names"] for each in sa.inspect(connection).get_unique_constraints("tmc_subscription")
    }
    if known.get(NAME) == COLUMNS:
        return
    if connection.dialect.name == "sqlite":  # it cannot drop a constraint: the table is copied
        with op.batch_alter_table("tmc_subscription", recreate="always") as table:
            table.drop_constraint(NAME, type_="unique")
            table.create_unique_constraint(NAME, COLUMNS)
    else:
        drop = f"DROP INDEX {NAME}, " if NAME in known else ""
        op.execute(f"ALTER TABLE tmc_subscription {drop}ADD CONSTRAINT {NAME} UNIQUE ({', '.join(COLUMNS)})")


def upgrade():
    if context.config.attributes["is_catalog"]:
        catalog()
    create(
        "tmc_database",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("identity", sa.String(32), nullable=False),
    )
