"""Episodes of alerts on every database: reminded less and less often, acknowledged, silenced, resolved."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.alerting import Server, Sink, rejected
from tests.support.store import POLICY, StoreUnderTest
from tmc_server.domain.alerts import MOST_OPEN, OTHER_ERRORS, REMIND_AFTER_MS, SETTLED_MS, NoticeEvent
from tmc_server.domain.ports.catalog import NewSilence
from tmc_server.errors import AlertUnknown
from tmc_server.store import episodes
from tmc_server.store.episodes import SqlEpisodeStore, ended
from tmc_server.store.retention import ClosedMessages
from tmc_server.store.tables import alert

MINUTE_S = REMIND_AFTER_MS[0] / 1000
SETTLED_S = SETTLED_MS / 1000


class TestEpisodes:
    def test_reminders_come_less_and_less_often(self, store: StoreUnderTest) -> None:
        sink, sent = Sink(), []
        server = Server(store, log=sink)
        for minute in range(2_000):
            if minute % 10 == 0:
                rejected(store, 1)
            server.turn()
            if sink.got:
                sent.append(minute)
                sink.got.clear()
            store.clock.advance(60)
        assert sent == [0, 10, 20, 80, 440, 1_880]

    def test_every_error_has_its_own(self, store: StoreUnderTest) -> None:
        server = Server(store, log=(sink := Sink()))
        rejected(store, 2, "order 17: no stock")
        rejected(store, 3, "order 18: no stock")
        rejected(store, 1, "timeout")
        server.turn()
        assert sorted(sink.counts) == [1, 5]
        assert len({each.fingerprint for each in sink.got}) == 2
        assert all(each.fingerprint for each in sink.got)

    def test_too_many_different_errors_are_not_told_apart(self, store: StoreUnderTest) -> None:
        server = Server(store, log=(sink := Sink()))
        for number in range(MOST_OPEN + 5):
            rejected(store, 1, f"error {chr(ord('a') + number)}")
        server.turn()
        others = [each for each in sink.got if each.fingerprint == OTHER_ERRORS]
        assert (len(sink.got), [each.total for each in others]) == (MOST_OPEN + 1, [5])

    def test_one_that_is_over_is_told_once_and_the_next_failure_begins_another(self, store: StoreUnderTest) -> None:
        server = Server(store, log=(sink := Sink()))
        numbers = rejected(store, 2)
        server.turn()
        store.perform(store.reactivate_of(numbers[0]))
        server.turn()
        assert len(sink.got) == 1
        store.clock.advance(5)
        store.perform(store.cancel_of(numbers[1]))
        server.settle(store)
        server.turn()
        raised, resolved = sink.got
        assert (resolved.event, resolved.episode, resolved.total) == (NoticeEvent.RESOLVED, raised.episode, 2)
        rejected(store, 1)
        server.turn()
        assert (sink.got[-1].event, sink.got[-1].total) == (NoticeEvent.RAISED, 1)
        assert sink.got[-1].episode != raised.episode

    def test_an_error_that_is_gone_is_resolved_although_another_one_is_not(self, store: StoreUnderTest) -> None:
        server = Server(store, log=(sink := Sink()))
        gone = rejected(store, 1, "no stock")
        rejected(store, 1, "timeout")
        server.turn()
        store.perform(store.cancel_of(gone[0]))
        server.settle(store)
        (resolved,) = [each for each in sink.got if each.event is NoticeEvent.RESOLVED]
        assert "no stock" in resolved.detail

    def test_a_reactivated_delivery_that_fails_again_continues_it(self, store: StoreUnderTest) -> None:
        """Acknowledged once is enough, and it is not said to be over meanwhile."""
        server, desk = Server(store, log=(sink := Sink())), SqlEpisodeStore(store.database, store.shard)
        numbers = rejected(store, 1)
        server.turn()
        desk.acknowledge("alice", desk.episodes(True, 1)[0].number, "looking")
        for _ in range(3):
            store.perform(store.reactivate_of(numbers[0]))
            server.turn()
            store.clock.advance(SETTLED_S - 1)
            store.redeliver(room=1)
            server.turn()
            store.perform(store.nack_of(numbers[0], store.row(numbers[0]).attempt, reject=True))
            server.turn()
        assert [each.event for each in sink.got] == [NoticeEvent.RAISED]
        (found,) = desk.episodes(False, 10)
        assert (found.count, found.acknowledged_by) == (4, "alice")

    def test_a_reminder_that_waits_is_not_sent_when_all_is_over(self, store: StoreUnderTest) -> None:
        server = Server(store, log=(sink := Sink()))
        numbers = rejected(store, 1)
        server.turn()
        numbers += rejected(store, 1)
        server.turn()
        store.perform(*(store.cancel_of(number) for number in numbers))
        server.settle(store)
        assert [each.event for each in sink.got] == [NoticeEvent.RAISED, NoticeEvent.RESOLVED]

    def test_a_sink_that_was_away_hears_of_what_is_over(self, store: StoreUnderTest) -> None:
        server = Server(store, log=(sink := Sink()))
        sink.fails = True
        numbers = rejected(store, 1)
        with pytest.raises(OSError, match="away"):
            server.turn()
        store.perform(store.cancel_of(numbers[0]))
        for _ in range(2):
            server.resolving.run_once()
            store.clock.advance(SETTLED_S)
        server.resolving.run_once()
        with pytest.raises(OSError, match="away"):
            server.turn()  # both are refused: the first notice for the second time, so it waits longer
        sink.fails = False
        for _ in range(6):
            store.clock.advance(4)
            server.turn()
        assert [each.event for each in sink.got] == [NoticeEvent.RAISED, NoticeEvent.RESOLVED]

    def test_a_queue_that_is_read_again_is_quiet_for_a_while(self, store: StoreUnderTest) -> None:
        server = Server(store, log=(sink := Sink()))
        for episode in range(3):  # alerted again every ten minutes, as long as nobody reads
            store.alerts.add("no consumer", store.topic.number, store.subscription.number, episode, "nobody reads")
            server.turn()
            store.clock.advance(600)
        assert [each.event for each in sink.got][-1] is NoticeEvent.RAISED
        store.clock.advance(1_500)
        server.turn()
        assert [each.event for each in sink.got].count(NoticeEvent.RESOLVED) == 1

    def test_two_servers_resolve_once(self, store: StoreUnderTest) -> None:
        one, two = Server(store, log=(sink := Sink())), Server(store, log=sink)
        numbers = rejected(store, 1)
        one.turn()
        store.perform(store.cancel_of(numbers[0]))
        one.resolving.run_once()
        store.clock.advance(SETTLED_S)
        with store.database.reading() as connection:
            (row,), _ = ended(connection, store.clock())
        assert [one.outbox.end(row), two.outbox.end(row)] == [True, False]
        one.turn()
        two.turn()
        assert len(sink.got) == 2

    def test_an_alert_that_comes_while_it_is_resolved_keeps_it_open(self, store: StoreUnderTest) -> None:
        server = Server(store, log=(sink := Sink()))
        numbers = rejected(store, 1)
        server.turn()
        store.perform(store.cancel_of(numbers[0]))
        server.resolving.run_once()
        store.clock.advance(SETTLED_S)
        with store.database.reading() as connection:
            (row,), _ = ended(connection, store.clock())
        rejected(store, 1)
        server.grouping.run_once()
        assert not server.outbox.end(row)
        assert len(sink.got) == 1

    def test_what_a_sink_refused_is_counted_once(self, store: StoreUnderTest) -> None:
        """Two notices of one episode wait."""
        server = Server(store, log=(sink := Sink()))
        rejected(store, 1)
        server.grouping.run_once()
        claimed = server.outbox.claim("log", 10, 1_000)
        rejected(store, 1)
        server.grouping.run_once()
        server.outbox.put_back(claimed, 0)
        rejected(store, 3)
        store.clock.advance(MINUTE_S)
        server.turn()
        assert sorted(sink.counts) == [1, 4]

    def test_many_that_stay_open_hide_none_that_is_over(
        self, store: StoreUnderTest, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(episodes, "_PAGE", 3)
        server = Server(store, log=(sink := Sink()))
        for number in range(7):
            store.alerts.add("contradiction", store.topic.number, 100 + number, 1, "both ways")
        numbers = rejected(store, 1)
        server.turn()
        store.perform(store.cancel_of(numbers[0]))
        server.settle(store)
        assert [each.kind for each in sink.got if each.event is NoticeEvent.RESOLVED] == ["delivery failed"]

    def test_an_alert_without_a_fingerprint_stays_open_as_long_as_anything_failed(self, store: StoreUnderTest) -> None:
        """A server of the version before wrote it."""
        server = Server(store, log=(sink := Sink()))
        numbers = rejected(store, 1)
        with store.database.transaction() as connection:
            connection.execute(alert.update().values(fingerprint=""))
        server.turn()
        server.turn()
        assert len(sink.got) == 1
        store.perform(store.cancel_of(numbers[0]))
        server.settle(store)
        assert len(sink.got) == 2

    def test_recipients_are_kept_while_it_is_open(self, store: StoreUnderTest) -> None:
        server = Server(store, log=(sink := Sink()))
        numbers = rejected(store, 1)
        server.turn()
        store.clock.advance(3_600)
        closed = ClosedMessages(store.database, store.leases)
        while closed.forget(store.clock(), 100):
            pass
        store.perform(store.cancel_of(numbers[0]))
        server.settle(store)
        assert [each.event for each in sink.got] == [NoticeEvent.RAISED, NoticeEvent.RESOLVED]
        store.clock.advance(3_600)
        while closed.forget(store.clock(), 100):
            pass
        assert SqlEpisodeStore(store.database, store.shard).episodes(False, 10) == []


class TestAcknowledging:
    def test_a_reminder_that_waits_is_withdrawn(self, store: StoreUnderTest) -> None:
        server, desk = Server(store, log=(sink := Sink())), SqlEpisodeStore(store.database, store.shard)
        for _ in range(2):
            rejected(store, 1)
            server.turn()
        desk.acknowledge("alice", desk.episodes(True, 1)[0].number, "looking")
        store.clock.advance(3_600)
        server.turn()
        assert len(sink.got) == 1

    def test_no_further_reminders_and_still_the_end(self, store: StoreUnderTest) -> None:
        server, desk = Server(store, log=(sink := Sink())), SqlEpisodeStore(store.database, store.shard)
        numbers = rejected(store, 1)
        server.turn()
        (found,) = desk.episodes(True, 10)
        assert found.id == sink.got[0].episode
        acknowledged = desk.acknowledge("alice", found.number, "looking")
        assert acknowledged is not None
        assert acknowledged.acknowledged_by == "alice"
        numbers += rejected(store, 1)
        store.clock.advance(3_600)
        server.turn()
        assert len(sink.got) == 1
        store.perform(*(store.cancel_of(number) for number in numbers))
        server.settle(store)
        assert [each.event for each in sink.got] == [NoticeEvent.RAISED, NoticeEvent.RESOLVED]
        assert desk.episodes(True, 10) == []
        assert [(each.count, each.acknowledged_by) for each in desk.episodes(False, 10)] == [(2, "alice")]

    def test_the_first_who_acknowledges_stays(self, store: StoreUnderTest) -> None:
        server, desk = Server(store, log=Sink()), SqlEpisodeStore(store.database, store.shard)
        rejected(store, 1)
        server.turn()
        number = desk.episodes(True, 1)[0].number
        for name in ("alice", "bob"):
            found = desk.acknowledge(name, number, "looking")
            assert found is not None
            assert found.acknowledged_by == "alice"
        assert desk.acknowledge("alice", number + 1, "looking") is None

    def test_a_contradiction_ends_with_it(self, store: StoreUnderTest) -> None:
        server, desk = Server(store, log=(sink := Sink())), SqlEpisodeStore(store.database, store.shard)
        store.alerts.add("contradiction", store.topic.number, store.subscription.number, 1, "both ways")
        server.turn()
        store.clock.advance(30 * 86_400)
        server.turn()
        assert len(sink.got) == 1
        desk.acknowledge("alice", desk.episodes(True, 1)[0].number, "known")
        server.turn()
        assert sink.got[-1].event is NoticeEvent.RESOLVED


class TestSilences:
    def _silence(self, store: StoreUnderTest, **scope: str | int) -> int:
        made = store.catalog_store.silence_alerts("alice", NewSilence(for_ms=3_600_000, reason="test", **scope))
        store.watch.run_once()
        return made.id

    def test_what_is_still_open_afterward_is_sent_then(self, store: StoreUnderTest) -> None:
        server = Server(store, log=(sink := Sink()))
        self._silence(store)
        for _ in range(60):
            rejected(store, 1)
            server.turn()
            assert sink.got == []
            store.clock.advance(60)
        server.turn()
        assert sink.counts == [60]

    def test_many_that_are_silenced_delay_no_other(self, store: StoreUnderTest) -> None:
        server = Server(store, log=(sink := Sink()))
        self._silence(store, kind="no consumer")
        for number in range(50):
            store.alerts.add("no consumer", store.topic.number, 100 + number, 1, "nobody reads")
        server.turn()
        store.clock.advance(1)
        rejected(store, 1)
        server.grouping.run_once()
        server.alerting["log"].run_once()
        assert [each.kind for each in sink.got] == ["delivery failed"]

    def test_what_is_over_before_is_never_sent(self, store: StoreUnderTest) -> None:
        server = Server(store, log=(sink := Sink()))
        self._silence(store)
        numbers = rejected(store, 1)
        server.turn()
        store.perform(store.cancel_of(numbers[0]))
        server.settle(store)
        store.clock.advance(3_700)
        server.turn()
        assert sink.got == []

    def test_one_that_is_ended_early(self, store: StoreUnderTest) -> None:
        server = Server(store, log=(sink := Sink()))
        number = self._silence(store)
        rejected(store, 1)
        server.turn()
        store.catalog_store.end_silence("alice", number, "done")
        store.watch.run_once()
        server.turn()
        assert sink.counts == [1]
        with pytest.raises(AlertUnknown):
            store.catalog_store.end_silence("alice", number, "done")

    @pytest.mark.parametrize(
        ("scope", "silenced"),
        [
            ({"kind": "no consumer"}, False),
            ({"kind": "delivery failed", "topic": "order.paid"}, True),
            ({"topic": "order.paid"}, True),
            ({"topic": "order.paid", "subscription": 1}, True),
            ({"topic": "order.paid", "subscription": 2}, False),
        ],
    )
    def test_only_what_it_covers(self, store: StoreUnderTest, scope: dict[str, str | int], silenced: bool) -> None:
        server = Server(store, log=(sink := Sink()))
        self._silence(store, **scope)
        rejected(store, 1)
        server.turn()
        assert (sink.got == []) is silenced


def test_what_the_consumer_said_is_the_cause_although_the_last_attempt_was_not_answered(store: StoreUnderTest) -> None:
    """Else the failures of one error would be two groups, and one of them would have no name."""
    server = Server(store, log=(sink := Sink()))
    said = rejected(store, 1, "no stock")[0]
    number = store.submitted(room=1)
    store.perform(store.nack_of(number, 1, error="no stock"))
    store.set_policy(replace(POLICY, max_age_ms=3_600_000))
    for _ in range(2):
        store.clock.advance(1_800)
        store.redeliver(room=1)
    details = [each.detail for each in store.alerted("delivery failed")]
    server.turn()
    (notice,) = sink.got
    assert (notice.count, notice.number) == (2, said)
    assert details == [
        "rejected by its consumer in attempt 1: no stock",
        "given up after attempt 2: no ack; an attempt before failed: no stock",
    ]
