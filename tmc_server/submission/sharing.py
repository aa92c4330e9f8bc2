"""Which submit queues this server reads: each is looked after by the server that looks after one of the shards."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from tmc_common.eventlog import EventLog
from tmc_common.submission import dead_queue_of
from tmc_server.domain.catalog import App
from tmc_server.domain.numbers import Shard
from tmc_server.domain.placement import table_index_for
from tmc_server.domain.ports.catalog import CatalogSource
from tmc_server.errors import TmcError
from tmc_server.metrics import METRICS
from tmc_server.submission.answers import Settled, settled
from tmc_server.submission.intake import Desk, Intake, Outcome
from tmc_server.submission.letters import Letter, Place

log = EventLog("tmc.submission")

_LOG_S = 60.0
_ALERT_MINUTES = 10

RaiseAlert = Callable[[str, int, str, int], None]
"""(kind, topic, detail, minutes): tell the owner of a topic, once in that time."""


class Reader(Protocol):
    """Reads the queues of one broker."""

    def want(self, places: Collection[Place]) -> None:
        """Read these and no others. From any thread; does not block."""

    def stop(self) -> None:
        """Finish what is under way, then end. Blocks."""


class Sharing:
    """A duty. held: shards that this server looks after.  shared: those whose queues are shared by that.

    others: readers whose broker shares the work itself.
    """

    def __init__(
        self,
        catalog: CatalogSource,
        held: Callable[[], Collection[Shard]],
        shared: Sequence[Reader],
        others: Sequence[Reader],
    ) -> None:
        self._catalog = catalog
        self._held = held
        self._shared = shared
        self._others = others

    def run_once(self) -> bool:
        """Return False: nothing is left to do."""
        places = [
            Place(app=app.id, tag=queue.tag)
            for app in self._catalog.current.apps.values()
            for queue in app.submit_queues
            if not app.disabled
        ]
        held = self._held()
        mine = [place for place in places if table_index_for(place.queue) in held]
        for reader in self._shared:
            reader.want(mine)
        for reader in self._others:
            reader.want(places)
        return False

    def stop(self) -> None:
        """Blocks."""
        for reader in (*self._shared, *self._others):
            reader.stop()


class Counter:
    """Makes the intakes of one broker's queues, and keeps count of what becomes of their letters."""

    def __init__(self, broker: str, desk: Desk, raise_alert: RaiseAlert) -> None:
        self._broker = broker
        self._desk = desk
        self._raise_alert = raise_alert
        self._unsaid: dict[str, tuple[int, str]] = {}  # how many of each queue, and why the last one was
        self._next_line = 0.0

    def open_intake(self, place: Place, done: Callable[[Sequence[Settled]], None]) -> Intake:
        """done: called on the loop with what is done."""

        def settle(outcomes: Sequence[tuple[Letter, Outcome]]) -> None:
            several = settled(place.app, outcomes)
            self._count(place, several)
            done(several)

        return Intake(place, self._desk, settle)

    def _count(self, place: Place, several: Sequence[Settled]) -> None:
        refused = [(each, each.refusal) for each in several if each.refusal is not None]
        METRICS.submission_taken.labels(self._broker).inc(len(several) - len(refused))
        for _, error in refused:
            METRICS.submission_refused.labels(self._broker, error.reason).inc()
        for each, error in [(each, error) for each, error in refused if not each.reply][:1]:
            self._complain(place, each.letter, error)
        if refused:
            self._unsaid[place.queue] = (self._unsaid.get(place.queue, (0, ""))[0] + len(refused), str(refused[0][1]))
        now = time.monotonic()
        if self._unsaid and now >= self._next_line:
            for queue, (count, why) in self._unsaid.items():
                log.warning("submission_refused", "%d messages of %s were refused: %s", count, queue, why)
            self._unsaid.clear()
            self._next_line = now + _LOG_S

    def _complain(self, place: Place, letter: Letter, error: TmcError) -> None:
        """Alert the owner of the topic that it is about, or of the app's first one."""
        catalog = self._desk.catalog.current
        app: App | None = catalog.app_by_id.get(place.app)
        own = [topic for topic in catalog.topics.values() if app is not None and topic.owner == app.number]
        named = [topic for topic in own if topic.name == letter.attributes.get("type")]
        for topic in (named or own)[:1]:
            dead = dead_queue_of(place.app)
            detail = f"a message of {place.queue} was refused and is in {dead}: {error.reason}: {error.sentence}"
            self._raise_alert("submission refused", topic.number, detail, _ALERT_MINUTES)
