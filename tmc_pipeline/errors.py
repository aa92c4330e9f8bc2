"""Why a job cannot continue: one line that says what to do. The command prints it and exits with 2.

PipelineError
|-- CannotRun        this machine or these settings: Java, drivers, addresses, rights, a mapping
|-- AnotherRun       the archive is being written by another run
|-- ArchiveDamaged   files that a manifest lists are gone or differ
`-- JobFailed        Spark or a disk failed during the run: nothing was published, run it again
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager


class PipelineError(Exception):
    """The base: its text is the one line."""


class CannotRun(PipelineError):
    """The machine or the settings must be fixed first."""


class AnotherRun(PipelineError):
    """One run at a time writes an archive."""


class ArchiveDamaged(PipelineError):
    """Files that a manifest lists are missing or differ."""


class JobFailed(PipelineError):
    """The job failed while it ran; nothing was published."""


NO_PYSPARK = 'PySpark is not installed here: pip install "tmc-center[pipeline]".'
DRIVER_PACKAGES = "libmariadb-java libpostgresql-jdbc-java libxerial-sqlite-jdbc-java"  # of Debian

_ENDED = "Spark's process ended: nothing was published, run it again."

# Messages of drivers and Spark, tried in this order -> what to do. `{}`: the first group that matched.
_TOLD: tuple[tuple[str, type[PipelineError], str], ...] = (
    (
        r"Access denied for user ('\S+')|authentication failed for user (\"\S+\")|role (\"\S+\") does not exist",
        CannotRun,
        "The database refuses {}: check user and password in the URL.",
    ),
    (
        r"((?:SELECT|SHOW VIEW) command denied to user '\S+' for table \S+|permission denied for (?:table|schema) \S+)",
        CannotRun,
        "The account may not read: GRANT SELECT on the databases of the center and of the ledgers to it ({}).",
    ),
    (
        r"Unknown database '([^']+)'|database \"([^\"]+)\" does not exist",
        CannotRun,
        "There is no database {}: check the URL, or run tmc init first.",
    ),
    (
        r"(Class org\.apache\.hadoop\.fs\.\S+ not found|No FileSystem for scheme \S+)",
        CannotRun,
        "{}: add the jars of the object store to spark.drivers (for S3, scripts/install-jars s3 gets them).",
    ),
    (
        r"(?:ClassNotFoundException|No suitable driver)[: ]*(\S*)",
        CannotRun,
        f"The JDBC driver {{}} was not found: set spark.drivers, or apt-get install {DRIVER_PACKAGES}.",
    ),
    (
        r"(?:Socket fail to connect to host:|Could not connect to address=\(host=)([^\s,)]+)|Connection to (\S+) refused",
        CannotRun,
        "No database answers at {}: check the URL, and that the database is running.",
    ),
    (
        r"Table '([^']+)' doesn't exist|no such table: (\S+)|relation \"([^\"]+)\" does not exist",
        CannotRun,
        "There is no table {}: check the URL and the name, or run tmc init with this version first.",
    ),
    (
        r"Unknown column '([^']+)'|no such column: (\S+)|column \"?([^\s\"]+)\"? does not exist",
        CannotRun,
        "There is no column {}: check the mapping.",
    ),
    (
        r"too many attempts to read: (message \d+ of shard \d+)",
        JobFailed,
        "The deliveries and attempts of {} are longer than the database's max_allowed_packet: raise it, then run this again; "
        "nothing was published.",
    ),
    (
        r"\[(?:PATH_NOT_FOUND)\][^:]*: *(\S+?)\.(?:\s|$)",
        CannotRun,
        "There is nothing at {}: check the path.",
    ),
    (
        r"(No space left on device|File too large|Disk quota exceeded)",
        JobFailed,
        "{}: make room, then run it again; nothing was published.",
    ),
    (
        r"(Permission denied|Read-only file system)",
        JobFailed,
        "{} where the job writes: choose another path or fix its permissions.",
    ),
    (
        r"ChecksumException: Checksum error: (?:file:)?(\S+)",
        ArchiveDamaged,
        "{} was edited or damaged after it was written: bring it back from a backup.",
    ),
    (
        r"(?:OutOfMemoryError|GC overhead limit exceeded)[: ]*([^\n]*)",
        JobFailed,
        "Out of memory ({}): raise spark.memory, or use the polite profile; nothing was published.",
    ),
    (  # py4j's words for a connection that was reset: an error of Java has a trace
        r"()\AAn error occurred while calling \S+\s*\Z",
        JobFailed,
        _ENDED,
    ),
    (
        r"FAILED_READ_FILE\S*\] [^\n]*?reading file (?:file:/*(?=/))?(\S+?)\.(?:\s|$)",
        ArchiveDamaged,
        "{} cannot be read: bring it back from a backup.",
    ),
)


def from_text(text: str) -> PipelineError:
    """The error for what Spark or a driver said."""
    for pattern, kind, sentence in _TOLD:
        found = re.search(pattern, text)
        if found:
            return kind(sentence.format(next((group for group in found.groups() if group), "")))
    causes = re.findall(r"^Caused by: (.+)$", text, re.M)[-1:] + [line for line in text.splitlines() if line.strip()]
    return JobFailed(f"Spark gave up: {(causes or ['no reason given'])[0].strip()[:300]}. Nothing was published.")


@contextmanager
def translated() -> Iterator[None]:
    """Convert errors of Spark, its JVM and the drivers to a PipelineError; the cause keeps the full error."""
    from py4j.protocol import Py4JError, Py4JNetworkError
    from pyspark.errors import PySparkException

    try:
        yield
    except Py4JNetworkError as exc:
        raise JobFailed(_ENDED) from exc
    except (PySparkException, Py4JError) as exc:
        raise from_text(f"{exc}\n{getattr(exc, '_stackTrace', '')}") from exc  # the trace holds the causes
    except ConnectionError as exc:  # the gateway to the JVM is gone: it was killed
        raise JobFailed(_ENDED) from exc
