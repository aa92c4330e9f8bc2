"""Who is asked when: bounds per service and per app, and what an app with hanging endpoints takes from its neighbors."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from tests.support.asking import COMMIT, HANGS
from tests.support.clock import ManualClock
from tmc_server.domain.catalog import App, Catalog, Topic
from tmc_server.domain.checks import CheckPolicy, CheckState, CheckTarget
from tmc_server.domain.ports.checks import Checked, Pending, Recorded
from tmc_server.duties.checking import Checking
from tmc_server.duties.pacing import APP_SHARE, OWN_TAGS, WORKERS, Pacing, Service, ServiceName, in_turn

SHOP, EVIL = 1, 2


def of(pacing: Pacing, tag: str, *, app: int = EVIL, registered: bool = False, now: float = 0.0) -> Service:
    name = ServiceName(app=app, tag=tag, kind="grpc", address="", options=(), tls=False)
    return pacing.service(name, 64, 16, registered=registered, now=now)


def begun(pacing: Pacing, service: Service, at_most: int = 100) -> int:
    """Pages that may begin until there is no more room."""
    count = 0
    while count < at_most and pacing.may_begin(service):
        pacing.begin(service)
        count += 1
    return count


class TestPacing:
    def test_a_service_has_two_pages_and_an_app_eight(self) -> None:
        pacing = Pacing()
        assert [begun(pacing, of(pacing, f"t{n}")) for n in range(6)] == [2, 2, 2, 2, 0, 0]
        assert begun(pacing, of(pacing, "default", app=SHOP)) == 2

    def test_nothing_begins_while_every_worker_is_taken(self) -> None:
        pacing = Pacing()
        taken = sum(begun(pacing, of(pacing, f"t{n % 4}", app=n // 4)) for n in range(4 * WORKERS // APP_SHARE))
        assert (taken, pacing.full) == (WORKERS, True)
        late = of(pacing, "default", app=99)
        assert begun(pacing, late) == 0
        pacing.end(of(pacing, "t0", app=0))
        assert begun(pacing, late) == 1

    def test_an_app_whose_pages_hang_is_left_with_one_worker_and_grows_back_with_answers(self) -> None:
        pacing, most = Pacing(), []
        service = of(pacing, "hangs")
        for _ in range(5):
            pacing.failed(service, 0.0, timed_out=True)
            most.append(service.app.most)
        for _ in range(9):
            pacing.answered(of(pacing, "fine"), "fine", 64, 0.0)
            most.append(service.app.most)
        assert most == [4, 2, 1, 1, 1, 2, 3, 4, 5, 6, 7, 8, 8, 8]

    def test_a_service_that_is_away_costs_its_app_no_share(self) -> None:
        pacing = Pacing()
        service = of(pacing, "away")
        rests = []
        for _ in range(8):
            pacing.failed(service, 0.0, timed_out=False)
            rests.append(service.pause_ms(0.0))
        assert rests == [1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 60_000, 60_000]
        assert (service.app.most, service.size) == (APP_SHARE, 64)

    def test_an_outage_long_after_another_begins_with_a_short_rest(self) -> None:
        pacing = Pacing()
        service = of(pacing, "away")
        for _ in range(8):
            pacing.failed(service, 0.0, timed_out=False)
        pacing.failed(service, 119.0, timed_out=False)  # a question came late: it may still be the same outage
        assert service.pause_ms(119.0) == 60_000
        pacing.failed(service, 240.0, timed_out=True, asked=119.5)  # it hung for two minutes
        assert service.pause_ms(240.0) == 60_000
        pacing.failed(service, 361.0, timed_out=False)
        assert service.pause_ms(361.0) == 1_000

    def test_environments_beyond_sixteen_share_one_slot_with_one_page_and_one_rest(self) -> None:
        pacing = Pacing()
        own = [of(pacing, f"t{n}") for n in range(OWN_TAGS)]
        slot = of(pacing, "t16")
        assert len({id(service) for service in own}) == OWN_TAGS
        assert all(of(pacing, f"fresh-{n}") is slot for n in range(1_000))
        assert slot.shared
        assert begun(pacing, slot) == 1
        pacing.end(slot)
        pacing.failed(slot, 0.0, timed_out=True)
        assert of(pacing, "fresher").pause_ms(0.5) == 500
        assert not of(pacing, "default", registered=True).shared
        assert not of(pacing, "t16", app=SHOP).shared

    def test_an_environment_of_the_slot_that_answers_takes_the_place_of_the_most_silent_one(self) -> None:
        pacing = Pacing()
        for number in range(OWN_TAGS):
            service = of(pacing, f"t{number}")
            if number != 5:
                pacing.answered(service, f"t{number}", 64, float(number))
        pacing.answered(of(pacing, "late"), "late", 64, 100.0)
        assert not of(pacing, "late").shared
        assert of(pacing, "t5").shared
        pacing.answered(of(pacing, "later"), "later", 64, 101.0)
        assert of(pacing, "t0").shared
        assert not of(pacing, "t1").shared

    def test_options_that_change_for_ever_are_forgotten(self) -> None:
        pacing = Pacing()
        for number in range(2_000):
            name = ServiceName(app=1, tag="default", kind="http", address=f"h:{number}", options=(), tls=False)
            made = pacing.service(name, 64, 16, registered=True, now=0.0)
        assert len(made.app.services) <= 256

    def test_apps_take_turns_and_the_one_that_waited_longest_begins(self) -> None:
        waiting = {EVIL: [f"e{n}" for n in range(9)], SHOP: ["s0", "s1"], 3: ["x0"]}
        turns = {EVIL: 9, SHOP: 4, 3: 7}
        assert in_turn(waiting, turns.__getitem__) == (["s0", "x0", "e0", "s1", "e1", "e2", "e3"], True)
        assert in_turn({SHOP: ["s0"]}, turns.__getitem__) == (["s0"], False)


class Simulation:
    """64 workers, rows in memory, time that jumps from event to event. A page takes as long as its app's endpoint."""

    PAGE_S: ClassVar = {SHOP: 0.1, EVIL: 3.0}

    def __init__(self, *, shared_topic: bool) -> None:
        self.clock = ManualClock(0)
        target = {"": CheckTarget(name="", kind="grpc", batch=10)}
        checks = CheckPolicy(targets=target)
        self.topic_of = {SHOP: 1, EVIL: 1 if shared_topic else 2}
        topic = Topic(
            number=1,
            name="t1",
            owner=SHOP,
            default_tag="default",
            table_index=0,
            spread=1,
            transaction_time_ms=1,
            open_limit=10,
            effective_ms=0,
            checks=checks,
        )
        topics = {1: topic, 2: replace(topic, number=2, name="t2", owner=EVIL)}
        apps = {
            number: App(
                number=number,
                id=f"app{number}",
                service_name="",
                biz_id="",
                alert_email="",
                alert_phone="",
                key_hashes=(),
            )
            for number in (SHOP, EVIL)
        }
        self.current = Catalog(version=1, apps=apps, topics=topics)
        self.rows: dict[int, Pending] = {}
        self.decided: Counter[int] = Counter()
        self.held = 0
        self.checking = Checking(self, self, self, monotonic=lambda: self.clock() / 1000, run=self._start)
        self._waiting: deque[Callable[[], None]] = deque()
        self._running: list[tuple[int, int, Callable[[], None]]] = []
        self._number = 0

    # -- rows: domain.ports.checks.DueChecks --

    def send(self, app: int, tag: str, count: int) -> None:
        for _ in range(count):
            self._number += 1
            state = CheckState(attempt=0, checked=0, unreached_ms=None, due_ms=self.clock())
            self.rows[self._number] = Pending(
                shard=0,
                number=self._number,
                topic=self.topic_of[app],
                producer=app,
                producer_tag=tag,
                key="k",
                attempt_id=b"",
                ledger_id=b"",
                created_ms=0,
                since_ms=0,
                target="",
                state=state,
            )

    def _due(self, topic: int) -> list[Pending]:
        now = self.clock()
        found = [row for row in self.rows.values() if row.topic == topic and (row.state.due_ms or 0) <= now]
        return sorted(found, key=lambda row: (row.state.due_ms, row.number))

    def due(self) -> list[tuple[int, int]]:
        return [(0, topic) for topic in (1, 2) if self._due(topic)]

    def read(self, _shard: int, topic: int, limit: int) -> list[Pending]:
        return self._due(topic)[:limit]

    def _move(self, pending: Sequence[Pending], by_ms: int) -> list[Pending]:
        for each in pending:
            self.rows[each.number] = replace(each, state=replace(each.state, due_ms=self.clock() + by_ms))
        return [self.rows[each.number] for each in pending]

    def claim(self, _shard: int, pending: Sequence[Pending], until_ms: int) -> list[Pending]:
        return self._move(pending, until_ms)

    def hold(self, _shard: int, pending: Sequence[Pending], pause_ms: int, _detail: str) -> int:
        self.held += 1
        return len(self._move(pending, pause_ms))

    def record(self, _shard: int, answers: Sequence[Checked], _tell: bool) -> Recorded:
        for checked in answers:
            if checked.answer is COMMIT:
                del self.rows[checked.pending.number]
                self.decided[checked.pending.producer] += 1
            else:
                self._move([checked.pending], max(1_000, checked.pause_ms))
        return Recorded(committed=0, rolled_back=0, failed=0, undecided=0, overtaken=0, overdue=False)

    # -- producers and workers --

    def asks_singly(self, target: CheckTarget) -> bool:
        return False

    def ask(
        self, _target: CheckTarget, app: App, tag: str, questions: Sequence[object], seconds: float
    ) -> list[object]:
        return [COMMIT if app.number == SHOP else HANGS] * len(questions)

    def _start(self, job: Callable[[], None]) -> None:
        self._waiting.append(job)
        self._employ()

    def _employ(self) -> None:
        while self._waiting and len(self._running) < WORKERS:
            job = self._waiting.popleft()
            app = job.args[0].app.number  # type: ignore[attr-defined]
            self._number += 1
            heapq.heappush(self._running, (self.clock() + round(self.PAGE_S[app] * 1000), self._number, job))

    def run(self, seconds: int, each_second: Callable[[int], None]) -> None:
        for second in range(seconds):
            each_second(second)
            until = (second + 1) * 1000
            while True:
                while self.checking.run_once():
                    """There is more."""
                if not self._running or self._running[0][0] > until:
                    break
                self.clock.now_ms, _, job = heapq.heappop(self._running)
                job()
                self._employ()
            self.clock.now_ms = until


def decided_by_the_neighbour(*, hostile: bool, shared_topic: bool = False) -> int:
    """Within half a minute in which it always has something due, beside an app with forty new environments a second."""
    made = Simulation(shared_topic=shared_topic)

    def each_second(second: int) -> None:
        made.send(SHOP, "default", 210)
        if hostile:
            for number in range(40):
                made.send(EVIL, f"env-{second}-{number}", 3)

    made.run(30, each_second)
    return made.decided[SHOP]


class TestOutages:
    def test_a_question_comes_again_when_its_service_has_rested(self) -> None:
        asked: list[int] = []

        class Watched(Simulation):
            def ask(self, *question: Any) -> list[object]:
                asked.append(self.clock())
                return super().ask(*question)

        made = Watched(shared_topic=False)
        made.send(EVIL, "default", 1)
        made.run(400, lambda _: None)
        pauses_s = [(later - earlier) / 1000 - made.PAGE_S[EVIL] for earlier, later in itertools.pairwise(asked)]
        assert len(pauses_s) >= 9
        for pause_s, rest_s in zip(pauses_s, (1, 2, 4, 8, 16, 32, 60, 60, 60), strict=False):
            assert rest_s <= pause_s <= rest_s + 1.1  # the simulation looks once a second


class TestNeighbours:
    def test_an_app_with_fresh_environments_and_hanging_endpoints_takes_less_than_a_fifth(self) -> None:
        alone = decided_by_the_neighbour(hostile=False)
        assert alone == 6_000
        assert decided_by_the_neighbour(hostile=True) > 0.8 * alone

    def test_also_in_a_topic_of_both(self) -> None:
        alone = decided_by_the_neighbour(hostile=False, shared_topic=True)
        assert decided_by_the_neighbour(hostile=True, shared_topic=True) > 0.8 * alone

    def test_it_never_has_more_than_its_workers(self) -> None:
        made, most = Simulation(shared_topic=False), 0

        def each_second(second: int) -> None:
            nonlocal most
            for number in range(40):
                made.send(EVIL, f"env-{second}-{number}", 3)
            most = max(most, len(made._running) + len(made._waiting))

        made.run(30, each_second)
        assert 0 < most <= APP_SHARE
