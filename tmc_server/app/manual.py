"""A center for users' tests: the real server on an SQLite file in memory, whose clock and duties the test drives.

See tmc_client.testing, which finds `start` under the entry point `tmc.embedded`.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tmc_server.app.embedded import EmbeddedServer
from tmc_server.app.maintenance import open_shards
from tmc_server.app.run_mode import RunMode, in_one_process
from tmc_server.config import Config
from tmc_server.delivery.stream import StreamOutlet
from tmc_server.domain.ids import MessageId
from tmc_server.domain.numbers import SubscriptionNumber
from tmc_server.domain.ports.delivery import Copy
from tmc_server.store.migrate import migrate
from tmc_server.store.scanning import due_times

IN_MEMORY = Path("/dev/shm")  # noqa: S108 - a folder of its own is made in it
_ROUNDS = 1000
# What depends on time that passes by itself, or is for operators only, does not run.
_DUTIES = {"senders", "catalog", "redelivering", "ordering", "checking", "bulk", "raising", "alerting", "alerting log"}
_LEASE_S = 5 * 365 * 86_400.0  # no advance of a test ends a lease


class ManualServer(EmbeddedServer):
    """now_ms: the clock, milliseconds since the epoch, which only `set_clock` moves."""

    def __init__(self, config: Config, folder: Path) -> None:
        self._folder = folder
        self._now_ms = round(time.time() * 1000)
        self._lock = threading.Lock()
        self._sent: dict[str, dict[SubscriptionNumber, Copy]] = {}
        self._copies: Counter[SubscriptionNumber] = Counter()
        super().__init__(
            config, RunMode(is_open=True, is_manual=True, clock=lambda: self._now_ms, on_copies=self._on_copies)
        )
        parts = self.server.parts
        self._duties = [duty for duty in (*parts.duties, *parts.findable) if duty.name in _DUTIES]

    @property
    def now_ms(self) -> int:
        return self._now_ms

    def copies_for(self, app: str) -> int:
        """Return how many copies went to the consumers of an app so far."""
        catalog = self.server.store.watch.current
        number = catalog.app_by_id[app].number if app in catalog.app_by_id else 0
        with self._lock:
            return sum(count for each, count in self._copies.items() if catalog.subscriptions[each].app == number)

    def set_clock(self, now_ms: int) -> None:
        self._now_ms = now_ms

    def run_duties(self) -> None:
        """Run all duties, here and now, until none has anything to do."""
        for _ in range(_ROUNDS):
            if not sum(duty.run_now() for duty in self._duties):
                return
        raise RuntimeError(f"the duties of the center had more to do after {_ROUNDS} rounds")

    def next_due_ms(self) -> int | None:
        """Return when the clock must stand for the next check or delivery; None: nothing waits for its time."""
        return min((due_ms for _, due_ms in self._due_times() if due_ms > self._now_ms), default=None)

    def _due_times(self) -> list[tuple[SubscriptionNumber, int]]:
        store = self.server.store
        return due_times(store.shards.catalog, store.watch.current)

    def waits_for_room(self) -> bool:
        """Return whether something is due whose consumers take nothing now, but will."""
        due = {number for number, due_ms in self._due_times() if due_ms <= self._now_ms}
        return any(self._streams.has_readers(each) and not self._streams.room(each) for each in due)

    def room(self, topic: str, app: str, tag: str) -> int:
        """Return how many copies the connected consumers of a subscription would take now."""
        catalog = self.server.store.watch.current
        found = catalog.topic_by_name.get(topic)
        if found is None or app not in catalog.app_by_id:
            return 0
        key = (found.number, catalog.app_by_id[app].number, tag or found.default_tag)
        subscription = catalog.subscription_by_name.get(key)
        return self._streams.room(subscription.number) if subscription is not None else 0

    def redeliver(self, message_id: str) -> int:
        """Hand the last copy for each subscription over once more. Returns: how many consumers took one."""
        taken = 0
        for copy in list(self._sent.get(message_id, {}).values()):
            if self._streams.reserve(copy.subscription, 1):
                self._streams.deliver([copy])
                taken += 1
        return taken

    @property
    def _streams(self) -> StreamOutlet:
        streams = self.server.parts.outlets.streams
        assert streams is not None
        return streams

    def _on_copies(self, copies: Sequence[Copy]) -> None:
        with self._lock:
            for copy in copies:
                self._copies[copy.subscription] += 1
                message_id = str(MessageId(copy.topic, copy.producer, copy.shard, copy.number))
                self._sent.setdefault(message_id, {})[copy.subscription] = copy

    def stop(self) -> None:
        """See EmbeddedServer; also removes the database."""
        if not self.is_ours:
            return
        super().stop()
        shutil.rmtree(self._folder, ignore_errors=True)


@cache
def _empty() -> bytes:
    """An SQLite file with empty tables."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "empty.db"
        shards = open_shards(in_one_process(Config(), f"sqlite:///{path}", port=0))
        migrate(shards)
        shards.close()
        return path.read_bytes()


def start() -> ManualServer:
    """Start a center with nothing in it. Raises CannotStart."""
    folder = Path(tempfile.mkdtemp(prefix="tmc-", dir=IN_MEMORY if IN_MEMORY.is_dir() else None))
    path = folder / "center.db"
    path.write_bytes(_empty())
    config = in_one_process(Config(), f"sqlite:///{path}", port=0)
    endless = config.server.model_copy(update={"lease_seconds": _LEASE_S})
    try:
        return ManualServer(config.model_copy(update={"server": endless}), folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
