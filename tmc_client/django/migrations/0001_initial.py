"""The tables of ledger, inbox and outbox, from their one declaration."""

from __future__ import annotations

import os
from typing import Any, ClassVar

from django.db import migrations
from sqlalchemy.schema import CreateIndex, CreateTable

from tmc_client.django.local import VENDORS, AtomicTransaction
from tmc_client.tables import metadata


def create(_apps: Any, editor: Any) -> None:
    if editor.connection.vendor not in VENDORS:
        return  # a database without blocks
    dialect = AtomicTransaction(editor.connection.alias).dialect
    there = set(editor.connection.introspection.table_names())
    for table in metadata.sorted_tables:
        if table.name in there:
            continue  # of tmc.create_tables
        editor.execute(str(CreateTable(table).compile(dialect=dialect)))
        for index in sorted(table.indexes, key=lambda index: str(index.name)):
            editor.execute(str(CreateIndex(index).compile(dialect=dialect)))
    if metadata.tables["tmc_ledger_info"].name not in there:
        editor.execute("INSERT INTO tmc_ledger_info (id, ledger_id, horizon_ms) VALUES (1, %s, 0)", [os.urandom(16)])


def drop(_apps: Any, editor: Any) -> None:
    for table in reversed(metadata.sorted_tables):
        editor.execute(f"DROP TABLE {table.name}")


class Migration(migrations.Migration):
    initial = True
    # MariaDB and MySQL commit every CREATE by itself.
    operations: ClassVar = [migrations.RunPython(create, drop, atomic=False)]
