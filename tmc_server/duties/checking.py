"""Ask the producers of undecided messages, in pages, each service at its own pace.

A page is claimed before it is asked: its messages carry the number of this check and are not due again before the answer can
be there. One thread reads and claims; pages are asked by workers, at most two at a time for one service, so that a hanging
service keeps two workers and nothing else. A service that could not be asked rests for a while (1 s doubling to 60 s); what
is due meanwhile moves on uncounted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

from tmc_server.domain.catalog import App, Catalog
from tmc_server.domain.checks import (
    FIRST_BACK_OFF_MS,
    LONGEST_BACK_OFF_MS,
    CheckAnswer,
    CheckReason,
    CheckTarget,
)
from tmc_server.domain.ports import Asking, CatalogSource, Checked, DueChecks, Pending, Settled
from tmc_server.metrics import METRICS

log = logging.getLogger("tmc.checking")

_PAGES_AT_ONCE = 2
_WORKERS = 64
_ROUNDS = 8  # pages of single questions are as long as so many rounds
_PAGE_SPARE_S = 1.0
_LOOK_AGAIN_S = 2.0
_CLAIM_SPARE_MS = 2_000
_LEAST_HOLD_MS = 15_000  # those that were asked try the service again; the others' rows are not written every second
_MOST_SERVICES = 1_000  # remembered
_SINGLE_KINDS = {"http", "reflection"}


@dataclass(frozen=True, slots=True)
class ServiceName:
    """Whoever is asked together: one app in one environment, by one way of asking."""

    app: int
    tag: str
    kind: str
    address: str
    options: tuple[tuple[str, str], ...]
    tls: bool


@dataclass(slots=True)
class _Service:
    """How one service does. size: questions of its next page.  most: pages at once.  quiet_until: monotonic seconds."""

    size: int
    most: int
    busy: int = 0
    failures: int = 0
    told: bool = False  # its owner, that nobody reaches it
    quiet_until: float = 0.0

    def pause_ms(self, now: float) -> int:
        return max(0, round((self.quiet_until - now) * 1000))


@dataclass(frozen=True, slots=True)
class _Page:
    """What goes to one service in one go."""

    work: DueChecks
    shard: int
    app: App
    target: CheckTarget
    service: _Service
    pending: Sequence[Pending]

    @property
    def at_once(self) -> CheckTarget:
        """The target as one of several pages may use it."""
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
        self._pool = None if run else ThreadPoolExecutor(_WORKERS, thread_name_prefix="tmc-check")
        self._run = run or self._pool.submit  # type: ignore[union-attr]
        self._lock = threading.Lock()
        self._services: dict[ServiceName, _Service] = {}
        # By shard and topic: whose messages were due when it was last looked at, and when that was.
        self._seen: dict[tuple[int, int], tuple[float, list[_Service]]] = {}

    def run_once(self) -> bool:
        """Begin as many pages as services have room for. Returns: something was begun or moved, there may be more."""
        moved = False
        for shard, topic in self._work.due():
            moved |= self._turn(shard, topic)
        return moved

    def stop(self) -> None:
        """Finish the pages that are under way: each has its time."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _turn(self, shard: int, topic: int) -> bool:
        catalog = self._catalog.current
        if topic not in catalog.topics or self._all_busy(shard, topic):
            return False
        moved = False
        seen: list[_Service] = []
        self._seen[shard, topic] = (self._monotonic(), seen)
        for name, target, pending in self._by_service(catalog, shard, topic):
            service = self._service(name, target)
            seen.append(service)
            pause = service.pause_ms(self._monotonic())
            if pause:
                held_ms = max(pause, _LEAST_HOLD_MS)
                moved |= bool(
                    self._work.hold(shard, pending, held_ms, f"{CheckReason.NOT_ASKED.name}: its service rests")
                )
            elif service.busy < service.most:
                moved |= self._begin(shard, catalog.apps[name.app], target, service, pending)
        return moved

    def _all_busy(self, shard: int, topic: int) -> bool:
        """A moment ago only messages of services were due here that have as many pages as they may."""
        looked, seen = self._seen.get((shard, topic), (0.0, []))
        recent = self._monotonic() - looked < _LOOK_AGAIN_S
        return bool(seen) and recent and all(service.busy >= service.most for service in seen)

    def _by_service(
        self, catalog: Catalog, shard: int, topic: int
    ) -> list[tuple[ServiceName, CheckTarget, list[Pending]]]:
        """What is due, each service's own part. A target that the topic has not is asked nowhere, and so rests."""
        targets = catalog.topics[topic].checks.targets
        parts: dict[tuple[int, str, str], list[Pending]] = {}
        for each in self._work.read(shard, topic, 4 * max((t.batch for t in targets.values()), default=100)):
            parts.setdefault((each.producer, each.producer_tag, each.target), []).append(each)
        found = []
        for (app, tag, named), pending in parts.items():
            target = targets.get(named) or CheckTarget(named, "")
            options = tuple(sorted(target.options.items()))
            name = ServiceName(app, tag, target.kind, target.address, options, target.tls)
            found.append((name, target, pending))
        return found

    def _service(self, name: ServiceName, target: CheckTarget) -> _Service:
        if name not in self._services:
            if len(self._services) >= _MOST_SERVICES:  # tags are the senders' choice
                idle = [n for n, s in self._services.items() if not (s.busy or s.pause_ms(self._monotonic()))]
                for each in idle:
                    del self._services[each]
            most = _PAGES_AT_ONCE if target.concurrency > 1 else 1
            self._services[name] = _Service(_longest_page(target), most)
        return self._services[name]

    def _begin(self, shard: int, app: App, target: CheckTarget, service: _Service, pending: Sequence[Pending]) -> bool:
        page = pending[: min(service.size, _longest_page(target))]
        until_ms = _claim_ms(target)
        claimed = self._work.claim(shard, page, until_ms)
        if not claimed:
            return False
        due = {each.number: each.state.due_ms or 0 for each in page}
        for each in claimed:
            if each.state.attempt == 1:
                late_ms = (each.state.due_ms or 0) - until_ms - due[each.number]
                METRICS.first_check_late_seconds.observe(late_ms / 1000)
        with self._lock:
            service.busy += 1
        self._run(partial(self.ask, _Page(self._work, shard, app, target, service, claimed)))
        return True

    def ask(self, page: _Page) -> None:
        """In a worker: ask, settle, and let the next page begin."""
        try:
            self._ask(page)
        except Exception as exc:  # noqa: BLE001 - the claim ends by itself, then they are asked again
            log.warning("answers of %d checks were lost, they are asked again: %s", len(page.pending), exc)
        finally:
            with self._lock:
                page.service.busy -= 1
            self._wake()

    def _ask(self, page: _Page) -> None:
        catalog = self._catalog.current
        topic = catalog.topics[page.pending[0].topic]
        questions = [each.question(page.app, topic.name) for each in page.pending]
        began = time.monotonic()
        tag, seconds = page.pending[0].producer_tag, _page_s(page.target)
        answers = self._asking.ask(page.at_once, page.app, tag, questions, seconds)
        METRICS.check_seconds.labels(page.target.kind).observe(time.monotonic() - began)
        pause_ms = self._learn(page, answers)
        settled = page.work.settle(
            page.shard,
            [Checked(each, answer, pause_ms) for each, answer in zip(page.pending, answers, strict=True)],
            not page.service.told,
        )
        page.service.told |= settled.overdue
        count(topic.name, answers, settled)

    def _learn(self, page: _Page, answers: Sequence[CheckAnswer]) -> int:
        """How the service does after this page. Returns: milliseconds until those that were not reached are due again.

        Should it hang on one of them, pages are halved until that one is alone: they grow slowly again, and whoever was in such a
        page comes after those who were not.
        """
        service, longest = page.service, _longest_page(page.target)
        reached = any(answer.said for answer in answers)
        with self._lock:
            if reached:
                service.failures, service.told = 0, False
                service.size = min(longest, service.size + max(1, longest // 16))
            else:
                service.failures += 1
                if answers[0].reason is CheckReason.TIMED_OUT:
                    service.size = max(1, service.size // 2)
            pause_ms = min(LONGEST_BACK_OFF_MS, FIRST_BACK_OFF_MS << min(max(0, service.failures - 1), 10))
            if not reached:
                service.quiet_until = self._monotonic() + pause_ms / 1000
        return 0 if reached else 2 * pause_ms


def count(topic: str, answers: Sequence[CheckAnswer], settled: Settled) -> None:
    """Metrics of one page."""
    for answer in answers:
        METRICS.checked.labels(topic, answer.verdict.name.lower(), answer.reason.name.lower()).inc()
    METRICS.check_failed.inc(settled.failed)
    if settled.committed:
        METRICS.submitted.labels(topic).inc(settled.committed)
    if settled.rolled_back:
        METRICS.rolled_back.labels(topic).inc(settled.rolled_back)


def _asks_singly(target: CheckTarget) -> bool:
    return target.kind in _SINGLE_KINDS and target.options.get("batch") != "true"


def _longest_page(target: CheckTarget) -> int:
    return target.concurrency * _ROUNDS if _asks_singly(target) else target.batch


def _page_s(target: CheckTarget) -> float:
    """How long a page may take, seconds; what is not asked by then comes in another one."""
    return 2 * target.deadline_ms / 1000 + _PAGE_SPARE_S


def _claim_ms(target: CheckTarget) -> int:
    """When its messages are asked about again: after the page, and time to store its answers."""
    return round(_page_s(target) * 1000) + _CLAIM_SPARE_MS
