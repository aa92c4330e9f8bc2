"""A database on two servers with synchronous replication: what is answered on the primary is on the replica too.

The roles are changed as docs/failover.md tells an operator to. What was the primary is thrown away and copied again.
"""

from __future__ import annotations

import subprocess
from abc import ABC, abstractmethod
from typing import Any

from tmc_storm.eventually import eventually
from tmc_storm.services.mariadb import MariaDB
from tmc_storm.services.postgresql import PostgreSQL

HOSTS = ("127.0.0.1", "127.0.0.2")
_SYSTEM = ("information_schema", "mysql", "performance_schema", "sys")


class Replicated(ABC):
    """A primary and its replica, both on HOSTS and one port."""

    primary: Any
    replica: Any
    _is_silent = False

    @abstractmethod
    def url(self, database: str) -> str:
        """Return its address, with both hosts."""

    @abstractmethod
    def demote(self) -> None:
        """Let the primary take no writes any more; it stays up."""

    @abstractmethod
    def fall_behind(self) -> None:
        """Let the replica receive nothing more, and the primary not wait for it."""

    @abstractmethod
    def promote(self) -> None:
        """Let the replica take writes, after everything it has received."""

    @abstractmethod
    def _replicate(self, host: str) -> Any:
        """Make a replica of the primary, and wait until it is synchronous."""

    @abstractmethod
    def _rejoin(self) -> None:
        """Have the primary wait for its replica again, after it was started again."""

    @property
    def port(self) -> int:
        """The port of both."""
        return int(self.primary.port)

    def create(self, database: str) -> None:
        """Create an empty database where there is none."""
        self.primary.create(database)

    def kill(self) -> None:
        """Kill the primary."""
        self.primary.kill()

    def start(self) -> None:
        """Start the primary again: it is the primary still."""
        self.primary.start()
        self._rejoin()

    def suspend(self) -> None:
        """Stop the primary's processes, with all connections open."""
        self.primary.suspend()

    def resume(self) -> None:
        """Let the primary run on after `suspend`."""
        self.primary.resume()

    def silence_primary(self) -> None:
        """Stop its processes, with all connections open, as if its machine were gone."""
        self.primary.suspend()
        self._is_silent = True

    def rebuild(self) -> None:
        """Make a new replica where the primary was."""
        if self._is_silent:
            self.primary.resume()
            self._is_silent = False
        host = self.primary.host
        self.primary.stop()
        self.primary = self.replica
        self.replica = self._replicate(host)

    def stop(self) -> None:
        self.replica.stop()
        self.primary.stop()


def _with_both_hosts(url: str, host: str) -> str:
    return url.replace(f"@{host}:", f"@{','.join(HOSTS)}:")


class ReplicatedMariaDB(Replicated):
    """See Replicated. Semi-synchronous, by global transaction ids."""

    def __init__(self, user: str = "tmc", password: str = "") -> None:
        """user: cannot write where others must not, as root can."""
        self._user, self._password = user, password
        self.primary = MariaDB(64, self._options(1), host=HOSTS[0])
        self._add_user(self.primary)
        self._copies = 1
        self.replica = self._replicate(HOSTS[1])

    def _options(self, number: int) -> tuple[str, ...]:
        return (
            f"--server-id={number}",
            "--log-bin=log",
            "--log-slave-updates",
            "--gtid-strict-mode",
            "--sync-binlog=1",
            "--skip-slave-start",
            "--log-bin-trust-function-creators",  # for the triggers of a shard that moves
            "--rpl-semi-sync-slave-enabled",
            "--rpl-semi-sync-master-wait-point=AFTER_SYNC",
            "--rpl-semi-sync-master-timeout=3600000",  # it would not wait any more after ten seconds
        )

    def _add_user(self, server: MariaDB) -> None:
        rights = "SELECT, INSERT, UPDATE, DELETE, CREATE, ALTER, DROP, INDEX, REFERENCES, TRIGGER"
        user = f"{self._user}@'127.0.0.%'"
        server.run_sql(
            "SET sql_log_bin = 0",
            f"CREATE USER {user} IDENTIFIED BY '{self._password}'",
            f"GRANT {rights} ON *.* TO {user}",
        )

    def _replicate(self, host: str) -> MariaDB:
        self._copies += 1
        made = MariaDB(64, (*self._options(self._copies), "--read-only"), host=host, port=self.primary.port)
        self._add_user(made)
        databases = [each["Database"] for each in self.primary.run_sql("SHOW DATABASES")]
        if own := [each for each in databases if each not in _SYSTEM]:
            at = [f"--host={self.primary.host}", f"--port={self.primary.port}", "--user=root"]
            what = ["--single-transaction", "--gtid", "--master-data=1", "--databases", *own]
            dump = subprocess.run(["mariadb-dump", "--no-defaults", *at, *what], check=True, capture_output=True).stdout
            into = [f"--host={host}", f"--port={made.port}", "--user=root", "--init-command=SET sql_log_bin = 0"]
            subprocess.run(["mariadb", "--no-defaults", *into], check=True, input=dump)
        made.run_sql(
            f"CHANGE MASTER TO MASTER_HOST = '{self.primary.host}', MASTER_PORT = {self.primary.port},"
            " MASTER_USER = 'root', MASTER_USE_GTID = slave_pos, MASTER_CONNECT_RETRY = 1",
            "START SLAVE",
        )
        self._rejoin()
        return made

    def _rejoin(self) -> None:
        self.primary.run_sql("SET GLOBAL rpl_semi_sync_master_enabled = ON")
        eventually(self._is_synchronous, seconds=60)

    def _is_synchronous(self) -> bool:
        (clients,) = self.primary.run_sql("SHOW STATUS LIKE 'Rpl_semi_sync_master_clients'")
        return bool(clients["Value"] == "1")

    def url(self, database: str) -> str:
        user = f"{self._user}:{self._password}@" if self._password else f"{self._user}@"
        return _with_both_hosts(self.primary.url(database).replace("root@", user), self.primary.host)

    def demote(self) -> None:
        self.primary.run_sql("SET GLOBAL read_only = ON")

    def fall_behind(self) -> None:
        self.primary.run_sql("SET GLOBAL rpl_semi_sync_master_enabled = OFF")
        self.replica.run_sql("STOP SLAVE IO_THREAD")

    def promote(self) -> None:
        self.replica.run_sql("STOP SLAVE IO_THREAD")
        (state,) = self.replica.run_sql("SHOW SLAVE STATUS")
        self.replica.run_sql(
            f"DO MASTER_GTID_WAIT('{state['Gtid_IO_Pos']}')",  # received is not yet done
            "STOP SLAVE",
            "RESET SLAVE ALL",
            "SET GLOBAL read_only = OFF",
        )


class ReplicatedPostgreSQL(Replicated):
    """See Replicated. By streaming, with synchronous_standby_names."""

    def __init__(self) -> None:
        self.primary = PostgreSQL(64, host=HOSTS[0])
        self.replica = self._replicate(HOSTS[1])

    def _replicate(self, host: str) -> PostgreSQL:
        self.primary.run_sql("ALTER SYSTEM SET synchronous_standby_names = 'walreceiver'")
        self.primary.reload()
        made = PostgreSQL(64, host=host, standby_of=self.primary, wal_retrieve_retry_interval="500ms")
        self._rejoin()  # the copy has the setting, too
        return made

    def _rejoin(self) -> None:
        eventually(self._is_synchronous, seconds=60)

    def _is_synchronous(self) -> bool:
        return bool(self.primary.run_sql("SELECT sync_state FROM pg_stat_replication") == [("sync",)])

    def url(self, database: str) -> str:
        return _with_both_hosts(self.primary.url(database), self.primary.host)

    def demote(self) -> None:
        self.primary.run_sql("ALTER SYSTEM SET default_transaction_read_only = on")
        self.primary.reload()
        eventually(lambda: self.primary.run_sql("SHOW transaction_read_only") == [("on",)])

    def fall_behind(self) -> None:
        self.primary.run_sql("ALTER SYSTEM SET synchronous_standby_names = ''")
        self.primary.reload()
        self.replica.run_sql("ALTER SYSTEM SET primary_conninfo = ''")
        self.replica.reload()
        eventually(lambda: not self.primary.run_sql("SELECT 1 FROM pg_stat_replication"))

    def promote(self) -> None:
        self.replica.run_sql("ALTER SYSTEM RESET synchronous_standby_names")
        self.replica.run_sql("SELECT pg_reload_conf()")
        self.replica.run_sql("SELECT pg_promote()")
