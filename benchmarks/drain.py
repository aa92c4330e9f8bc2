"""Undecided messages that are decided by checks: how many per second, by kind of check.

One server over MariaDB with RabbitMQ, one subscriber per topic; PREPARED messages and the producer's ledger are filled in by
MariaDB's SEQUENCE engine, made due at once, and the clock runs until the last one is decided, by the database's clock. One
message in ten was not committed by its producer: over the SDK's endpoint those are fenced, a marker and a commit each.
lost and invented compare the center's tables with the ledger afterwards.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import sqlalchemy as sa

import tmc_client as tmc
from tests.support.cluster import KINDS, Cluster, Kind
from tests.support.series import Series
from tmc_client.producing.producer import prepare_request
from tmc_common.protocol import admin_pb2
from tmc_storm.eventually import eventually
from tmc_storm.services.ports import free_port

ROOT = Path(__file__).parents[1]
PRODUCER = str(Path(__file__).parent / "drain_producer.py")
SERVICES = 10
TRANSACTION_MS = 1_000
NO_DELAY = timedelta(0)


class Drain:
    """A cluster, ten apps with a topic each, and their endpoints."""

    def __init__(self, kind: Kind) -> None:
        self.ports = [free_port() for _ in range(SERVICES)]
        instances = {f"orders{n}": [f"127.0.0.1:{port}"] for n, port in enumerate(self.ports)}
        self.cluster = Cluster(
            kind=kind,
            lease_seconds=10,
            pool_mb=1024,
            TMC_DISCOVERY__INSTANCES=json.dumps(instances),
            TMC_CHECKS__ALLOW='["127.0.0.0/8:*"]',
        )
        cluster = self.cluster
        cluster.register("coupons", *(f"orders{n}" for n in range(SERVICES)))
        settings = {"open_limit": 10_000_000, "transaction_time_ms": TRANSACTION_MS}
        for n in range(SERVICES):
            made = cluster.subscribe(
                f"drain.{n}", "coupons", owner=f"orders{n}", topic_settings={**settings, "table_index": n}
            )
        topics = {t.name: t for t in cluster.admin("ListTopics", admin_pb2.ListTopicsRequest()).topics}
        apps = {a.id: a for a in cluster.admin("ListApps", admin_pb2.ListAppsRequest()).apps}
        self.topic = [topics[f"drain.{n}"].number for n in range(SERVICES)]
        self.app = [apps[f"orders{n}"].number for n in range(SERVICES)]
        cluster.in_effect(made)
        database = cluster.databases[0]
        self.ledger_url = database.create("bench_shop")
        self.engine = sa.create_engine(database.url("tmc_cluster"), isolation_level="AUTOCOMMIT")
        self.series = Series(self.engine)
        self.shop = sa.create_engine(self.ledger_url, isolation_level="AUTOCOMMIT")
        tmc.create_tables(self.shop)
        with self.shop.connect() as connection:
            found = connection.exec_driver_sql("SELECT ledger_id FROM tmc_ledger_info").scalar_one()
            self.ledger_id = bytes(found).hex()
        self.processes: list[subprocess.Popen[str]] = []
        self._next = 1 << 40

    def run(self, *arguments: str) -> subprocess.Popen[str]:
        """An endpoint that is ready."""
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.drain_producer", *arguments], stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        self.processes.append(process)
        return process

    def ledger_endpoints(self, numbers: list[int]) -> subprocess.Popen[str]:
        pairs = [text for n in numbers for text in (str(self.ports[n]), self.cluster.keys[f"orders{n}"])]
        return self.run("ledger", self.cluster.addresses, self.ledger_url, *pairs)

    def fill(self, n: int, count: int, *, fresh_tags: bool = False) -> tuple[int, int]:
        """PREPARED messages of topic n, not due yet, nine of ten in the ledger. Returns: first number, first beyond.

        fresh_tags: each in an environment of its own.
        """
        first = self._next
        self._next += count
        table, shard = f"tmc_message_{n:02d}", f"{n:02d}"
        tag = f"CONCAT('env-', {first} + seq)" if fresh_tags else "'default'"
        series, number = self.series, f"({first} + seq)"
        ledger_id = series.hexadecimal(f"'{self.ledger_id}'")
        with self.engine.connect() as connection, self.shop.connect() as shop:
            connection.exec_driver_sql(
                f"INSERT INTO {table} (id, topic_no, producer_no, producer_tag, message_key, live, attempt_id, ledger_id,"
                " digest, state, content_type, body, delay_ms, due_ms, created_ms)"
                f" SELECT {first} + seq, {self.topic[n]}, {self.app[n]}, {tag}, CONCAT('k-', {first} + seq), 1,"
                f" {series.attempt_id(number)}, {ledger_id}, {series.digest('seq')}, 1, 'text/plain', {series.body}, 0,"
                f" 9000000000000, {series.now} FROM {series.source(count)}"
            )
            shop.exec_driver_sql(
                "INSERT INTO tmc_ledger (message_id, state, topic, message_key, attempt_id, created_ms)"
                f" SELECT CONCAT('{self.topic[n]}-{self.app[n]}-{shard}-', {first} + seq), 1, 'drain.{n}',"
                f" CONCAT('k-', {first} + seq), '', {series.now}"
                f" FROM {series.source(count)} WHERE MOD({number}, 10) <> 0"
            )
        return first, first + count

    def drain(self, n: int, span: tuple[int, int], wait_for: int | None = None) -> float:
        """Make them due and wait until all are decided. Returns: decisions per second."""
        began = self.begin(n, span)
        return self.end(n, span, began, wait_for)

    def begin(self, n: int, span: tuple[int, int]) -> int:
        with self.engine.connect() as connection:
            began = int(connection.exec_driver_sql(f"SELECT {self.series.now}").scalar_one())
            connection.exec_driver_sql(
                f"UPDATE tmc_message_{n:02d} SET due_ms = {began} WHERE id >= {span[0]} AND id < {span[1]}"
            )
        return began

    def end(self, n: int, span: tuple[int, int], began: int, wait_for: int | None = None) -> float:
        count = span[1] - span[0]

        def done() -> bool:
            time.sleep(0.2)
            return self._one(n, span, "COUNT(*)", "due_ms IS NULL") >= (wait_for or count)

        eventually(done, seconds=300)
        last = self._one(n, span, "MAX(decided_ms)", "TRUE")
        return count / ((last - began) / 1000)

    def _one(self, n: int, span: tuple[int, int], what: str, where: str) -> int:
        with self.engine.connect() as connection:
            query = f"SELECT {what} FROM tmc_message_{n:02d} WHERE id >= {span[0]} AND id < {span[1]} AND {where}"
            return int(connection.exec_driver_sql(query).scalar_one() or 0)

    def forget(self, n: int, span: tuple[int, int]) -> None:
        """Stop checking these messages."""
        with self.engine.connect() as connection:
            connection.exec_driver_sql(
                f"UPDATE tmc_message_{n:02d} SET due_ms = NULL, state = 4 WHERE id >= {span[0]} AND id < {span[1]}"
            )

    def compare(self, n: int, span: tuple[int, int]) -> tuple[int, int]:
        """Lost: committed by the producer, not by the center. Invented: the other way round."""
        lost = self._one(n, span, "COUNT(*)", "MOD(id, 10) <> 0 AND state <> 2")
        return lost, self._one(n, span, "COUNT(*)", "MOD(id, 10) = 0 AND state <> 3")

    def set_check(self, n: int, **target: Any) -> None:
        request = admin_pb2.SetTopicCheckRequest(
            topic=f"drain.{n}", targets=[admin_pb2.CheckTarget(**target)], untried=True
        )
        made = self.cluster.admin("SetTopicCheck", request)
        eventually(lambda: time.time() * 1000 >= made.effective_ms + 1_000)

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self.engine.dispose()
        self.shop.dispose()
        self.cluster.tell_errors()
        self.cluster.stop()


def others(drain: Drain, count: int, *, hangs: bool) -> float:
    """Decisions per second of nine services, while the tenth hangs or has no message to check."""
    spans = {n: drain.fill(n, count) for n in range(SERVICES)}
    if hangs:
        drain.begin(SERVICES - 1, spans[SERVICES - 1])
        time.sleep(1)
    began = {n: drain.begin(n, spans[n]) for n in range(SERVICES - 1)}
    times = [count / drain.end(n, spans[n], began[n]) for n in began]
    drain.forget(SERVICES - 1, spans[SERVICES - 1])
    return count * len(times) / max(times)


def late_ms(drain: Drain, n: int, seconds: float) -> list[int]:
    """From the end of the transaction time to the decision, for messages that arrive evenly and are never submitted."""
    center = tmc.connect(drain.cluster.addresses, app=f"orders{n}", key=drain.cluster.keys[f"orders{n}"])
    until, ledger_id = time.monotonic() + seconds, bytes.fromhex(drain.ledger_id)
    numbers = []
    while time.monotonic() < until:
        request = prepare_request(f"drain.{n}", b"x" * 256, key=f"late-{time.monotonic_ns()}", ledger_id=ledger_id)
        prepared = center.producer.prepare(request, center.timeout).result(10)
        numbers.append(int(prepared.message_id.rpartition("-")[2]))
        time.sleep(0.005)
    center.close()
    ids = ",".join(map(str, numbers))
    query = f"SELECT decided_ms - created_ms FROM tmc_message_{n:02d} WHERE id IN ({ids}) AND decided_ms IS NOT NULL"

    def waits() -> list[int]:
        with drain.engine.connect() as connection:
            return [int(waited) - TRANSACTION_MS for waited in connection.exec_driver_sql(query).scalars()]

    eventually(lambda: len(waits()) == len(numbers), seconds=30)
    return sorted(waits())


def beside(drain: Drain, messages: int, rounds: int) -> dict[str, Any]:
    """How late first checks are, and what nine services lose while a tenth hangs."""
    drain.ledger_endpoints(list(range(SERVICES - 1)))
    drain.run("hang", str(drain.ports[SERVICES - 1]))
    late = late_ms(drain, 4, 10)
    healthy, hanging = [], []
    others(drain, messages // 100, hangs=False)  # warm up
    for _ in range(rounds):
        healthy.append(others(drain, messages // 20, hangs=False))
        hanging.append(others(drain, messages // 20, hangs=True))
    return {
        "first_check_late_ms": late[int(len(late) * 0.99)],
        "first_check_late_ms_median": round(statistics.median(late)),
        "others_per_s": round(statistics.median(healthy)),
        "others_beside_a_hanging_one_per_s": round(statistics.median(hanging)),
        "others_loss_share": round(1 - statistics.median(hanging) / statistics.median(healthy), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--database", choices=KINDS, default="mariadb")
    parser.add_argument("--only", choices=("single_grpc", "single_http", "reflection"), help="one kind of check alone")
    options = parser.parse_args()
    drain = Drain(options.database)
    lost = invented = 0
    result: dict[str, Any] = {}
    try:

        def settled(n: int, count: int) -> float:
            nonlocal lost, invented
            span = drain.fill(n, count)
            rate = drain.drain(n, span)
            one, other = drain.compare(n, span)
            lost, invented = lost + one, invented + other
            return rate

        if options.only is None:
            ledger = drain.ledger_endpoints([0])
            settled(0, 2_000)  # warm up
            result["messages_per_s"] = round(settled(0, options.messages))
            ledger.kill()
        single = {"single_grpc": ("single", {"kind": "grpc"}), "single_http": ("http", {"kind": "http"})}
        single["reflection"] = ("reflection", {"kind": "reflection"})
        for n, (name, (mode, target)) in enumerate(single.items(), start=1):
            if options.only not in (None, name):
                continue
            address, part = f"127.0.0.1:{drain.ports[n]}", options.messages // 10
            options_of = {
                "http": {"path": "/verifyMessage"},
                "reflection": {
                    "method": "shop.v1.OrderService/GetOrder",
                    "request": '{"order_id": "{key}"}',
                    "verdict": "payment.status",
                    "COMMIT": "STATUS_PAID",
                    "ROLLBACK": "STATUS_CANCELLED",
                },
            }.get(target["kind"], {})
            endpoint = drain.run(mode, str(drain.ports[n]))
            drain.set_check(n, **target, address=address, options=options_of, concurrency=32)
            settled(n, 500)
            result[f"{name}_per_s"] = round(settled(n, part))
            endpoint.kill()
            drain.set_check(n, kind="grpc")
        if options.only is None:
            result |= beside(drain, options.messages, options.rounds)
        result |= {"lost": lost, "invented": invented, "server_memory_mb": round(drain.cluster.servers[0].rss_mb())}
    finally:
        drain.stop()
    print(json.dumps(result) if options.json else "\n".join(f"{key:36} {value}" for key, value in result.items()))


if __name__ == "__main__":
    main()
