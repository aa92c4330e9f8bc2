"""Services in other languages that are killed, and servers: each order that committed has one coupon, and no other has."""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

import tmc_client as tmc
from tests.support.cluster import Cluster
from tests.support.dose import LONG, in_turn
from tests.support.foreign import Process, for_go
from tests.support.go_client import built, has_go
from tmc_storm.eventually import eventually
from tmc_storm.services.ports import free_port
from tmc_storm.services.postgresql import PostgreSQL

pytestmark = [pytest.mark.services, pytest.mark.timeout(1200 if LONG else 480)]
_ORDERS = 20_000 if LONG else 400
_KILLS = 30 if LONG else 6  # of shop, servers and consumer in turn
EXAMPLES = Path(__file__).parents[2] / "examples"
_RECORDED = {"TMC_DISCOVERY__KIND": "recorded", "TMC_CHECKS__ALLOW": '["127.0.0.1/32:*"]'}


Shop = Callable[[Cluster, sa.URL], list[object]]


def _in_go(cluster: Cluster, database: sa.URL) -> list[object]:
    return [built(), "shop", cluster.addresses, cluster.keys["orders"], *for_go(database), _checks(), _ORDERS]


def _in_node(cluster: Cluster, database: sa.URL) -> list[object]:
    folder = EXAMPLES / "node"
    subprocess.run(["npm", "install", "--no-audit", "--no-fund"], cwd=folder, check=True, timeout=600)
    where = f"postgresql://{database.username}@{database.host}:{database.port}/{database.database}"
    return ["node", folder / "shop.js", cluster.addresses, cluster.keys["orders"], where, _checks(), _ORDERS]


def _in_java(cluster: Cluster, database: sa.URL) -> list[object]:
    folder = EXAMPLES / "java"
    subprocess.run(["mvn", "-q", "-B", "package"], cwd=folder, check=True, timeout=600)
    where = f"jdbc:postgresql://{database.host}:{database.port}/{database.database}?user={database.username}"
    classes = f"{folder}/target/shop-0.jar:{folder}/target/lib/*"
    return ["java", "-cp", classes, "shop.Shop", cluster.addresses, cluster.keys["orders"], where, _checks(), _ORDERS]


def _checks() -> str:
    return f"127.0.0.1:{free_port()}"


@contextmanager
def _coupons(cluster: Cluster, engine: sa.Engine) -> Iterator[None]:
    """A consumer in this process, with our SDK."""
    tmc.create_tables(engine)
    with tmc.connect(cluster.addresses, app="coupons", key=cluster.keys["coupons"]) as center:
        consumer = tmc.Consumer(center)

        @consumer.listener("order.paid", inbox=tmc.SqlInbox(sessionmaker(engine)))
        def give(body: str, session: Session) -> None:
            session.execute(sa.text("INSERT INTO coupons VALUES (:name)"), {"name": body})

        with consumer:
            yield


def _names(engine: sa.Engine, table: str) -> Counter[str]:
    with engine.connect() as connection:
        return Counter(connection.scalars(sa.text(f"SELECT name FROM {table}")))


def _each_order_has_one_coupon(cluster: Cluster, url: str, shop_of: Shop, folder: Path, consumer: bool) -> None:
    """consumer: in Go, too, and killed; else in this process."""
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE orders (name VARCHAR(20) PRIMARY KEY)"))
        connection.execute(sa.text("CREATE TABLE coupons (name VARCHAR(20) NOT NULL)"))
    cluster.register("orders", "coupons")
    settings = {"transaction_time_ms": 1000}
    cluster.in_effect(cluster.subscribe("order.paid", "coupons", topic_settings=settings))
    with ExitStack() as stack:
        shop = Process(shop_of(cluster, engine.url), folder / "shop.log")
        stack.callback(shop.kill)
        victims = [shop, *cluster.servers]
        if consumer:
            command = [built(), "coupons", cluster.addresses, "coupons", cluster.keys["coupons"], *for_go(engine.url)]
            coupons = Process([*command, "guest", "guest"], folder / "coupons.log")
            stack.callback(coupons.stop)
            victims.append(coupons)
        else:
            stack.enter_context(_coupons(cluster, engine))
        for kill in range(_KILLS):
            wanted = _ORDERS * 8 // 9 * (kill + 1) // (_KILLS + 1)
            eventually(lambda most=wanted: _names(engine, "orders").total() >= most, describe=shop.said)
            victim = victims[kill % len(victims)]
            victim.kill()
            victim.start()
        eventually(lambda: "all is sold" in shop.said(), describe=shop.said)
        eventually(lambda: "PREPARED" not in cluster.messages())
        eventually(lambda: set(cluster.consumptions()) == {"ACKED"})
    orders = {str(number) for number in range(_ORDERS) if number % 9}
    assert _names(engine, "orders") == dict.fromkeys(orders, 1)
    assert _names(engine, "coupons") == dict.fromkeys(orders, 1)
    assert cluster.messages()["COMMITTED"] == len(orders)
    engine.dispose()


if has_go():

    @pytest.mark.parametrize("delivery", in_turn("go", ["rabbitmq, and PostgreSQL", "builtin, and MariaDB"]))
    def test_in_go(postgresql: PostgreSQL, tmp_path: Path, delivery: str) -> None:
        kind, _, database_name = delivery.partition(", and ")
        with Cluster(servers=1 if kind == "builtin" else 2, TMC_DELIVERY__KIND=kind, **_RECORDED) as cluster:
            database = cluster.databases[0] if database_name == "MariaDB" else postgresql
            _each_order_has_one_coupon(cluster, database.create("go_shop"), _in_go, tmp_path, consumer=True)


_EXAMPLES = [pytest.param(shop, id=tool) for shop, tool in ((_in_node, "npm"), (_in_java, "mvn")) if shutil.which(tool)]
if _EXAMPLES:

    @pytest.mark.parametrize("shop", in_turn("examples", _EXAMPLES))
    def test_the_examples(postgresql: PostgreSQL, tmp_path: Path, shop: Shop) -> None:
        with Cluster(servers=2, **_RECORDED) as cluster:
            url = postgresql.create(f"shop{shop.__name__}")
            _each_order_has_one_coupon(cluster, url, shop, tmp_path, consumer=False)
