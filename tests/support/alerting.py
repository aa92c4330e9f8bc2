"""Servers that send alerts to sinks which remember them."""

from __future__ import annotations

from collections.abc import Collection

from tests.support.store import StoreUnderTest
from tmc_server.domain.alerts import SETTLED_MS
from tmc_server.domain.catalog import Catalog
from tmc_server.domain.ports.alerts import Alert
from tmc_server.duties.alerting import Alerting, Grouping, Resolving
from tmc_server.store.alert_outbox import SqlAlertOutbox


class Sink:
    """Remembers. fails: it is away.  refuses: subscriptions.  dies: the server is gone after sending, before marking."""

    def __init__(self, refuses: Collection[int] = ()) -> None:
        self.got: list[Alert] = []
        self.asked: list[int] = []  # about subscriptions
        self.fails = self.dies = False
        self.refuses = refuses

    def send(self, alert: Alert, catalog: Catalog) -> None:
        self.asked.append(alert.subscription)
        if self.fails:
            raise OSError("away")
        if alert.subscription in self.refuses:
            raise OSError("refused")
        self.got.append(alert)
        if self.dies:
            raise KeyboardInterrupt

    @property
    def counts(self) -> list[int]:
        return [alert.count for alert in self.got]


class Server:
    """The duties of one server. Its claims are its own; its sinks are those of everybody."""

    def __init__(self, store: StoreUnderTest, **sinks: Sink) -> None:
        self.outbox = SqlAlertOutbox(store.database, store.shard, store.watch)
        self.grouping = Grouping(self.outbox, list(sinks))
        self.resolving = Resolving(self.outbox)
        self.alerting = {name: Alerting(self.outbox, name, sink, store.watch) for name, sink in sinks.items()}

    def turn(self) -> None:
        while self.grouping.run_once():
            pass
        self.resolving.run_once()
        self.send()

    def settle(self, store: StoreUnderTest) -> None:
        """Turns until what is over is resolved."""
        self.turn()
        store.clock.advance(SETTLED_MS / 1000)
        self.turn()

    def send(self) -> None:
        for duty in self.alerting.values():
            while duty.run_once():
                pass


def rejected(store: StoreUnderTest, count: int, error: str = "broken") -> list[int]:
    numbers = []
    for _ in range(count):
        numbers.append(store.submitted(room=1))
    store.perform(*(store.nack_of(number, 1, reject=True, error=error) for number in numbers))
    return numbers
