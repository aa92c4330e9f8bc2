"""The page about the wire shows the tables and headers as they are."""

from __future__ import annotations

import re
from pathlib import Path

from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateIndex, CreateTable

from tmc_client import tables
from tmc_common.cloud_events import record_headers

PAGE = (Path(__file__).parents[2] / "docs/wire.md").read_text()


def test_its_tables_are_those_of_the_sdk() -> None:
    shown = "".join(re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL))
    ours = []
    for table in (tables.ledger, tables.ledger_info, tables.inbox, tables.inbox_order):
        ours.append(CreateTable(table))
        ours += [CreateIndex(index) for index in sorted(table.indexes, key=lambda index: str(index.name))]
    compiled = "".join(f"{statement.compile(dialect=postgresql.dialect())};" for statement in ours)
    assert "".join(shown.split()) == "".join(compiled.split())


def test_its_records_have_these_headers() -> None:
    records = PAGE[PAGE.index("## Records in Kafka") :]
    named = set(re.findall(r"`((?:ce_|content-)[a-z-]+)`", records))
    attributes = dict.fromkeys(("id", "source", "type", "subject", "tmcattempt", "tmcsubscriber"), "x")
    assert named == set(record_headers(attributes, "text/plain", {})) - {"ce_specversion"}
