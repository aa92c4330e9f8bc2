"""A private PgBouncer in front of a PostgreSQL of the tests, stopped by its process id."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Literal

from tmc_storm.eventually import eventually
from tmc_storm.services.ports import end, free_port
from tmc_storm.services.postgresql import as_postgres


class PgBouncer:
    """`url(database)` is an SQLAlchemy address. It has `size` connections of each database."""

    def __init__(self, postgresql_port: int, mode: Literal["session", "transaction"], size: int = 2) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="tmc-pgbouncer-"))
        self.port = free_port()
        (self.home / "users.txt").write_text('"tmc" ""\n')
        (self.home / "pgbouncer.ini").write_text(
            f"[databases]\n* = host=127.0.0.1 port={postgresql_port}\n[pgbouncer]\nlisten_addr = 127.0.0.1\n"
            f"listen_port = {self.port}\nunix_socket_dir =\nauth_type = trust\nauth_file = {self.home}/users.txt\n"
            f"pool_mode = {mode}\ndefault_pool_size = {size}\nignore_startup_parameters = extra_float_digits\n"
        )
        if as_postgres():  # it refuses to run as root
            for path in (self.home, *self.home.iterdir()):
                shutil.chown(path, "postgres", "postgres")
        atexit.register(self.stop)
        binary = shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin")
        assert binary is not None
        with open(self.home / "log", "wb") as log:
            self.process = subprocess.Popen(
                [*as_postgres(), binary, str(self.home / "pgbouncer.ini")],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        eventually(self._answers)

    def _answers(self) -> bool:
        assert self.process.poll() is None, (self.home / "log").read_text()[-2000:]
        with socket.socket() as probe:
            probe.settimeout(1)
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def url(self, database: str, driver: str = "psycopg") -> str:
        return f"postgresql+{driver}://tmc@127.0.0.1:{self.port}/{database}"

    def stop(self) -> None:
        end(self.process, signal.SIGINT)
        shutil.rmtree(self.home, ignore_errors=True)
