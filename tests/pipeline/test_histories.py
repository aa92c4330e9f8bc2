"""A simulated month of honest operation in random order: nobody is accused, and increments find what a whole run finds."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from pyspark.sql import SparkSession

import tmc_client as tmc
from tests.pipeline.running import FETCH
from tests.support.clock import ManualClock
from tests.support.dose import LONG
from tests.support.store import POLICY, StoreUnderTest, sqlite_store
from tmc_client import cleaning
from tmc_client.tables import inbox, ledger, ledger_info
from tmc_common.headers import REPLAY_OF, REPLAY_TO
from tmc_pipeline.archive.contents import Archive
from tmc_pipeline.archive.job import HOUR_MS, Archiving
from tmc_pipeline.archive.rewriting import Rewriting
from tmc_pipeline.archive.verify import Verifying
from tmc_pipeline.center import CenterTables, databases_of
from tmc_pipeline.files import HadoopFolder
from tmc_pipeline.reconcile.job import Reconciliation, Summary
from tmc_pipeline.reconcile.ledgers import Ledgers
from tmc_pipeline.reconcile.verdicts import CANCELED, DISCREPANCIES
from tmc_pipeline.settings import LedgerSource
from tmc_server.archives.folder import ArchiveFolder
from tmc_server.config import StoreConfig
from tmc_server.domain.ids import MessageId
from tmc_server.domain.message import digest_of
from tmc_server.domain.ports.catalog import NewSubscription
from tmc_server.duties.retention import Retention
from tmc_server.store.retention import ClosedMessages

pytestmark = pytest.mark.timeout(1200)
DAY_MS = 86_400_000
_LEDGER_ID = b"l" * 16
_DAYS = 24 if LONG else 16
_BEHIND_MS = 3 * HOUR_MS  # the consumer's clock


class Month:
    """A center, a producer with its ledger, a consumer with its inbox, and operators. seed: of all choices."""

    def __init__(self, store: StoreUnderTest, folder: Path, seed: int) -> None:
        self.store = store
        self.dice = random.Random(seed)
        self.urls = {name: f"sqlite:///{folder}/{name}.db" for name in ("orders", "coupons")}
        self.engines = {name: sa.create_engine(url) for name, url in self.urls.items()}
        for engine in self.engines.values():
            tmc.create_tables(engine)
        with self.engines["orders"].begin() as connection:
            connection.execute(ledger_info.update().values(ledger_id=_LEDGER_ID))
        self.undecided: list[Any] = []
        self.under_way: list[int] = []
        self.failed: list[int] = []
        self.acked: list[int] = []
        self.canceled = 0
        self.replays = 0

    def id_of(self, number: int) -> str:
        return str(MessageId(self.store.topic.number, self.store.orders.number, self.store.shard, number))

    def a_step(self) -> None:
        self.store.clock.advance(self.dice.uniform(60, 7_200))
        steps = [self.send] * 6 + [self.ack] * 6 + [self.prepare, self.decide, self.roll_back, self.fail, self.give_up]
        self.dice.choice([*steps, self.reactivate, self.cancel, self.replay, self.subscribe_again])()

    def send(self) -> None:
        prepared = self.store.prepared(ledger_id=_LEDGER_ID)
        self._commit(prepared)

    def prepare(self) -> None:
        self.undecided.append(self.store.prepared(ledger_id=_LEDGER_ID))

    def decide(self) -> None:
        if self.undecided:
            self._commit(self.undecided.pop(0))

    def roll_back(self) -> None:
        prepared = self.store.prepared(ledger_id=_LEDGER_ID)
        self.store.perform(self.store.rollback_of(prepared.number))
        if self.dice.random() < 0.5:
            self._note(prepared, state=2)

    def _commit(self, prepared: Any) -> None:
        self._note(prepared, state=1)
        self.store.outlet.room = 1
        self.store.perform(self.store.submit_of(prepared.number))
        self.store.outlet.room = 0
        self.under_way.append(prepared.number)

    def _note(self, prepared: Any, state: int) -> None:
        values = {
            "message_id": self.id_of(prepared.number),
            "state": state,
            "topic": "order.paid",
            "message_key": prepared.key,
            "attempt_id": prepared.attempt_id,
            "created_ms": self.store.clock(),
            "settled_ms": self.store.clock(),
        }
        with self.engines["orders"].begin() as connection:
            connection.execute(ledger.insert().values(values))

    def _one(self, among: list[int]) -> int | None:
        return among.pop(self.dice.randrange(len(among))) if among else None

    def _effect(self, number: int) -> None:
        at = self.store.clock() - _BEHIND_MS
        row = {"subscriber": "coupons.default", "message_id": self.id_of(number), "received_ms": at}
        with self.engines["coupons"].begin() as connection:
            connection.execute(inbox.insert().values(row))

    def ack(self) -> None:
        number = self._one(self.under_way)
        if number is not None:
            self._effect(number)
            self.store.clock.advance(self.dice.uniform(0, 5))
            self.store.perform(self.store.ack_of(number))
            self.acked.append(number)

    def fail(self) -> None:
        """Fail one attempt of a delivery; the delivery goes on."""
        if self.under_way:
            self.store.perform(self.store.nack_of(self.dice.choice(self.under_way), 1))

    def give_up(self) -> None:
        number = self._one(self.under_way)
        if number is not None:
            self.store.perform(self.store.nack_of(number, 1, reject=True))
            self.failed.append(number)

    def reactivate(self) -> None:
        number = self._one(self.failed)
        if number is not None:
            self.store.perform(self.store.reactivate_of(number))
            self.under_way.append(number)

    def cancel(self) -> None:
        number = self._one(self.failed if self.dice.random() < 0.5 else self.under_way)
        if number is not None:
            (answer,) = self.store.perform(self.store.cancel_of(number))
            self.canceled += not isinstance(answer, Exception)

    def replay(self) -> None:
        """To the one subscriber, by an operator, of a message that is in the center yet."""
        if not self.acked:
            return
        original, subscription = self.id_of(self.acked[-1]), self.store.subscription.number
        self.replays += 1
        headers = {REPLAY_OF: original, REPLAY_TO: str(subscription)}
        prepared = self.store.a_prepare(
            f"replay.{original}.{subscription}.{self.replays}",
            publish=True,
            headers=headers,
            digest=digest_of(b"hello", "text/plain", headers, 0),
        )
        self.store.perform(prepared)
        self.under_way.append(prepared.number)

    def subscribe_again(self) -> None:
        """Removed, which cancels what is under way, and registered again a while later."""
        if self.dice.random() > 0.3:
            return
        store = self.store
        removed = store.catalog_store.remove_subscription("test", "order.paid", "coupons", "")
        store.catalog_store.finish_removal("test", removed.number)
        store.watch.run_once()
        store.clock.advance(300)
        store.redeliver(room=0)
        self.under_way.clear()
        self.failed.clear()
        store.clock.advance(300)
        store.subscription = store.catalog_store.register_subscription(
            "test", NewSubscription(topic="order.paid", app="coupons", tag="", policy=POLICY)
        )
        store.watch.run_once()
        store.clock.advance(300)


class Pipeline:
    """Its jobs by the center's clock, and the retention duty."""

    def __init__(self, spark: SparkSession, month: Month, folder: Path) -> None:
        self.month = month
        config = StoreConfig.model_validate({"catalog": f"sqlite:///{folder}/center.db"})
        self.spark, self.folder, self.config = spark, folder, config
        self.archive = Archive(spark, f"{folder}/archive", self.tables)

    @property
    def tables(self) -> CenterTables:
        """With the names of now."""
        return CenterTables(self.spark, databases_of(self.config), FETCH)

    def archived(self) -> None:
        Archiving(self.spark, self.tables, self.archive, 60_000, HOUR_MS).run(self.month.dice.random() < 0.2)

    def compacted(self) -> None:
        Rewriting(self.spark, self.tables, self.archive).compact()

    def removed(self) -> None:
        store = self.month.store
        lists = ArchiveFolder(f"{self.folder}/archive", center=self.archive.owner)
        duty = Retention([ClosedMessages(store.database, store.leases)], lists, DAY_MS, 1000, lambda _: None)
        while duty.run_once():
            pass

    def cleaned(self) -> None:
        tmc.clean_inbox(self.month.engines["coupons"], timedelta(days=7))
        tmc.clean_ledger(self.month.engines["orders"], timedelta(days=7))

    def reconciled(self, since: str | None) -> tuple[Summary, set[tuple[str, str, str]]]:
        """The summary, and message, subscriber and verdict of each discrepancy."""
        sources = {
            name: LedgerSource.model_validate({"app": name, "url": url}) for name, url in self.month.urls.items()
        }
        summary = Reconciliation(
            spark=self.spark,
            center=self.tables,
            archive=self.archive,
            ledgers=Ledgers(self.spark, FETCH),
            folder=HadoopFolder(self.spark, f"{self.folder}/reconcile"),
            tolerance_ms=60_000,
        ).run([sources["orders"]], [sources["coupons"]], since)
        details = self.spark.read.parquet(f"{summary.path}/details.parquet")
        rows = details.where(details.verdict.isin(*DISCREPANCIES)).collect()
        return summary, {(row.message_id, row.subscriber, row.verdict) for row in rows}


@pytest.fixture
def month(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Month]:
    clock = ManualClock(time.time_ns() // 1_000_000 - (_DAYS + 1) * DAY_MS)
    store = sqlite_store(tmp_path, clock)
    monkeypatch.setattr(CenterTables, "now_ms", lambda _: clock())
    monkeypatch.setattr(cleaning.time, "time_ns", lambda: (clock() - _BEHIND_MS) * 1_000_000)
    yield Month(store, tmp_path, request.param)
    store.close()


@pytest.mark.takes_turns("days")
@pytest.mark.parametrize("month", range(20) if LONG else [1], indirect=True, ids="seed-{}".format)
def test_a_month_of_honest_operation_accuses_nobody(spark: SparkSession, month: Month, tmp_path: Path) -> None:
    """And each increment finds what a run over everything finds, whatever was cleaned, removed, or repaired meanwhile."""
    pipeline = Pipeline(spark, month, tmp_path)
    began = month.store.clock()
    since: str | None = None
    for day in range(1, _DAYS + 1):
        while month.store.clock() < began + day * DAY_MS:
            month.a_step()
        if day % 4 == 0:
            pipeline.archived()
            pipeline.removed()
        if day % 8 == 0:
            if day > 8:
                pipeline.cleaned()
            month.store.clock.advance(600)
            summary, found = pipeline.reconciled(since)
            assert found == set()
            assert all(each["holds"] for each in summary.relations)
            since = "last"
    pipeline.compacted()
    assert Verifying(pipeline.archive).run().problems == ()
    whole, found = pipeline.reconciled(None)
    assert found == set()
    assert whole.verdicts[CANCELED] >= month.canceled * 0.9  # one may be of a subscription that is removed since
