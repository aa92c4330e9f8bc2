"""Waits for the databases before a server starts.

A database that is down, read-only or full may recover; a refusal (wrong password, no such database) is permanent and
reported at once.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import sqlalchemy as sa

from tmc_common.eventlog import EventLog
from tmc_server.app.maintenance import CannotStart, CannotStartYet, driver_missing
from tmc_server.config import Config
from tmc_server.store.dialects import dialect_of, url_of
from tmc_server.store.dialects.contract import Refusal
from tmc_server.store.dialects.hosts import NoPrimary

log = EventLog("tmc.app")

_RETRY_S = 1.0
_SAID_AGAIN_S = 30.0


class DatabaseAway(Exception):
    """Nobody answers there now; the text says where."""


def require_databases(config: Config, created: bool = False) -> None:
    """Raises CannotStart unless every database answers. created: what is missing will be made."""
    try:
        _look(config, created)
    except DatabaseAway as exc:
        raise CannotStart(str(exc)) from exc


def wait_for_databases(config: Config) -> bool:
    """Wait until every database answers, and say so at once, then every 30 seconds.

    Returns: False when a signal asked it to stop.  Raises: CannotStart, this will not get better by waiting.
    """
    stopping, silent_s = threading.Event(), _SAID_AGAIN_S
    with _signals(stopping):
        while True:
            try:
                _look(config, created=False)
            except DatabaseAway as exc:
                if silent_s >= _SAID_AGAIN_S:
                    log.warning("database_awaited", "waiting for the database: %s", exc)
                    silent_s = 0.0
                if stopping.wait(_RETRY_S):
                    return False
                silent_s += _RETRY_S
            else:
                return True


def run_when_possible(config: Config, run: Callable[[], None]) -> None:
    """Run a server as soon as its databases allow; while they do not, say so every 30 seconds. Returns after SIGTERM too.

    Raises: CannotStart, this will not get better by waiting.
    """
    stopping, said_at = threading.Event(), float("-inf")
    while wait_for_databases(config):
        try:
            run()
        except CannotStartYet as exc:
            if time.monotonic() - said_at >= _SAID_AGAIN_S:
                log.warning("database_awaited", "the server starts when its database can be used: %s", exc)
                said_at = time.monotonic()
        else:
            return
        with _signals(stopping):
            if stopping.wait(_RETRY_S):
                return


@contextmanager
def _signals(stopping: threading.Event) -> Iterator[None]:
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, lambda *_: stopping.set()) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _look(config: Config, created: bool) -> None:
    """Raises DatabaseAway, CannotStart."""
    urls = [config.store.catalog, *(part.url for part in config.store.shards), *config.store.spare]
    for text in dict.fromkeys(secret.get_secret_value() for secret in urls):
        url = url_of(text)
        if url.get_backend_name() == "sqlite":
            _look_at_file(url)
        else:
            _connect(url, created)


def _connect(url: sa.URL, created: bool) -> None:
    dialect = dialect_of(url.get_backend_name())
    server = f"{url.host or 'localhost'}:{url.port or dialect.port}"
    try:
        with dialect.once(url).connect():
            return
    except ModuleNotFoundError as exc:
        raise driver_missing(exc) from exc
    except (TypeError, sa.exc.ProgrammingError) as exc:  # the driver's own text quotes the option
        raise CannotStart(
            "The URL of [store] has an option behind its ? that the database driver does not know."
        ) from exc
    except NoPrimary as exc:
        raise DatabaseAway(f"The database at {server} takes no writes. {exc}") from exc
    except sa.exc.DBAPIError as exc:
        match dialect.refusal_of(exc):
            case Refusal.USER:
                raise CannotStart(
                    f"The database at {server} refuses the user {url.username or ''!r}: check user, password and rights "
                    f"in the URL of [store]."
                ) from exc
            case Refusal.DATABASE:
                if created:
                    return
                raise CannotStart(
                    f"There is no database {url.database!r} at {server}: create it, or run tmc init."
                ) from exc
        said = exc.orig.args[0] if exc.orig is not None and exc.orig.args else None
        raise DatabaseAway(f"The database at {server} does not answer ({_briefly(said)}).") from exc


def _briefly(said: object) -> str:
    """The number of an error; or what libpq says last in its first line, such as "Connection refused"."""
    return (
        f"error {said}" if isinstance(said, int) else str(said).strip().partition("\n")[0].rpartition(": ")[2].strip()
    )


def _look_at_file(url: sa.URL) -> None:
    if url.database in (None, "", ":memory:"):
        return
    path = Path(str(url.database))
    if not path.parent.is_dir():
        raise CannotStart(f"Cannot open {path}: the folder {path.parent} does not exist.")
    if not os.access(path if path.exists() else path.parent, os.R_OK | os.W_OK):
        raise CannotStart(f"Cannot open {path}: this user must not write there.")
    if path.is_dir():
        raise CannotStart(f"Cannot open {path}: it is a folder, give the name of a file.")
    if not path.exists():
        return
    try:
        with closing(sqlite3.connect(path, timeout=0)) as connection:
            connection.execute("PRAGMA schema_version").fetchall()
    except sqlite3.OperationalError:
        return  # somebody is at work on it; whether that is allowed is decided by the lock
    except sqlite3.DatabaseError as exc:
        raise CannotStart(f"Cannot open {path}: it is not an SQLite file.") from exc
