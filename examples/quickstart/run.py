"""The quickstart: a center, two services with databases of their own, orders, kills, and a comparison of the ledgers.

usage: run.py [--orders 300] [--keep] [--port 0]        exit code 0: the databases agree
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent


class Service:
    """A process that can be killed and started again."""

    def __init__(self, name: str, *command: str, log: Path) -> None:
        self.name = name
        self._command = command
        self._log = log
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        environment = os.environ | {"TMC_DEV__RETRY_INTERVAL_MS": "1000"}
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log, env=environment)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.kill()


def rows(database: Path, query: str) -> list[tuple]:
    """Read a service's own database; empty while the service has not made its tables."""
    if not database.exists():
        return []
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=10) as connection:
        try:
            return connection.execute(query).fetchall()
        except sqlite3.OperationalError:
            return []


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for_port(port: int, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    sys.exit(f"the center did not come up on port {port}; its log is in the folder named above")


def admin(tmc: str, port: int, *arguments: str) -> dict:
    """What an operator sees."""
    command = [tmc, "admin", "--address", f"127.0.0.1:{port}", *arguments]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def wait_for_subscription(tmc: str, port: int, seconds: float = 30) -> None:
    """Until the coupon service is known to the center."""
    end = time.monotonic() + seconds
    while not admin(tmc, port, "list-subscriptions").get("subscriptions"):
        if time.monotonic() > end:
            sys.exit("the coupon service did not subscribe; its log is in the folder named above")


def committed_in_center(tmc: str, port: int) -> set[str]:
    """The keys of all submitted messages, as an operator sees them."""
    keys: set[str] = set()
    token = ""
    while True:
        paging = ("--page-size", "1000", "--page-token", token)
        answer = admin(tmc, port, "list-messages", "order.paid", "--state", "COMMITTED", "--json", *paging)
        keys |= {message["key"] for message in answer.get("messages", [])}
        token = answer.get("next_page_token", "")
        if not token:
            return keys


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--orders", type=int, default=300)
    parser.add_argument("--keep", action="store_true", help="leave the center running")
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="tmc-quickstart-"))
    port = options.port or free_port()
    tmc = str(Path(sys.executable).parent / "tmc")
    orders_db, coupons_db = folder / "orders.db", folder / "coupons.db"
    address = f"127.0.0.1:{port}"
    center = Service(
        "center", tmc, "dev", "--port", str(port), "--data", str(folder / "center.db"), log=folder / "center.log"
    )
    orders = Service(
        "order service",
        sys.executable,
        str(HERE / "order_service.py"),
        address,
        f"sqlite:///{orders_db}",
        str(options.orders),
        log=folder / "orders.log",
    )
    coupons = Service(
        "coupon service",
        sys.executable,
        str(HERE / "coupon_service.py"),
        address,
        f"sqlite:///{coupons_db}",
        log=folder / "coupons.log",
    )
    print(f"center, order service and coupon service start; databases and logs in {folder}")
    agreed = False
    try:
        center.start()
        wait_for_port(port)
        coupons.start()
        wait_for_subscription(tmc, port)  # an app that is not subscribed yet receives nothing
        orders.start()
        run_with_kills(options.orders, center, orders, coupons, orders_db, port)
        agreed = report(orders_db, coupons_db, tmc, port, began)
    finally:
        orders.stop()
        coupons.stop()
        if not options.keep:
            center.stop()
    if options.keep:
        print(f"the center runs at {address}, process {center.process.pid}; stop it with: kill {center.process.pid}")
    return 0 if agreed else 1


def run_with_kills(count: int, center: Service, orders: Service, coupons: Service, orders_db: Path, port: int) -> None:
    """Kill -9 each service in turn at fixed points of the work, and start it again."""
    schedule = [(count * (i + 1) // 6, victim) for i, victim in enumerate([orders, coupons, center, coupons, orders])]
    end = time.monotonic() + 120
    while orders.process.poll() is None or schedule:
        done = (rows(orders_db, "SELECT COUNT(*) FROM orders") or [(0,)])[0][0]
        if schedule and done >= schedule[0][0]:
            victim = schedule.pop(0)[1]
            victim.kill()
            print(f"  killed the {victim.name} at order {done}")
            victim.start()
            if victim is center:
                wait_for_port(port)
        if time.monotonic() > end or (orders.process.poll() not in (None, 0)):
            sys.exit("the order service did not finish; its log is in the folder named above")
        time.sleep(0.005)


def report(orders_db: Path, coupons_db: Path, tmc: str, port: int, began: float) -> bool:
    """Wait until every paid order has its coupon, then compare the three."""
    status = Counter(state for (state,) in rows(orders_db, "SELECT status FROM orders"))
    paid = {order for (order,) in rows(orders_db, "SELECT id FROM orders WHERE status = 'paid'")}
    end = time.monotonic() + 60
    while True:
        coupons = Counter(order for (order,) in rows(coupons_db, "SELECT order_id FROM coupons"))
        if paid <= set(coupons) or time.monotonic() > end:
            break
        time.sleep(0.05)
    submitted = {int(key.removeprefix("paid-")) for key in committed_in_center(tmc, port)}
    lost = len(paid - set(coupons)) + len(paid - submitted)
    invented = len(set(coupons) - paid) + len(submitted - paid)
    doubled = sum(count - 1 for count in coupons.values())
    never = status["cancelled"] + status["interrupted"]
    print(
        f"paid {len(paid)}, submitted {len(submitted)}, rolled back or never prepared {never}, "
        f"coupons {sum(coupons.values())}, lost {lost}, invented {invented}, doubled {doubled}"
    )
    agreed = not (lost or invented or doubled) and len(paid) > 0
    if not agreed:
        print(
            f"paid without coupon: {sorted(paid - set(coupons))}, coupon without payment: {sorted(set(coupons) - paid)}"
        )
    print("the two databases agree" if agreed else "THE TWO DATABASES DO NOT AGREE")
    print(f"{time.monotonic() - began:.1f} seconds")
    print(
        "next: read examples/quickstart/order_service.py and docs/sdk.md, or run `.venv/bin/tmc dev` and write your own"
    )
    return agreed


if __name__ == "__main__":
    sys.exit(main())
