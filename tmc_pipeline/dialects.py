"""Every fact about SQL and JDBC that differs between the databases, in one place.

MariaDB and MySQL: `jdbc:mysql:` with MariaDB's driver. Spark has a dialect for that prefix only; with `jdbc:mariadb:` it quotes
columns in a way that MariaDB reads as text, and every row would hold the column names. SQLite: the xerial driver, whose
types depend on the first row, so every read states its column types.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from tmc_common.clocks import CLOCK_MS
from tmc_pipeline.errors import CannotRun
from tmc_server.domain.ids import EPOCH_MS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

DRIVERS = {"mysql": "org.mariadb.jdbc.Driver", "postgresql": "org.postgresql.Driver", "sqlite": "org.sqlite.JDBC"}
JARS = {"mysql": "mariadb-java-client.jar", "postgresql": "postgresql.jar", "sqlite": "sqlite-jdbc.jar"}
_TLS = ("sslmode", "sslrootcert", "sslcert", "sslkey")  # as libpq and PostgreSQL's JDBC driver call them
_DAY_MS = 86_400_000
_LONGEST_JSON = 64 << 20  # bytes of one message's consumptions; the default of 1 MiB would silently truncate them


@dataclass(frozen=True, kw_only=True)
class Database:
    """One database as Spark reads it. family: a key of DRIVERS.  name: for people, without the password."""

    family: str
    name: str
    url: str
    properties: Mapping[str, str] = field(repr=False)

    def rows_as_json(
        self, table: str, alias: str, where: str, columns: Mapping[str, str], texts: Collection[str] = ()
    ) -> str:
        """An expression: the matching rows of a table as one JSON array of objects.

        columns: by their names in the objects.  texts: those columns that are no numbers.
        MariaDB and MySQL give NULL for what does not fit into max_allowed_packet.
        """
        values = {name: f"{alias}.{column}" for name, column in columns.items()}
        if self.family == "sqlite":
            rows = f"json_group_array({self.json_object(**values)})"
        elif self.family == "postgresql":
            pairs = ", ".join(f"'{name}', {value}" for name, value in values.items())
            rows = f"COALESCE(CAST(JSON_AGG(JSON_BUILD_OBJECT({pairs})) AS text), '[]')"
        else:
            quoted = {name: f"JSON_QUOTE({each})" if columns[name] in texts else each for name, each in values.items()}
            row = self.json_object(**{name: f"IFNULL({value}, 'null')" for name, value in quoted.items()})
            rows = f"IF(COUNT(*) = 0, '[]', CONCAT('[', GROUP_CONCAT({row}), ']'))"
        return f"(SELECT {rows} FROM {table} {alias} WHERE {where})"

    def json_object(self, **values: str) -> str:
        """An expression: one JSON object. values: expressions of JSON or, in SQLite and MySQL, numbers; not NULL."""
        if self.family == "sqlite":
            pairs = ", ".join(f"'{name}', {value}" for name, value in values.items())
            return f"json_object({pairs})"
        # Joined as text: MariaDB's JSON functions check each value, and take twice as long.
        pairs = ", ',".join(f'"{name}":\', {value}' for name, value in values.items())
        return f"CONCAT('{{{pairs}, '}}')"

    @property
    def no_bytes(self) -> str:
        """An expression: NULL in the place of bytes."""
        return "CAST(NULL AS bytea)" if self.family == "postgresql" else "NULL"

    def chance(self, share: float) -> str:
        """A condition that selects about this share of the rows at random, each row independently."""
        if self.family == "sqlite":
            return f"abs(random() / 9223372036854775808.0) < {share:.9f}"
        if self.family == "postgresql":
            return f"random() < {share:.9f}"
        return f"RAND() < {share:.9f}"

    @property
    def sums(self) -> bool:
        """Return whether it can take message ids apart and hash rows by itself."""
        return self.family != "sqlite"

    def quoted(self, name: str) -> str:
        """The name of a column."""
        mark = "`" if self.family == "mysql" else '"'
        return f"{mark}{name.replace(mark, mark * 2)}{mark}"

    def number(self, column: str) -> str:
        """An expression: the number at the end of a message id; 0 or NULL if there is none."""
        if self.family == "postgresql":
            return f"CAST(SUBSTRING(BTRIM(CAST({column} AS text)) FROM '-([0-8]?[0-9]{{1,18}})$') AS bigint)"
        return f"CAST(SUBSTRING_INDEX(TRIM({column}), '-', -1) AS UNSIGNED)"

    def is_id(self, column: str) -> str:
        """A condition: it is a message id."""
        pattern = "'^[0-9]+-[0-9]+-[0-9][0-9]-[0-9]+$'"
        if self.family == "postgresql":
            return f"BTRIM(CAST({column} AS text)) ~ {pattern}"
        return f"TRIM({column}) REGEXP {pattern}"

    def day(self, number: str) -> str:
        """An expression: days since the epoch, when the message with this number was prepared."""
        division = "/" if self.family == "postgresql" else "DIV"
        return f"(({number} >> 22) + {EPOCH_MS}) {division} {_DAY_MS}"

    def hexadecimal(self, column: str) -> str:
        """An expression: bytes as upper-case text."""
        return f"UPPER(ENCODE({column}, 'hex'))" if self.family == "postgresql" else f"HEX({column})"

    def mark(self, columns: Sequence[str]) -> str:
        """An expression: a number that stands for what these columns have, the same that reconcile/ledgers.marked makes."""
        if self.family == "postgresql":
            text = f"CONCAT_WS('|', {', '.join(columns)})"
            return f"CAST(CAST('x' || SUBSTR(MD5({text}), 1, 7) AS bit(28)) AS bigint)"
        return f"CRC32(CONVERT(CONCAT_WS('|', {', '.join(columns)}) USING utf8mb4))"

    @property
    def clock(self) -> str:
        """An expression: epoch milliseconds by this database's clock."""
        return CLOCK_MS[self.family]

    def options(self, fetch: int) -> dict[str, str]:
        """JDBC options of a read. fetch: rows that the driver holds in memory at a time; without it, all of them."""
        options = {"url": self.url, "driver": DRIVERS[self.family], "fetchsize": str(fetch), **self.properties}
        if self.family == "mysql":
            options["sessionInitStatement"] = "SET SESSION TRANSACTION READ ONLY"
        if self.family == "postgresql":
            options["sessionInitStatement"] = "SET TRANSACTION READ ONLY"  # each read is one, and has begun by then
        return options

    def read(self, spark: SparkSession, query: str, schema: str, fetch: int) -> DataFrame:
        """Return the rows of a query, unread. schema: name TYPE, name TYPE, ..."""
        options = {**self.options(fetch), "dbtable": f"({query}) q", "customSchema": schema}
        return spark.read.format("jdbc").options(**options).load()


def database(url: str) -> Database:
    """url: as SQLAlchemy writes it. Raises CannotRun."""
    try:
        parsed = make_url(url)
    except ArgumentError as exc:
        raise CannotRun(
            f"{url.split('@')[-1][:80]!r} is no database URL: write it as in the center's [store]."
        ) from exc
    family = parsed.get_backend_name()
    if family in ("mysql", "mariadb"):
        return _mysql(parsed)
    if family == "sqlite":
        return _sqlite(parsed)
    if family == "postgresql":
        return _postgresql(parsed)
    raise CannotRun(
        f"The pipeline reads MariaDB, MySQL, PostgreSQL and SQLite, not {family}: use Parquet or CSV for this ledger."
    )


def _named(parsed: URL) -> str:
    """Return its database. Raises CannotRun."""
    if not parsed.database:
        raise CannotRun(f"{parsed.render_as_string()} names no database: add /name.")
    return parsed.database


def _mysql(parsed: URL) -> Database:
    name = _named(parsed)
    options = {
        "permitMysqlScheme": "true",
        "useServerPrepStmts": "false",
        "tcpKeepAlive": "true",
        "connectTimeout": "10000",
        "sessionVariables": f"group_concat_max_len={_LONGEST_JSON}",
    }
    authority = parsed.query.get("ssl_ca")
    if authority:
        options |= {"useSsl": "true", "serverSslCert": str(authority)}
    if "," in (parsed.host or ""):
        raise CannotRun(
            f"The driver of MariaDB cannot tell which of {parsed.host} is the primary: give the pipeline a URL with that host "
            "alone, as in TMC_STORE__CATALOG."
        )
    host = f"{parsed.host or '127.0.0.1'}:{parsed.port or 3306}"
    return Database(
        family="mysql",
        name=f"{host}/{name}",
        url=f"jdbc:mysql://{host}/{name}?{'&'.join(f'{key}={value}' for key, value in options.items())}",
        properties={"user": parsed.username or "", "password": str(parsed.password or "")},
    )


def _postgresql(parsed: URL) -> Database:
    name = _named(parsed)
    hosts = (parsed.host or "127.0.0.1").split(",")
    host = ",".join(f"{each}:{parsed.port or 5432}" for each in hosts)
    primary = "&targetServerType=primary" if len(hosts) > 1 else ""
    options = {"user": parsed.username or "", "password": str(parsed.password or "")}
    options |= {key: str(parsed.query[key]) for key in _TLS if key in parsed.query}
    return Database(
        family="postgresql",
        name=f"{host}/{name}",
        url=f"jdbc:postgresql://{host}/{quote(name)}?connectTimeout=10&tcpKeepAlive=true{primary}",
        properties=options,
    )


def _sqlite(parsed: URL) -> Database:
    path = Path(parsed.database or "").absolute()
    if not path.is_file():
        raise CannotRun(f"There is no SQLite file {path}: check the URL.")
    return Database(family="sqlite", name=str(path), url=f"jdbc:sqlite:file:{quote(str(path))}?mode=ro", properties={})
