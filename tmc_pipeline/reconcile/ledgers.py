"""Read the records of producers and consumers, ledgers and inboxes in databases, Parquet or CSV, into one schema.

The SDK's own tables need no mapping; others need one that says which column is which.

NOTED: message_id string (null: the row names no message); subscriber string ("" in producers' ledgers); committed and rolled_back
int 1 or 0 (producers), unknown int: 1: a state that the mapping does not name; effects int 1 (consumers); at_ms bigint, epoch
milliseconds; body_sha256 string (hexadecimal) or null; noted_topic, noted_key string, attempt_id binary: of committed messages,
null where they are not kept; noted_app string: whose ledger it is, null: several apps share it; ledger int: which one; sdk int:
1: the SDK's; mark bigint: a hash of the row; source_key string: which rows it is one of.
"""

from __future__ import annotations

import difflib
import logging
import re
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import reduce
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql import types as t

from tmc_pipeline.dialects import Database, database
from tmc_pipeline.errors import CannotRun, translated
from tmc_pipeline.reconcile.days import DAY_MS, Sum
from tmc_pipeline.reconcile.outlines import made_ms, noted_number
from tmc_pipeline.session import SLICE
from tmc_pipeline.settings import LedgerSource

log = logging.getLogger("tmc.pipeline")

_IDENTITY = {"topic": "topic", "message_key": "message_key", "attempt_id": "attempt_id"}  # of the SDK's ledger
_ID = r"^\d+-\d+-\d\d-\d+\z"  # with $, a line break could follow
_BLANKS = " \t\r\n"
_OPTIONAL = {"body_sha256", "at_ms", "subscriber", *_IDENTITY}
# As RFC 4180 has it: a quote inside quotes is doubled.
_CSV = {"header": "true", "escape": '"', "encoding": "UTF-8"}
_SAMPLES = 50  # sampled keys per slice
_PLAIN = re.compile(r"[\w.-]+")  # keys that need no escaping


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Producers or consumers. table: the SDK's.  usual: its columns.  key: its primary key.  free: may be mapped besides.

    marking: columns that a changed row differs in.
    """

    name: str
    table: str
    usual: Mapping[str, str]
    key: tuple[str, ...]
    free: frozenset[str]
    marking: tuple[str, ...]


PRODUCER = Kind(
    name="producer",
    table="tmc_ledger",
    usual={"message_id": "message_id", "state": "state", "at_ms": "created_ms"},
    key=("message_id",),
    free=frozenset({"body_sha256", *_IDENTITY}),
    marking=("message_id", "state", "at_ms", "topic", "message_key", "attempt_id"),
)
CONSUMER = Kind(
    name="consumer",
    table="tmc_inbox",
    usual={"message_id": "message_id", "subscriber": "subscriber", "at_ms": "received_ms"},
    key=("subscriber", "message_id"),
    free=frozenset({"body_sha256", "subscriber"}),
    marking=("subscriber", "message_id", "at_ms"),
)


@dataclass(frozen=True, kw_only=True)
class Notes:
    """Select notes of messages with numbers from `first` on, or in `numbers`. below: those with numbers below `first` instead."""

    first: int
    numbers: Sequence[int] = ()
    below: bool = False

    def chosen(self, number: Column) -> Column:
        if self.below:
            return number < self.first
        return (number >= self.first) | number.isin(list(self.numbers)) if self.numbers else number >= self.first

    def condition(self, number: str) -> str:
        """Return the same in SQL."""
        if self.below:
            return f"{number} < {self.first}"
        listed = f" OR {number} IN ({', '.join(map(str, self.numbers))})" if self.numbers else ""
        return f"{number} >= {self.first}{listed}"


class Ledgers:
    """Reads the configured sources. fetch: rows per round trip.  slice_rows: approximate number of rows per task.

    opening: concurrent connections while reads are prepared.
    """

    def __init__(self, spark: SparkSession, fetch: int, opening: int = 1, slice_rows: int = SLICE) -> None:
        self._spark = spark
        self._fetch = fetch
        self._opening = opening
        self._slice = slice_rows

    def noted(
        self, producers: Sequence[LedgerSource], consumers: Sequence[LedgerSource], notes: Notes | None = None
    ) -> list[DataFrame]:
        """NOTED of each source, producers first. notes: None: all. Raises CannotRun."""
        with ThreadPoolExecutor(self._opening) as pool:
            produced = [pool.submit(self.produced, source, producers, notes) for source in producers]
            consumed = [pool.submit(self.consumed, source, consumers, notes) for source in consumers]
            return [each.result() for each in (*produced, *consumed)]

    def produced(
        self, source: LedgerSource, among: Sequence[LedgerSource] = (), notes: Notes | None = None
    ) -> DataFrame:
        """NOTED of one producer. A state that the mapping does not name counts as neither. Raises CannotRun.

        among: all producers: those that share a place share its rows.  notes: None: all.
        """
        rows, columns = self._opened(source, PRODUCER, notes)
        shared = is_shared(source, among)
        state = f.col(columns["state"]).cast("string")

        def meaning(verdict: str) -> Column:
            values = [value for value, meant in source.states.items() if meant == verdict]
            return f.coalesce(state.isin(values), f.lit(False)).cast("int")

        values = {
            "committed": meaning("COMMITTED"),
            "rolled_back": meaning("ROLLED_BACK"),
            "unknown": f.coalesce(~state.isin(list(source.states)), f.lit(True)).cast("int"),
            "noted_app": f.lit(None if shared else source.app),
            "ledger": f.lit(_number_of(source)),
            "sdk": f.lit(int(source.is_sdk)),
        }
        return _shaped(rows, columns, f.lit(""), values)

    def consumed(
        self, source: LedgerSource, among: Sequence[LedgerSource] = (), notes: Notes | None = None
    ) -> DataFrame:
        """NOTED of one consumer, one row per effect. Raises CannotRun.

        among: all consumers. Rows of other subscribers go to the first consumer at this place: none is dropped.
        notes: None: all.
        """
        here = [each for each in among or [source] if _place(each) == _place(source)]
        rows, columns = self._opened(source, CONSUMER, notes)
        own = f.lit(f"{source.app}.{source.tag}")
        if "subscriber" in columns:  # one inbox may serve several
            named = f.col(columns["subscriber"]).cast("string")
            others = [f"{each.app}.{each.tag}" for each in here if each is not source]
            mine = ~named.isin(others) if here[0] is source else named == f"{source.app}.{source.tag}"
            rows = rows.where(f.coalesce(mine, f.lit(here[0] is source)) if others else f.lit(True))
            own = f.coalesce(named, own)
        return _shaped(rows, columns, own, {"effects": f.lit(1)})

    def days(
        self, producers: Sequence[LedgerSource], consumers: Sequence[LedgerSource], before: int
    ) -> dict[str, dict[int, Sum]]:
        """Sums over the notes about messages with numbers below `before`, by source_key and day, as days.days_of makes them."""
        every = [*((each, PRODUCER) for each in producers), *((each, CONSUMER) for each in consumers)]
        places = {key_of(source, kind): (source, kind) for source, kind in every}
        with ThreadPoolExecutor(self._opening) as pool:
            found = [pool.submit(self._days, source, kind, before) for source, kind in places.values()]
            return dict(zip(places, (each.result() for each in found), strict=True))

    def _days(self, source: LedgerSource, kind: Kind, before: int) -> dict[int, Sum]:
        place = _database_of(source)
        with translated():
            if place is not None and place.sums:
                _, columns = self._columns(source, kind)
                named = {name: place.quoted(column) for name, column in columns.items()}
                number = place.number(named["message_id"])
                wanted = f"{number} > 0 AND {number} < {before}"
                if not source.is_sdk:
                    wanted += f" AND {place.is_id(named['message_id'])}"
                query = (
                    f"SELECT {place.day(number)} AS day, COUNT(*) AS found, "
                    f"SUM({place.mark(_texts(place, named, _marking(source, kind)))}) AS marks "
                    f"FROM {source.table or kind.table} WHERE {wanted} GROUP BY 1"
                )
                found = self._small(place, query, "day BIGINT, found BIGINT, marks BIGINT")
            else:
                rows, columns = self._opened(source, kind, Notes(first=before, below=True))
                shaped = _shaped(rows, columns, f.lit(""), {})
                day = f.floor(made_ms(noted_number("message_id")) / DAY_MS).alias("day")
                found = (
                    shaped.where(f.col("message_id").isNotNull())
                    .groupBy(day)
                    .agg(f.count(f.lit(1)).alias("found"), f.sum("mark").alias("marks"))
                    .collect()
                )
        return {int(row.day): (int(row.found), int(row.marks)) for row in found}

    def horizon_ms(self, source: LedgerSource, kind: Kind) -> int:
        """Return how far the SDK's own table was cleaned: rows from before may be deleted; 0: none, or another table."""
        place = _database_of(source)
        if place is None or not source.is_sdk:
            return 0
        query = "SELECT horizon_ms FROM tmc_ledger_info"
        if kind is CONSUMER:
            subscriber = f"{source.app}.{source.tag}".replace("'", "")
            query = f"SELECT horizon_ms FROM tmc_inbox_horizon WHERE subscriber = '{subscriber}'"
        try:
            with translated():
                rows = self._small(place, query, "horizon_ms BIGINT")
        except CannotRun as exc:
            if "There is no table" not in str(exc):
                raise
            log.warning("%s: how far it was cleaned is not known, its SDK is older: %s", source.app, exc)
            return 0
        return max((int(row.horizon_ms) for row in rows), default=0)

    def lines(self, consumers: Sequence[LedgerSource]) -> DataFrame | None:
        """LINE of findings.py of all SDK inboxes; None: there are none."""
        places = {_place(each): each for each in consumers if each.is_sdk}
        query = "SELECT subscriber, topic, order_key, sequence FROM tmc_inbox_order"
        schema = "subscriber STRING, topic STRING, order_key STRING, sequence BIGINT"
        with translated():
            frames = [
                place.read(self._spark, query, schema, self._fetch)
                for place in map(_database_of, places.values())
                if place is not None
            ]
        return reduce(DataFrame.unionByName, frames) if frames else None

    def _opened(self, source: LedgerSource, kind: Kind, notes: Notes | None) -> tuple[DataFrame, dict[str, str]]:
        """The rows with mark and source_key, and which of their columns is which."""
        rows, columns = self._columns(source, kind)
        place = _database_of(source)
        if place is not None:
            slicing = _slicing(source, kind, columns, rows)
            rows = self._read(place, source.table or kind.table, rows, slicing, columns["message_id"], notes)
        elif notes is not None:
            rows = rows.where(notes.chosen(_number_in(columns["message_id"])))
        marking = [
            f.hex(columns[name]) if name == "attempt_id" else f.col(columns[name]).cast("string")
            for name in _marking(source, kind)
        ]
        family = place.family if place is not None else ""
        return rows.withColumns({"mark": marked(family, marking), "source_key": f.lit(key_of(source, kind))}), columns

    def _columns(self, source: LedgerSource, kind: Kind) -> tuple[DataFrame, dict[str, str]]:
        """All rows, unread, and which of their columns is which."""
        usual = {**kind.usual, **(_IDENTITY if source.is_sdk and kind is PRODUCER else {})}
        known = {*usual, *kind.free}
        unknown = sorted(set(source.columns) - known)
        if unknown:
            near = difflib.get_close_matches(unknown[0], known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(known))}."
            raise CannotRun(f"{source.app}: there is no such column to map, {unknown[0]}: {hint}")
        wanted = {**usual, **source.columns}
        where, rows = self._rows(source, kind)
        columns = {name: column for name, column in wanted.items() if column in rows.columns}
        for name, column in wanted.items():
            if name not in columns and (name in source.columns or name not in _OPTIONAL):
                raise CannotRun(f"{where} has no column {column} for {name}: it has {', '.join(rows.columns)}. Map it.")
        return rows, columns

    def _rows(self, source: LedgerSource, kind: Kind) -> tuple[str, DataFrame]:
        """Return where they are, for people, and all of them: of a database only to see its columns."""
        with translated():
            if source.parquet:
                return source.parquet, self._spark.read.parquet(source.parquet)
            if source.csv:
                return source.csv, _as_written(self._spark.read.options(**_CSV).csv(source.csv))
            place, table = database(source.url.get_secret_value()), source.table or kind.table
            if not table.replace("_", "").replace(".", "").isalnum():
                raise CannotRun(f"{table!r} is no table name: letters, digits, _ and one dot.")
            rows = self._spark.read.format("jdbc").options(**place.options(self._fetch), dbtable=table).load()
            return f"{table} in {place.name}", rows

    def _read(
        self,
        place: Database,
        table: str,
        rows: DataFrame,
        slicing: Sequence[str],
        message_id: str,
        notes: Notes | None,
    ) -> DataFrame:
        """The rows of a table of a database. notes: chosen there; None: all, by as many tasks as they need.

        slicing: columns whose order divides them; empty: one task.  message_id: the column.
        """
        options = place.options(self._fetch)
        if notes is not None:
            if place.sums:
                condition = notes.condition(place.number(place.quoted(message_id)))
                query = f"(SELECT * FROM {table} WHERE {condition}) q"
                return self._spark.read.format("jdbc").options(**options, dbtable=query).load()
            return rows.where(notes.chosen(_number_in(message_id)))
        if not slicing:
            return rows
        quoted = [place.quoted(name) for name in slicing]
        conditions = ranges(quoted, self._edges(place, table, quoted)) or ["1 = 1"]
        return self._spark.read.jdbc(place.url, table, predicates=conditions, properties=options)

    def _edges(self, place: Database, table: str, columns: Sequence[str]) -> list[tuple[str, ...]]:
        """Keys that divide a table into slices of about as many rows each, in the database's own order."""
        (counted,) = self._small(place, f"SELECT COUNT(*) AS n FROM {table}", "n BIGINT")
        slices = -(-int(counted.n) // self._slice)
        if slices < 2:
            return []
        keys, chance = ", ".join(columns), place.chance(min(1.0, slices * _SAMPLES / counted.n))
        named = ", ".join(f"{column} AS k{number}" for number, column in enumerate(columns))
        query = f"SELECT {named} FROM {table} WHERE {chance} ORDER BY {keys} LIMIT {slices * _SAMPLES * 2}"
        rows = self._small(place, query, ", ".join(f"k{number} STRING" for number in range(len(columns))))
        found = [tuple(rows[len(rows) * n // slices]) for n in range(1, slices)] if rows else []
        return [key for key in dict.fromkeys(found) if all(text and _PLAIN.fullmatch(text) for text in key)]

    def _small(self, place: Database, query: str, schema: str) -> Sequence[Any]:
        """A small result, here in the driver."""
        rows: Sequence[Any] = place.read(self._spark, query, schema, self._fetch).collect()
        return rows


def ranges(columns: Sequence[str], edges: Sequence[tuple[str, ...]]) -> list[str]:
    """Conditions that divide all rows at these keys, one per task; the database finds each by its primary key."""

    def beside(edge: tuple[str, ...], comparison: str) -> str:
        """Rows before (<) an edge, or from it on (>=)."""
        *first, last = zip(columns, edge, strict=True)
        condition = f"{last[0]} {comparison} '{last[1]}'"
        for column, text in reversed(first):
            condition = f"({column} {comparison[0]} '{text}' OR ({column} = '{text}' AND {condition}))"
        return condition

    starts = [None, *edges]
    ends = [*edges, None]
    return [
        " AND ".join([*([beside(low, ">=")] if low else []), *([beside(high, "<")] if high else [])]) or "1 = 1"
        for low, high in zip(starts, ends, strict=True)
    ]


def is_shared(source: LedgerSource, among: Sequence[LedgerSource]) -> bool:
    """Return whether other apps write to the same place, so that its rows do not say whose they are."""
    return any(each.app != source.app and _place(each) == _place(source) for each in among)


def reads_the_same(source: LedgerSource, other: LedgerSource) -> bool:
    """Return whether two producers share their rows, and read them in the same way."""
    return (_place(source), source.states, source.columns) == (_place(other), other.states, other.columns)


def key_of(source: LedgerSource, kind: Kind) -> str:
    """Name the rows that a source reads: the same for those that read the same rows in the same way, also in later runs."""
    mapping = zlib.crc32(repr((sorted(source.columns.items()), sorted(source.states.items()))).encode())
    return f"{kind.name}-{_number_of(source)}-{mapping:08x}"


def _marking(source: LedgerSource, kind: Kind) -> tuple[str, ...]:
    """Return what marks are made of. Databases and Spark may write times and numbers of other tables as different texts."""
    return kind.marking if source.is_sdk else ("message_id",)


def _texts(place: Database, named: Mapping[str, str], marking: Sequence[str]) -> list[str]:
    """Return expressions of what marks are made of, in SQL."""
    return [place.hexadecimal(named[name]) if name == "attempt_id" else named[name] for name in marking]


def _slicing(source: LedgerSource, kind: Kind, columns: Mapping[str, str], rows: DataFrame) -> tuple[str, ...]:
    """Return the primary key; of another table, its message id, if that is text."""
    if not source.table:
        return tuple(columns[name] for name in kind.key if name in columns)
    column = columns["message_id"]
    return (column,) if isinstance(rows.schema[column].dataType, t.StringType) else ()


def _number_in(column: str) -> Column:
    """bigint: the number at the end of a message id; null: there is none."""
    return f.substring_index(f.btrim(f.col(column).cast("string"), f.lit(_BLANKS)), "-", -1).try_cast("bigint")


def marked(family: str, texts: Sequence[Column]) -> Column:
    """bigint: as Database.mark has it."""
    text = f.concat_ws("|", *texts)
    if family == "postgresql":
        return f.conv(f.substring(f.md5(text), 1, 7), 16, 10).cast("bigint")
    return f.crc32(text)


def _database_of(source: LedgerSource) -> Database | None:
    url = source.url.get_secret_value()
    return database(url) if url else None


def _number_of(source: LedgerSource) -> int:
    """The same for a place in every run, also when its password changes."""
    url, *rest = _place(source)
    return zlib.crc32(repr([url.rpartition("@")[2], *rest]).encode()) >> 1


def _milliseconds(rows: DataFrame, column: str) -> Column:
    """A time of a ledger as bigint; null: it is none."""
    if isinstance(rows.schema[column].dataType, t.LongType):
        return f.col(column)  # a database can filter by it
    at = f.col(column)
    return (f.unix_millis(at) if isinstance(rows.schema[column].dataType, t.TimestampType) else at).try_cast("bigint")


def _place(source: LedgerSource) -> tuple[str, ...]:
    """Return where its rows are."""
    return (source.url.get_secret_value(), source.table, source.parquet, source.csv)


def _as_written(rows: DataFrame) -> DataFrame:
    """Remove the byte order mark, blanks and quotes that spreadsheets put around column names."""
    return rows.toDF(*[name.removeprefix("\ufeff").strip().strip('"') for name in rows.columns])


def _shaped(rows: DataFrame, columns: Mapping[str, str], subscriber: Column, values: Mapping[str, Column]) -> DataFrame:
    """values: by the names of NOTED; those left out are 0, or null where they are no counts."""

    def named(name: str) -> Column:
        return f.col(columns[name]) if name in columns else f.lit(None)

    text = f.btrim(named("message_id").cast("string"), f.lit(_BLANKS))
    digest = named("body_sha256")
    if "body_sha256" in columns and isinstance(rows.schema[columns["body_sha256"]].dataType, t.BinaryType):
        digest = f.hex(digest)
    attempt = named("attempt_id")
    if "attempt_id" in columns and isinstance(rows.schema[columns["attempt_id"]].dataType, t.StringType):
        attempt = f.unhex(attempt)
    at = _milliseconds(rows, columns["at_ms"]) if "at_ms" in columns else f.lit(None).cast("bigint")
    return rows.select(
        f.when(text.rlike(_ID), text).alias("message_id"),
        subscriber.alias("subscriber"),
        *[values.get(name, f.lit(0)).alias(name) for name in ("committed", "rolled_back", "unknown", "effects")],
        values.get("noted_app", f.lit(None)).cast("string").alias("noted_app"),
        values.get("ledger", f.lit(None)).cast("int").alias("ledger"),
        values.get("sdk", f.lit(0)).alias("sdk"),
        *[
            f.when(values.get("committed", f.lit(0)) == 1, value.cast(kind)).alias(name)
            for name, value, kind in (
                ("noted_topic", named("topic"), "string"),
                ("noted_key", named("message_key"), "string"),
                ("attempt_id", attempt, "binary"),
            )
        ],
        at.alias("at_ms"),
        f.lower(digest.cast("string")).alias("body_sha256"),
        "mark",
        "source_key",
    )
