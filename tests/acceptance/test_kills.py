"""kill -9 of server, producer and consumer at random moments: the ledgers agree.

The services are those of the quickstart. 15 kills in 1,500 orders; with `--long` 50 kills in 5,000 orders. The dose can be
set: TMC_TEST_ORDERS, TMC_TEST_KILLS.
"""

from __future__ import annotations

import os
import random
import sys
from collections import Counter
from pathlib import Path

import pytest

from examples.quickstart.run import HERE, Service, committed_in_center, rows, wait_for_port, wait_for_subscription
from tests.support.dose import LONG
from tmc_storm.eventually import eventually
from tmc_storm.services.ports import free_port

ORDERS = int(os.environ.get("TMC_TEST_ORDERS", "5000" if LONG else "1500"))
KILLS = int(os.environ.get("TMC_TEST_KILLS", "50" if LONG else "15"))


@pytest.mark.takes_turns("killed services")
@pytest.mark.timeout(900)
def test_kills_lose_nothing_invent_nothing_double_nothing(tmp_path: Path) -> None:
    seed = int(os.environ.get("TMC_TEST_SEED", random.randrange(1 << 30)))
    print(f"TMC_TEST_SEED={seed}")
    dice = random.Random(seed)
    port = free_port()
    address, tmc = f"127.0.0.1:{port}", str(Path(sys.executable).parent / "tmc")
    orders_db, coupons_db = tmp_path / "orders.db", tmp_path / "coupons.db"
    center = Service(
        "center", tmc, "dev", "--port", str(port), "--data", str(tmp_path / "center.db"), log=tmp_path / "center.log"
    )
    orders = Service(
        "orders",
        sys.executable,
        str(HERE / "order_service.py"),
        address,
        f"sqlite:///{orders_db}",
        str(ORDERS),
        log=tmp_path / "orders.log",
    )
    coupons = Service(
        "coupons",
        sys.executable,
        str(HERE / "coupon_service.py"),
        address,
        f"sqlite:///{coupons_db}",
        log=tmp_path / "coupons.log",
    )
    moments = sorted(dice.sample(range(20, ORDERS - 20), KILLS))
    victims = [dice.choice([center, orders, coupons]) for _ in moments]
    try:
        center.start()
        wait_for_port(port)
        coupons.start()
        wait_for_subscription(tmc, port)
        orders.start()
        for moment, victim in zip(moments, victims, strict=True):
            eventually(lambda m=moment: _orders(orders_db) >= m or orders.process.poll() is not None, seconds=120)  # type: ignore[misc]
            victim.kill()
            victim.start()
            if victim is center:
                wait_for_port(port)
        eventually(
            lambda: orders.process.poll() == 0,
            seconds=200,
            describe=lambda: (tmp_path / "orders.log").read_text()[-2000:],
        )
        paid = {n for (n,) in rows(orders_db, "SELECT id FROM orders WHERE status = 'paid'")}
        eventually(lambda: paid <= {n for (n,) in rows(coupons_db, "SELECT order_id FROM coupons")}, seconds=60)
        given = Counter(n for (n,) in rows(coupons_db, "SELECT order_id FROM coupons"))
        submitted = {int(key.removeprefix("paid-")) for key in committed_in_center(tmc, port)}
        assert len(paid) > ORDERS * 0.8
        assert set(given) == paid == submitted
        assert set(given.values()) == {1}
        print(f"{KILLS} kills: {Counter(v.name for v in victims)}; paid {len(paid)}, coupons {sum(given.values())}")
    finally:
        for service in (orders, coupons, center):
            service.stop()


def _orders(database: Path) -> int:
    return int((rows(database, "SELECT COUNT(*) FROM orders") or [(0,)])[0][0])
