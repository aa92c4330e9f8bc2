"""The outbox alone against what one writes by hand, sides alternating; MariaDB and RabbitMQ, no center.

Both sides write over connections of the driver, from the first insert to the last ack of a consumer in this process; ours sends
directly, with a relay beside it.
outbox_gain_naive: 16 threads with a message per transaction, against a row, a confirm and an update per message.
outbox_gain_batched: 2 threads with 100 messages per transaction, against pages of 500 with pipelined confirms.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from typing import Any

import MySQLdb
import sqlalchemy as sa

import tmc_client as tmc
from benchmarks import handrolled
from tmc_storm.services.mariadb import MariaDB
from tmc_storm.services.rabbitmq import RabbitMQ

_NAIVE, _BATCHED = 4_000, 20_000


def messages_per_s(server: MariaDB, broker: RabbitMQ, count: int, batched: bool) -> float:
    """As handrolled.messages_per_s."""
    handrolled.prepare(server, broker)
    database = server.create("tmc_outbox")
    engine = sa.create_engine(database)
    tmc.create_tables(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql("TRUNCATE tmc_outbox")
    engine.dispose()
    context = multiprocessing.get_context("spawn")
    go, ready, end = context.Event(), context.Semaphore(0), context.Event()
    producer = context.Process(target=_produce, args=(database, broker.url, count, batched, go, ready, end))
    producer.start()
    ready.acquire()
    began = time.monotonic()
    go.set()
    handrolled.consume(broker.url, count, batched)
    elapsed = time.monotonic() - began
    end.set()
    producer.join(30)
    return count / elapsed


def _produce(database: str, url: str, count: int, batched: bool, go: Any, ready: Any, end: Any) -> None:
    threads, step = handrolled.producers(batched)
    named = sa.make_url(database)
    target = tmc.RabbitTarget(url, routing_key=lambda _entry: handrolled.QUEUE)

    def connect() -> Any:
        return MySQLdb.connect(host="127.0.0.1", port=named.port, user="root", db=named.database)

    with tmc.Outbox(connect, target) as outbox:

        def work(first: int, last: int) -> None:
            connection = connect()
            for start in range(first, last, step):
                with outbox.transaction(connection) as tx:
                    for number in range(start, min(start + step, last)):
                        tx.send("bench", handrolled.BODY, key=f"k{number}")
            connection.close()

        ready.release()
        go.wait()
        handrolled.shared(work, count, threads)
        end.wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    server, broker = MariaDB(pool_mb=1024), RabbitMQ()
    runs: dict[str, list[float]] = {}
    try:
        for _ in range(options.rounds):
            for name, side, count, batched in (
                ("handrolled_naive", handrolled, _NAIVE, False),
                ("outbox_naive", None, _NAIVE, False),
                ("handrolled_batched", handrolled, _BATCHED, True),
                ("outbox_batched", None, _BATCHED, True),
            ):
                measure = side.messages_per_s if side is not None else messages_per_s
                runs.setdefault(name, []).append(measure(server, broker, count, batched))
    finally:
        broker.stop()
        server.stop()
    figures: dict[str, float] = {name: round(statistics.median(values)) for name, values in runs.items()}
    for kind in ("naive", "batched"):
        figures[f"outbox_gain_{kind}"] = round(figures[f"outbox_{kind}"] / figures[f"handrolled_{kind}"], 3)
    print(json.dumps(figures) if options.json else "\n".join(f"{name}: {value}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
