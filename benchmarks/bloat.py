"""Dead rows of a center on PostgreSQL, and their cost: lives in batches, and closed messages that retention removes behind them.

Each round writes `--messages` full lives into one shard and removes those of the round before last, so two rounds of rows stay.
After a round: the size of the shard's tables with their indexes, the share of dead rows, and how long the look for due rows and a
batch of 200 lives take. `size_growth` and `batch_growth` compare the last round with the third, when retention has begun. With
`--snapshot`, a transaction that reads is open all the time, as a slow dump is: nothing can be vacuumed then.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import sqlalchemy as sa

from tests.support.store import StoreUnderTest, server_store
from tmc_server.store.retention import ClosedMessages
from tmc_storm.services.postgresql import PostgreSQL

_BATCH = 200


def _lives(store: StoreUnderTest) -> list[int]:
    """One batch of them. Returns: the numbers."""
    prepared = [store.a_prepare(body=b"x" * 256) for _ in range(_BATCH)]
    numbers = [each.number for each in prepared]
    store.perform(*prepared)
    store.outlet.room = _BATCH
    store.perform(*map(store.submit_of, numbers))
    store.outlet.delivered.clear()
    store.perform(*map(store.ack_of, numbers))
    return numbers


def _round(store: StoreUnderTest, count: int) -> tuple[list[int], float, float]:
    """Returns: the numbers, and the medians of a batch and of a look for due rows, in milliseconds."""
    numbers, batches, looks = [], [], []
    for _ in range(count // _BATCH):
        began = time.monotonic()
        numbers += _lives(store)
        between = time.monotonic()
        store.due.due()
        batches.append(between - began)
        looks.append(time.monotonic() - between)
        store.clock.advance(1)
    return numbers, statistics.median(batches) * 1000, statistics.median(looks) * 1000


def _tables(connection: sa.Connection, shard: int) -> dict[str, float]:
    row = connection.exec_driver_sql(
        "SELECT SUM(pg_total_relation_size(relid)), SUM(n_dead_tup), SUM(n_live_tup) FROM pg_stat_user_tables"
        f" WHERE relname IN ('tmc_message_{shard:02d}', 'tmc_consumption_{shard:02d}')"
    ).one()
    return {"mb": round(float(row[0]) / 1e6, 1), "dead_share": round(float(row[1]) / float(row[2] or 1), 2)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--snapshot", action="store_true", help="a transaction that reads is open all the time")
    options = parser.parse_args()
    # A look each 5 seconds instead of each minute: with a tenth of the time per round, as in one of ten times as many messages.
    server = PostgreSQL(pool_mb=1024, autovacuum_naptime="5s")
    store = server_store(server)
    look = sa.create_engine(server.url("tmc_contract"), isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    retention = ClosedMessages(store.database, store.leases)
    kept: list[list[int]] = []
    rounds: list[dict[str, Any]] = []
    with look.connect() as connection, look.connect() as reader:
        if options.snapshot:
            reader.exec_driver_sql("BEGIN ISOLATION LEVEL REPEATABLE READ")
            reader.exec_driver_sql("SELECT COUNT(*) FROM tmc_topic")
        for _ in range(options.rounds):
            numbers, batch_ms, look_ms = _round(store, options.messages)
            kept.append(numbers)
            if len(kept) > 2:
                old = kept.pop(0)
                for start in range(0, len(old), _BATCH):
                    retention.remove(store.shard, old[start : start + _BATCH], store.clock())
            figures = {"batch_ms": round(batch_ms, 1), "look_ms": round(look_ms, 2)}
            rounds.append(figures | _tables(connection, store.shard))
    store.close()
    server.stop()
    first, last = rounds[2], rounds[-1]
    result = {
        "size_growth": round(last["mb"] / first["mb"], 2),
        "batch_growth": round(last["batch_ms"] / first["batch_ms"], 2),
        "look_growth": round(last["look_ms"] / first["look_ms"], 2),
        "dead_share": last["dead_share"],
        "messages": options.messages * options.rounds,
        "all_rounds": rounds,
    }
    print(json.dumps(result) if options.json else "\n".join(f"{key:28} {value}" for key, value in result.items()))


if __name__ == "__main__":
    main()
