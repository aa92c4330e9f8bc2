"""Measures what a message costs by subscribers, body and shards, fits the lines of `tmc size`, and tries them on other runs.

Over MariaDB and over PostgreSQL; 256 asyncio tasks make single calls to one server. Of each run: CPU microseconds of server,
database and broker, bytes of rows that stay, and bytes of the database's log, each per message. Some runs are kept back: `off_*`
is how far the prediction is from what those cost, in percent. --output FILE: what `tmc size --costs FILE` reads.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from benchmarks.capacity_fit import FITTED, KEPT_BACK, MANY, Shape, fitted
from benchmarks.lifecycle import Ledgers, run
from tests.support.cluster import KINDS, Cluster, Kind
from tmc_cli.size import Costs

PARTS = ("server", "database", "broker")
"""Parts whose CPU time a plan counts; callers and consumers belong to services."""
_MIDDLE = 12
"""The first shard of topics: eight from here on are in both of two databases."""
_LOGGED = {
    "mysql": "SELECT variable_value FROM information_schema.global_status WHERE variable_name = 'INNODB_OS_LOG_WRITTEN'",
    "postgresql": "SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')",
}
_KEPT = {
    "mysql": "SELECT SUM(data_length + index_length) FROM information_schema.tables WHERE table_schema = 'tmc_cluster'",
    "postgresql": "SELECT SUM(pg_total_relation_size(oid)) FROM pg_class WHERE relkind = 'r' AND relname LIKE 'tmc%'",
}


class Side:
    """A center with a topic for each number of subscribers."""

    def __init__(self, kind: Kind, databases: int, stack: ExitStack) -> None:
        self.cluster = stack.enter_context(
            Cluster(kind=kind, databases=databases, lease_seconds=10, pool_mb=512, own_broker=True)
        )
        self._engines = [sa.create_engine(each.url("tmc_cluster")) for each in self.cluster.databases]
        self._ledgers = Ledgers()
        apps = ["coupons", *(f"more{number}" for number in range(1, MANY))]
        self.cluster.register("orders", *apps)
        topics = {shape.topic: shape for shape in (*FITTED, *KEPT_BACK) if shape.databases == databases}
        made = [
            self.cluster.subscribe(
                name, app, topic_settings={"table_index": _MIDDLE, "spread": shape.shards, "open_limit": 10_000_000}
            )
            for name, shape in topics.items()
            for app in apps[: shape.subscribers]
        ]
        self.cluster.in_effect(*made)

    def run(self, shape: Shape, messages: int) -> dict[str, float]:
        """Return what a message of this shape costs: microseconds by part, kept and logged bytes; and `per_s`."""
        others = [f"more{number}" for number in range(1, shape.subscribers)]
        settings = {
            "BENCH_TOPIC": shape.topic,
            "BENCH_BODY": str(shape.body_bytes),
            "BENCH_SUBSCRIBERS": ",".join(f"{app}:{self.cluster.keys[app]}" for app in others),
        }
        kept, logged = self._total(_KEPT), self._total(_LOGGED)
        count = int(messages * shape.share) // 256 * 256
        lives = run(self.cluster, "tasks", 4, 64, count, self._ledgers, **settings)
        assert (self._ledgers.lost, self._ledgers.invented) == (0, 0)
        logged = self._total(_LOGGED) - logged  # before the tables are analyzed, which writes to the log itself
        kept = self._total(_KEPT) - kept
        assert kept > 0
        return {part: lives.cpu_us[part] for part in PARTS} | {
            "kept_bytes": kept / count,
            "logged_bytes": logged / count,
            "per_s": lives.per_s,
        }

    def close(self) -> None:
        for engine in self._engines:
            engine.dispose()

    def _total(self, queries: Mapping[str, str]) -> float:
        """The sum over the databases."""
        total = 0.0
        for engine in self._engines:
            with engine.connect() as connection:
                if queries is _KEPT and engine.dialect.name != "postgresql":
                    tables = connection.scalars(sa.text("SHOW TABLES")).all()
                    connection.execute(sa.text("ANALYZE TABLE " + ", ".join(tables)))
                family = "postgresql" if engine.dialect.name == "postgresql" else "mysql"
                total += float(connection.scalar(sa.text(queries[family])) or 0)
        return total


def costs_of(measured: Mapping[Shape, Mapping[str, float]]) -> dict[str, Any]:
    """Fit the lines of one kind of database."""

    def line(key: str) -> list[float]:
        return fitted(FITTED, [measured[shape][key] for shape in FITTED])

    return {
        "cpu_us": {part: line(part) for part in PARTS},
        "kept_bytes": line("kept_bytes"),
        "logged_bytes": line("logged_bytes"),
    }


def _predicted(costs: Costs, shape: Shape) -> dict[str, float]:
    day = 86_400
    return {part: costs.cores(part, shape.load) * 1e6 for part in PARTS} | {
        "kept_bytes": costs.bytes_per_day(costs.kept_bytes, shape.load) / day,
        "logged_bytes": costs.bytes_per_day(costs.logged_bytes, shape.load) / day,
    }


def _all_of(kind: Kind, rounds: int, messages: int) -> dict[Shape, dict[str, float]]:
    """Measure all shapes. Returns: the medians of the rounds."""
    found: dict[Shape, list[dict[str, float]]] = {}
    for databases in sorted({shape.databases for shape in FITTED + KEPT_BACK}):
        with ExitStack() as stack:
            side = Side(kind, databases, stack)
            stack.callback(side.close)
            shapes = [shape for shape in FITTED + KEPT_BACK if shape.databases == databases]
            side.run(shapes[0], messages // 2)  # warm up
            for shape in shapes * rounds:
                found.setdefault(shape, []).append(side.run(shape, messages))
    return {
        shape: {key: statistics.median(each[key] for each in several) for key in several[0]}
        for shape, several in found.items()
    }


def _rows(kind: Kind, measured: Mapping[Shape, Mapping[str, float]], costs: Costs) -> Iterator[tuple[str, Any]]:
    """Yield a line for each shape, and for each shape that was kept back how far off the prediction is."""
    for shape, costing in sorted(measured.items()):
        name = f"{kind}_{shape.subscribers}x{shape.body_bytes}_in_{shape.shards}_shards_of_{shape.databases}_databases"
        yield name, {key: round(value) for key, value in costing.items()}
        if shape in KEPT_BACK:
            predicted = _predicted(costs, shape)
            yield (
                f"off_{name}",
                {key: round((predicted[key] / costing[key] - 1) * 100) for key in predicted},
            )
            center = sum(predicted[part] for part in PARTS) / sum(costing[part] for part in PARTS)
            yield f"off_center_{name}", round((center - 1) * 100)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--messages", type=int, default=10_000, help="of the smallest shape, each round")
    parser.add_argument("--output", metavar="FILE", help="write what tmc size reads")
    options = parser.parse_args()
    result: dict[str, Any] = {}
    found: dict[str, Any] = {}
    for kind in KINDS:
        measured = _all_of(kind, options.rounds, options.messages)
        found[kind] = costs_of(measured)
        result |= _rows(kind, measured, Costs(**found[kind]))
    if options.output:
        about = {"version": version("tmc-center"), "measured": datetime.now(UTC).date().isoformat()}
        Path(options.output).write_text(json.dumps(about | {"costs": found}, indent=1) + "\n")
    print(json.dumps(result) if options.json else "\n".join(f"{key:60} {value}" for key, value in result.items()))


if __name__ == "__main__":
    main()
