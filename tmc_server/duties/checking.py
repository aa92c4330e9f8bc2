"""Check undecided messages with their producers, in pages, each service at its own pace.

A page is claimed before it is asked: its messages get the number of this check and are not due again until the answer
can have arrived. One thread reads and claims; workers ask the pages. `pacing` decides how many workers a service and
an app may have and which services rest, so that a hanging service holds at most two workers, a hanging app eight, and
nothing else is affected. A service that could not be asked rests (1 s doubling to 60 s); checks due meanwhile are
postponed, uncounted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

from tmc_common.eventlog import EventLog
from tmc_server.domain.catalog import App, Catalog
from tmc_server.domain.checks import (
    CheckAnswer,
    CheckReason,
    CheckTarget,
)
from tmc_server.domain.numbers import Shard
from tmc_server.domain.ports.catalog import CatalogSource
from tmc_server.domain.ports.checks import Asking, Checked, DueChecks, Pending, Recorded
from tmc_server.duties.pacing import WORKERS, Pacing, Service, ServiceName, in_turn
from tmc_server.metrics import METRICS

log = EventLog("tmc.checking")

_ALERT_AGAIN_S = 3_600
_ROUNDS = 8  # of calls at once in a page of single questions
_PAGE_SPARE_S = 1.0
_LOOK_AGAIN_S = 2.0
_CLAIM_SPARE_MS = 2_000
_BEHIND_OTHERS_MS = 100  # what was not in a failed page is asked about first when the service's rest is over
_PERHAPS_STOPPED = {  # by a question of the page
    CheckReason.FAILED,
    CheckReason.UNREACHABLE,
    CheckReason.TIMED_OUT,
    CheckReason.NOT_ASKED,
}
_CROWDED_HOLD_MS = 15_000  # out of the others' way, and not written every second
_UNSEEN: tuple[float, list[Service]] = (0.0, [])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Page:
    """What goes to one service in one go."""

    work: DueChecks
    shard: Shard
    app: App
    target: CheckTarget
    service: Service
    pending: Sequence[Pending]

    @property
    def target_share(self) -> CheckTarget:
        """The target, with its concurrency divided among the pages of the service."""
        return replace(self.target, concurrency=max(1, self.target.concurrency // self.service.most))


class Checking:
    """One database's checks. wake: called when a worker has become free.

    monotonic: seconds, for pauses.  run: how a page is run, by default in a worker thread.
    """

    def __init__(
        self,
        work: DueChecks,
        asking: Asking,
        catalog: CatalogSource,
        wake: Callable[[], None] = lambda: None,
        monotonic: Callable[[], float] = time.monotonic,
        run: Callable[[Callable[[], None]], object] | None = None,
    ) -> None:
        self._work = work
        self._asking = asking
        self._catalog = catalog
        self._wake = wake
        self._monotonic = monotonic
        self._pool = None if run else ThreadPoolExecutor(WORKERS, thread_name_prefix="tmc-check")
        self._run = run or self._pool.submit  # type: ignore[union-attr]
        self._lock = threading.Lock()
        self._pacing = Pacing()
        # By shard and topic: whose messages were due when it was last looked at, and when that was.
        self._seen: dict[tuple[Shard, int], tuple[float, list[Service]]] = {}

    def run_once(self) -> bool:
        """Begin as many pages as services have room for. Returns: there may be more."""
        if self._pacing.full:
            return False  # the end of a page wakes us
        catalog = self._catalog.current
        places, more = self._in_turn(catalog)
        moved = False
        for shard, topic in places:
            moved |= self._turn(catalog, shard, topic)
        return moved or more

    def _in_turn(self, catalog: Catalog) -> tuple[list[tuple[Shard, int]], bool]:
        """Shards and topics with due messages that may be asked about, fair between the topics' owners."""
        waiting: dict[int, list[tuple[Shard, int]]] = {}
        for shard, number in self._work.due():
            topic = catalog.topics.get(number)
            if topic is not None and not self._all_busy(shard, number):
                waiting.setdefault(topic.owner, []).append((shard, number))
        for places in waiting.values():
            places.sort(key=lambda place: self._seen.get(place, _UNSEEN)[0])
        return in_turn(waiting, lambda owner: self._pacing.app(owner).turn)

    def stop(self) -> None:
        """Finish the pages that are under way: each has its time."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _turn(self, catalog: Catalog, shard: Shard, topic: int) -> bool:
        moved = False
        seen: list[Service] = []
        resting: dict[int, tuple[int, list[Pending]]] = {}  # by service: for how many milliseconds
        self._seen[shard, topic] = (self._monotonic(), seen)
        parts, crowded = self._by_service(catalog, shard, topic)
        registered = {each.default_tag for each in catalog.topics.values()}
        for name, target, pending in parts:
            service = self._service(name, target, registered=name.tag in registered)
            seen.append(service)
            if pause_ms := service.pause_ms(self._monotonic()):
                resting.setdefault(id(service), (pause_ms, []))[1].extend(pending)
            elif self._pacing.may_begin(service):
                moved |= self._begin(shard, catalog.apps[name.app], target, service, pending)
            elif crowded and not service.does_well:  # or it would block other services' checks in this topic
                resting.setdefault(id(service), (_CROWDED_HOLD_MS, []))[1].extend(pending)
        if resting:
            seen.clear()  # nobody knows yet what was behind them
        for held_ms, pending in resting.values():
            moved |= bool(self._work.hold(shard, pending, held_ms, f"{CheckReason.NOT_ASKED.name}: its service rests"))
        return moved

    def _all_busy(self, shard: Shard, topic: int) -> bool:
        """Return whether all checks due here, as of a moment ago, belong to services that may not begin another page."""
        looked, seen = self._seen.get((shard, topic), _UNSEEN)
        recent = self._monotonic() - looked < _LOOK_AGAIN_S
        return bool(seen) and recent and not any(self._pacing.may_begin(service) for service in seen)

    def _by_service(
        self, catalog: Catalog, shard: Shard, topic: int
    ) -> tuple[list[tuple[ServiceName, CheckTarget, list[Pending]]], bool]:
        """Due checks by service, those of the longest-waiting app first; and whether there may be more.

        A target that the topic does not have cannot be asked, so its checks rest.
        """
        targets = catalog.topics[topic].checks.targets
        parts: dict[tuple[int, str, str], list[Pending]] = {}
        limit = 4 * max((self._longest_page(each) for each in targets.values()), default=100)
        due = self._work.read(shard, topic, limit)
        for each in due:
            parts.setdefault((each.producer, each.producer_tag, each.target), []).append(each)
        found = []
        for (app, tag, named), pending in parts.items():
            target = targets.get(named) or CheckTarget(name=named, kind="")
            options = tuple(sorted(target.options.items()))
            name = ServiceName(
                app=app, tag=tag, kind=target.kind, address=target.address, options=options, tls=target.tls
            )
            found.append((name, target, pending))
        found.sort(key=lambda part: self._pacing.app(part[0].app).turn)
        return found, len(due) >= limit

    def _service(self, name: ServiceName, target: CheckTarget, *, registered: bool) -> Service:
        with self._lock:
            return self._pacing.service(
                name, self._longest_page(target), target.concurrency, registered=registered, now=self._monotonic()
            )

    def _begin(self, shard: Shard, app: App, target: CheckTarget, service: Service, pending: Sequence[Pending]) -> bool:
        until_ms = _claim_ms(target)
        claimed = self._work.claim(shard, pending[: min(service.size, self._longest_page(target))], until_ms)
        if not claimed:
            return False
        due = {each.number: each.state.due_ms or 0 for each in pending}
        for each in claimed:
            if each.state.attempt == 1:
                late_ms = (each.state.due_ms or 0) - until_ms - due[each.number]
                METRICS.first_check_late_seconds.observe(late_ms / 1000)
        with self._lock:
            self._pacing.begin(service)
        page = _Page(work=self._work, shard=shard, app=app, target=target, service=service, pending=claimed)
        self._run(partial(self.ask, page))
        return True

    def ask(self, page: _Page) -> None:
        """Ask, record, and let the next page begin. Called in a worker."""
        try:
            self._ask(page)
        except Exception as exc:  # noqa: BLE001 - the claim ends by itself, then they are asked again
            log.warning(
                "check_answers_lost", "answers of %d checks were lost, they are asked again: %s", len(page.pending), exc
            )
        finally:
            with self._lock:
                self._pacing.end(page.service)
            self._wake()

    def _ask(self, page: _Page) -> None:
        catalog = self._catalog.current
        topic = catalog.topics[page.pending[0].topic]
        questions = [each.question(page.app, topic.name) for each in page.pending]
        began, asked = time.monotonic(), self._monotonic()
        tag, seconds = page.pending[0].producer_tag, _page_s(page.target)
        answers = self._asking.ask(page.target_share, page.app, tag, questions, seconds)
        METRICS.check_seconds.labels(page.target.kind).observe(time.monotonic() - began)
        pause_ms = self._learn(page, answers, asked)
        recorded = page.work.record(
            page.shard,
            [Checked(each, answer, pause_ms) for each, answer in zip(page.pending, answers, strict=True)],
            self._monotonic() >= page.service.alert_again,
        )
        if recorded.overdue:
            page.service.alert_again = self._monotonic() + _ALERT_AGAIN_S
        count(topic.name, answers, recorded)

    def _longest_page(self, target: CheckTarget) -> int:
        return target.concurrency * _ROUNDS if self._asking.asks_singly(target) else target.batch

    def _learn(self, page: _Page, answers: Sequence[CheckAnswer], asked: float) -> int:
        """Update the pacing of the service. Returns: milliseconds until unreached checks are due again.

        asked: when the page began.
        """
        now = self._monotonic()
        with self._lock:
            pause_ms = 0
            if any(answer.service_responded for answer in answers):
                self._pacing.answered(page.service, page.pending[0].producer_tag, self._longest_page(page.target), now)
            else:
                timed_out = answers[0].reason is CheckReason.TIMED_OUT
                self._pacing.failed(page.service, now, timed_out=timed_out, asked=asked)
                pause_ms = page.service.rest_ms + _BEHIND_OTHERS_MS
            if len(answers) > 1 and all(answer.reason in _PERHAPS_STOPPED for answer in answers):
                self._pacing.shorten(page.service, len(answers))
            return pause_ms


def count(topic: str, answers: Sequence[CheckAnswer], recorded: Recorded) -> None:
    """Metrics of one page."""
    for answer in answers:
        METRICS.checked.labels(topic, answer.verdict.name.lower(), answer.reason.name.lower()).inc()
    if recorded.committed:
        METRICS.submitted.labels(topic).inc(recorded.committed)
    if recorded.rolled_back:
        METRICS.rolled_back.labels(topic).inc(recorded.rolled_back)


def _page_s(target: CheckTarget) -> float:
    """Time limit of a page, in seconds; questions not asked by then go into a later page."""
    return 2 * target.deadline_ms / 1000 + _PAGE_SPARE_S


def _claim_ms(target: CheckTarget) -> int:
    """Return how long a page stays claimed: its time limit, plus time to store the answers."""
    return round(_page_s(target) * 1000) + _CLAIM_SPARE_MS
