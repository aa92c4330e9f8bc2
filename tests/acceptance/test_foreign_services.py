"""Services in other languages that are killed, and servers: each order that committed has one coupon, and no other has."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.support.cluster import Cluster
from tests.support.dose import LONG
from tests.support.foreign import Process, for_go
from tests.support.go_client import built
from tmc_storm.eventually import eventually
from tmc_storm.services.ports import free_port
from tmc_storm.services.postgresql import PostgreSQL

pytestmark = [pytest.mark.services, pytest.mark.timeout(1200 if LONG else 300)]
_ORDERS = 20_000 if LONG else 1_500
_KILLS = 30 if LONG else 6  # of shop, consumer and a server in turn
_RECORDED = {"TMC_DISCOVERY__KIND": "recorded", "TMC_CHECKS__ALLOW": '["127.0.0.1/32:*"]'}


def _in_go(cluster: Cluster, engine: sa.Engine, folder: Path) -> tuple[Process, Process]:
    """The shop and the consumer."""
    driver, dsn = for_go(engine.url)
    shop = [built(), "shop", cluster.addresses, cluster.keys["orders"], driver, dsn]
    coupons = [built(), "coupons", cluster.addresses, "coupons", cluster.keys["coupons"], driver, dsn, "guest", "guest"]
    return (
        Process([*shop, f"127.0.0.1:{free_port()}", _ORDERS], folder / "shop.log"),
        Process(coupons, folder / "coupons.log"),
    )


def _names(engine: sa.Engine, table: str) -> Counter[str]:
    with engine.connect() as connection:
        return Counter(connection.scalars(sa.text(f"SELECT name FROM {table}")))


def _each_committed_order_has_one_coupon(
    cluster: Cluster,
    engine: sa.Engine,
    start: Callable[[Cluster, sa.Engine, Path], tuple[Process, Process]],
    folder: Path,
) -> None:
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE orders (name VARCHAR(20) PRIMARY KEY)"))
        connection.execute(sa.text("CREATE TABLE coupons (name VARCHAR(20) NOT NULL)"))
    cluster.register("orders", "coupons")
    settings = {"transaction_time_ms": 1000}
    cluster.in_effect(cluster.subscribe("order.paid", "coupons", topic_settings=settings))
    shop, coupons = start(cluster, engine, folder)
    for kill in range(_KILLS):
        wanted = _ORDERS * 8 // 9 * (kill + 1) // (_KILLS + 1)
        eventually(lambda most=wanted: _names(engine, "orders").total() >= most)
        victim = (shop, coupons, cluster.servers[kill % len(cluster.servers)])[kill % 3]
        victim.kill()
        victim.start()
    eventually(lambda: shop.has_said("sold"))
    eventually(lambda: "PREPARED" not in cluster.messages())
    eventually(lambda: set(cluster.consumptions()) == {"ACKED"})
    coupons.stop()
    shop.stop()
    orders = {str(number) for number in range(_ORDERS) if number % 9}
    assert _names(engine, "orders") == dict.fromkeys(orders, 1)
    assert _names(engine, "coupons") == dict.fromkeys(orders, 1)
    assert cluster.messages()["COMMITTED"] == len(orders)


if shutil.which("go"):

    def test_in_go_with_postgresql_and_rabbitmq(postgresql: PostgreSQL, tmp_path: Path) -> None:
        engine = sa.create_engine(postgresql.create("go_shop"))
        with Cluster(servers=2, **_RECORDED) as cluster:
            _each_committed_order_has_one_coupon(cluster, engine, _in_go, tmp_path)
        engine.dispose()

    def test_in_go_with_mariadb_and_built_in_delivery(tmp_path: Path) -> None:
        with Cluster(**_RECORDED, TMC_DELIVERY__KIND="builtin") as cluster:
            engine = sa.create_engine(cluster.databases[0].create("go_shop"))
            _each_committed_order_has_one_coupon(cluster, engine, _in_go, tmp_path)
            engine.dispose()
