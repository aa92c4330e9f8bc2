"""The service that takes orders.

usage: python -m tmc_storm.shop.producer SETTINGS.json. Runs until it is killed, or gets SIGTERM: then it finishes what it
has begun. It takes no orders once there is a file CLOSING_TIME in its folder. Its threads use what the center and the SDK offer:
transaction blocks, also of asyncio and through a submit queue, an outbox, messages without a transaction, over gRPC and HTTP,
in an order, with a delay; some transactions are rolled back, and some messages are prepared and forgotten. Answers that are
not usual go to NAME.answers, one JSON object per line.
"""

from __future__ import annotations

import contextlib
import json
import logging
import random
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

import tmc_client as tmc
from tmc_storm.shop import books
from tmc_storm.shop.orders import ChangedMind, Order
from tmc_storm.shop.over_asyncio import AsyncBlocks
from tmc_storm.shop.over_http import HttpPublisher
from tmc_storm.shop.settings import CLOSING_TIME, ShopSettings, Way, closed_file

log = logging.getLogger("tmc_storm.producer")

_PATIENCE = timedelta(seconds=10)
_FORGOTTEN = ".forgotten"
_PAUSE_S = 0.2
_DEBT_S = 30.0  # orders of so long an outage are taken after it; of a longer one, the last of them


class Shop:
    """One process of the service."""

    def __init__(self, settings: ShopSettings, center: tmc.Center) -> None:
        self._settings = settings
        self._center = center
        self._engine = books.engine_of(settings.database)
        self._outbox = tmc.Outbox(self._engine, center)
        self._open = contextlib.ExitStack()
        self._open.callback(self._outbox.close)
        self._may_think = self._engine.dialect.name != "sqlite"  # where an open transaction locks everybody out
        self._life = secrets.token_hex(4)  # no key of an earlier process comes again
        self._closed = threading.Event()
        self._stopped = threading.Event()
        self._answers = (Path(settings.folder) / f"{settings.name}.answers").open("a")
        self._lock = threading.Lock()

    def stop(self, *_: object) -> None:
        """Finish what was begun, and end."""
        self._stopped.set()
        self._closed.set()

    def run(self) -> None:
        """Take orders until closing time; answer checks and send what is in the outbox until `stop`."""
        with self._open:
            self._run()

    def _run(self) -> None:
        for topic in (books.PAID, books.SHIPPED):
            self._center.check(topic)(_without_ledger)
        if self._settings.check_address:
            self._center.checks(self._engine).serve(self._settings.check_address)
        threading.Thread(target=self._resume, name="resume", daemon=True).start()
        self._outbox.start()
        pace_s = len(self._settings.ways) / self._settings.per_second
        threads = [
            threading.Thread(target=self._trade, args=(way, pace_s, work)) for way, work in self._work_of_ways().items()
        ]
        threads.append(threading.Thread(target=self._trade_in_order, args=(pace_s,)))
        for thread in threads:
            thread.start()
        closing_time = Path(self._settings.folder) / CLOSING_TIME
        while not self._stopped.wait(_PAUSE_S):
            if closing_time.exists():
                self._closed.set()
            if not any(thread.is_alive() for thread in threads):
                closed_file(self._settings.folder, self._settings.name).touch()
        for thread in threads:
            thread.join()

    def _work_of_ways(self) -> Mapping[Way, Callable[[Order], object]]:
        """Open the doors of the center. Returns: how an order is taken in each way but ORDER."""
        settings, center = self._settings, self._center
        blocks = self._open.enter_context(contextlib.closing(AsyncBlocks(settings)))
        work: dict[Way, Callable[[Order], object]] = {
            Way.BLOCK: partial(self._block, center),
            Way.ANOTHER_BLOCK: partial(self._block, center),
            Way.ASYNC_BLOCK: blocks.send,
            Way.ANOTHER_ASYNC_BLOCK: blocks.send,
            Way.OUTBOX: self._add,
            Way.PUBLISH: partial(self._publish, self._publish_by_sdk),
        }
        if Way.HTTP in settings.ways:
            publisher = HttpPublisher(settings.http, settings.app, settings.key)
            work[Way.HTTP] = partial(self._publish, self._open.enter_context(contextlib.closing(publisher)).publish)
        if Way.QUEUE in settings.ways:
            work[Way.QUEUE] = partial(self._block, self._open.enter_context(settings.connect_through_queue()))
        return work

    def _resume(self) -> None:
        """Submit what an earlier process committed; the checks would do it, later."""
        try:
            self._center.resume(self._engine)
        except sa.exc.SQLAlchemyError as exc:
            log.warning("resume: %r", exc)
        except Exception as exc:
            self._note("resume", exc)

    def _trade(self, way: str, pace_s: float, work: Callable[[Order], object]) -> None:
        dice = random.Random(f"{self._settings.seed} {self._settings.name} {way}")
        number, due_s = 0, time.monotonic()
        while not self._closed.wait(due_s - time.monotonic()):
            due_s = max(due_s, time.monotonic() - _DEBT_S) + pace_s * dice.uniform(0.5, 1.5)
            number += 1
            order = Order(
                key=f"{self._settings.name}.{self._life}.{way}.{number}",
                topic=dice.choice((books.PAID, books.SHIPPED)),
                delay_s=dice.randint(1, 6) if dice.random() < 0.05 else 0,
                is_refused=dice.random() < 0.01,
                is_undone=dice.random() < 0.1,
                text="x" * dice.choice((0, 10, 100, 3000)),
                thinks_s=dice.uniform(1, 5) if self._may_think and dice.random() < 0.03 else 0.0,
            )
            try:
                is_forgotten = dice.random() < 0.02 and bool(self._settings.check_address)
                (self._forget if is_forgotten else work)(order)
            except ChangedMind:
                continue
            except sa.exc.SQLAlchemyError as exc:  # an answer of the database; its tables say what is true
                log.warning("%s: %r", order.key, exc)
            except Exception as exc:  # whatever the SDK raises is an answer to judge
                self._note(order.key, exc)

    def _block(self, center: tmc.Center, order: Order) -> None:
        is_slow = order.thinks_s > 0
        with Session(self._engine) as session, center.transaction(session, prepare_first=is_slow) as tx:
            tx.send(order.topic, order.body, key=order.key, delay=order.delay)
            self._closed.wait(order.thinks_s)  # perhaps for longer than its topic allows: then a check fences it
            session.execute(books.sent.insert(), order.row())
            if order.is_undone:
                raise ChangedMind

    def _add(self, order: Order) -> None:
        with Session(self._engine) as session:
            session.execute(books.sent.insert(), order.row())
            self._outbox.add(session, order.topic, order.body, key=order.key, delay=order.delay)
            if order.is_undone:
                raise ChangedMind
            session.commit()

    def _forget(self, order: Order) -> None:
        """Prepare, and never decide: the check says that it was rolled back."""
        try:
            self._center.prepare(order.topic, order.body, key=f"{order.key}{_FORGOTTEN}")
        except tmc.Decided as exc:
            if exc.reason != "ALREADY_ROLLED_BACK":  # its first answer was lost, and a check came before the repeat
                raise

    def _publish(self, publish: Callable[[Order], None], order: Order) -> None:
        """publish: returns when the message is stored."""
        self._insist_on_books(books.begun, {"message_key": order.key})
        row = order.row()  # its time before the call
        publish(order)
        self._insist_on_books(books.sent, row)

    def _publish_by_sdk(self, order: Order) -> None:
        attempt = tmc.new_attempt_id()
        self._insist(
            lambda: self._center.publish(
                order.topic,
                order.body,
                key=order.key,
                order_key=order.order_key,
                delay=order.delay,
                attempt_id=attempt,
                timeout=_PATIENCE,
            )
        )

    def _trade_in_order(self, pace_s: float) -> None:
        """Send messages of one order key, each after the answer for the one before."""
        order_key = f"{self._settings.name}.{self._life}"
        number, due_s = 0, time.monotonic()
        while not self._closed.wait(due_s - time.monotonic()):
            due_s = max(due_s, time.monotonic() - _DEBT_S) + pace_s
            number += 1
            key = f"{order_key}.order.{number}"
            order = Order(key=key, topic=books.ACCOUNT, number=number, order_key=order_key)
            try:
                self._publish(self._publish_by_sdk, order)
            except Exception as exc:
                self._note(key, exc)

    def _insist(self, call: Callable[[], object]) -> None:
        """Call until it is answered: the same attempt, so it counts once."""
        while True:
            try:
                call()
                return
            except (tmc.Unavailable, tmc.DeadlineExceeded, tmc.Overloaded):
                time.sleep(_PAUSE_S)

    def _insist_on_books(self, table: sa.Table, row: Mapping[str, Any]) -> None:
        while True:
            try:
                with self._engine.begin() as connection:
                    connection.execute(table.insert(), row)
                return
            except sa.exc.SQLAlchemyError:
                time.sleep(_PAUSE_S)

    def _note(self, key: str, exc: Exception) -> None:
        line = json.dumps({"at_s": time.time(), "key": key, "error": type(exc).__name__, "text": str(exc)[:500]})
        with self._lock:
            self._answers.write(line + "\n")
            self._answers.flush()


def _without_ledger(question: tmc.Question) -> tmc.Verdict:
    """Answer for messages that no block prepared."""
    return tmc.Verdict.ROLLBACK if question.key.endswith(_FORGOTTEN) else tmc.Verdict.UNKNOWN


def main(path: str) -> None:
    """Run until a signal."""
    logging.basicConfig(level=logging.WARNING)
    settings = ShopSettings.read(path)
    with settings.connect() as center:
        shop = Shop(settings, center)
        signal.signal(signal.SIGTERM, shop.stop)
        shop.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
