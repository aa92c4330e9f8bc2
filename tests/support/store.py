"""A store as the server wires it, driven operation by operation: real tables, real statements, a manual clock."""

from __future__ import annotations

import atexit
import itertools
import os
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from tests.support.clock import ManualClock
from tmc_common.headers import ORDER_KEY
from tmc_server.domain.catalog import NewApp, NewTopic
from tmc_server.domain.checks import CheckPolicy, CheckTarget
from tmc_server.domain.consumption import ConsumptionState, QueueLook
from tmc_server.domain.ids import IdGenerator, MessageId
from tmc_server.domain.message import MessageState, digest_of
from tmc_server.domain.numbers import NO_SUBSCRIPTION, RunNumber
from tmc_server.domain.operations import (
    Ack,
    Answer,
    Cancel,
    Decide,
    DeliverNow,
    Done,
    Extend,
    GiveBack,
    Nack,
    Operation,
    Prepare,
    Reactivate,
    Stored,
)
from tmc_server.domain.ordering import OrderMode
from tmc_server.domain.placement import shard_of
from tmc_server.domain.ports.catalog import NewSubscription
from tmc_server.domain.ports.checks import Asking
from tmc_server.domain.ports.delivery import Claimed, Copy
from tmc_server.domain.ports.ordering import FIRST_LINE, Repaired
from tmc_server.domain.retry import RetryPolicy
from tmc_server.duties.checking import Checking
from tmc_server.store.alert_outbox import SqlAlertOutbox
from tmc_server.store.batch import ShardWriter
from tmc_server.store.catalog import CatalogStore
from tmc_server.store.catalog_watch import CatalogWatch
from tmc_server.store.due import SqlDueWork
from tmc_server.store.due_checks import SqlCheckStore, SqlDueChecks
from tmc_server.store.engines import Database, ShardMap, repeated
from tmc_server.store.leases import ShardLeases
from tmc_server.store.line_repair import SqlLineWork
from tmc_server.store.migrate import migrate
from tmc_server.store.outcomes import Wait
from tmc_server.store.tables import METADATA, database_identity, meta, shard_map, shard_tables
from tmc_server.store.transaction import Hook, no_hook
from tmc_storm.services.mariadb import MariaDB
from tmc_storm.services.postgresql import PostgreSQL


class RecordingOutlet:
    """An outlet that remembers. room: copies it takes; None: endless."""

    def __init__(self, room: int | None = None) -> None:
        self.room = room
        self.delivered: list[Copy] = []
        self.came: dict[int, int] = {}
        self.looks_like: QueueLook | None = QueueLook()
        self.reserved = 0
        self._lock = threading.Lock()

    def reserve(self, subscription: int, wanted: int) -> int:
        with self._lock:
            granted = wanted if self.room is None else min(self.room, wanted)
            if self.room is not None:
                self.room -= granted
            self.reserved += granted
            return granted

    def release(self, subscription: int, count: int) -> None:
        with self._lock:
            self.reserved -= count
            if self.room is not None:
                self.room += count

    def deliver(self, copies: Sequence[Copy]) -> None:
        with self._lock:
            self.reserved -= len(copies)
            self.delivered.extend(copies)

    def drained_until(self, subscription: int, tried_ms: int) -> None:
        self.came[subscription] = tried_ms

    def look(self, subscription: int) -> QueueLook | None:
        return self.looks_like


DONE = Done(NO_SUBSCRIPTION)
"""Equal to every Done."""

INCARNATION = 7
POLICY = RetryPolicy(interval_ms=10_000, max_retry=3)


class StoreUnderTest:
    """Shards in one database, one topic, one subscriber (more by `subscribe`)."""

    def __init__(self, database: Database, clock: ManualClock) -> None:
        self.database = database
        self.clock = clock
        self.catalog_store = CatalogStore(database, change_delay_ms=0)
        self.monotonic = time.monotonic  # a test may set another
        self.watch = CatalogWatch(self.catalog_store, monotonic=lambda: self.monotonic())
        self.orders, self.orders_key = self.catalog_store.register_app(
            "test", NewApp(id="orders", service_name="orders", biz_id="orders")
        )
        self.catalog_store.register_app("test", NewApp(id="coupons", service_name="coupons", biz_id="coupons"))
        self.topic = self.catalog_store.register_topic(
            "test",
            NewTopic(
                name="order.paid",
                owner="orders",
                default_tag="default",
                table_index=5,
                spread=1,
                transaction_time_ms=10_000,
                open_limit=1_000_000,
            ),
        )
        self.subscription = self.catalog_store.register_subscription(
            "test", NewSubscription(topic="order.paid", app="coupons", tag="", policy=POLICY)
        )
        self.watch.run_once()
        self.outlet = RecordingOutlet(room=0)
        self.ids = IdGenerator(clock)
        self.ids.lease(1, 0, 1 << 62)
        self.writer = self.new_writer()
        self.leases = self.new_leases()
        self.due = SqlDueWork(self.writer, self.leases, self.watch)
        self.lines = SqlLineWork(self.writer, self.leases, self.watch)
        self.checks = SqlDueChecks(self.writer, self.leases, self.watch)
        self.desk = SqlCheckStore(lambda _shard: self.writer)
        self.alerts = SqlAlertOutbox(database, self.shard, self.watch)
        self._numbers = itertools.count(1)
        self._handlers_begin = False
        self._begun = 0

    @property
    def shard(self) -> int:
        return shard_of(self.topic.table_index, self.topic.spread, "any")

    def new_writer(self, hook: Hook = no_hook, incarnation: int | None = INCARNATION) -> ShardWriter:
        return ShardWriter(self.database, self.watch, self.outlet, lambda: incarnation, hook)

    def new_leases(self, incarnation: int = INCARNATION, lease_ms: int = 1 << 50) -> ShardLeases:
        """Leases on the topic's shard, taken."""
        leases = ShardLeases(self.database, lambda: [self.shard], lambda: incarnation, lambda: [incarnation], lease_ms)
        leases.run_once()
        return leases

    def close(self) -> None:
        self.database.close()

    # -- building operations --------------------------------------------------------------------------------------

    def a_prepare(
        self, key: str | None = None, body: bytes = b"hello", publish: bool = False, **changes: Any
    ) -> Prepare:
        """A message of `order.paid`; every call is a new attempt unless attempt_id says otherwise."""
        delay_ms = changes.pop("delay_ms", 0)
        values: dict[str, Any] = {
            "shard": self.shard,
            "app": self.orders.number,
            "number": self.ids.next(),
            "topic": self.topic,
            "producer_tag": "default",
            "key": key or f"key-{next(self._numbers)}",
            "attempt_id": os.urandom(16),
            "digest": digest_of(body, "text/plain", {}, delay_ms),
            "body": body,
            "content_type": "text/plain",
            "headers": {},
            "delay_ms": delay_ms,
            "ledger_id": None,
            "publish": publish,
        }
        return Prepare(**(values | changes))

    def again(self, prepared: Prepare, body: bytes | None = None) -> Prepare:
        """The same attempt once more, as a repeat of the call makes it: with a new number."""
        return self.a_prepare(
            prepared.key,
            body or prepared.body,
            prepared.publish,
            attempt_id=prepared.attempt_id,
            delay_ms=prepared.delay_ms,
        )

    def submit_of(self, number: int) -> Decide:
        return self._decide(commit=True, number=number)

    def rollback_of(self, number: int) -> Decide:
        return self._decide(commit=False, number=number)

    def decide_attempt(self, prepared: Prepare, commit: bool) -> Decide:
        return self._decide(commit=commit, number=None, key=prepared.key, attempt_id=prepared.attempt_id)

    def _decide(self, **fields: Any) -> Decide:
        return Decide(shard=self.shard, app=self.orders.number, topic=self.topic, producer_tag="default", **fields)

    def _delivery(self, number: int) -> dict[str, Any]:
        return {"shard": self.shard, "app": 0, "number": number, "subscription": self.subscription.number}

    def ack_of(self, number: int, attempt: int = 0) -> Ack:
        return Ack(**self._delivery(number), attempt=attempt)

    def nack_of(self, number: int, attempt: int, **changes: Any) -> Nack:
        return Nack(**self._delivery(number), attempt=attempt, policy=self.policy, **{"error": "broken", **changes})

    def extend_of(self, number: int, attempt: int, extend_ms: int = 60_000, run: int = 0) -> Extend:
        return Extend(**self._delivery(number), attempt=attempt, extend_ms=extend_ms, run=RunNumber(run))

    def give_back_of(self, number: int, attempt: int, after_ms: int = 0, tried_ms: int | None = None) -> GiveBack:
        return GiveBack(**self._delivery(number), attempt=attempt, after_ms=after_ms, tried_ms=tried_ms)

    def reactivate_of(self, number: int) -> Reactivate:
        return Reactivate(**self._delivery(number), actor="operator", reason="test")

    def deliver_now_of(self, number: int) -> DeliverNow:
        return DeliverNow(**self._delivery(number), actor="operator", reason="test")

    def cancel_of(self, number: int) -> Cancel:
        return Cancel(**self._delivery(number), actor="operator", reason="test")

    def stored(self, number: int | None, state: MessageState) -> Stored:
        """The answer about a message of `orders`."""
        message_id = MessageId(self.topic.number, self.orders.number, self.shard, number) if number else None
        return Stored(message_id=message_id, state=state)

    # -- doing ----------------------------------------------------------------------------------------------------

    def perform(self, *operations: Operation, writer: ShardWriter | None = None) -> list[Answer]:
        """Run them as one batch, as a lane would; tombstones and locked rows included."""
        pending: list[Operation] = list(operations)
        answers: dict[Operation, Answer] = {}
        buried: set[Operation] = set()
        with self.database.engine.connect() as connection:
            for _ in range(2000):
                if not pending:
                    break
                batch, pending = pending, []
                outcomes = repeated(partial((writer or self.writer).run, connection, self.shard, batch, buried))
                for operation, outcome in zip(batch, outcomes, strict=True):
                    if isinstance(outcome, Wait):
                        pending.append(operation)
                        if outcome is Wait.BURIED:
                            buried.add(operation)
                    else:
                        answers[operation] = outcome
        return [answers[operation] for operation in operations]

    def prepared(self, **changes: Any) -> Prepare:
        operation = self.a_prepare(**changes)
        self.perform(operation)
        return operation

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """The shard's messages are not where they were, as while it moves; see store/moving.py."""
        name = shard_tables(self.shard).message.name
        self._rename(name, f"{name}_moved")
        try:
            yield
        finally:
            self._rename(f"{name}_moved", name)

    def _rename(self, table: str, name: str) -> None:
        with self.database.transaction() as connection:
            for statement in self.database.dialect.renaming({table: name}):
                connection.exec_driver_sql(statement)

    def submitted(self, room: int = 0, **changes: Any) -> int:
        """A committed message. room: copies that the outlet takes at that moment."""
        operation = self.prepared(**changes)
        self.outlet.room = room
        self.perform(self.submit_of(operation.number))
        self.outlet.room = 0
        self._begin_handlers()
        return operation.number

    def begin_handlers(self) -> None:
        """From now on a handler begins each copy that is handed over, and those that were, and never answers."""
        self._handlers_begin = True
        self._begin_handlers()

    def _begin_handlers(self) -> None:
        while self._handlers_begin and len(self.outlet.delivered) > self._begun:
            copy = self.outlet.delivered[self._begun]
            self._begun += 1
            which = {"shard": copy.shard, "app": 0, "number": copy.number, "subscription": copy.subscription}
            self.perform(Extend(**which, attempt=copy.attempt, extend_ms=1, run=RunNumber(1)))

    def redeliver(self, room: int | None = None, limit: int = 200, due: SqlDueWork | None = None) -> Claimed:
        """One pass over everything due, with so much room at the outlet."""
        moved = Claimed()
        self.outlet.room = room
        look = self.outlet.look(self.subscription.number)
        assert look is not None
        for shard, subscription in (due or self.due).due():
            for exhausted_only in (False, True):
                moved += (due or self.due).claim(shard, subscription, limit, look, exhausted_only)
        self.outlet.room = 0
        self._begin_handlers()
        return moved

    def set_checks(self, retry: RetryPolicy, *targets: CheckTarget) -> None:
        """How the topic is checked from now on."""
        policy = CheckPolicy({target.name: target for target in targets or (CheckTarget(name="", kind="grpc"),)}, retry)
        self.catalog_store.set_topic_check("test", self.topic.name, policy)
        self.watch.run_once()
        self.topic = self.watch.current.topics[self.topic.number]

    def checking(self, asking: Asking, due: SqlDueChecks | None = None) -> Checking:
        """The duty over this store: pages run where they are begun, pauses go by the manual clock."""
        seconds = lambda: self.clock() / 1000  # noqa: E731
        return Checking(due or self.checks, asking, self.watch, monotonic=seconds, run=lambda job: job())

    def take_ordered_topic(self, order: OrderMode = OrderMode.STRICT) -> None:
        """From now on messages go to a topic with order keys, and its one subscription."""
        self.topic = self.catalog_store.register_topic(
            "test",
            NewTopic(
                name="account.moved",
                owner="orders",
                default_tag="default",
                table_index=self.topic.table_index,
                spread=1,
                transaction_time_ms=10_000,
                open_limit=1_000_000,
                ordered=True,
            ),
        )
        self.set_order(order)

    @property
    def policy(self) -> RetryPolicy:
        return self.watch.current.subscriptions[self.subscription.number].policy

    def set_order(self, order: OrderMode, policy: RetryPolicy = POLICY) -> None:
        """The order mode and the policy of the subscription from now on."""
        new = NewSubscription(topic=self.topic.name, app="coupons", tag="", policy=policy, order=order)
        self.subscription = self.catalog_store.register_subscription("test", new)
        self.watch.run_once()

    def set_policy(self, policy: RetryPolicy) -> None:
        """The policy of the subscription from now on."""
        self.set_order(self.subscription.order, policy)

    def a_keyed(self, order_key: str, **changes: Any) -> Prepare:
        return self.a_prepare(headers={ORDER_KEY: order_key}, **changes)

    def sent(self, order_key: str, room: int = 0, **changes: Any) -> int:
        """A committed message of the ordered topic. room: copies that the outlet takes at that moment."""
        return self.submitted(room, headers={ORDER_KEY: order_key}, **changes)

    def repaired(self) -> Repaired:
        """All lines of the subscription were examined, two at a time."""
        total, after = Repaired(after=None), FIRST_LINE
        while after is not None:
            page = self.lines.repair(self.shard, self.subscription.number, after, 2)
            total, after = total + page, page.after
        return total

    def removed(self) -> None:
        """The subscription of `coupons` is removed for good, and this server knows it."""
        leaving = self.catalog_store.remove_subscription("test", self.topic.name, "coupons", "")
        self.catalog_store.finish_removal("test", leaving.number)
        self.watch.run_once()

    def alerted(self, kind: str) -> list[Any]:
        return [alert for alert in self.alerts.unsent(10_000) if alert.kind == kind]

    # -- looking --------------------------------------------------------------------------------------------------

    def row(self, number: int, subscription: int = 0) -> Any:
        """The consumption of a subscription; 0: of `coupons`."""
        table = shard_tables(self.shard).consumption
        query = sa.select(table).where(
            table.c.message_id == number, table.c.subscription_no == (subscription or self.subscription.number)
        )
        with self.database.reading() as connection:
            return connection.execute(query).one_or_none()

    def message_row(self, number: int) -> Any:
        table = shard_tables(self.shard).message
        with self.database.reading() as connection:
            return connection.execute(sa.select(table).where(table.c.id == number)).one_or_none()

    def state_of(self, number: int) -> MessageState | None:
        row = self.message_row(number)
        return None if row is None else MessageState(row.state)

    def consumption_state(self, number: int) -> ConsumptionState:
        return ConsumptionState(self.row(number).state)

    def messages_with_key(self, key: str) -> list[Any]:
        table = shard_tables(self.shard).message
        with self.database.reading() as connection:
            return list(connection.execute(sa.select(table).where(table.c.message_key == key).order_by(table.c.id)))

    def delivered_attempts(self, number: int) -> list[int]:
        return [copy.attempt for copy in self.outlet.delivered if copy.number == number]

    def counting(self) -> StatementCounter:
        return StatementCounter({self.database.engine, self.database.readers})


class StatementCounter:
    """Counts what goes to the database inside a `with` block. statements: without BEGIN, COMMIT, and session settings."""

    def __init__(self, engines: set[sa.Engine]) -> None:
        self._engines = engines
        self.statements: deque[str] = deque()
        self.commits = 0

    def _executed(self, _conn: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        if not statement.startswith("BEGIN"):
            self.statements.append(statement)

    def _committed(self, _conn: Any) -> None:
        self.commits += 1

    def __enter__(self) -> StatementCounter:
        for engine in self._engines:
            sa.event.listen(engine, "before_cursor_execute", self._executed)
            sa.event.listen(engine, "commit", self._committed)
        return self

    def __exit__(self, *_: object) -> None:
        for engine in self._engines:
            sa.event.remove(engine, "before_cursor_execute", self._executed)
            sa.event.remove(engine, "commit", self._committed)


@cache
def migrated_sqlite() -> Path:
    """A file with empty tables, made once per run."""
    path = Path(tempfile.mkdtemp(prefix="tmc-sqlite-")) / "center.db"
    atexit.register(shutil.rmtree, path.parent, ignore_errors=True)
    database = Database(f"sqlite:///{path}")
    migrate(ShardMap(database, [database] * 32))
    database.close()  # what the write-ahead log holds goes into the file
    return path


def sqlite_store(directory: Path, clock: ManualClock | None = None) -> StoreUnderTest:
    clock = clock or ManualClock()
    shutil.copy(migrated_sqlite(), directory / "center.db")
    return StoreUnderTest(Database(f"sqlite:///{directory}/center.db", clock=clock), clock)


_migrated: set[str] = set()
_WRITTEN_BY_MIGRATE = {meta, database_identity, shard_map}


def server_store(
    server: MariaDB | PostgreSQL, name: str = "tmc_contract", clock: ManualClock | None = None
) -> StoreUnderTest:
    """The tables are made once per server and emptied for every store."""
    clock = clock or ManualClock()
    database = Database(server.url(name), clock=clock)
    sa.event.listen(database.engine, "connect", _may_idle)
    if database.url.render_as_string() not in _migrated:
        migrate(ShardMap(database, [database] * 32))
        _migrated.add(database.url.render_as_string())
    with database.transaction() as connection:
        has_rows = connection.execute(_has_rows()).one()._mapping
        for name in has_rows:
            if has_rows[name]:
                connection.execute(METADATA.tables[name].delete())
    return StoreUnderTest(database, clock)


def _may_idle(connection: Any, _record: object) -> None:
    """Undo the limit of our sessions: a machine that stands still for seconds ends no test's transaction."""
    limit = "idle_in_transaction_session_timeout" if hasattr(connection, "pgconn") else "idle_transaction_timeout"
    with connection.cursor() as cursor:
        cursor.execute(f"SET SESSION {limit} = 0")
    connection.commit()


@cache
def _has_rows() -> sa.Select[Any]:
    """For each table whether it has rows: one statement instead of one per table, of which a test fills a few."""
    for shard in range(32):
        shard_tables(shard)
    tables = [table for table in METADATA.tables.values() if table not in _WRITTEN_BY_MIGRATE]
    return sa.select(*(sa.exists().select_from(table).label(table.name) for table in tables))


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Start `work` in a thread. Returns: the thread and the list that gets its result or exception."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(work())
        except Exception as exc:  # noqa: BLE001 - handed to the test
            result.append(exc)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, result
