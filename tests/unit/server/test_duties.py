"""Duties and requests without a database: the work is scripted."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.support.rogue import RogueHttp
from tests.support.store import RecordingOutlet
from tmc_server.alerts.webhook import WebhookSink
from tmc_server.domain.catalog import App, Catalog, Subscription, Topic
from tmc_server.domain.consumption import QueueLook
from tmc_server.domain.numbers import SubscriptionNumber
from tmc_server.domain.ports.alerts import Alert
from tmc_server.domain.ports.delivery import Claimed
from tmc_server.domain.ports.servers import ServerRun
from tmc_server.domain.retry import RetryPolicy
from tmc_server.duties.alerting import Alerting, Grouping
from tmc_server.duties.counting import Counting
from tmc_server.duties.periodic import Periodic
from tmc_server.duties.redelivering import Redelivering
from tmc_server.duties.rescuing import Rescuing
from tmc_server.errors import RateLimited, RowLocked, StoreUnavailable
from tmc_server.requests.caller import RateLimiter
from tmc_storm.eventually import eventually


class ScriptedWork:
    """Due pairs, and what a claim of them moves."""

    def __init__(self, due: Mapping[tuple[int, int], Claimed]) -> None:
        self._due = due
        self.claims: list[tuple[int, int, bool]] = []
        self.rescues: list[tuple[int, Mapping[int, int]]] = []
        self.pages: dict[int, list[int]] = {}
        self.leases = {3: 1}

    def due(self) -> list[tuple[int, int]]:
        return list(self._due)

    def claim(self, shard: int, subscription: int, limit: int, look: QueueLook, exhausted_only: bool) -> Claimed:
        self.claims.append((shard, subscription, exhausted_only))
        return Claimed() if exhausted_only else self._due[shard, subscription]

    def held_shards(self) -> Mapping[int, int]:
        return self.leases

    def rescue(self, shard: int, gone: Mapping[int, int]) -> int:
        self.rescues.append((shard, gone))
        pages = self.pages.get(shard)
        return pages.pop(0) if pages else 0


class SlowWork(ScriptedWork):
    """A page takes 0.4 seconds."""

    now = 0.0

    def rescue(self, shard: int, gone: Mapping[int, int]) -> int:
        self.now += 0.4
        return super().rescue(shard, gone)


class TestRedelivering:
    def test_one_page_for_each_due_subscription(self) -> None:
        work = ScriptedWork({(1, 7): Claimed(delivered=200), (2, 8): Claimed(delivered=1, failed=2, cancelled=3)})
        result = Redelivering([work], RecordingOutlet()).one_pass()
        assert result == Claimed(delivered=201, failed=2, cancelled=3)
        assert work.claims == [(1, 7, False), (2, 8, False)]
        assert result.moved  # there may be more: the loop goes on at once

    def test_nothing_due_is_nothing_to_go_on_for(self) -> None:
        assert not Redelivering([ScriptedWork({})], RecordingOutlet()).run_once()

    def test_exhausted_rows_fail_even_without_consumer_credit(self) -> None:
        work = ScriptedWork({(1, 7): Claimed()})
        duty = Redelivering([work], RecordingOutlet())
        for _ in range(40):
            assert not duty.run_once()
        assert work.claims.count((1, 7, True)) == 2

    def test_a_broker_that_is_away_pauses_everything(self) -> None:
        work, outlet = ScriptedWork({(1, 7): Claimed(delivered=1)}), RecordingOutlet()
        outlet.looks_like = None
        assert not Redelivering([work], outlet).run_once()
        assert work.claims == []

    def test_a_queue_without_consumers_for_a_minute_is_reported(self) -> None:
        reported: list[tuple[int, float]] = []
        now = 0.0
        work, outlet = ScriptedWork({(1, 7): Claimed(held=3)}), RecordingOutlet()
        duty = Redelivering(
            [work], outlet, on_abandoned=lambda each, _: reported.append((each, now)), monotonic=lambda: now
        )
        for at_s, consumers in ((0.0, 0), (59.0, 0), (60.0, 1), (61.0, 0), (120.0, 0), (121.0, 0), (900.0, 0)):
            now = at_s
            outlet.looks_like = QueueLook(consumers=consumers, messages=3)
            duty.run_once()
        assert reported == [(7, 121.0)]

    def test_one_that_fails_does_not_stop_the_others(self) -> None:
        work = ScriptedWork({(1, 7): Claimed(delivered=1), (2, 8): Claimed(delivered=2)})
        claim = work.claim

        def stuck(shard: int, *arguments: Any, **keywords: Any) -> Claimed:
            if shard == 1:
                raise RowLocked
            return claim(shard, *arguments, **keywords)

        work.claim = stuck  # type: ignore[method-assign]
        with pytest.raises(RowLocked):
            Redelivering([work], RecordingOutlet()).run_once()
        assert work.claims == [(2, 8, False)]


class _Members:
    alive: tuple[ServerRun, ...] = ()
    gone: tuple[ServerRun, ...] = ()


def _run(incarnation: int, expires_ms: int) -> ServerRun:
    return ServerRun(incarnation=incarnation, name=str(incarnation), started_ms=0, expires_ms=expires_ms)


class TestRescuing:
    def test_each_run_that_is_gone_once_per_shard_and_epoch(self) -> None:
        work, members = ScriptedWork({}), _Members()
        duty = Rescuing([work], members, uncertain_ms=100, most_s=1.0)
        assert duty.run_once() == 0
        members.gone = (_run(5, 1000),)
        work.pages = {3: [500, 20]}
        assert (duty.run_once(), duty.run_once()) == (520, 0)
        work.leases = {3: 1, 4: 9}
        assert duty.run_once() == 0
        members.gone = (_run(5, 1000), _run(6, 2000))
        assert duty.run_once() == 0
        work.leases = {3: 2, 4: 9}  # lost and got back: in between another server looked after it
        assert duty.run_once() == 0
        assert work.rescues == [
            *[(3, {5: 900})] * 3,
            (4, {5: 900}),
            (4, {6: 1900}),
            (3, {6: 1900}),
            (3, {5: 900, 6: 1900}),
        ]

    def test_leases_are_renewed_in_between(self) -> None:
        """Its thread is that of the leases: a server that left much behind must not cost the next one its shards."""
        work, members = SlowWork({}), _Members()
        work.leases = {3: 1, 4: 1}
        work.pages = {3: [500] * 4, 4: [7]}
        members.gone = (_run(5, 1000),)
        duty = Rescuing([work], members, uncertain_ms=None, most_s=1.0, monotonic=lambda: work.now)
        assert [duty.run_once() for _ in range(3)] == [1500, 507, 0]
        assert len(work.rescues) == 7

    def test_each_shard_has_its_turn(self) -> None:
        work, members = ScriptedWork({}), _Members()
        work.leases = {3: 1, 4: 1}
        work.pages = {3: [100] * 9, 4: [7]}
        members.gone = (_run(5, 1000),)
        duty = Rescuing([work], members, uncertain_ms=None, most_s=0.0)
        assert [duty.run_once() for _ in range(3)] == [100, 7, 100]

    def test_a_thousand_runs_are_looked_for_in_parts(self) -> None:
        work, members = ScriptedWork({}), _Members()
        members.gone = tuple(_run(number, 1000) for number in range(1000))
        duty = Rescuing([work], members, uncertain_ms=None, most_s=1.0)
        assert (duty.run_once(), duty.run_once()) == (0, 0)
        assert [len(gone) for _, gone in work.rescues] == [200] * 5
        assert len({run for _, gone in work.rescues for run in gone}) == 1000


class TestPeriodic:
    def test_it_continues_after_failures_and_logs_them_once(self, caplog: pytest.LogCaptureFixture) -> None:
        runs: list[int] = []

        def run_once() -> bool:
            runs.append(1)
            if len(runs) in (2, 3):
                raise StoreUnavailable
            return len(runs) < 6

        with caplog.at_level("INFO", "tmc.duties"):
            duty = Periodic("testing", run_once, 0.001)
            duty.start()
            eventually(lambda: len(runs) > 6)
            duty.stop()
        texts = [record.getMessage() for record in caplog.records]
        assert [text.split(":")[0] for text in texts] == [
            "testing fails, and tries again",
            "testing works again after 2 failures",
        ]

    @pytest.mark.parametrize(("error", "stuck"), [(ValueError("a bug"), 2), (StoreUnavailable(), 0), (RowLocked(), 0)])
    def test_only_its_own_fault_makes_it_stuck_with_every_fifth_failure(self, error: Exception, stuck: int) -> None:
        runs, called, over = itertools.count(1), [], threading.Event()

        def run_once() -> bool:
            if next(runs) > 14:
                over.set()
                return False
            raise error

        duty = Periodic("testing", run_once, 0.001, on_stuck=lambda: called.append(1))
        duty.start()
        assert over.wait(10)
        duty.stop()
        assert len(called) == stuck

    def test_waking_runs_it_before_its_period_is_over(self) -> None:
        ran = threading.Event()
        duty = Periodic("testing", lambda: ran.set(), 3600)
        duty.start()
        assert ran.wait(10)
        ran.clear()
        duty.wake()
        assert ran.wait(10)
        duty.stop()


class _Outbox:
    """domain.ports.alerts.AlertOutbox with one claim at a time, in memory."""

    def __init__(self, alerts: list[Alert]) -> None:
        self.alerts = alerts
        self.claimed: list[Alert] = []
        self.put_back_for: list[int] = []
        self.ungrouped = 0

    def add(self, kind: str, topic: int, subscription: int, episode: int, detail: str) -> None:
        raise NotImplementedError

    def group(self, sinks: Sequence[str], limit: int) -> int:
        grouped = min(self.ungrouped, limit)
        self.ungrouped -= grouped
        return grouped

    def claim(self, sink: str, limit: int, for_ms: int) -> list[Alert]:
        self.claimed = [alert for alert in self.alerts if alert not in self.claimed][:limit]
        return self.claimed

    def mark_sent(self, notices: Sequence[Alert]) -> None:
        self.alerts = [alert for alert in self.alerts if alert not in notices]

    def put_back(self, notices: Sequence[Alert], after_ms: int) -> None:
        self.claimed = []
        self.put_back_for.append(len(notices))


class _Sink:
    def __init__(self, fails: bool = False) -> None:
        self.got: list[int] = []
        self.fails = fails

    def send(self, alert: Alert, catalog: Catalog) -> None:
        if self.fails:
            raise OSError("away")
        self.got.append(alert.id)


class TestAlerting:
    ALERTS = tuple(
        Alert(
            id=i, kind="delivery failed", topic=1, shard=0, number=i, subscription=1, attempt=1, detail="", created_ms=0
        )
        for i in range(3)
    )

    def test_each_notice_is_sent_once_and_marked(self) -> None:
        outbox, sink = _Outbox(list(self.ALERTS)), _Sink()
        duty = Alerting(outbox, "log", sink, _Fixed())
        assert (duty.run_once(), duty.run_once()) == (False, False)
        assert (sink.got, outbox.alerts) == ([0, 1, 2], [])

    def test_a_full_page_is_followed_by_another_one_at_once(self) -> None:
        outbox, sink = _Outbox(list(self.ALERTS)), _Sink()
        duty = Alerting(outbox, "log", sink, _Fixed(), page=2)
        assert (duty.run_once(), duty.run_once()) == (True, False)
        assert sink.got == [0, 1, 2]

    def test_a_sink_that_is_away_is_asked_three_times_a_run_and_gets_all_later(self) -> None:
        alerts = [
            Alert(
                id=i,
                kind="delivery failed",
                topic=1,
                shard=0,
                number=i,
                subscription=1,
                attempt=1,
                detail="",
                created_ms=0,
                fingerprint=str(i),
            )
            for i in range(5)
        ]
        outbox, sink = _Outbox(alerts), _Sink(fails=True)
        duty = Alerting(outbox, "webhook", sink, _Fixed())
        with pytest.raises(OSError, match="away"):
            duty.run_once()
        assert (outbox.put_back_for, len(outbox.alerts)) == ([1, 1, 1, 2], 5)
        sink.fails = False
        duty.run_once()
        assert sink.got == [0, 1, 2, 3, 4]

    def test_what_a_slow_sink_did_not_get_within_the_claim_is_put_back(self) -> None:
        outbox, sink, now = _Outbox(list(self.ALERTS)), _Sink(), iter((0.0, 0.0, 70.0))
        Alerting(outbox, "webhook", sink, _Fixed(), monotonic=lambda: next(now)).run_once()
        assert (sink.got, outbox.put_back_for) == ([0], [2])

    def test_grouping_wakes_the_senders_and_continues_while_there_is_more(self) -> None:
        outbox, woken = _Outbox([]), []
        outbox.ungrouped = 3
        duty = Grouping(outbox, ["log"], lambda: woken.append(1), page=2)
        assert [duty.run_once() for _ in range(3)] == [True, False, False]
        assert len(woken) == 2

    def test_a_webhook_gets_names_instead_of_numbers(self) -> None:
        rogue = RogueHttp()
        rogue.say("alerts", b"{}")
        sink = WebhookSink(f"http://{rogue.address}/alerts")
        sink.send(
            Alert(
                id=7,
                kind="check failed",
                topic=1,
                shard=5,
                number=99,
                subscription=0,
                attempt=3,
                detail="nobody knew",
                created_ms=12,
            ),
            _Fixed().current,
        )
        assert json.loads(rogue.bodies[0]) == {
            "event": "raised",
            "alert_id": "",
            "kind": "check failed",
            "topic": "t",
            "message_id": "1-1-05-99",
            "subscriber": "",
            "tag": "",
            "attempt": 3,
            "detail": "nobody knew",
            "created_ms": 12,
            "count": 1,
            "first_ms": 12,
            "last_ms": 12,
            "total": 1,
            "since_ms": 12,
            "fingerprint": "",
            "message_ids": ["1-1-05-99"],
            "owner": "",
            "owner_email": "",
            "owner_phone": "",
            "also": [],
        }
        WebhookSink(f"http://{rogue.address}/gone").send(
            self.ALERTS[0], _Fixed().current
        )  # refused for good: told in the log
        for path in ("error", "noise", "redirect"):
            with pytest.raises(OSError, match=r".+"):
                WebhookSink(f"http://{rogue.address}/{path}").send(self.ALERTS[0], _Fixed().current)
        rogue.stop()

    @pytest.mark.parametrize("habit", ["drip_head", "hints", "hang"])
    def test_a_webhook_that_never_finishes_its_answer_is_left_at_the_deadline(self, habit: str) -> None:
        rogue = RogueHttp()
        with pytest.raises(OSError, match="Timeout"):
            WebhookSink(f"http://{rogue.address}/{habit}", deadline_s=0.3).send(self.ALERTS[0], _Fixed().current)
        rogue.stop()

    def test_a_webhook_is_not_asked_through_a_proxy_and_its_address_is_not_logged(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The address may carry a secret."""
        rogue = RogueHttp()
        rogue.say("s3cret", b"{}")
        for variable in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(variable, "http://127.0.0.1:9")
        with caplog.at_level("DEBUG"):
            WebhookSink(f"http://{rogue.address}/s3cret").send(self.ALERTS[0], _Fixed().current)
        assert rogue.asked == ["POST /s3cret HTTP/1.1"]
        assert "s3cret" not in caplog.text
        rogue.stop()


class _Fixed:
    """A catalog with one topic, number 1, open limit 10, and one subscription to it."""

    def __init__(self, **settings: int) -> None:
        topic = Topic(number=1, name="t", owner=1, transaction_time_ms=1, open_limit=10, effective_ms=0, **settings)
        subscription = Subscription(
            number=SubscriptionNumber(7),
            topic=1,
            app=2,
            tag="default",
            policy=RetryPolicy(),
            effective_ms=0,
            removed_ms=None,
        )
        self.current = Catalog(version=1, topics={1: topic}, subscriptions={subscription.number: subscription})

    def in_use(self) -> tuple[Catalog, bool]:
        return self.current, False


class TestCounting:
    class Counter:
        def __init__(self, answer: int) -> None:
            self.answer = answer
            self.asked = 0
            self.backlogs: list[int] = []  # answers, the last one again and again
            self.backlogs_asked = 0

        def count(self, shards: object, topic: int, limit: int) -> int:
            self.asked += 1
            return self.answer

        def unacked(self, shards: object, subscription: object, limit: int) -> int:
            self.backlogs_asked += 1
            return min(limit, self.backlogs.pop(0) if len(self.backlogs) > 1 else self.backlogs[0])

    def _counting(self, counter: Counter, **settings: int) -> tuple[Counting, list[str]]:
        alerts: list[str] = []
        return Counting(_Fixed(**settings), counter, lambda _number, detail: alerts.append(detail)), alerts

    def test_deliveries_without_a_limit_are_not_counted(self) -> None:
        counter = self.Counter(0)
        counting, _ = self._counting(counter)
        counting.run_once()
        assert (counting.unacked(1), counter.backlogs_asked) == (0, 0)

    def test_deliveries_are_counted_more_often_and_alerted_as_they_come_near_the_limit(self) -> None:
        counter = self.Counter(0)
        counter.backlogs = [10, 49, 50, 79, 80, 300]
        counting, alerts = self._counting(counter, unacked_limit=100)
        seen = []
        for _ in range(14):
            counting.run_once()
            seen.append(counting.unacked(1))
        assert seen == [10] * 4 + [49] * 5 + [50, 79, 80, 100, 100]
        assert [alert.partition(" deliveries")[0] for alert in alerts] == ["80 of 100", *["the limit of 100"] * 2]

    def test_a_subscription_near_the_limit_hides_no_other_one(self) -> None:
        """A has 85 failed deliveries for ever; what B does not ack counts on top."""
        counter = self.Counter(0)
        counter.backlogs = [85, 10, 85, 40]
        alerts: list[str] = []
        catalog = _Fixed(unacked_limit=100)
        first = catalog.current.subscriptions[SubscriptionNumber(7)]
        second = replace(first, number=SubscriptionNumber(8), tag="second")
        catalog.current = replace(catalog.current, subscriptions={7: first, 8: second})
        counting = Counting(catalog, counter, lambda _number, detail: alerts.append(detail))
        counting.run_once()
        assert (counting.unacked(1), len(alerts)) == (95, 1)
        counting.run_once()
        assert (counting.unacked(1), len(alerts)) == (100, 2)

    def test_a_database_that_is_away_stops_no_other_count(self) -> None:
        class Away(TestCounting.Counter):
            def count(self, shards: object, topic: int, limit: int) -> int:
                if topic == 1:
                    raise StoreUnavailable
                return super().count(shards, topic, limit)

        catalog = _Fixed()
        other = Topic(number=2, name="other", owner=1, transaction_time_ms=1, open_limit=10, effective_ms=0)
        catalog.current = Catalog(version=1, topics={**catalog.current.topics, 2: other})
        counting = Counting(catalog, Away(3), lambda _number, _detail: None)
        with pytest.raises(StoreUnavailable):
            counting.run_once()
        assert (counting.open(1), counting.open(2)) == (0, 3)

    def test_a_topic_is_counted_at_first_sight_and_when_it_fills_up(self) -> None:
        counter = self.Counter(3)
        counting = self._counting(counter)[0]
        for _ in range(5):
            counting.run_once()
        assert (counting.open(1), counter.asked) == (3, 1)
        counting.moved(1, 2)
        counting.run_once()
        assert (counting.open(1), counter.asked) == (3, 2)

    def test_what_the_estimate_missed_is_found_in_the_end(self) -> None:
        counter = self.Counter(0)
        counting = self._counting(counter)[0]
        counting.run_once()
        counter.answer = 10  # stored by calls that nobody waited for
        for _ in range(30):
            counting.run_once()
        assert counting.open(1) == 10

    def test_the_estimate_never_falls_below_zero(self) -> None:
        counting = self._counting(self.Counter(0))[0]
        counting.moved(1, -5)
        counting.moved(1, 1)
        assert counting.open(1) == 1


class TestRateLimiter:
    APPS = tuple(
        App(number=i, id=f"app{i}", service_name="", biz_id="", alert_email="", alert_phone="", key_hashes=())
        for i in range(2)
    )

    def test_a_burst_of_a_second_then_the_rate_for_each_app_by_itself(self) -> None:
        now = [100.0]
        limiter = RateLimiter(10, lambda: now[0])
        for _ in range(10):
            limiter.take(self.APPS[0], 1)
        with pytest.raises(RateLimited) as caught:
            limiter.take(self.APPS[0], 1)
        assert caught.value.retry_after_ms == 101
        limiter.take(self.APPS[1], 10)
        now[0] += 0.2
        limiter.take(self.APPS[0], 2)
        with pytest.raises(RateLimited):
            limiter.take(self.APPS[0], 1)

    def test_a_batch_larger_than_the_rate_passes_after_a_full_second_and_is_paid_for(self) -> None:
        now = [0.0]
        limiter = RateLimiter(10, lambda: now[0])
        limiter.take(self.APPS[0], 30)
        now[0] = 2.9
        with pytest.raises(RateLimited):
            limiter.take(self.APPS[0], 10)
        now[0] = 3.0
        limiter.take(self.APPS[0], 10)

    def test_zero_is_no_limit(self) -> None:
        limiter = RateLimiter(0)
        for _ in range(1000):
            limiter.take(self.APPS[0], 1000)
