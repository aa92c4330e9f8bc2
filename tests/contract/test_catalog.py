"""The catalog: changes that no submit misses, registrations, node slots."""

from __future__ import annotations

import pytest

from tests.support.clock import ManualClock
from tests.support.store import POLICY, StoreUnderTest, in_thread
from tmc_server.domain.message import MessageState
from tmc_server.domain.operations import Stored
from tmc_server.domain.ports import NewTopic
from tmc_server.errors import AppUnknown, CatalogStale, NameTaken, RotationOpen
from tmc_server.store.catalog import CatalogStore, CatalogWatch
from tmc_server.store.due import DueConsumptions
from tmc_server.store.nodes import LEASE_MS, NodeSlots

DELAY_MS = 5000


class TestChanges:
    """A server reads the catalog at some moment and submits at a later one."""

    @pytest.fixture
    def watch(self, store: StoreUnderTest) -> CatalogWatch:
        made = CatalogWatch(CatalogStore(store.database, DELAY_MS))
        made.run_once()
        store.watch = made
        store.writer = store.new_writer()
        store.due = DueConsumptions(store.writer, store.leases, made)
        return made

    def test_a_submit_with_an_old_copy_is_refused_and_changes_nothing(
        self, store: StoreUnderTest, watch: CatalogWatch
    ) -> None:
        operation, publish = store.prepared(), store.a_prepare(publish=True)
        store.clock.now_ms += DELAY_MS + 1
        answers = store.perform(store.submit_of(operation.number), publish)
        assert [type(answer) for answer in answers] == [CatalogStale, CatalogStale]
        assert store.state_of(operation.number) is MessageState.PREPARED
        assert store.messages_with_key(publish.key) == []
        watch.run_once()
        assert store.perform(store.submit_of(operation.number)) == [Stored(operation.number, MessageState.COMMITTED)]

    def test_prepares_and_rollbacks_go_on_with_an_old_copy(self, store: StoreUnderTest, watch: CatalogWatch) -> None:
        store.clock.now_ms += DELAY_MS + 1
        operation = store.prepared()
        assert store.perform(store.rollback_of(operation.number)) == [
            Stored(operation.number, MessageState.ROLLED_BACK)
        ]

    @pytest.mark.parametrize(("after_ms", "reached"), [(DELAY_MS - 1, False), (DELAY_MS, True)])
    def test_a_new_subscription_counts_from_its_time_of_effect(
        self, store: StoreUnderTest, watch: CatalogWatch, after_ms: int, reached: bool
    ) -> None:
        editor = CatalogStore(store.database, DELAY_MS)
        editor.register_app("test", "mail", "mail", "mail", "", "")
        made = editor.register_subscription("test", "order.paid", "mail", "", POLICY)
        assert made.effective_ms == store.clock() + DELAY_MS
        operation = store.prepared()
        store.clock.now_ms += after_ms
        watch.run_once()
        store.perform(store.submit_of(operation.number))
        store.redeliver(room=10)
        assert (made.number in {copy.subscription for copy in store.outlet.delivered}) is reached

    @pytest.mark.parametrize("apart_ms", [0, 1, 999])
    def test_a_copy_that_lacks_a_subscription_is_stale_when_it_comes_into_effect(
        self, store: StoreUnderTest, watch: CatalogWatch, apart_ms: int
    ) -> None:
        """Read and changed in the same millisecond, and the clocks of two databases differ."""
        editor = CatalogStore(store.database, DELAY_MS)
        editor.register_app("test", "mail", "mail", "mail", "", "")
        made = editor.register_subscription("test", "order.paid", "mail", "", POLICY)
        assert made.number not in {s.number for s in watch.current.subscriptions_of[made.topic]}
        assert watch.is_stale(made.effective_ms - apart_ms)
        assert not watch.is_stale(store.clock() + round(2 * watch.period_s * 1000))


class TestRegistering:
    def test_two_registrations_at_once_make_two_numbers(self, store: StoreUnderTest) -> None:
        names = [f"app-{i}" for i in range(8)]
        threads = [
            in_thread(lambda n=name: store.catalog_store.register_app("test", n, n, n, "", "")) for name in names
        ]
        made = []
        for thread, result in threads:
            thread.join(30)
            made.append(result[0][0].number)
        assert len(set(made)) == len(names)

    def test_unknown_owners_and_other_settings(self, store: StoreUnderTest) -> None:
        with pytest.raises(AppUnknown):
            store.catalog_store.register_topic("test", NewTopic("t", "nobody", "default", 0, 1, 1, 1))
        with pytest.raises(NameTaken):
            store.catalog_store.register_topic(
                "test", NewTopic("order.paid", "orders", "default", 6, 1, 10_000, 1_000_000)
            )

    def test_a_removed_subscription_can_come_back(self, store: StoreUnderTest) -> None:
        store.catalog_store.remove_subscription("test", "order.paid", "coupons", "")
        again = store.catalog_store.register_subscription("test", "order.paid", "coupons", "", POLICY)
        assert (again.number, again.removed_ms) == (store.subscription.number, None)

    def test_keys_rotate(self, store: StoreUnderTest) -> None:
        first = store.watch.current.app_by_id["orders"].key_hashes
        store.catalog_store.add_key("test", "orders", False)
        store.watch.run_once()
        second = store.watch.current.app_by_id["orders"].key_hashes
        assert (len(second), second[1]) == (2, first[0])
        store.catalog_store.drop_old_key("test", "orders")
        store.watch.run_once()
        assert store.watch.current.app_by_id["orders"].key_hashes == second[:1]

    def test_a_second_rotation_cannot_cut_off_running_services(self, store: StoreUnderTest) -> None:
        used = store.watch.current.app_by_id["orders"].key_hashes[0]
        store.catalog_store.add_key("test", "orders", False)
        with pytest.raises(RotationOpen):
            store.catalog_store.add_key("test", "orders", False)
        store.catalog_store.add_key("test", "orders", True)  # the answer with the newest one was lost
        store.watch.run_once()
        hashes = store.watch.current.app_by_id["orders"].key_hashes
        assert (len(hashes), hashes[1]) == (2, used)

    def test_the_longest_names_fit_everywhere(self, store: StoreUnderTest) -> None:
        app, topic, tag = "a" * 64, "t" * 128, "g" * 64
        store.catalog_store.register_app("o" * 64, app, "s" * 128, "b" * 128, "e" * 255, "p" * 64)
        store.catalog_store.register_topic("o" * 64, NewTopic(topic, app, tag, 0, 32, 1, 1))
        store.catalog_store.register_subscription("o" * 64, topic, app, tag, POLICY)
        store.catalog_store.remove_subscription("o" * 64, topic, app, tag)

    def test_every_change_leaves_an_audit_row(self, store: StoreUnderTest) -> None:
        import sqlalchemy as sa

        from tmc_server.store.tables import audit

        store.catalog_store.add_key("alice", "orders", False)
        with store.database.reading() as connection:
            rows = connection.execute(sa.select(audit.c.actor, audit.c.action, audit.c.subject)).fetchall()
        assert ("alice", "add app key", "orders") in [tuple(row) for row in rows]


def _slots(store: StoreUnderTest, name: str) -> NodeSlots:
    return NodeSlots(store.database, name, store.clock, monotonic=lambda: store.clock() / 1000)


class TestNodeSlots:
    def test_two_servers_take_two_slots(self, store: StoreUnderTest) -> None:
        one, two = (_slots(store, name) for name in ("one", "two"))
        assert {one.acquire().slot, two.acquire().slot} == {0, 1}

    def test_a_released_slot_is_used_again_with_a_higher_epoch(self, store: StoreUnderTest) -> None:
        one, two = (_slots(store, name) for name in ("one", "two"))
        first = one.acquire()
        last = one.ids.next()
        one.release()
        second = two.acquire()
        assert (second.slot, second.epoch) == (first.slot, first.epoch + 1)
        assert second.incarnation > first.incarnation
        assert two.ids.next() > last

    def test_a_slot_whose_holder_died_is_taken_over_after_its_lease(self, store: StoreUnderTest) -> None:
        one, two = (_slots(store, name) for name in ("one", "two"))
        first = one.acquire()
        last = one.ids.next()
        store.clock.now_ms += LEASE_MS
        assert two.acquire().slot == first.slot
        assert two.ids.next() > last
        assert one.run_once() is False  # it noticed, and took another slot
        assert one.lease is not None
        assert one.lease.slot != first.slot
        assert one.ids.next() != two.ids.next()

    def test_a_kept_lease_goes_on(self, store: StoreUnderTest) -> None:
        one = _slots(store, "one")
        one.acquire()
        made = [one.ids.next()]
        for _ in range(5):
            store.clock.now_ms += LEASE_MS - 1
            assert one.run_once() is True
            made.append(one.ids.next())
        assert made == sorted(made)

    def test_numbers_never_repeat_when_clocks_go_back_between_runs(self, store: StoreUnderTest) -> None:
        local = ManualClock(store.clock() + 60_000)  # this machine's clock was ahead
        one = NodeSlots(store.database, "one", local)
        one.acquire()
        made = [one.ids.next() for _ in range(10)]
        one.release()
        local.now_ms -= 120_000
        two = NodeSlots(store.database, "two", local)
        two.acquire()
        assert two.ids.next() > made[-1]

    def test_a_run_is_alive_while_it_beats_and_gone_afterwards(self, store: StoreUnderTest) -> None:
        one, two = (_slots(store, name) for name in ("one", "two"))
        first, second = one.acquire(), two.acquire()
        store.clock.now_ms += LEASE_MS // 2
        one.run_once()
        two.run_once()
        assert [run.name for run in one.alive] == ["one", "two"]
        store.clock.now_ms += LEASE_MS - 1
        two.run_once()
        assert one.incarnation() == first.incarnation
        store.clock.now_ms += 1
        assert one.incarnation() is None  # it knows by itself, before anybody else acts on it
        two.run_once()
        assert [run.incarnation for run in two.alive] == [second.incarnation]
        assert [run.incarnation for run in two.gone] == [first.incarnation]

    @pytest.mark.parametrize("all_answered", [True, False])
    def test_a_run_that_stopped_is_rescued_only_when_something_was_left_open(
        self, store: StoreUnderTest, all_answered: bool
    ) -> None:
        one, two = (_slots(store, name) for name in ("one", "two"))
        one.acquire()
        one.release(all_answered)
        two.acquire()
        assert [run.name for run in two.gone] == ([] if all_answered else ["one"])
