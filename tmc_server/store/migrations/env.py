"""Alembic's entry: runs the revisions on the one connection that store/migrate.py hands over."""

from alembic import context

connection = context.config.attributes["connection"]
context.configure(connection=connection, version_table="tmc_schema_version", transactional_ddl=False)
context.run_migrations()
