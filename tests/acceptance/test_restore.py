"""What docs/backup.md says about restored databases: of the center, of a producer, of a consumer."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

import tmc_client as tmc
from tests.support.center import RunningCenter
from tmc_client.tables import ledger
from tmc_common.protocol import types_pb2
from tmc_storm.eventually import eventually

SETTINGS: dict[str, dict[str, Any]] = {
    "dev": {"retry_interval_ms": 300, "transaction_time_ms": 200},
    "discovery": {"kind": "recorded"},
    "checks": {"allow": ["127.0.0.0/8:*"]},
}


class Service:
    """One database of its own: `paid` of a producer, or `coupon` of a consumer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open()
        tmc.create_tables(self.engine)
        with self.engine.begin() as connection:
            connection.exec_driver_sql("CREATE TABLE effect (number INTEGER)")

    def _open(self) -> None:
        self.engine = sa.create_engine(f"sqlite:///{self.path}")

    def effects(self) -> list[int]:
        with self.engine.connect() as connection:
            return list(connection.exec_driver_sql("SELECT number FROM effect ORDER BY number").scalars())

    def ledger_ids(self) -> set[str]:
        with self.engine.connect() as connection:
            return set(connection.execute(sa.select(ledger.c.message_id)).scalars())

    def back_up(self) -> None:
        self.engine.dispose()
        shutil.copy(self.path, f"{self.path}.backup")

    def restore(self) -> None:
        self.engine.dispose()
        shutil.copy(f"{self.path}.backup", self.path)
        self._open()


class Shop:
    """A center, a producer and a consumer, each with a database that can be put back."""

    def __init__(self, folder: Path) -> None:
        self._center_file = folder / "center.db"
        self.orders, self.coupons = Service(folder / "orders.db"), Service(folder / "coupons.db")
        self.calls: list[str] = []
        self.start()

    def start(self) -> None:
        self.center = RunningCenter(f"sqlite:///{self._center_file}", open_to_all=True, **SETTINGS)
        self.producer = tmc.connect(self.center.address, app="orders")
        self.producer.checks(self.orders.engine).serve()
        self._consumer: tmc.Consumer | None = None

    def stop(self) -> None:
        self.stop_consumer()
        self.producer.close()
        self.center.stop()

    def consume(self) -> None:
        self._consumer = tmc.Consumer(tmc.connect(self.center.address, app="coupons"))

        @self._consumer.listener("order.paid", inbox=tmc.SqlInbox(sessionmaker(self.coupons.engine)))
        def give(paid: dict[str, int], session: Session, message: tmc.Message) -> None:
            self.calls.append(message.id)
            session.execute(sa.text("INSERT INTO effect VALUES (:order)"), paid)

        self._consumer.start()
        self.center.subscribed()

    def stop_consumer(self) -> None:
        if self._consumer is not None:
            self._consumer.stop()
            self._consumer = None

    def pay(self, number: int) -> str:
        with Session(self.orders.engine) as session, self.producer.transaction(session) as tx:
            session.execute(sa.text("INSERT INTO effect VALUES (:number)"), {"number": number})
            tx.send("order.paid", {"order": number}, key=f"paid-{number}")
        return tx.messages[0].message_id

    def back_up_center(self) -> None:
        self.stop()
        shutil.copy(self._center_file, f"{self._center_file}.backup")
        self.start()

    def copy_running_center(self) -> None:
        Path(f"{self._center_file}.backup").unlink(missing_ok=True)
        with (
            closing(sqlite3.connect(self._center_file)) as source,
            closing(sqlite3.connect(f"{self._center_file}.backup")) as target,
        ):
            source.backup(target)

    def restore_center(self) -> None:
        self.stop()
        shutil.copy(f"{self._center_file}.backup", self._center_file)
        self.start()


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    made = Shop(tmp_path)
    made.consume()
    made.pay(1)
    eventually(lambda: made.coupons.effects() == [1])
    yield made
    made.stop()
    made.orders.engine.dispose()
    made.coupons.engine.dispose()


def test_a_center_of_yesterday_repeats_what_was_done_since_and_misses_what_is_newer(shop: Shop) -> None:
    shop.stop_consumer()
    shop.pay(2)
    shop.back_up_center()
    shop.consume()
    eventually(lambda: shop.coupons.effects() == [1, 2])
    newer = shop.pay(3)
    eventually(lambda: shop.coupons.effects() == [1, 2, 3])
    shop.restore_center()
    shop.consume()
    eventually(lambda: _is_acked(shop, "paid-2"))
    assert shop.coupons.effects() == [1, 2, 3], "the inbox knows the second copy"
    with pytest.raises(tmc.NotFound):
        shop.producer.get_message(topic="order.paid", key="paid-3")
    assert newer in shop.orders.ledger_ids(), "the ledger names what the center has lost"
    later = shop.pay(4)
    assert later not in {newer, *shop.calls[:-1]}, "numbers are not given out again"


def test_a_message_that_was_decided_after_the_backup_is_decided_again_by_its_check(shop: Shop) -> None:
    """Prepared before the backup, submitted after it: the ledger has the row."""
    with Session(shop.orders.engine) as session, shop.producer.transaction(session, prepare_first=True) as tx:
        tx.send("order.paid", {"order": 2}, key="paid-2")
        assert shop.producer.flush()
        shop.copy_running_center()
        session.execute(sa.text("INSERT INTO effect VALUES (2)"))
    eventually(lambda: shop.coupons.effects() == [1, 2])
    shop.restore_center()
    shop.consume()
    eventually(lambda: _is_acked(shop, "paid-2"), seconds=60)
    assert shop.coupons.effects() == [1, 2]


def test_a_producer_of_yesterday_has_announced_what_it_does_not_know(shop: Shop) -> None:
    shop.orders.back_up()
    shop.pay(2)
    eventually(lambda: shop.coupons.effects() == [1, 2])
    shop.orders.restore()
    assert shop.orders.effects() == [1]
    with pytest.raises(tmc.KeyCommitted):
        shop.pay(2)
    assert shop.orders.effects() == [1], "nothing is half done"


def test_a_consumer_of_yesterday_gets_back_what_is_replayed(shop: Shop) -> None:
    shop.coupons.back_up()
    message_id = shop.pay(2)
    eventually(lambda: shop.coupons.effects() == [1, 2])
    eventually(lambda: _is_acked(shop, "paid-2"))
    shop.stop_consumer()
    shop.coupons.restore()
    shop.consume()
    assert shop.coupons.effects() == [1]
    shop.center.run_admin("replay", message_id, "coupons", "--reason", "restored from a backup")
    eventually(lambda: shop.coupons.effects() == [1, 2])


def _is_acked(shop: Shop, key: str) -> bool:
    detail = shop.center.detail("order.paid", key)
    return [each.state for each in detail.consumptions] == [types_pb2.CONSUMPTION_STATE_ACKED]
