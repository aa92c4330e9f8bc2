"""Forks of forks. Servers that fork: see tests/integration/surroundings."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest

from tests.support.center import RunningCenter


@pytest.fixture(scope="module")
def running(tmp_path_factory) -> Iterator[RunningCenter]:
    folder = tmp_path_factory.mktemp("fork")
    with RunningCenter(f"sqlite:///{folder}/c.db", open_to_all=True) as made:
        yield made


def _keys(running: RunningCenter) -> set[str]:
    import sqlalchemy as sa

    from tmc_server.domain.placement import table_index_for
    from tmc_server.store.tables import shard_tables

    table = shard_tables(table_index_for("forked")).message
    with running.server.store.shards.catalog.reading() as connection:
        return set(connection.execute(sa.select(table.c.message_key)).scalars())


def test_fork_after_a_call(running: RunningCenter) -> None:
    script = textwrap.dedent("""
        import os, sys
        import tmc_client as tmc
        center = tmc.connect(sys.argv[1], app="orders")
        center.publish("forked", b"", key="fork-parent")
        children = []
        for i in range(4):
            pid = os.fork()
            if pid == 0:
                center.publish("forked", b"", key=f"fork-child-{i}")
                if i == 0 and os.fork() == 0:
                    center.publish("forked", b"", key="fork-grandchild")
                    os._exit(0)
                elif i == 0:
                    assert os.wait()[1] == 0
                os._exit(0)
            children.append(pid)
        center.publish("forked", b"", key="fork-parent-again")
        codes = [os.waitpid(pid, 0)[1] for pid in children]
        sys.exit(0 if codes == [0] * 4 else f"children ended with {codes}")
    """)
    done = subprocess.run([sys.executable, "-c", script, running.address], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    expected = {"fork-parent", "fork-parent-again", "fork-grandchild", *(f"fork-child-{i}" for i in range(4))}
    assert expected <= _keys(running)
