"""Kinds of processes a guest lives in. Each uses all places and returns what was said, by path and use."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

from tmc_storm.eventually import eventually
from tmc_storm.services.ports import end, free_port

ROOT = Path(__file__).parents[3]
Said = Mapping[str, Mapping[str, str]]
_SECONDS = 300


def _environment(places: Path) -> dict[str, str]:
    return os.environ | {
        "PLACES": str(places),
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
        "C_FORCE_ROOT": "1",
    }


def _program(places: Path, text: str, *under: str, also: str = "") -> Said:
    """The last line that it prints is its JSON. under: a command that runs it.  also: a folder to import from first."""
    command = [*under, sys.executable, "-c", textwrap.dedent(text), str(places)]
    environment = _environment(places)
    if also:
        environment["PYTHONPATH"] = f"{also}:{environment['PYTHONPATH']}"
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=_SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said: Said = json.loads(done.stdout.splitlines()[-1])
    return said


def plain(places: Path) -> Said:
    return _program(
        places,
        """
        import json, sys
        from tests.integration.surroundings import guest
        print(json.dumps(guest.use_places(sys.argv[1])))
        """,
    )


def fork(places: Path) -> Said:
    return _program(
        places,
        """
        import json, os, sys
        from tests.integration.surroundings import web
        child = os.fork()
        if child == 0:
            print(web.application({}, lambda *_: None)[0].decode(), flush=True)
            os._exit(0)
        sys.exit(os.waitpid(child, 0)[1])
        """,
    )


def multiprocessing_spawn(places: Path) -> Said:
    return _program(
        places,
        """
        import json, multiprocessing, sys
        from tests.integration.surroundings import guest, web
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            print(json.dumps(pool.apply(guest.use_places, (sys.argv[1],))))
        """,
    )


def gevent(places: Path) -> Said:
    return _program(
        places,
        """
        from gevent import monkey
        monkey.patch_all()
        import json, sys
        from tests.integration.surroundings import guest
        guest.serve_checks(sys.argv[1])
        print(json.dumps(guest.use_places(sys.argv[1])))
        """,
    )


def opentelemetry_instrument(places: Path) -> Said:
    """Connections and cursors of the drivers are proxies."""
    under = str(Path(sys.executable).parent / "opentelemetry-instrument")
    return _program(
        places,
        """
        import json, sqlite3, sys
        from tests.integration.surroundings import guest
        assert type(sqlite3.connect(":memory:")) is not sqlite3.Connection
        print(json.dumps(guest.use_places(sys.argv[1])))
        """,
        under,
        "--traces_exporter=none",
        "--metrics_exporter=none",
        "--logs_exporter=none",
    )


def oldest_sqlalchemy(places: Path) -> Said:
    """scripts/services installs it beside the environment."""
    return _program(
        places,
        """
        import json, sys
        import sqlalchemy
        from tests.integration.surroundings import guest
        assert sqlalchemy.__version__ == "2.0.40"
        print(json.dumps(guest.use_places(sys.argv[1])))
        """,
        also=f"{sys.prefix}-sqlalchemy-2.0.40",
    )


def uvloop(places: Path) -> Said:
    return _program(
        places,
        """
        import asyncio, json, sys, uvloop
        from tests.integration.surroundings import guest
        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
        print(json.dumps(guest.use_places(sys.argv[1])))
        """,
    )


def _web(places: Path, *command: str, port: int) -> Said:
    server = subprocess.Popen(command, cwd=ROOT, env=_environment(places), start_new_session=True)
    try:
        body = eventually(lambda: _get(port), seconds=60)
        said: Said = json.loads(body)
        return said
    finally:
        end(server, signal.SIGTERM)


def _get(port: int) -> str:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=_SECONDS) as response:
            return str(response.read().decode())
    except OSError:
        return ""


def gunicorn_preload(places: Path) -> Said:
    port = free_port()
    options = ["--preload", "-w", "2", "-b", f"127.0.0.1:{port}", "--timeout", str(_SECONDS), "--log-level", "error"]
    return _web(
        places, sys.executable, "-m", "gunicorn", *options, "tests.integration.surroundings.web:application", port=port
    )


def _uwsgi(places: Path, *options: str) -> Said:
    port = free_port()
    command = [
        str(Path(sys.executable).parent / "uwsgi"),
        "--http-socket",
        f"127.0.0.1:{port}",
        "--master",
        "--need-app",
    ]
    command += [
        "--processes",
        "2",
        "--die-on-term",
        "--module",
        "tests.integration.surroundings.web",
        "--virtualenv",
        sys.prefix,
    ]
    return _web(places, *command, "--disable-logging", *options, port=port)


def uwsgi(places: Path) -> Said:
    """It forks without telling Python, and runs no threads between requests."""
    return _uwsgi(places)


def uwsgi_with_threads(places: Path) -> Said:
    return _uwsgi(places, "--enable-threads")


def uwsgi_lazy(places: Path) -> Said:
    return _uwsgi(places, "--lazy-apps", "--enable-threads")


def celery_prefork(places: Path) -> Said:
    folder = places.parent / "celery"
    for name in ("queue", "done"):
        (folder / name).mkdir(parents=True)
    (folder / "guest_jobs.py").write_text(
        textwrap.dedent(f"""
        import pathlib
        import celery
        from tests.integration.surroundings import web
        app = celery.Celery("guest_jobs", broker="filesystem://")
        app.conf.broker_transport_options = {{
            "data_folder_in": "{folder}/queue", "data_folder_out": "{folder}/queue", "control_folder": "{folder}/done",
        }}
        app.conf.task_ignore_result = True

        @app.task
        def use():
            found = web.application({{}}, lambda *_: None)[0]
            pathlib.Path("{folder}/part").write_bytes(found)
            pathlib.Path("{folder}/part").rename("{folder}/said.json")
    """)
    )
    environment = _environment(places) | {"PYTHONPATH": f"{folder}:{ROOT}"}
    command = [sys.executable, "-m", "celery", "-A", "guest_jobs"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    worker = subprocess.Popen(
        [*command, "worker", "--pool", "prefork", "-c", "2", "-l", "ERROR"], cwd=ROOT, env=environment, **quiet
    )
    try:
        subprocess.run(
            [sys.executable, "-c", "import guest_jobs; guest_jobs.use.delay()"],
            cwd=ROOT,
            env=environment,
            check=True,
            timeout=60,
        )
        eventually((folder / "said.json").exists, seconds=_SECONDS)
        said: Said = json.loads((folder / "said.json").read_text())
        return said
    finally:
        end(worker, signal.SIGTERM)


PROCESSES: Mapping[str, Callable[[Path], Said]] = {
    process.__name__: process
    for process in (
        plain,
        fork,
        multiprocessing_spawn,
        gunicorn_preload,
        uwsgi,
        uwsgi_with_threads,
        uwsgi_lazy,
        celery_prefork,
        gevent,
        opentelemetry_instrument,
        oldest_sqlalchemy,
        uvloop,
    )
}
