"""A server starts when its database allows; what an administrator has to mend is said in one sentence."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.support.cluster import TMC
from tmc_storm.eventually import eventually
from tmc_storm.services.mariadb import MariaDB
from tmc_storm.services.ports import free_port

pytestmark = pytest.mark.mariadb


@pytest.fixture
def database() -> Iterator[MariaDB]:
    """A server of its own: it is made read-only."""
    made = MariaDB(pool_mb=64)
    yield made
    made.stop()


def _say(database: MariaDB, *statements: str) -> None:
    root = sa.create_engine(database.url("mysql"), isolation_level="AUTOCOMMIT")
    with root.connect() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)
    root.dispose()


def _settings(database: MariaDB, user: str) -> dict[str, str]:
    url = sa.make_url(database.url("center")).set(username=user, password="secret")
    return os.environ | {
        "TMC_STORE__CATALOG": url.render_as_string(hide_password=False),
        "TMC_SERVER__LISTEN": f"127.0.0.1:{free_port()}",
    }


def _user(name: str, rights: str) -> list[str]:
    return [
        "CREATE DATABASE IF NOT EXISTS center",
        f"CREATE USER {name} IDENTIFIED BY 'secret'",
        f"GRANT {rights} ON center.* TO {name}",
    ]


def test_init_without_rights_says_so_in_one_sentence(database: MariaDB) -> None:
    _say(database, *_user("poor", "SELECT"))
    done = subprocess.run(
        [TMC, "init"], env=_settings(database, "poor"), capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert "denied" in done.stderr


def test_a_server_waits_while_its_database_is_read_only(database: MariaDB, tmp_path: Path) -> None:
    _say(database, *_user("center", "ALL PRIVILEGES"))
    settings = _settings(database, "center")
    subprocess.run([TMC, "init"], env=settings, check=True, capture_output=True, timeout=120)
    _say(database, "SET GLOBAL read_only = 1")
    log = tmp_path / "log"
    with log.open("wb") as file:
        server = subprocess.Popen([TMC, "serve"], env=settings, stdout=file, stderr=file)

    def says(text: str) -> bool:
        assert server.poll() is None, log.read_text()
        return text in log.read_text()

    try:
        eventually(lambda: says("the server starts when its database can be used"), seconds=60)
        assert says("read-only")
        assert not says("Traceback")
        _say(database, "SET GLOBAL read_only = 0")
        eventually(lambda: says("serving on port"), seconds=60)
    finally:
        server.terminate()
        assert server.wait(60) == 0
