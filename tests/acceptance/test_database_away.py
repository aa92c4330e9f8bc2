"""The center's database killed under load: UNAVAILABLE meanwhile, nothing answered is lost, recovery without a helping hand."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest

import tmc_client as tmc
from benchmarks.serving import TOPIC, serving
from tmc_common.protocol import types_pb2
from tmc_storm.eventually import eventually
from tmc_storm.services.mariadb import MariaDB
from tmc_storm.services.postgresql import PostgreSQL


@pytest.mark.parametrize(
    "kind", [pytest.param(MariaDB, marks=pytest.mark.mariadb), pytest.param(PostgreSQL, marks=pytest.mark.postgresql)]
)
def test_a_database_is_killed_and_comes_back(kind: type[MariaDB] | type[PostgreSQL]) -> None:
    server = kind()
    try:
        with serving(server.url("tmc_away")) as served:
            center = tmc.connect(served.address, app="orders", key=served.orders_key)
            answered: list[str] = []
            stop = threading.Event()

            def produce(worker: int) -> None:
                count = 0
                while not stop.is_set():
                    key = f"{worker}-{count}"
                    try:
                        center.submit(
                            center.prepare(TOPIC, key.encode(), key=key, timeout=timedelta(seconds=30)),
                            timeout=timedelta(seconds=30),
                        )
                    except tmc.KeyInProgress:
                        continue
                    answered.append(key)
                    count += 1

            workers = [threading.Thread(target=produce, args=(i,)) for i in range(8)]
            for worker in workers:
                worker.start()
            eventually(lambda: len(answered) > 200)
            server.kill()
            with pytest.raises(tmc.Unavailable):
                tmc.connect(served.address, app="orders", key=served.orders_key).publish(
                    TOPIC, b"", key="meanwhile", timeout=timedelta(seconds=1)
                )
            before = len(answered)
            server.start()
            eventually(lambda: len(answered) > before + 200, seconds=60)
            stop.set()
            for worker in workers:
                worker.join(60)
            for key in answered:
                found = center.get_message(topic=TOPIC, key=key)
                assert (found.state, found.body) == (types_pb2.MESSAGE_STATE_COMMITTED, key.encode())
            center.close()
    finally:
        server.stop()
