"""The examples of docs/surroundings.md, and of the sections that it names, are run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Session

import tmc_client as tmc
from tests.support.center import RunningCenter
from tmc_client import recording, tables

DOCS = Path(__file__).parents[3] / "docs"


def _examples(page: str, mentions: str) -> list[str]:
    """Its Python blocks with this word."""
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    return [block for block in blocks if mentions in block]


class Base(DeclarativeBase):
    pass


@pytest.fixture
def names(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """What the examples take for granted: an engine with a schema for each tenant, and a center."""
    tenants = ("acme", "globex", "initech")
    engine = sa.create_engine(f"sqlite:///{tmp_path}/shop.db")
    for tenant in tenants:
        attach = f"ATTACH '{tmp_path}/{tenant}.db' AS {tenant}"
        sa.event.listen(engine, "connect", lambda raw, _record, attach=attach: raw.execute(attach))
    tmc.create_tables(engine)
    for tenant in tenants:
        tables.metadata.create_all(engine.execution_options(schema_translate_map={None: tenant}))
    with RunningCenter(f"sqlite:///{tmp_path}/c.db", open_to_all=True) as running:
        with tmc.connect(running.address, app="orders") as center:
            yield {"sa": sa, "tmc": tmc, "Session": Session, "engine": engine, "center": center, "Base": Base}
    engine.dispose()


def test_an_engine_through_a_pooler(names: dict[str, Any]) -> None:
    (example,) = _examples("surroundings.md", "prepare_threshold")
    exec(example, names)
    assert names["engine"].dialect.driver == "psycopg"


def test_a_ledger_per_tenant(names: dict[str, Any]) -> None:
    (blocks,) = _examples("surroundings.md", "schema_translate_map")
    exec(blocks, names)
    (checks,) = _examples("checks.md", "checks.add(")
    exec(checks.replace("0.0.0.0:50061", "127.0.0.1:0"), names)
    found = {}
    for tenant in ("acme", "globex"):
        with names["engine_of"](tenant).connect() as connection:
            found[tenant] = connection.execute(sa.select(tables.ledger.c.message_key)).scalars().all()
    assert found == {"acme": ["acme-7"], "globex": []}


def test_the_env_of_alembic(names: dict[str, Any]) -> None:
    configured: dict[str, Any] = {}
    names |= {"context": SimpleNamespace(configure=lambda **given: configured.update(given)), "connection": None}
    (example,) = _examples("surroundings.md", "include_object")
    exec(example, names)
    assert configured["include_object"] is tables.include_object


def test_a_test_that_rolls_everything_back(names: dict[str, Any]) -> None:
    recording.sent.clear()
    sa.event.listen(names["engine"], "connect", lambda raw, _record: setattr(raw, "isolation_level", None))
    sa.event.listen(names["engine"], "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
    names["engine"].dispose()
    (example,) = _examples("testing.md", "create_savepoint")
    exec(example, names)
