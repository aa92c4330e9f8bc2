"""The shops of examples/shops: each pays an order, and gives one coupon for it."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.support.center import RunningCenter
from tests.support.cluster import ROOT
from tmc_storm.eventually import eventually
from tmc_storm.services.ports import free_port
from tmc_storm.services.postgresql import PostgreSQL
from tmc_storm.services.rabbitmq import RabbitMQ

_SERVE = """
import importlib, sys, wsgiref.simple_server
module = importlib.import_module(sys.argv[1])
if hasattr(module, "prepare_database"):
    module.prepare_database()
application = getattr(module, "application", None) or module.app
wsgiref.simple_server.make_server("127.0.0.1", int(sys.argv[2]), application).serve_forever()
"""


class Shop:
    """The programs of one example, with a database of their own. url: of an empty one; "": SQLite's."""

    def __init__(self, stack: str, center: RunningCenter | None, folder: Path, url: str = "") -> None:
        database = folder / f"{stack}.db"
        self._engine = sa.create_engine(url or f"sqlite:///{database}", poolclass=sa.NullPool)
        asynchronous = url.replace("psycopg", "asyncpg") or f"sqlite+aiosqlite:///{database}"
        self.module = f"examples.shops.{stack}"
        self._log = folder / f"{stack}.log"
        self.environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "TMC_ADDRESS": center.address if center is not None else "",
            "SHOP_DATABASE": str(database),
            "SHOP_URL": asynchronous if stack == "fastapi_shop" else self._engine.url.render_as_string(False),
            "CELERY_FOLDER": str(folder),
        }
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, *command: str) -> None:
        with open(self._log, "ab") as log:
            made = subprocess.Popen([sys.executable, *command], cwd=ROOT, env=self.environment, stdout=log, stderr=log)
        self._running.append(made)

    def run(self, *command: str) -> None:
        subprocess.run([sys.executable, *command], cwd=ROOT, env=self.environment, check=True, timeout=60)

    def pay_over_http(self, *server: str) -> None:
        port = free_port()
        self.start(*server, str(port))

        def paid() -> bool:
            request = urllib.request.Request(f"http://127.0.0.1:{port}/orders/7/pay", method="POST")
            try:
                with urllib.request.urlopen(request, timeout=20) as answer:
                    return bool(answer.status == 200)
            except ConnectionError:
                return False
            except urllib.error.URLError as exc:
                if isinstance(exc, urllib.error.HTTPError):
                    raise
                return False

        eventually(paid, seconds=60, describe=self.log)

    def is_prepared(self) -> bool:
        """Whether one of its programs has made the tables: on PostgreSQL, two at once get in each other's way."""
        return sa.inspect(self._engine).has_table("coupon")

    def numbers(self, table: str) -> list[int]:
        with self._engine.connect() as connection:
            try:
                return list(connection.exec_driver_sql(f"SELECT number FROM {table}").scalars())
            except (sa.exc.OperationalError, sa.exc.ProgrammingError):
                return []  # not made yet

    def log(self) -> str:
        return self._log.read_text()[-2000:]

    def stop(self) -> None:
        for process in self._running:
            process.send_signal(signal.SIGTERM)
        for process in self._running:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _sqlite3(shop: Shop) -> None:
    shop.run("-m", shop.module, "pay", "7")


def _wsgi(shop: Shop) -> None:
    shop.pay_over_http("-c", _SERVE, shop.module)


def _uvicorn(shop: Shop) -> None:
    shop.pay_over_http("-m", "uvicorn", f"{shop.module}:app", "--port")


PAY = {"sqlite3_shop": _sqlite3, "flask_shop": _wsgi, "django_shop": _wsgi, "fastapi_shop": _uvicorn}


DATABASES = ("sqlite", "postgresql")
CASES = [
    ("sqlite3_shop", "sqlite"),
    *((stack, each) for stack in sorted(PAY) if stack != "sqlite3_shop" for each in DATABASES),
]


@pytest.fixture
def url(request: pytest.FixtureRequest, stack: str, database: str) -> str:
    """The address of an empty database; "" for SQLite."""
    if database == "sqlite":
        return ""
    postgresql: PostgreSQL = request.getfixturevalue("postgresql")
    return postgresql.create(f"shop_{stack}")


@pytest.fixture
def shop(stack: str, url: str, tmp_path: Path) -> Iterator[Shop]:
    with RunningCenter(f"sqlite:///{tmp_path}/center.db", open_to_all=True) as center:
        made = Shop(stack, center, tmp_path, url)
        made.start("-m", made.module, "consume")
        center.subscribed()
        yield made
        made.stop()


@pytest.mark.parametrize(("stack", "database"), CASES)
def test_an_order_that_is_paid_gets_one_coupon(shop: Shop, stack: str) -> None:
    PAY[stack](shop)
    eventually(lambda: shop.numbers("coupon") == [7], seconds=60, describe=shop.log)
    assert shop.numbers("paid") == [7]


def test_every_example_is_run() -> None:
    there = {path.stem for path in (ROOT / "examples" / "shops").glob("*_shop.py")}
    assert there == {*PAY, "celery_shop", "library_shop", "outbox_shop", "postgresql_shop"}


@pytest.mark.parametrize("database", DATABASES)
@pytest.mark.parametrize("stack", ["celery_shop"])
def test_a_celery_task_that_was_enqueued_twice_has_one_effect(
    stack: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CELERY_BROKER", "filesystem://")
    with RunningCenter(f"sqlite:///{tmp_path}/center.db", open_to_all=True) as center:
        shop = Shop(stack, center, tmp_path, url)
        try:
            shop.start("-m", shop.module, "consume")
            eventually(shop.is_prepared, seconds=60, describe=shop.log)
            shop.start("-m", "celery", "-A", shop.module, "worker", "--pool", "solo", "-l", "ERROR")
            center.subscribed()
            shop.run("-m", shop.module, "pay", "7")
            shop.run("-m", shop.module, "pay", "8")
            eventually(lambda: shop.numbers("coupon") == [7, 8], seconds=60, describe=shop.log)
            eventually(lambda: not list((tmp_path / "tasks").glob("*.msg")), seconds=60, describe=shop.log)
            assert shop.numbers("coupon") == [7, 8]
        finally:
            shop.stop()


@pytest.mark.services
@pytest.mark.parametrize("database", DATABASES)
@pytest.mark.parametrize("stack", ["outbox_shop"])
def test_the_outbox_alone_needs_no_center(stack: str, url: str, tmp_path: Path, rabbitmq: RabbitMQ) -> None:
    shop = Shop(stack, None, tmp_path, url)
    shop.environment["SHOP_RABBITMQ"] = rabbitmq.url
    try:
        shop.start("-m", shop.module, "consume")
        eventually(shop.is_prepared, seconds=60, describe=shop.log)
        with rabbitmq.connect() as connection:
            connection.channel().queue_declare("order.paid", durable=True)
        shop.run("-m", shop.module, "pay", "7")
        eventually(lambda: shop.numbers("coupon") == [7], seconds=60, describe=shop.log)
    finally:
        shop.stop()


@pytest.mark.postgresql
def test_orders_and_coupons_on_postgresql(tmp_path: Path, postgresql: PostgreSQL) -> None:
    with RunningCenter(f"sqlite:///{tmp_path}/center.db", open_to_all=True) as center:
        shop = Shop("postgresql_shop", center, tmp_path)
        databases = {name: postgresql.create(f"shop_{name}") for name in ("orders", "coupons")}
        shop.environment |= {f"SHOP_{name.upper()}": url for name, url in databases.items()}
        engine = sa.create_engine(databases["coupons"])

        def coupons() -> list[int]:
            with engine.connect() as connection:
                return list(connection.execute(sa.text("SELECT number FROM coupon")).scalars())

        try:
            shop.start("-m", shop.module, "consume")
            center.subscribed()
            shop.run("-m", shop.module, "pay", "7")
            eventually(lambda: coupons() == [7], seconds=60, describe=shop.log)
        finally:
            shop.stop()
            engine.dispose()


def test_the_center_inside_the_program_needs_no_other_process(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "SHOP_URL": f"sqlite:///{tmp_path}/shop.db"}
    command = [sys.executable, "-m", "examples.shops.library_shop"]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, text=True) as shop:
        assert shop.stdin is not None
        try:
            for number in (7, 8):
                print(number, file=shop.stdin, flush=True)
            with closing(sqlite3.connect(tmp_path / "shop.db", timeout=30)) as connection:

                def coupons() -> list[int]:
                    try:
                        return [number for (number,) in connection.execute("SELECT number FROM coupon ORDER BY number")]
                    except sqlite3.OperationalError:
                        return []  # not made yet

                eventually(lambda: coupons() == [7, 8], seconds=60)
        finally:
            shop.stdin.close()
        assert shop.wait(60) == 0


def test_the_unit_tests_of_the_example_pass_with_the_installed_plugin() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "examples/testing"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.startswith("...")
