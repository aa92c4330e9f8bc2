"""The center's tables as DataFrames: all shards of all databases in parallel, read only.

One statement reads a message with its consumptions and failed attempts into one row, so each row is consistent in
itself. Two rows may show different moments; jobs use only what has been final for a while.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, reduce
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import ArrayType, StructField, StructType

from tmc_pipeline.dialects import Database, database
from tmc_pipeline.errors import CannotRun
from tmc_pipeline.frames import ATTEMPT, ATTEMPTS, CONSUMPTION, CONSUMPTIONS, MESSAGE, STORED, brief, named, names
from tmc_pipeline.session import SLICE, rows_at_a_time
from tmc_pipeline.settings import BODY_BYTES
from tmc_server.config import StoreConfig
from tmc_server.domain.ids import first_number
from tmc_server.domain.ordering import OrderMode
from tmc_server.domain.placement import SHARDS

SCHEMA = "0001"  # the revision whose columns are read here; newer ones only add

_SAMPLES = 50  # sampled rows per slice: its size is then accurate to about a seventh

LISTED_AT_MOST = 20_000  # numbers that are asked for one by one; more of them are read as a range
_LISTED = 1_000  # numbers of one query
_NO_END = (1 << 63) - 1
_NEVER_MS = 1 << 62

# JSON with names of one letter: half as long to make, send and parse.
_BRIEF = StructType([StructField("c", ArrayType(brief(CONSUMPTION))), StructField("a", ArrayType(brief(ATTEMPT)))])
# The shard is a column of the query and no literal of the plan: so all shards share one piece of generated code.
_READ = ", ".join(
    [
        "shard smallint",
        *[f"{each.name} {each.dataType.simpleString()}" for each in STORED.fields],
        "live smallint",
        "belongings string",
    ]
)


@dataclass(frozen=True, kw_only=True)
class Life:
    """When a subscription is in effect: messages decided in [from_ms, to_ms). to_ms None: it was not removed.

    from_ms lies far ahead while not all servers have confirmed that they know it.
    """

    topic_no: int
    from_ms: int
    to_ms: int | None


@dataclass(frozen=True, kw_only=True)
class Names:
    """The catalog as people know it, by number. subscriptions: (topic name, subscriber as app.tag, removed).

    lives: of subscriptions: number of the topic, and from when to when they are in effect.  ordered: topics with order keys.
    in_order: subscriptions whose deliveries all have their place in an order key: its order was never switched off.
    forwarded: subscriptions whose ack is the confirm of a broker or webhook.
    """

    topics: Mapping[int, str]
    apps: Mapping[int, str]
    subscriptions: Mapping[int, tuple[str, str, bool]]
    lives: Mapping[int, Life]
    ordered: frozenset[int] = frozenset()
    in_order: frozenset[int] = frozenset()
    forwarded: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True)
class MessageRange:
    """Which messages are read: those prepared in [from_ms, to_ms), and those in `numbers` (by shard), whatever their age.

    Numbers begin with the time, so both are ranges of the primary key: nothing else is looked at.
    lows: by shard: a lower number from which on all are read.
    """

    from_ms: int = 0
    to_ms: int | None = None
    numbers: Mapping[int, Sequence[int]] = field(default_factory=dict)
    lows: Mapping[int, int] = field(default_factory=dict)

    def bounds(self, shard: int) -> tuple[int, int]:
        """The range of numbers, the end excluded."""
        low = min(first_number(self.from_ms), self.lows.get(shard, _NO_END))
        return low, _NO_END if self.to_ms is None else first_number(self.to_ms)

    @property
    def listed(self) -> int:
        """Return how many numbers are listed."""
        return sum(map(len, self.numbers.values()))

    def beyond(self, shard: int) -> list[int]:
        """Numbers of that shard outside the range."""
        low, high = self.bounds(shard)
        return sorted({each for each in self.numbers.get(shard, ()) if not low <= each < high})


EVERYTHING = MessageRange()


@dataclass(frozen=True)
class Span:
    """Rows of a range. sample: some of its message numbers, chosen at random, sorted; empty: one task reads all."""

    rows: int
    sample: Sequence[int] = ()

    def slices(self, size: int, bounds: tuple[int, int]) -> list[tuple[int, int]]:
        """Ranges (from, before) of about `size` rows that cover the range, also what is added meanwhile.

        Numbers encode times, and traffic comes in bursts: with equal ranges, one of them would get most of the work.
        """
        count = -(-self.rows // size)
        edges = sorted({self.sample[len(self.sample) * n // count] for n in range(1, count)}) if self.sample else []
        low, high = bounds
        return list(zip([low, *edges], [*edges, high], strict=True))


class CenterTables:
    """Reads the center's tables. fetch: rows held at a time; with bodies, as many as spark.body_bytes allows.

    opening: concurrent connections while reads are prepared.  slice_rows: approximate number of rows per task.
    """

    def __init__(
        self,
        spark: SparkSession,
        databases: StoreDatabases,
        fetch: int,
        opening: int = 1,
        body_bytes: int = BODY_BYTES,
        slice_rows: int = SLICE,
    ) -> None:
        self._spark = spark
        self._configured = databases
        self._fetch = fetch
        self._opening = opening
        self._slice = slice_rows
        self._fetch_bodies = rows_at_a_time(fetch, body_bytes)

    @cached_property
    def _databases(self) -> StoreDatabases:
        """The databases by shard as the catalog has them: shards move while servers run. Raises CannotRun."""
        catalog, known = self._configured.catalog, self._configured.each
        identities: dict[str, Database] = {}
        for place in known:
            if identities.setdefault(self._identity(place), place).url != place.url:
                raise CannotRun(
                    "Two databases in [store] say that they are the same one: name each by one URL, and no copies."
                )
        rows = self._rows(catalog, "SELECT shard, identity FROM tmc_shard_map", "shard INT, identity STRING")
        holders = {row.shard: identities[row.identity] for row in rows if row.identity in identities}
        away = [shard for shard in range(SHARDS) if shard not in holders]
        if away:
            raise CannotRun(
                f"Shards {', '.join(map(str, away))} are in a database that [store] does not name: add its URL to [store] spare."
            )
        return StoreDatabases(catalog, [holders[shard] for shard in range(SHARDS)])

    def check(self) -> None:
        """Check the databases before reading. Raises CannotRun: wrong schema, or the driver returns column names."""
        for place in self._configured.each:
            (row,) = self._rows(place, "SELECT version_num FROM tmc_schema_version", "version_num STRING")
            if row.version_num == "version_num":
                raise CannotRun(
                    f"The driver reads column names instead of values from {place.name}: use MariaDB's driver with jdbc:mysql."
                )
            if row.version_num < SCHEMA:
                raise CannotRun(
                    f"{place.name} has schema {row.version_num}, this pipeline reads {SCHEMA}: run tmc init with this version."
                )

    def now_ms(self) -> int:
        """The earliest of the databases' clocks."""
        return min(self._clock_ms(place) for place in self._databases.each)

    @cached_property
    def clocks_apart_ms(self) -> int:
        """Return by how much the databases' clocks differ."""
        clocks = [self._clock_ms(place) for place in self._databases.each]
        return max(clocks) - min(clocks) if len(clocks) > 1 else 0

    def _clock_ms(self, place: Database) -> int:
        return int(self._rows(place, f"SELECT {place.clock} AS now", "now BIGINT")[0].now)

    @cached_property
    def names(self) -> Names:
        """Return the names, as of the first use."""
        apps = self.from_catalog("SELECT app_no, id FROM tmc_app", "app_no INT, id STRING")
        topics = self.from_catalog(
            "SELECT topic_no, name, ordered FROM tmc_topic", "topic_no INT, name STRING, ordered SMALLINT"
        )
        subscribed = self.from_catalog(
            "SELECT subscription_no, topic_no, app_no, tag, effective_ms, removed_ms, order_mode, forward_kind"
            " FROM tmc_subscription",
            "subscription_no INT, topic_no INT, app_no INT, tag STRING, effective_ms BIGINT, removed_ms BIGINT,"
            " order_mode SMALLINT, forward_kind STRING",
        )
        by_topic = {row.topic_no: row.name for row in topics}
        by_app = {row.app_no: row.id for row in apps}
        ordered = frozenset(row.topic_no for row in topics if row.ordered)
        changed = self._order_changed() if ordered else set()
        return Names(
            topics=by_topic,
            apps=by_app,
            ordered=ordered,
            forwarded=frozenset(row.subscription_no for row in subscribed if row.forward_kind),
            in_order=frozenset(
                row.subscription_no
                for row in subscribed
                if row.topic_no in ordered
                and row.order_mode != OrderMode.OFF
                and (by_topic[row.topic_no], by_app.get(row.app_no, ""), row.tag) not in changed
            ),
            lives={
                row.subscription_no: Life(
                    topic_no=row.topic_no, from_ms=row.effective_ms or _NEVER_MS, to_ms=row.removed_ms
                )
                for row in subscribed
            },
            subscriptions={
                row.subscription_no: (
                    by_topic.get(row.topic_no, f"topic-{row.topic_no}"),
                    f"{by_app.get(row.app_no, f'app-{row.app_no}')}.{row.tag}",
                    row.removed_ms is not None,
                )
                for row in subscribed
            },
        )

    def worked_off(self) -> Callable[[int, str], bool]:
        """Return a function of shard and run: whether the retention duty has worked off the list of that run there."""
        rows = self._from_all(
            "SELECT shard, run, position FROM tmc_retention", "shard INT, run STRING, position BIGINT"
        )
        at = {int(row.shard): (str(row.run), int(row.position)) for row in rows}

        def is_done(shard: int, run: str) -> bool:
            reached, position = at.get(shard, ("", 0))
            return reached > run or (reached == run and position < 0)

        return is_done

    @cached_property
    def identity(self) -> str:
        """The catalog's own random text, whatever its address: it says which center this is."""
        return self._identity(self._configured.catalog)

    def _identity(self, place: Database) -> str:
        """The random text of a database; "" if it has none."""
        rows = self._rows(place, "SELECT identity FROM tmc_database", "identity STRING")
        return str(rows[0].identity) if rows else ""

    def removing(self) -> set[str]:
        """Return the archive runs whose lists the retention duty works off, or has worked off last."""
        runs = self._from_all("SELECT DISTINCT run FROM tmc_retention WHERE run <> ''", "run STRING")
        return {str(row.run) for row in runs}

    def _order_changed(self) -> set[tuple[str, ...]]:
        """Topic, app and tag of subscriptions whose order was changed at any time, from the audit trail."""
        query = (
            "SELECT subject FROM tmc_audit WHERE action = 'register subscription' AND change_text LIKE '%order_mode: %'"
        )
        return {tuple(row.subject.split(" ")) for row in self.from_catalog(query, "subject STRING")}

    def from_catalog(self, query: str, schema: str) -> Sequence[Any]:
        """Return the rows of a query of the catalog's database."""
        return self._rows(self._databases.catalog, query, schema)

    def from_each(self, query: str, schema: str) -> DataFrame:
        """Return the rows of a query of every database, unread."""
        # Of every configured one: what operators did is noted where a shard was then.
        frames = [place.read(self._spark, query, schema, self._fetch) for place in self._configured.each]
        return reduce(DataFrame.unionByName, frames)

    def horizon_ms(self) -> int:
        """Messages closed earlier may have been removed by the retention duty."""
        rows = self._from_all("SELECT MAX(horizon_ms) AS horizon FROM tmc_retention", "horizon BIGINT")
        return max((int(row.horizon) for row in rows if row.horizon is not None), default=0)

    def messages(
        self, among: MessageRange = EVERYTHING, changed_since_ms: int = 0, body: bool = True, attempts: bool = True
    ) -> DataFrame:
        """One row per message: MESSAGE of frames.py, and live smallint, null: its key is free. No order.

        changed_since_ms: omit messages decided and closed earlier.  body, attempts: False gives null bodies, or no attempts,
        and does not read them.
        """
        spans = self._spans(among)
        fetch = self._fetch_bodies if body else self._fetch

        def opened(shard: int) -> DataFrame:
            place = self._databases.shards[shard]
            return self._spark.read.jdbc(
                place.url,
                messages_of(place, shard, changed_since_ms, body, attempts),
                predicates=self._predicates(among, shard, spans[shard]),
                properties=place.options(fetch) | {"customSchema": _READ},
            )

        wanted = [shard for shard in range(SHARDS) if spans[shard].rows or among.beyond(shard)]
        with ThreadPoolExecutor(self._opening) as pool:  # each asks for the columns before anything is read
            parts = list(pool.map(opened, wanted))
        if not parts:
            return self._spark.createDataFrame([], MESSAGE).withColumn("live", f.lit(None).cast("smallint"))
        stored = reduce(DataFrame.unionByName, parts)
        # A task costs more than a few rows. Twice as many as their number asks for: neighbors may be large.
        rows = sum(span.rows for span in spans.values()) + among.listed
        return _parsed(stored.coalesce(2 * max(self._spark.sparkContext.defaultParallelism, -(-rows // self._slice))))

    def _predicates(self, among: MessageRange, shard: int, span: Span) -> list[str]:
        """One per task; no row matches two."""
        beyond = among.beyond(shard)
        slices = span.slices(self._slice, among.bounds(shard)) if span.rows else []
        lists = [beyond[start : start + _LISTED] for start in range(0, len(beyond), _LISTED)]
        return [f"id >= {low} AND id < {high}" for low, high in slices] + [
            f"id IN ({', '.join(map(str, each))})" for each in lists
        ]

    def _spans(self, among: MessageRange) -> dict[int, Span]:
        """Return the spans of every shard, with one query per database, and one more for each shard that several tasks read."""

        def spans(place: Database) -> dict[int, Span]:
            mine = [shard for shard, holder in enumerate(self._databases.shards) if holder == place]
            parts = [f"SELECT {shard} AS shard, COUNT(*) AS found FROM {in_range(shard, among)}" for shard in mine]
            rows = self._rows(place, " UNION ALL ".join(parts), "shard INT, found BIGINT") if parts else []
            return {row.shard: Span(row.found, self._sample(place, row.shard, row.found, among)) for row in rows}

        with ThreadPoolExecutor(self._opening) as pool:
            return {shard: span for found in pool.map(spans, self._databases.each) for shard, span in found.items()}

    def _sample(self, place: Database, shard: int, rows: int, among: MessageRange) -> Sequence[int]:
        """Message numbers at which to cut. The database reads an index for them, as it does to count."""
        if rows <= self._slice:
            return ()
        chance = place.chance(min(1.0, _SAMPLES / self._slice))
        chosen = self._rows(place, f"SELECT id FROM {in_range(shard, among)} AND {chance}", "id BIGINT")
        return sorted(int(row.id) for row in chosen)

    def _from_all(self, query: str, schema: str) -> Sequence[Any]:
        return [row for place in self._databases.each for row in self._rows(place, query, schema)]

    def _rows(self, place: Database, query: str, schema: str) -> Sequence[Any]:
        """A small result, here in the driver."""
        rows: Sequence[Any] = place.read(self._spark, query, schema, self._fetch).collect()
        return rows


@dataclass(frozen=True)
class StoreDatabases:
    """The databases of the catalog and of each shard. spare: further ones, to which shards may have moved."""

    catalog: Database
    shards: Sequence[Database]
    spare: Sequence[Database] = ()

    @property
    def each(self) -> list[Database]:
        """Return every database once."""
        return list({place.url: place for place in (self.catalog, *self.shards, *self.spare)}.values())


def databases_of(store: StoreConfig) -> StoreDatabases:
    """Raises CannotRun."""
    catalog = database(store.catalog.get_secret_value())
    shards = [catalog] * SHARDS
    for part in store.shards:
        place = database(part.url.get_secret_value())
        shards[part.first : part.last + 1] = [place] * (part.last + 1 - part.first)
    return StoreDatabases(catalog, shards, [database(url.get_secret_value()) for url in store.spare])


def in_range(shard: int, among: MessageRange) -> str:
    """Table and condition of a query over the range, without its listed numbers."""
    if not among.from_ms and among.to_ms is None:  # no range: then the database reads its smallest index and no rows
        return f"tmc_message_{shard:02d} WHERE 1 = 1"
    low, high = among.bounds(shard)
    return f"tmc_message_{shard:02d} WHERE id >= {low} AND id < {high}"


def messages_of(place: Database, shard: int, since_ms: int, body: bool = True, attempts: bool = True) -> str:
    """A query of one shard; Spark adds the range of ids, and the database carries it into the primary key."""
    consumption, attempt = f"tmc_consumption_{shard:02d}", f"tmc_attempt_{shard:02d}"
    wanted = [f"m.{name}" if body or name != "body" else f"{place.no_bytes} AS body" for name in names(STORED)]
    consumptions = place.rows_as_json(consumption, "c", "c.message_id = m.id", named(CONSUMPTION))
    failed = place.rows_as_json(attempt, "a", "a.message_id = m.id", named(ATTEMPT), texts=("error",))
    belongings = place.json_object(c=consumptions, **({"a": failed} if attempts else {}))
    conditions = ["1 = 1"]
    if since_ms > 0:
        later = f"(l.closed_ms IS NULL OR l.closed_ms >= {int(since_ms)})"
        late = f"EXISTS (SELECT 1 FROM {consumption} l WHERE l.message_id = m.id AND {later})"
        conditions.append(f"(m.decided_ms IS NULL OR m.decided_ms >= {int(since_ms)} OR {late})")
    return (
        f"(SELECT {shard} AS shard, {', '.join(wanted)}, m.live, {belongings} AS belongings "
        f"FROM tmc_message_{shard:02d} m WHERE {' AND '.join(conditions)}) q"
    )


def _parsed(stored: DataFrame) -> DataFrame:
    """STORED with shard and belongings -> MESSAGE. JSON that is missing or cannot be read fails the job: a row must not lose
    parts.
    """
    lacking = f.raise_error(f.concat(f.lit("too many attempts to read: message "), "id", f.lit(" of shard "), "shard"))
    text = f.coalesce("belongings", lacking.cast("string"))
    belongings, none = f.from_json(text, _BRIEF, {"mode": "FAILFAST"}), f.array()
    # In one step, which parses once: two would copy every row with its body once more.
    return stored.select(
        *names(MESSAGE, but=("consumptions", "attempts")),
        "live",
        f.coalesce(belongings["c"].cast(CONSUMPTIONS), none.cast(CONSUMPTIONS)).alias("consumptions"),
        f.coalesce(belongings["a"].cast(ATTEMPTS), none.cast(ATTEMPTS)).alias("attempts"),
    )
