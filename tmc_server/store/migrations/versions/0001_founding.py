"""The founding schema: a new database gets all declared tables at once (store/migrate.py), and begins here.

A later revision adds what was declared after it, for each database that is there: `context.config.attributes` says whether it
is the catalog, and which shards it has. It runs again if it was cut short, so it looks before it adds.
"""

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Nothing: no database is older."""
