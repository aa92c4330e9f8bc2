"""A catalog and answers in memory, for outlets without a store."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping, Sequence

from tmc_server.domain.catalog import App, Catalog, Forward, QueueMode, Subscription, Topic
from tmc_server.domain.ports.delivery import Copy, QueueProgress, SharedProgress
from tmc_server.domain.retry import RetryPolicy

_numbers = itertools.count(1)


class SomeCatalog:
    """App orders owns topics t1, t2, ... (but for one that app shop may own); app `consumer` gets or forwards each."""

    def __init__(
        self, consumer: str, count: int = 2, forwards: Sequence[Forward] = (), other_owner_of: int = 0
    ) -> None:
        apps = {
            n: App(number=n, id=id_, service_name=id_, biz_id=id_, alert_email="", alert_phone="", key_hashes=())
            for n, id_ in ((1, "orders"), (2, consumer), (3, "shop"))
        }
        topics = {
            n: Topic(
                number=n,
                name=f"t{n}",
                owner=3 if n == other_owner_of else 1,
                default_tag="default",
                table_index=0,
                spread=1,
                transaction_time_ms=1000,
                open_limit=1000,
                effective_ms=0,
                queue_mode=QueueMode.MULTI,
            )
            for n in range(1, count + len(forwards) + 1)
        }
        subscriptions = {
            n: Subscription(
                number=n,
                topic=n,
                app=2,
                tag="default",
                policy=RetryPolicy(),
                effective_ms=0,
                removed_ms=None,
                forward=forwards[n - count - 1] if n > count else None,
            )
            for n in topics
        }
        self.current = Catalog(version=1, apps=apps, topics=topics, subscriptions=subscriptions)

    def in_use(self) -> tuple[Catalog, bool]:
        return self.current, False


class ProgressInMemory:
    """domain.ports.delivery.SharedProgress for the outlets of several server runs in one process."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, int], QueueProgress] = {}

    def of_server(self, incarnation: int) -> SharedProgress:
        return _OneServer(self.rows, incarnation)


class _OneServer:
    def __init__(self, rows: dict[tuple[str, int], QueueProgress], incarnation: int) -> None:
        self._rows = rows
        self._incarnation = incarnation

    def share(self, seen: Sequence[QueueProgress]) -> bool:
        self._rows.update({(each.queue, self._incarnation): each for each in seen})
        return True

    def of(self, queue: str) -> Mapping[int, QueueProgress]:
        return {run: seen for (name, run), seen in self._rows.items() if name == queue and run != self._incarnation}


class RecordedAnswers:
    """What became of copies."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.given_back: list[tuple[Copy, int]] = []
        self.acknowledged: list[Copy] = []
        self.refused: list[tuple[Copy, str]] = []
        self.final: list[Copy] = []
        self.complaints: list[tuple[int, str]] = []

    def give_back(self, copies: Sequence[Copy], after_ms: int) -> None:
        with self.lock:
            self.given_back += [(copy, after_ms) for copy in copies]

    def acknowledge(self, copies: Sequence[Copy]) -> None:
        with self.lock:
            self.acknowledged += copies

    def refuse(self, copies: Sequence[Copy], error: str, *, final: bool = False) -> None:
        with self.lock:
            self.refused += [(copy, error) for copy in copies]
            self.final += copies if final else ()

    def complain(self, subscription: int, detail: str) -> None:
        with self.lock:
            self.complaints.append((subscription, detail))


def a_copy(subscription: int, body: bytes = b"hello", **changes: object) -> Copy:
    """A copy of a new message of the subscription's topic."""
    values = {
        "shard": 3,
        "number": next(_numbers),
        "subscription": subscription,
        "attempt": 1,
        "topic": subscription,
        "producer": 1,
        "key": "key",
        "body": body,
        "content_type": "text/plain",
        "headers": {"color": "red"},
    }
    return Copy(**(values | changes))
