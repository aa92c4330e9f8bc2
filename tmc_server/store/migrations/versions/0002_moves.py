"""Shards that move to another database."""

from alembic import context, op

from tmc_server.store.tables import METADATA, shard_move

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    if context.config.attributes["is_catalog"]:
        METADATA.create_all(op.get_bind(), tables=[shard_move])
