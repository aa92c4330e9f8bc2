"""A shard of many rows moves from MariaDB to PostgreSQL, or the other way, under traffic on it.

Messages are published at `--per-second` over calls that repeat nothing, in order, and consumed; two servers. First without a
move, then while the rows are copied, compared and switched. `traffic_loss_share` is what is consumed less per second meanwhile.
Before that, the command is killed `--kills` times at random, and continued or, each fifth time, undone.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from typing import Any

import sqlalchemy as sa

from tests.support.cluster import KINDS, Cluster
from tests.support.shard_traffic import ShardTraffic, kill_moves, move, start_move
from tmc_server.store.engines import Database
from tmc_server.store.tables import shard_tables
from tmc_storm.eventually import eventually
from tmc_storm.services.mariadb import MariaDB
from tmc_storm.services.postgresql import PostgreSQL

_SHARD = 7
_BATCH = 5
_THREADS = 10
_MOVE_S = 7200.0


def _fill(database: MariaDB | PostgreSQL, messages: int) -> None:
    """Copies of a message that is consumed already, long ago; with its delivery."""
    tables = shard_tables(_SHARD)
    is_mariadb = isinstance(database, MariaDB)
    numbers = f"seq_1_to_{messages}" if is_mariadb else f"generate_series(1, {messages}) AS n(seq)"
    sixteen = "UNHEX(MD5(seq))" if is_mariadb else "decode(md5(seq::text), 'hex')"
    older = "(seq + 1000000000) * 1024"  # minutes before anything else
    first = sa.create_engine(database.url("tmc_cluster"), isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    with first.connect() as run:
        newest = run.execute(sa.select(sa.func.max(tables.message.c.id))).scalar_one()
        other: dict[sa.Table, dict[str, str]] = {
            tables.message: {
                "id": f"t.id - {older}",
                "message_key": "CONCAT('old-', seq)",
                "attempt_id": sixteen,
            },
            tables.consumption: {"message_id": f"t.message_id - {older}", "order_hash": "NULL", "sequence": "NULL"},
        }
        for table, values in other.items():
            columns = [column.name for column in table.c]
            taken = ", ".join(values.get(name, f"t.{name}") for name in columns)
            key = "id" if table is tables.message else "message_id"
            run.exec_driver_sql(
                f"INSERT INTO {table.name} ({', '.join(columns)})"
                f" SELECT {taken} FROM {table.name} t, {numbers} WHERE t.{key} = {newest}"
            )
    first.dispose()


def _rate(traffic: ShardTraffic, until: Any) -> float:
    """Consumed messages per second until this is true."""
    began, before = time.monotonic(), len(traffic.got)
    eventually(until, seconds=_MOVE_S)
    return (len(traffic.got) - before) / (time.monotonic() - began)


def _move(cluster: Cluster, traffic: ShardTraffic, options: argparse.Namespace) -> dict[str, Any]:
    eventually(lambda: len(traffic.got) > 1_000)
    _fill(cluster.databases[0], options.rows // 2)
    result: dict[str, Any] = {"source": options.source, "rows": options.rows}
    result["killed"] = kill_moves(cluster, traffic, to="tmc_spare", kills=options.kills, longest_s=8.0, undo_each=5)
    ends = time.monotonic() + options.seconds
    result["lives_per_s_before"] = round(_rate(traffic, lambda: time.monotonic() > ends), 1)
    began = time.monotonic()
    process = start_move(cluster, _SHARD, "--to", "tmc_spare")
    result["lives_per_s_meanwhile"] = round(_rate(traffic, lambda: process.poll() is not None), 1)
    result["move_s"] = round(time.monotonic() - began, 1)
    said, _ = process.communicate()
    moved = re.search(r"callers waited for ([0-9.]+) s", said)
    assert moved is not None, said
    result["frozen_ms"] = round(float(moved[1]) * 1000)
    result["traffic_loss_share"] = round(1 - result["lives_per_s_meanwhile"] / result["lives_per_s_before"], 3)
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--source", choices=KINDS, default="mariadb", help="the other kind is where the shard goes")
    parser.add_argument("--rows", type=int, default=5_000_000, help="in the shard: messages and deliveries")
    parser.add_argument("--per-second", type=float, default=500)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=30, help="without a move")
    options = parser.parse_args()
    target = PostgreSQL(pool_mb=1024) if options.source == "mariadb" else MariaDB(pool_mb=1024)
    spare = target.create("tmc_spare")
    with Cluster(
        servers=2, kind=options.source, pool_mb=1024, own_broker=True, TMC_STORE__SPARE=f'["{spare}"]'
    ) as cluster:
        cluster.shared(2)
        traffic = ShardTraffic(cluster, shard=_SHARD, threads=_THREADS, batch=_BATCH, per_s=options.per_second)
        try:
            result = _move(cluster, traffic, options)
            traffic.goes_on(5 * _BATCH * _THREADS)
            move(cluster, _SHARD, "--confirm", seconds=_MOVE_S)
        finally:
            traffic.stop()
        result["doubled"] = _rows(spare) - traffic.count - options.rows // 2
        result |= {"messages": traffic.count, "failed_calls": len(traffic.failed), "lost": traffic.lost}
        result["out_of_order"] = traffic.out_of_order
    target.stop()
    print(json.dumps(result, indent=None if options.json else 2))


def _rows(url: str) -> int:
    """Messages of the shard, where it is now."""
    database = Database(url, patient=True)
    with database.reading() as connection:
        count = int(
            connection.execute(sa.select(sa.func.count()).select_from(shard_tables(_SHARD).message)).scalar_one()
        )
    database.close()
    return count


if __name__ == "__main__":
    main()
