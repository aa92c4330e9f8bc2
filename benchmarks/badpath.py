"""Measures the bad path: consumers that refuse, services that resume, tables that are cleaned. Ratios, sides alternating.

reject_statements, nack_statements: of a batch of 400, per database; acks beside them take 2.
publish_beside_rejects_ratio: messages per second that are published while their consumer rejects each of them, as a share of
those while it acks them.
async_resume_ratio: messages per second that an asyncio service submits from its ledger, as a share of a blocking one's.
clean_inbox_ratio: rows per second that `clean_inbox` deletes, as a share of `clean_ledger`'s; MariaDB, with nobody writing.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

import tmc_client as tmc
import tmc_client.aio
from tests.support.center import RunningCenter
from tests.support.store import StoreUnderTest, server_store, sqlite_store
from tmc_client.producing.ledger import rows_for
from tmc_client.tables import inbox, ledger
from tmc_server.domain.operations import Operation
from tmc_storm.services.mariadb import MariaDB

_BATCH = 400
_THREADS = 32
_AGE = timedelta(days=8)
_numbers = itertools.count()


def statements(store: StoreUnderTest) -> dict[str, int]:
    """Count the statements of a batch of 400 answers, by kind."""
    kinds: dict[str, Callable[[int], Operation]] = {
        "ack": lambda number: store.ack_of(number, 1),
        "nack": lambda number: store.nack_of(number, 1),
        "reject": lambda number: store.nack_of(number, 1, reject=True),
    }
    counts = {}
    for kind, answer in kinds.items():
        operations = [answer(store.submitted(room=1)) for _ in range(_BATCH)]
        with store.counting() as counted:
            store.perform(*operations)
        counts[f"{kind}_statements"] = len(counted.statements)
    store.close()
    return counts


@contextmanager
def _consuming(center: RunningCenter, rejects: bool) -> Iterator[None]:
    with tmc.connect(center.address, app="coupons", key=center.keys["coupons"]) as coupons:
        consumer = tmc.Consumer(coupons)

        @consumer.listener("order.paid")
        def handle(_body: bytes) -> None:
            if rejects:
                raise tmc.Reject("no stock")

        with consumer:
            yield


def published_per_s(center: RunningCenter, orders: tmc.Center, *, rejects: bool, count: int) -> float:
    """While each message is delivered and answered."""
    with _consuming(center, rejects), ThreadPoolExecutor(_THREADS) as pool:
        began = time.monotonic()
        list(pool.map(lambda _: orders.publish("order.paid", b"x" * 256, key=f"k{next(_numbers)}"), range(count)))
        return count / (time.monotonic() - began)


def resumed_per_s(center: RunningCenter, orders: tmc.Center, folder: Path, *, in_loop: bool, count: int) -> float:
    """From a ledger of SQLite."""
    path = folder / f"ledger-{next(_numbers)}.db"
    engine = sa.create_engine(f"sqlite:///{path}")
    tmc.create_tables(engine)
    with ThreadPoolExecutor(_THREADS) as pool:
        prepared = list(pool.map(lambda _: orders.prepare("order.paid", b"x", key=f"k{next(_numbers)}"), range(count)))
    with engine.begin() as connection:
        connection.execute(ledger.insert(), rows_for(prepared))

    async def resume() -> tuple[int, float]:
        beside = create_async_engine(f"sqlite+aiosqlite:///{path}")
        async with tmc_client.aio.connect(center.address, app="orders", key=center.keys["orders"]) as there:
            await there.publish("order.paid", b"x", key=f"k{next(_numbers)}")  # the others are connected, too
            began = time.monotonic()
            found = await there.resume(beside)
            elapsed = time.monotonic() - began
        await beside.dispose()
        return found, elapsed

    if in_loop:
        done, elapsed = asyncio.run(resume())
    else:
        began = time.monotonic()
        done, elapsed = orders.resume(engine), time.monotonic() - began
    engine.dispose()
    assert done == count, done
    return count / elapsed


def cleaned_per_s(engine: sa.Engine, *, of_inbox: bool, count: int) -> float:
    """Rows that are old enough, beside as many that are not."""
    now = time.time_ns() // 1_000_000
    old = now - 30 * 86_400_000
    times = [old if number % 2 else now for number in range(2 * count)]
    table = inbox if of_inbox else ledger
    rows = [
        {"subscriber": "coupons.default", "message_id": f"1-1-00-{number}", "received_ms": at}
        if of_inbox
        else {
            "message_id": f"1-1-00-{number}",
            "state": 1,
            "topic": "order.paid",
            "message_key": f"k{number}",
            "attempt_id": os.urandom(16),
            "created_ms": at,
            "settled_ms": at,
        }
        for number, at in enumerate(times)
    ]
    with engine.begin() as connection:
        connection.execute(table.delete())
        connection.execute(table.insert(), rows)
    began = time.monotonic()
    removed = tmc.clean_inbox(engine, _AGE) if of_inbox else tmc.clean_ledger(engine, _AGE)
    elapsed = time.monotonic() - began
    assert removed == count, removed
    return count / elapsed


def _alternating(measure: Callable[[bool], float], rounds: int) -> tuple[float, float]:
    """Medians of the bad side and of the good one."""
    runs: dict[bool, list[float]] = {True: [], False: []}
    measure(False)  # warm up
    for _ in range(rounds):
        for bad in (True, False):
            runs[bad].append(measure(bad))
    return statistics.median(runs[True]), statistics.median(runs[False])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--messages", type=int, default=6_000)
    options = parser.parse_args()
    figures: dict[str, float] = {}
    server = MariaDB(pool_mb=512)
    try:
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            for name, store in {"sqlite": sqlite_store(folder), "mariadb": server_store(server)}.items():
                figures |= {f"{key}_{name}": count for key, count in statements(store).items()}
            for name, url in {"sqlite": f"sqlite:///{folder}/c.db", "mariadb": server.create("center")}.items():
                with (
                    RunningCenter(url) as center,
                    tmc.connect(center.address, app="orders", key=center.keys["orders"]) as orders,
                ):
                    bad, good = _alternating(
                        lambda rejects: published_per_s(center, orders, rejects=rejects, count=options.messages),
                        options.rounds,
                    )
                    figures[f"publish_beside_rejects_ratio_{name}"] = round(bad / good, 3)
                    figures |= {
                        f"publish_beside_rejects_{name}": round(bad),
                        f"publish_beside_acks_{name}": round(good),
                    }
                    if name == "mariadb":
                        bad, good = _alternating(
                            lambda in_loop: resumed_per_s(center, orders, folder, in_loop=in_loop, count=2_000),
                            options.rounds,
                        )
                        figures["async_resume_ratio"] = round(bad / good, 3)
                        figures |= {"async_resume": round(bad), "blocking_resume": round(good)}
            engine = sa.create_engine(server.create("business"))
            tmc.create_tables(engine)
            bad, good = _alternating(
                lambda of_inbox: cleaned_per_s(engine, of_inbox=of_inbox, count=20_000), options.rounds
            )
            figures["clean_inbox_ratio"] = round(bad / good, 3)
            figures |= {"clean_inbox": round(bad), "clean_ledger": round(good)}
            engine.dispose()
    finally:
        server.stop()
    print(json.dumps(figures) if options.json else "\n".join(f"{name}: {value}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
