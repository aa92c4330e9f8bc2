"""Shards that move to another database. Each step can be repeated: MariaDB keeps what was done before a kill."""

import sqlalchemy as sa
from alembic import context, op

from tmc_server.store.tables import METADATA, server, shard_move

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    if context.config.attributes["is_catalog"]:
        METADATA.create_all(op.get_bind(), tables=[shard_move])
        new = server.c.known_databases
        if new.name not in {column["name"] for column in sa.inspect(op.get_bind()).get_columns(server.name)}:
            op.add_column(server.name, sa.Column(new.name, new.type))
