"""Keys that copies are signed with, per subscription.

Every step looks before it changes something, so a revision that was cut short is simply run again. Subscriptions that are
there get no key here: servers of older revisions would go on handing out unsigned copies. They get one when the first
consumer that verifies asks, see docs/decisions/0017-signed-deliveries.md.
"""

import sqlalchemy as sa
from alembic import context, op

revision = "0009"
down_revision = "0008"

COLUMNS = (
    ("delivery_key", sa.String(64), ""),
    ("other_key", sa.String(64), ""),
    ("signed_ms", sa.BigInteger, "0"),
)


def upgrade():
    if not context.config.attributes["is_catalog"]:
        return
    present = {column["name"] for column in sa.inspect(op.get_bind()).get_columns("tmc_subscription")}
    for name, kind, default in COLUMNS:
        if name not in present:
            op.add_column("tmc_subscription", sa.Column(name, kind, nullable=False, server_default=default))
