"""The SDK in forked processes: os.fork after a call, gunicorn --preload, Celery prefork. All send."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.center import RunningCenter
from tests.support.eventually import eventually
from tests.support.ports import free_port


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


def test_gunicorn_preload(running: RunningCenter, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(
        textwrap.dedent(f"""
        import os
        import tmc_client as tmc
        center = tmc.connect("{running.address}", app="orders")
        center.publish("forked", b"", key="gunicorn-preloaded")

        def app(environ, start_response):
            key = "gunicorn-" + environ["QUERY_STRING"]
            center.publish("forked", b"", key=key)
            start_response("200 OK", [("Content-Type", "text/plain")])
            return [str(os.getpid()).encode()]
    """)
    )
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "gunicorn",
        "--preload",
        "-w",
        "3",
        "-b",
        f"127.0.0.1:{port}",
        "--log-level",
        "error",
        "shop:app",
    ]
    server = subprocess.Popen(command, cwd=tmp_path)
    try:
        eventually(lambda: _get(port, "first"))
        workers = {_get(port, str(i)) for i in range(60)}
        assert len(workers) > 1
        assert {"gunicorn-preloaded", *(f"gunicorn-{i}" for i in range(60))} <= _keys(running)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(20)


def _get(port: int, query: str) -> str:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/?{query}", timeout=10) as response:
            return response.read().decode()
    except OSError:
        return ""


def test_celery_prefork(running: RunningCenter, tmp_path: Path) -> None:
    for folder in ("queue", "done"):
        (tmp_path / folder).mkdir()
    (tmp_path / "jobs.py").write_text(
        textwrap.dedent(f"""
        import os
        import celery
        import tmc_client as tmc
        app = celery.Celery("jobs", broker="filesystem://")
        app.conf.broker_transport_options = {{
            "data_folder_in": "{tmp_path}/queue", "data_folder_out": "{tmp_path}/queue", "control_folder": "{tmp_path}/done",
        }}
        app.conf.task_ignore_result = True
        center = tmc.connect("{running.address}", app="orders")
        center.publish("forked", b"", key=f"celery-import-{{os.getpid()}}")

        @app.task
        def send(key):
            center.publish("forked", b"", key=key)
    """)
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONWARNINGS": "ignore", "C_FORCE_ROOT": "1"}
    command = [sys.executable, "-m", "celery", "-A", "jobs", "worker", "--pool", "prefork", "-c", "2", "-l", "ERROR"]
    worker = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        script = "import jobs; [jobs.send.delay(f'celery-{i}') for i in range(20)]"
        subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, check=True, timeout=60)
        eventually(lambda: {f"celery-{i}" for i in range(20)} <= _keys(running), seconds=60)
    finally:
        worker.send_signal(signal.SIGTERM)
        try:
            worker.wait(20)
        except subprocess.TimeoutExpired:
            worker.kill()
