"""An asyncio engine that was used on another event loop before: found at the start, in one sentence."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import sqlalchemy as sa

from tmc_storm.services.mariadb import MariaDB
from tmc_storm.services.postgresql import PostgreSQL

SAYS = "connections of another event loop"
USES = {
    "inbox": "await tmc.SqlInbox(async_sessionmaker(engine)).check_async()",
    "block": """async with aio.connect("127.0.0.1:1", app="orders") as center, AsyncSession(engine) as session:
                    async with center.transaction(session, prepare_first=True):
                        pass""",
}


def _run(url: str, use: str, disposes: bool) -> str:
    """In a process of its own: connections whose loop is closed cannot be closed any more. Returns: what was refused."""
    script = f"""
        import asyncio
        from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
        import tmc_client as tmc
        from tmc_client import aio
        from tmc_client.local import one_transaction
        engine = create_async_engine({url!r})

        async def prepare():
            await aio.create_tables(engine)
            if {disposes}:
                await engine.dispose()

        async def on_another_loop():
            try:
                {use}
            except tmc.InvalidRequest as exc:
                print(exc)

        asyncio.run(prepare())
        asyncio.run(on_another_loop())
        assert not one_transaction._BY_CONNECTION
    """
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("driver", ["asyncpg", "asyncmy"])
def test_connections_of_another_loop_are_named(use: str, driver: str, postgresql: PostgreSQL, mariadb: MariaDB) -> None:
    url = postgresql.create("tmc_loops", "asyncpg")
    if driver == "asyncmy":
        url = sa.make_url(mariadb.create("tmc_loops")).set(drivername="mysql+asyncmy").render_as_string(False)
    said = _run(url, USES[use], disposes=False)
    assert SAYS in said
    assert "`await engine.dispose()`" in said


@pytest.mark.parametrize("use", USES)
def test_an_engine_that_was_disposed_of_works_on_another_loop(use: str, postgresql: PostgreSQL) -> None:
    assert _run(postgresql.create("tmc_loops", "asyncpg"), USES[use], disposes=True) == ""
