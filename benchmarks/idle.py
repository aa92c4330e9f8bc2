"""CPU cost of an idle server: milliseconds per second, holding 32 shards, with RabbitMQ and Consul.

One topic and one subscriber in every shard, no traffic; then the same with five million closed messages in the tables, made by
MariaDB's SEQUENCE engine.
"""

from __future__ import annotations

import argparse
import json
import time

import sqlalchemy as sa

from tests.support.cluster import Cluster
from tmc_storm.services.mariadb import MariaDB


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used, all its threads, to the nanosecond: its own clock, see clock_getcpuclockid(3)."""
    return time.clock_gettime((~pid << 3) | 2)


def measure(cluster: Cluster, seconds: float) -> float:
    """Milliseconds per second."""
    pid = cluster.servers[0].pid
    time.sleep(5)  # what is done once after a start
    before, began = cpu_s(pid), time.monotonic()
    time.sleep(seconds)
    return (cpu_s(pid) - before) / (time.monotonic() - began) * 1000


def fill(server: MariaDB, rows: int) -> None:
    """Closed messages, evenly over the shards."""
    share = rows // 32
    engine = sa.create_engine(server.url("tmc_cluster"))
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        for shard in range(32):
            nn = f"{shard:02d}"
            connection.exec_driver_sql(
                f"INSERT INTO tmc_message_{nn} (id, topic_no, producer_no, producer_tag, message_key, live, attempt_id, digest,"
                " state, content_type, body, delay_ms, due_ms, created_ms, decided_ms)"
                " SELECT seq, 1, 1, 'default', CONCAT('closed-', seq), 1, UNHEX(LPAD(HEX(seq), 32, '0')),"
                " UNHEX(SHA2(seq, 256)), 2, 'text/plain', 'x', 0, NULL, 1700000000000, 1700000000000"
                f" FROM seq_1_to_{share}"
            )
            connection.exec_driver_sql(
                f"INSERT INTO tmc_consumption_{nn} (message_id, subscription_no, state, attempt, tried, due_ms, created_ms,"
                f" closed_ms) SELECT seq, {shard + 1}, 2, 1, 1, NULL, 1700000000000, 1700000000000 FROM seq_1_to_{share}"
            )
    engine.dispose()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--rows", type=int, default=5_000_000)
    options = parser.parse_args()
    with Cluster(
        consul=True,
        lease_seconds=10,
        pool_mb=1024,
        TMC_TELEMETRY__LISTEN="127.0.0.1:0",
        TMC_STORE__CHANGE_DELAY_MS="5000",
    ) as cluster:
        cluster.register("orders", "coupons")
        for shard in range(32):
            cluster.subscribe(f"bench.{shard}", "coupons", topic_settings={"table_index": shard})
        empty = measure(cluster, options.seconds)
        began = time.monotonic()
        fill(cluster.databases[0], options.rows)
        filled_in = time.monotonic() - began
        full = measure(cluster, options.seconds)
        memory = cluster.servers[0].rss_mb()
    result = {
        "cpu_ms_per_s": round(full, 2),
        "cpu_ms_per_s_empty": round(empty, 2),
        "cpu_ms_per_s_full": round(full, 2),
        "closed_rows": options.rows,
        "filled_in_s": round(filled_in),
        "server_memory_mb": round(memory),
    }
    print(json.dumps(result) if options.json else "\n".join(f"{key:28} {value}" for key, value in result.items()))


if __name__ == "__main__":
    main()
