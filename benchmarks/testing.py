"""How long a user's unit test takes with tmc_client.testing: a producer's block, a consumer with an inbox, one message.

test_ms: one such test, center and all, median after the first of the process.
first_test_ms: that first one, with what a process does once, without imports.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.orm import Session

import tmc_client as tmc
from tmc_client.testing import ManualCenter

_TESTS = 40


def _one_test(path: Path) -> None:
    engine = sa.create_engine(f"sqlite:///{path}")
    tmc.create_tables(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE coupon (number INTEGER)")
    with ManualCenter() as center:
        consumer = tmc.Consumer(center.connect(app="coupons"))

        @consumer.listener("order.paid", inbox=tmc.SqlInbox(lambda: Session(engine)))
        def give(paid: dict[str, int], session: Session) -> None:
            session.execute(sa.text("INSERT INTO coupon VALUES (:order)"), paid)

        center.consume(consumer)
        with Session(engine) as session, center.connect(app="orders").transaction(session) as tx:
            tx.send("order.paid", {"order": 7}, key="paid-7")
        center.assert_nothing_open()
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT number FROM coupon").scalar_one() == 7
    engine.dispose()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    took = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(_TESTS):
            began = time.perf_counter()
            _one_test(Path(folder) / f"{number}.db")
            took.append((time.perf_counter() - began) * 1000)
    figures = {"test_ms": round(statistics.median(took[1:])), "first_test_ms": round(took[0])}
    print(json.dumps(figures) if options.json else "\n".join(f"{name} {value}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
