"""A private MariaDB on a free port: own data directory, own socket, stopped by its process id.

The data directory is prepared once per cache folder and copied for every run, so a start takes about a second.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path

import sqlalchemy as sa

from tmc_storm.services.cache import cache
from tmc_storm.services.ports import end, free_port
from tmc_storm.services.service import Service

DAEMON = next((p for p in ("/usr/sbin/mariadbd", "/usr/libexec/mariadbd") if os.path.exists(p)), "mariadbd")


def _user() -> list[str]:
    return ["--user=root"] if os.getuid() == 0 else []


def _prepared_directory() -> Path:
    folder = cache()
    prepared = folder / "mariadb-data"
    if not prepared.exists():
        scratch = Path(tempfile.mkdtemp(dir=folder))
        subprocess.run(
            [
                "mariadb-install-db",
                "--no-defaults",
                f"--datadir={scratch}",
                "--auth-root-authentication-method=normal",
                "--skip-test-db",
                *_user(),
            ],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            scratch.rename(prepared)
        except OSError:  # another run was faster
            shutil.rmtree(scratch)
    return prepared


class MariaDB(Service):
    """One private server. `url(database)` gives its SQLAlchemy address; root has no password."""

    def __init__(
        self,
        pool_mb: int = 256,
        options: tuple[str, ...] = (),
        home: Path | None = None,
        host: str = "127.0.0.1",
        port: int | None = None,
    ) -> None:
        """home: keep the data there, after `stop` too."""
        self._keep = home is not None
        self.home = home or Path(tempfile.mkdtemp(prefix="tmc-mariadb-"))
        self.host, self.port = host, port or free_port()
        if not self._keep:
            atexit.register(self.stop)  # a test that fails half way leaves nothing behind
        self._options = [
            f"--innodb-buffer-pool-size={pool_mb}M",
            "--innodb-flush-log-at-trx-commit=1",
            "--innodb-log-file-size=256M",
            "--max-connections=300",
            "--character-set-server=utf8mb4",
            *options,
        ]
        if not (self.home / "data").exists():
            shutil.copytree(_prepared_directory(), self.home / "data")
        self.start()

    def start(self) -> None:
        scratch = self.home / "tmp"  # of its own: a server that starts deletes the temporary tables it finds
        scratch.mkdir(exist_ok=True)
        command = [
            DAEMON,
            "--no-defaults",
            f"--datadir={self.home}/data",
            f"--tmpdir={scratch}",
            f"--socket={self.home}/s",
            f"--pid-file={self.home}/pid",
            f"--port={self.port}",
            f"--bind-address={self.host}",
            *_user(),
            *self._options,
        ]
        self._run(command)

    def _answers(self) -> bool:
        with socket.socket() as probe:
            probe.settimeout(1)
            return probe.connect_ex((self.host, self.port)) == 0 and bool(probe.recv(1))

    def url(self, database: str) -> str:
        return f"mariadb+mysqldb://root@{self.host}:{self.port}/{database}"

    def create(self, database: str) -> str:
        """An empty database where there is none; its address."""
        self.run_sql(f"CREATE DATABASE IF NOT EXISTS {database} CHARACTER SET utf8mb4")
        return self.url(database)

    def run_sql(self, *statements: str) -> list[sa.RowMapping]:
        """Run statements as root. Returns the rows of the last one."""
        engine = sa.create_engine(self.url(""), isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
        found: list[sa.RowMapping] = []
        with engine.connect() as connection:
            for statement in statements:
                result = connection.exec_driver_sql(statement, execution_options={"no_parameters": True})
                found = list(result.mappings()) if result.returns_rows else []
        return found

    def kill(self) -> None:
        """Kill -9, as a power switch would as far as the process is concerned."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        end(self.process, signal.SIGTERM)
        if not self._keep:
            shutil.rmtree(self.home, ignore_errors=True)
