"""Read the records of producers and consumers, ledgers and inboxes in databases, Parquet or CSV, into one schema.

The SDK's own tables need no mapping; others need one that says which column is which.

NOTED: message_id string (null: the row names no message); subscriber string ("" in producers' ledgers); committed and rolled_back
int 1 or 0 (producers), unknown int: 1: a state that the mapping does not name; effects int 1 (consumers); at_ms bigint, epoch
milliseconds; body_sha256 string (hexadecimal) or null; noted_topic, noted_key string, attempt_id binary: of committed messages,
null where they are not kept; noted_app string: whose ledger it is, null: several apps share it; ledger int: which one; sdk int:
1: the SDK's.
"""

from __future__ import annotations

import difflib
import re
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql import types as t

from tmc_pipeline.dialects import Database, database
from tmc_pipeline.errors import CannotRun, translated
from tmc_pipeline.session import SLICE
from tmc_pipeline.settings import LedgerSource
from tmc_server.domain.ids import EPOCH_MS

_PRODUCERS = {"message_id": "message_id", "state": "state", "at_ms": "created_ms"}
_IDENTITY = {"topic": "topic", "message_key": "message_key", "attempt_id": "attempt_id"}  # of the SDK's ledger
_CONSUMERS = {"message_id": "message_id", "subscriber": "subscriber", "at_ms": "received_ms"}
_ID = r"^\d+-\d+-\d\d-\d+\z"  # with $, a line break could follow
_BLANKS = " \t\r\n"
_CLOCKS_APART_MS = 3_600_000  # the ledger is cleaned by its app's clock, messages are dated by the center's
_OPTIONAL = {"body_sha256", "at_ms", "subscriber", *_IDENTITY}
# As RFC 4180 has it: a quote inside quotes is doubled.
_CSV = {"header": "true", "escape": '"', "encoding": "UTF-8"}
PRODUCERS_TABLE, CONSUMERS_TABLE = "tmc_ledger", "tmc_inbox"
_KEYS = {PRODUCERS_TABLE: ("message_id",), CONSUMERS_TABLE: ("subscriber", "message_id")}  # their primary keys
_SAMPLES = 50  # sampled keys per slice
_PLAIN = re.compile(r"[\w.-]+")  # keys that need no escaping


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
        self, producers: Sequence[LedgerSource], consumers: Sequence[LedgerSource], from_ms: int = 0
    ) -> list[DataFrame]:
        """NOTED of each source, producers first. from_ms: omit rows with earlier times. Raises CannotRun."""
        with ThreadPoolExecutor(self._opening) as pool:
            produced = [pool.submit(self.produced, source, producers, from_ms) for source in producers]
            consumed = [pool.submit(self.consumed, source, consumers, from_ms) for source in consumers]
            return [each.result() for each in (*produced, *consumed)]

    def produced(self, source: LedgerSource, among: Sequence[LedgerSource] = (), from_ms: int = 0) -> DataFrame:
        """NOTED of one producer. A state that the mapping does not name counts as neither. Raises CannotRun.

        among: all producers: those that share a place share its rows.  from_ms: omit rows with earlier times.
        """
        table = source.table or PRODUCERS_TABLE
        usual = _PRODUCERS | (_IDENTITY if source.is_sdk else {})
        rows, columns = self._opened(source, table, usual, {"body_sha256", *_IDENTITY}, from_ms)
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

    def consumed(self, source: LedgerSource, among: Sequence[LedgerSource] = (), from_ms: int = 0) -> DataFrame:
        """NOTED of one consumer, one row per effect. Raises CannotRun.

        among: all consumers. Rows of other subscribers go to the first consumer at this place: none is dropped.
        from_ms: omit rows with earlier times.
        """
        table = source.table or CONSUMERS_TABLE
        here = [each for each in among or [source] if _place(each) == _place(source)]
        rows, columns = self._opened(source, table, _CONSUMERS, {"body_sha256", "subscriber"}, from_ms)
        own = f.lit(f"{source.app}.{source.tag}")
        if "subscriber" in columns:  # one inbox may serve several
            named = f.col(columns["subscriber"]).cast("string")
            others = [f"{each.app}.{each.tag}" for each in here if each is not source]
            mine = ~named.isin(others) if here[0] is source else named == f"{source.app}.{source.tag}"
            rows = rows.where(f.coalesce(mine, f.lit(True)) if others else f.lit(True))
            own = f.coalesce(named, own)
        return _shaped(rows, columns, own, {"effects": f.lit(1)})

    def horizon_ms(self, source: LedgerSource) -> int:
        """The horizon of an SDK ledger: rows of messages prepared earlier may be deleted; 0 for other ledgers."""
        url = source.url.get_secret_value()
        if not url or source.table:
            return 0
        place = database(url)
        options = {**place.options(self._fetch), "dbtable": "(SELECT horizon_ms FROM tmc_ledger_info) q"}
        with translated():
            read = self._spark.read.format("jdbc").options(**options, customSchema="horizon_ms BIGINT").load()
            horizon = max((int(row.horizon_ms) for row in read.collect()), default=0)
        return horizon + _CLOCKS_APART_MS if horizon else 0

    def _opened(
        self, source: LedgerSource, table: str, usual: Mapping[str, str], free: set[str], from_ms: int
    ) -> tuple[DataFrame, dict[str, str]]:
        """The rows, and which of their columns is which. free: may be missing when the mapping does not name them."""
        unknown = sorted(set(source.columns) - set(usual) - free)
        if unknown:
            near = difflib.get_close_matches(unknown[0], [*usual, *free], n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted({*usual, *free}))}."
            raise CannotRun(f"{source.app}: there is no such column to map, {unknown[0]}: {hint}")
        wanted = {**usual, **source.columns}
        where, rows = self._rows(source, table, sliced=not from_ms)
        columns = {name: column for name, column in wanted.items() if column in rows.columns}
        for name, column in wanted.items():
            if name not in columns and (name in source.columns or name not in _OPTIONAL):
                raise CannotRun(f"{where} has no column {column} for {name}: it has {', '.join(rows.columns)}. Map it.")
        if "at_ms" in columns and from_ms:
            at = _milliseconds(rows, columns["at_ms"])
            rows = rows.where(at.isNull() | (at < EPOCH_MS) | (at >= from_ms))  # in seconds, or 0: no time at all
        return rows, columns

    def _rows(self, source: LedgerSource, table: str, sliced: bool) -> tuple[str, DataFrame]:
        with translated():
            if source.parquet:
                return source.parquet, self._spark.read.parquet(source.parquet)
            if source.csv:
                return source.csv, _as_written(self._spark.read.options(**_CSV).csv(source.csv))
            place = database(source.url.get_secret_value())
            return f"{table} in {place.name}", self._table(place, table, sliced)

    def _table(self, place: Database, table: str, sliced: bool) -> DataFrame:
        """sliced: several tasks read it. To find where to cut takes two scans, more than to read a few of its rows."""
        if not table.replace("_", "").replace(".", "").isalnum():
            raise CannotRun(f"{table!r} is no table name: letters, digits, _ and one dot.")
        options = place.options(self._fetch)
        if table not in _KEYS:
            return self._spark.read.format("jdbc").options(**options, dbtable=table).load()
        conditions = ranges(_KEYS[table], self._edges(place, table) if sliced else []) or ["1 = 1"]
        return self._spark.read.jdbc(place.url, table, predicates=conditions, properties=options)

    def _edges(self, place: Database, table: str) -> list[tuple[str, ...]]:
        """Keys that divide a table into slices of about as many rows each, in the database's own order."""
        (counted,) = self._small(place, f"SELECT COUNT(*) AS n FROM {table}", "n BIGINT")
        slices = -(-int(counted.n) // self._slice)
        if slices < 2:
            return []
        keys, chance = ", ".join(_KEYS[table]), place.chance(min(1.0, slices * _SAMPLES / counted.n))
        query = f"SELECT {keys} FROM {table} WHERE {chance} ORDER BY {keys} LIMIT {slices * _SAMPLES * 2}"
        rows = self._small(place, query, ", ".join(f"{name} STRING" for name in _KEYS[table]))
        found = [tuple(rows[len(rows) * n // slices]) for n in range(1, slices)] if rows else []
        return [key for key in dict.fromkeys(found) if all(_PLAIN.fullmatch(text) for text in key)]

    def _small(self, place: Database, query: str, schema: str) -> Sequence[Any]:
        """A small result, here in the driver."""
        options = {**place.options(self._fetch), "dbtable": f"({query}) q", "customSchema": schema}
        found: Sequence[Any] = self._spark.read.format("jdbc").options(**options).load().collect()
        return found


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
    )
