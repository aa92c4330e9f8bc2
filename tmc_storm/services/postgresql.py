"""A private PostgreSQL on a free port: own data directory and socket, stopped by its process id.

PostgreSQL refuses to run as root: as root it runs as the Debian package's user.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from tmc_storm.services.ports import accepts, end, free_port
from tmc_storm.services.service import Service

BINARIES = max(Path("/usr/lib/postgresql").glob("*/bin"), default=Path("/usr/bin"))
_SUPERUSER = "tmc"


def as_postgres() -> list[str]:
    """Return what to put in front of a command, for root.

    Popen would change the user between fork and exec, and so run the fork handlers of gRPC, which can end the child.
    """
    return ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"] if os.getuid() == 0 else []


class PostgreSQL(Service):
    """One private server. `url(database)` gives its SQLAlchemy address; user tmc has no password."""

    def __init__(
        self, pool_mb: int = 128, *, host: str = "127.0.0.1", standby_of: PostgreSQL | None = None, **settings: str
    ) -> None:
        """standby_of: a copy of that one, on the same port.  settings: of the server, such as autovacuum_naptime."""
        self._settings = {"shared_buffers": f"{pool_mb}MB", **settings}
        self.home = Path(tempfile.mkdtemp(prefix="tmc-postgresql-"))
        if as_postgres():
            shutil.chown(self.home, "postgres", "postgres")
        self.host = host
        self.port: int = standby_of.port if standby_of else free_port()
        atexit.register(self.stop)  # a test that fails half way leaves nothing behind
        data = str(self.home / "data")
        if standby_of:
            source = ["-h", standby_of.host, "-p", str(standby_of.port), "-U", _SUPERUSER]
            make = ["pg_basebackup", *source, "-D", data, "--write-recovery-conf", "--checkpoint=fast", "--no-sync"]
        else:
            make = [
                "initdb",
                "-D",
                data,
                "-A",
                "trust",
                "-U",
                _SUPERUSER,
                "-E",
                "UTF8",
                "--locale=C.UTF-8",
                "--no-sync",
            ]
        command = [*as_postgres(), str(BINARIES / make[0]), *make[1:]]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=self.home)
        self.start()

    def start(self) -> None:
        settings = {
            "listen_addresses": self.host,
            "port": self.port,
            "unix_socket_directories": self.home,
            "max_connections": 200,
            **self._settings,
        }
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        self._run([*as_postgres(), BINARIES / "postgres", "-D", self.home / "data", *options], cwd=self.home)

    def _answers(self) -> bool:
        if not accepts(self.port, self.host):
            return False
        try:
            self.run_sql("SELECT 1")
        except sa.exc.OperationalError:  # it is still starting up
            return False
        return True

    def run_sql(self, statement: str) -> list[Any]:
        """Run a statement as its superuser. Returns the rows."""
        engine = sa.create_engine(self.url("postgres"), isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
        with engine.connect() as connection:
            found = connection.exec_driver_sql(statement)
            return list(found) if found.returns_rows else []

    def url(self, database: str, driver: str = "psycopg") -> str:
        return f"postgresql+{driver}://{_SUPERUSER}@{self.host}:{self.port}/{database}"

    def create(self, database: str, driver: str = "psycopg") -> str:
        """An empty database where there is none; its address."""
        if not self.run_sql(f"SELECT 1 FROM pg_database WHERE datname = '{database}'"):
            self.run_sql(f"CREATE DATABASE {database}")
        return self.url(database, driver)

    def reload(self) -> None:
        """Read the configuration files again."""
        assert self.process is not None
        self.process.send_signal(signal.SIGHUP)

    def kill(self) -> None:
        """An immediate shutdown: as after a crash, it recovers at its next start."""
        end(self.process, signal.SIGQUIT)

    def _signal(self, number: signal.Signals) -> None:
        """Send it to all its processes: each backend has a group of its own."""
        assert self.process is not None
        os.kill(self.process.pid, number)
        for child in self._children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, number)

    def _children(self) -> Iterator[int]:
        assert self.process is not None
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if int(path.read_text().rpartition(")")[2].split()[1]) == self.process.pid:
                    yield int(path.parent.name)

    def stop(self) -> None:
        end(self.process, signal.SIGINT)  # a fast shutdown: open transactions are rolled back
        shutil.rmtree(self.home, ignore_errors=True)
