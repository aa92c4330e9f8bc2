"""The catalog: changes that no submit misses, registrations, node slots."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import sqlalchemy as sa

from tests.support.clock import ManualClock
from tests.support.store import DONE, POLICY, StoreUnderTest, in_thread
from tmc_server.domain.catalog import DeliveryKeys, NewApp, NewTopic, Subscription
from tmc_server.domain.checks import CheckPolicy, CheckTarget
from tmc_server.domain.consumption import ConsumptionState
from tmc_server.domain.message import MessageState
from tmc_server.domain.ports.catalog import NewSubscription
from tmc_server.domain.ports.delivery import Claimed
from tmc_server.errors import (
    AppUnknown,
    CatalogStale,
    CredentialsInvalid,
    NameTaken,
    NoIdentity,
    RotationOpen,
    StoreUnavailable,
)
from tmc_server.store.activation import CatalogActivation
from tmc_server.store.batch import ShardWriter
from tmc_server.store.catalog import CatalogStore, hash_of
from tmc_server.store.catalog_watch import CatalogWatch
from tmc_server.store.engines import Database, ShardMap
from tmc_server.store.migrate import migrate
from tmc_server.store.nodes import LEASE_MS, NodeSlots
from tmc_server.store.operators import OperatorStore
from tmc_server.store.tables import audit, check_target, shard_tables, subscription, topic

DELAY_MS = 5000


class Center:
    """Servers on one catalog, each with its own copy and its own beat; all go by one manual monotonic clock.

    The wall clock of the databases is the store's, and moves apart from it.
    """

    def __init__(self, store: StoreUnderTest) -> None:
        self.store = store
        self.seconds = 1_000.0
        self.editor = CatalogStore(store.database, DELAY_MS)
        self.pauses = 0
        self.look_seconds = 0.0
        self.looking: list[Server] = []
        self.registrar = self.server("registrar")

    def server(self, name: str) -> Server:
        made = Server(self, name)
        self.looking.append(made)
        return made

    def pass_by(self, seconds: float) -> None:
        """Time in which every server that still does so looks at the catalog."""
        self.pauses += 1
        self.seconds += seconds
        for server in self.looking:
            server.watch.run_once()

    def subscribe(self, app: str) -> Subscription:
        self.editor.register_app("test", NewApp(id=app, service_name=app, biz_id=app))
        return self.editor.register_subscription(
            "test", NewSubscription(topic="order.paid", app=app, tag="", policy=POLICY)
        )

    def await_everywhere(self) -> int:
        return self.registrar.activation().wait()


class Server:
    """One server run, as app/wiring.py wires it."""

    def __init__(self, center: Center, name: str) -> None:
        self.center = center
        seconds = lambda: center.seconds  # noqa: E731
        self.nodes = NodeSlots(center.store.database, name, center.store.clock, monotonic=seconds, stale_ms=DELAY_MS)
        self.watch = CatalogWatch(center.editor, self.nodes.run, self.nodes.acknowledge, seconds)
        self.nodes.acquire()
        self.watch.run_once()
        self.writer = ShardWriter(center.store.database, self.watch, center.store.outlet, lambda: 9)

    def activation(self) -> CatalogActivation:
        center, database = self.center, self.center.store.database

        def refresh() -> None:
            center.seconds += center.look_seconds
            self.watch.run_once()

        return CatalogActivation(
            database, refresh, self.nodes.run, monotonic=lambda: center.seconds, pause=center.pass_by
        )

    def publishes_to(self, subscription: Subscription) -> bool | type[CatalogStale]:
        """Whether a message that is published through this server now reaches a subscription, or that it is refused."""
        store = self.center.store
        publish = store.a_prepare(publish=True)
        (answer,) = store.perform(publish, writer=self.writer)
        if isinstance(answer, CatalogStale):
            return CatalogStale
        table = shard_tables(store.shard).consumption
        with store.database.reading() as connection:
            rows = connection.execute(sa.select(table.c.subscription_no).filter_by(message_id=publish.number))
            return subscription.number in rows.scalars().all()


class TestChanges:
    """A server reads the catalog at some moment and submits at a later one."""

    @pytest.fixture
    def center(self, store: StoreUnderTest) -> Center:
        return Center(store)

    def test_a_submit_with_an_old_copy_is_refused_and_changes_nothing(self, center: Center) -> None:
        store, server = center.store, center.registrar
        operation, publish = store.prepared(), store.a_prepare(publish=True)
        center.seconds += DELAY_MS / 1000
        answers = store.perform(store.submit_of(operation.number), publish, writer=server.writer)
        assert [type(answer) for answer in answers] == [CatalogStale, CatalogStale]
        assert store.state_of(operation.number) is MessageState.PREPARED
        assert store.messages_with_key(publish.key) == []
        server.watch.run_once()
        assert store.perform(store.submit_of(operation.number), writer=server.writer) == [
            store.stored(operation.number, MessageState.COMMITTED)
        ]

    def test_prepares_and_rollbacks_go_on_with_an_old_copy(self, center: Center) -> None:
        store = center.store
        center.seconds += 1000
        operation = store.a_prepare()
        store.perform(operation, writer=center.registrar.writer)
        assert store.perform(store.rollback_of(operation.number), writer=center.registrar.writer) == [
            store.stored(operation.number, MessageState.ROLLED_BACK)
        ]

    def test_a_clock_that_is_set_back_hides_no_subscription(self, center: Center) -> None:
        made = center.subscribe("mail")
        center.await_everywhere()
        center.store.clock.advance(-3600)
        assert center.registrar.publishes_to(made) is True

    def test_a_shard_database_whose_clock_is_behind_hides_no_subscription(self, center: Center, tmp_path) -> None:
        behind = ManualClock(center.store.clock() - 10_000)
        shards = Database(f"sqlite:///{tmp_path}/behind.db", clock=behind)
        migrate(ShardMap(shards, [shards] * 32))
        made = center.subscribe("mail")
        center.await_everywhere()
        center.store.database, catalog = shards, center.store.database
        center.registrar.writer = ShardWriter(shards, center.registrar.watch, center.store.outlet, lambda: 9)
        assert center.registrar.publishes_to(made) is True
        center.store.database = catalog
        shards.close()

    def test_a_slow_commit_of_a_change_hides_no_subscription(self, center: Center) -> None:
        """Everybody looks while it is written, and is fresh when it is committed at last."""
        other = center.server("other")
        database = center.store.database

        def look(_connection: object) -> None:
            center.seconds += 2 * DELAY_MS / 1000
            if not database.dialect.has_one_writer:  # there, who reads waits for nobody either, but has one connection
                other.watch.run_once()

        sa.event.listen(database.engine, "commit", look)
        made = center.subscribe("mail")
        sa.event.remove(database.engine, "commit", look)
        center.looking.remove(other)
        assert other.publishes_to(made) in (False, CatalogStale)  # not answered yet: either way is true
        center.await_everywhere()
        assert other.publishes_to(made) is CatalogStale
        other.watch.run_once()
        assert other.publishes_to(made) is True

    def test_a_server_that_acknowledges_is_waited_for_no_longer(self, center: Center) -> None:
        other = center.server("other")
        made = center.subscribe("mail")
        center.await_everywhere()
        assert center.pauses == 1  # its next look
        assert other.publishes_to(made) is True

    def test_a_server_that_sleeps_can_submit_nothing_when_it_wakes_up(self, center: Center) -> None:
        asleep = center.server("asleep")
        center.looking.remove(asleep)
        made = center.subscribe("mail")
        began = center.seconds
        center.await_everywhere()
        assert center.seconds - began >= DELAY_MS / 1000
        assert asleep.publishes_to(made) is CatalogStale
        asleep.watch.run_once()
        assert asleep.publishes_to(made) is True

    def test_a_wait_ends_when_its_server_stops(self, center: Center) -> None:
        asleep = center.server("asleep")
        center.looking.remove(asleep)
        center.subscribe("mail")
        waiting = center.registrar.activation()
        waiting._pause = lambda _seconds: waiting.stop()  # time stands still: nothing else ends it
        with pytest.raises(StoreUnavailable, match="repeat the same call"):
            waiting.wait()

    def test_a_server_that_is_gone_is_waited_for_once(self, center: Center) -> None:
        center.look_seconds = 0.5  # so it is silenced well after the wait began
        gone = center.server("gone")
        center.looking.remove(gone)
        center.store.clock.advance(LEASE_MS / 1000)
        center.registrar.nodes.run_once()
        center.subscribe("mail")
        center.await_everywhere()
        paused = center.pauses
        center.subscribe("bills")
        center.await_everywhere()
        assert center.pauses <= paused + 1, "the second change waits for it, too"
        with pytest.raises(CatalogStale):
            gone.watch.run_once()  # however fresh that look would be, nobody waits for it any more
        assert gone.nodes.run_once() is False  # it takes another identity
        gone.watch.run_once()
        assert gone.watch.in_use()[1] is False

    def test_a_server_that_lost_its_identity_and_finds_no_other_stays_stale(
        self, center: Center, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its row is waited for once; later changes find nothing of it to wait for."""
        lost = center.server("lost")
        center.looking.remove(lost)
        center.store.clock.advance(LEASE_MS / 1000)
        center.registrar.nodes.run_once()
        center.subscribe("mail")
        center.await_everywhere()

        def refuse(_connection: object) -> None:
            raise NoIdentity("All slots are leased.")

        with monkeypatch.context() as patched:
            patched.setattr(lost.nodes, "_take", refuse)
            with pytest.raises(NoIdentity):
                lost.nodes.run_once()
        with pytest.raises(CatalogStale):
            lost.watch.run_once()
        made = center.subscribe("bills")
        center.await_everywhere()
        assert lost.publishes_to(made) is CatalogStale
        lost.nodes.run_once()
        lost.watch.run_once()
        assert lost.publishes_to(made) is True

    @pytest.mark.parametrize(
        ("table", "values", "name"),
        [
            (subscription, {"kind": 99}, "subscription 1"),
            (topic, {"queue_mode": 99}, "topic 1"),
            (check_target, {"options": "{"}, "check target 'main' of topic 1"),
        ],
    )
    def test_a_row_that_cannot_be_read_stays_as_it_was(
        self,
        store: StoreUnderTest,
        caplog: pytest.LogCaptureFixture,
        table: sa.Table,
        values: dict[str, Any],
        name: str,
    ) -> None:
        """Others are read; a server that never read it reads nothing, since it might forget a subscriber."""
        editor, watch = store.catalog_store, store.watch
        target = CheckTarget(name="main", kind="http")
        editor.set_topic_check("test", store.topic.name, CheckPolicy({"main": target}))
        watch.run_once()
        before = watch.current
        with store.database.transaction() as connection:
            connection.execute(table.update().values(values))
        editor.register_app("test", NewApp(id="later", service_name="later", biz_id="later"))
        watch.run_once()
        assert watch.current.app_by_id["later"]
        assert watch.current.topics == before.topics
        assert watch.current.subscriptions == before.subscriptions
        assert f"the row of {name} cannot be read" in caplog.text
        OperatorStore(store.database, change_delay_ms=0).make_first()
        late = CatalogWatch(editor)
        with pytest.raises(StoreUnavailable, match=name):
            late.run_once()
        assert late.operators.tokens

    def test_a_center_of_one_process_looks_without_an_identity(self, center: Center) -> None:
        watch = CatalogWatch(CatalogStore(center.store.database, 0), lambda: None)
        assert watch.run_once() is True
        assert watch.in_use()[1] is False

    def test_a_server_that_starts_while_a_change_is_awaited_has_it(self, center: Center) -> None:
        made = center.subscribe("mail")
        late = center.server("late")
        center.looking.remove(late)
        center.await_everywhere()
        assert late.publishes_to(made) is True

    def test_a_copy_and_its_age_are_of_one_moment(self, center: Center) -> None:
        """A thread that stops after it took the copy must not find the age of the next one."""
        watch = center.registrar.watch
        watch._monotonic = lambda: center.pass_by(2 * DELAY_MS / 1000) or center.seconds
        watch.run_once = lambda: setattr(watch, "_seen", (watch.current, center.seconds))
        assert watch.in_use()[1] is True


class TestRemoving:
    def test_nothing_is_cancelled_by_a_copy_that_missed_the_return(self, store: StoreUnderTest) -> None:
        """The removal is taken back, another server does not hear of it for a while."""
        number = store.submitted()
        store.catalog_store.remove_subscription("test", "order.paid", "coupons", "")
        store.watch.run_once()
        store.catalog_store.register_subscription(
            "test", NewSubscription(topic="order.paid", app="coupons", tag="", policy=POLICY)
        )
        assert store.redeliver(room=10) == Claimed(delivered=1)
        assert store.consumption_state(number) is ConsumptionState.SCHEDULED

    def test_a_subscription_that_was_removed_comes_back_with_another_number(self, store: StoreUnderTest) -> None:
        number = store.submitted()
        store.removed()
        again = store.catalog_store.register_subscription(
            "test", NewSubscription(topic="order.paid", app="coupons", tag="", policy=POLICY)
        )
        assert (again.number > store.subscription.number, again.removed_ms) == (True, None)
        late = store.a_prepare(publish=True)
        old_copy = store.watch.current
        store.watch.run_once()
        store.perform(late)
        store.watch._seen = (old_copy, 0.0)  # this server missed the return
        store.redeliver(room=10)
        assert store.consumption_state(number) is ConsumptionState.CANCELLED
        store.subscription = again
        assert store.consumption_state(late.number) is ConsumptionState.SCHEDULED

    def test_an_ack_of_a_copy_of_the_earlier_life_is_accepted(self, store: StoreUnderTest) -> None:
        cancelled, open_one = store.submitted(), store.submitted(room=1)
        store.removed()
        store.redeliver(room=10)
        first = store.subscription
        store.subscription = store.catalog_store.register_subscription(
            "test", NewSubscription(topic="order.paid", app="coupons", tag="", policy=POLICY)
        )
        store.watch.run_once()
        assert store.perform(store.ack_of(cancelled), store.ack_of(open_one)) == [DONE, DONE]
        store.subscription = first
        states = [store.consumption_state(number) for number in (cancelled, open_one)]
        assert states == [ConsumptionState.CANCELLED, ConsumptionState.ACKED]

    def test_nothing_is_given_up_with_a_stale_copy(self, store: StoreUnderTest) -> None:
        store.begin_handlers()
        number = store.submitted(room=1)
        store.catalog_store.change_delay_ms = DELAY_MS
        store.monotonic = lambda: time.monotonic() + 2 * DELAY_MS
        store.clock.advance(3600)
        for _ in range(POLICY.max_retry + 3):
            store.redeliver(room=10)
            store.clock.advance(3600)
        assert store.consumption_state(number) is ConsumptionState.SCHEDULED
        store.catalog_store.change_delay_ms = 0
        store.redeliver(room=10)
        assert store.consumption_state(number) is ConsumptionState.FAILED

    @pytest.mark.parametrize("point", ["tmc_app", "tmc_topic", "tmc_subscription"])
    def test_a_copy_is_of_one_moment(self, store: StoreUnderTest, point: str) -> None:
        """A whole change comes between two reads of one load."""
        watch, editor = CatalogWatch(store.catalog_store), store.catalog_store
        done: list[bool] = []

        def change(_conn: object, _cursor: object, statement: str, *_: object) -> None:
            if f"FROM {point}" in statement and not done:
                done.append(True)
                editor.register_app("test", NewApp(id="mail", service_name="mail", biz_id="mail"))
                editor.register_topic(
                    "test",
                    NewTopic(
                        name="bills",
                        owner="mail",
                        default_tag="default",
                        table_index=0,
                        spread=1,
                        transaction_time_ms=1,
                        open_limit=1,
                    ),
                )
                editor.register_subscription("test", NewSubscription(topic="bills", app="mail", tag="", policy=POLICY))

        sa.event.listen(store.database.readers, "after_cursor_execute", change)
        watch.run_once()
        sa.event.remove(store.database.readers, "after_cursor_execute", change)
        copy = watch.current
        assert done
        assert ("mail" in copy.app_by_id, "bills" in copy.topic_by_name, len(copy.subscriptions)) == (False, False, 1)
        assert watch.run_once() is True


class TestRegistering:
    def test_two_registrations_at_once_make_two_numbers(self, store: StoreUnderTest) -> None:
        names = [f"app-{i}" for i in range(8)]
        threads = [
            in_thread(lambda n=name: store.catalog_store.register_app("test", NewApp(id=n, service_name=n, biz_id=n)))
            for name in names
        ]
        made = []
        for thread, result in threads:
            thread.join(30)
            made.append(result[0][0].number)
        assert len(set(made)) == len(names)

    def test_unknown_owners_and_other_settings(self, store: StoreUnderTest) -> None:
        with pytest.raises(AppUnknown):
            store.catalog_store.register_topic(
                "test",
                NewTopic(
                    name="t",
                    owner="nobody",
                    default_tag="default",
                    table_index=0,
                    spread=1,
                    transaction_time_ms=1,
                    open_limit=1,
                ),
            )
        with pytest.raises(NameTaken):
            store.catalog_store.register_topic(
                "test",
                NewTopic(
                    name="order.paid",
                    owner="orders",
                    default_tag="default",
                    table_index=6,
                    spread=1,
                    transaction_time_ms=10_000,
                    open_limit=1_000_000,
                ),
            )

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

    def test_a_delivery_key_is_announced_before_it_signs(self, store: StoreUnderTest) -> None:
        editor, number = store.catalog_store, store.subscription.number
        first = _keys(store)
        announced = editor.announce_delivery_key("test", "order.paid", "coupons", "", drop_previous=False).keys
        assert announced is not None
        assert announced.other is not None
        assert (first.other, announced.signing, announced.other != first.signing) == (None, first.signing, True)
        assert _keys(store) == announced
        editor.sign_with("test", number, announced.other)
        rotated = replace(announced, signing=announced.other, other=first.signing)
        assert _keys(store) == rotated
        editor.sign_with("test", number, bytes(32))  # announced by a rotation that another one overtook
        assert _keys(store) == rotated

    def test_a_second_rotation_of_a_delivery_key_has_to_say_that_it_drops_one(self, store: StoreUnderTest) -> None:
        rotate = partial(store.catalog_store.announce_delivery_key, "test", "order.paid", "coupons", "")
        first = rotate(drop_previous=False).keys
        with pytest.raises(RotationOpen):
            rotate(drop_previous=False)
        second = rotate(drop_previous=True).keys
        assert first is not None
        assert second is not None
        assert (second.signing, second.other != first.other) == (first.signing, True)

    def test_a_subscription_that_comes_back_keeps_its_delivery_keys(self, store: StoreUnderTest) -> None:
        """It reads the same queue, and copies for its earlier life may be there."""
        before = _keys(store)
        store.removed()
        store.subscription = store.catalog_store.register_subscription(
            "test", NewSubscription(topic="order.paid", app="coupons", tag="", policy=POLICY)
        )
        assert _keys(store) == before

    def test_delivery_keys_are_random_and_shown_nowhere(self, store: StoreUnderTest) -> None:
        mine = _keys(store)
        store.catalog_store.register_app("test", NewApp(id="mail", service_name="mail", biz_id="mail"))
        other = store.catalog_store.register_subscription(
            "test", NewSubscription(topic="order.paid", app="mail", tag="", policy=POLICY)
        )
        assert other.keys is not None
        assert other.keys.signing != mine.signing
        assert repr(other.keys) == "DeliveryKeys()"

    def test_the_keys_of_each_environment_rotate_by_themselves(self, store: StoreUnderTest) -> None:
        editor = store.catalog_store

        def keys() -> dict[str, int]:
            store.watch.run_once()
            app = store.watch.current.app_by_id["orders"]
            return {"": len(app.key_hashes)} | {each.tag: len(each.key_hashes) for each in app.tag_keys}

        first = hash_of(editor.add_key("test", "orders", False, "staging"))
        editor.add_key("test", "orders", False, "qa")
        assert keys() == {"": 1, "qa": 1, "staging": 1}
        second = hash_of(editor.add_key("test", "orders", False, "staging"))
        with pytest.raises(RotationOpen):
            editor.add_key("test", "orders", False, "staging")
        assert keys() == {"": 1, "qa": 1, "staging": 2}
        assert store.watch.current.authenticated("orders", first)[1] == "staging"
        editor.drop_old_key("test", "orders", "staging")
        assert keys() == {"": 1, "qa": 1, "staging": 1}
        assert store.watch.current.authenticated("orders", second)[1] == "staging"
        with pytest.raises(CredentialsInvalid):
            store.watch.current.authenticated("orders", first)
        editor.drop_old_key("test", "orders", "staging", True)
        assert keys() == {"": 1, "qa": 1}
        with pytest.raises(AppUnknown):
            editor.add_key("test", "nobody", False, "staging")

    def test_an_app_is_disabled_and_enabled_with_actor_and_reason(self, store: StoreUnderTest) -> None:
        seen = []
        for disabled in (True, False):
            store.catalog_store.set_disabled("alice", "orders", disabled, "its key is public")
            store.watch.run_once()
            seen.append({app.id for app in store.watch.current.apps.values() if app.disabled})
        assert seen == [{"orders"}, set()]
        with store.database.reading() as connection:
            rows = connection.execute(sa.select(audit.c.action, audit.c.subject, audit.c.actor, audit.c.reason))
            changes = {tuple(row) for row in rows}
        assert {(f"{verb} app", "orders", "alice", "its key is public") for verb in ("disable", "enable")} <= changes
        with pytest.raises(AppUnknown):
            store.catalog_store.set_disabled("alice", "nobody", True, "why")

    def test_the_longest_names_fit_everywhere(self, store: StoreUnderTest) -> None:
        app, topic, tag = "a" * 64, "t" * 128, "g" * 64
        store.catalog_store.register_app(
            "o" * 64,
            NewApp(id=app, service_name="s" * 128, biz_id="b" * 128, alert_email="e" * 255, alert_phone="p" * 64),
        )
        store.catalog_store.register_topic(
            "o" * 64,
            NewTopic(
                name=topic, owner=app, default_tag=tag, table_index=0, spread=32, transaction_time_ms=1, open_limit=1
            ),
        )
        store.catalog_store.register_subscription(
            "o" * 64, NewSubscription(topic=topic, app=app, tag=tag, policy=POLICY)
        )
        store.catalog_store.remove_subscription("o" * 64, topic, app, tag)

    def test_every_change_leaves_an_audit_row(self, store: StoreUnderTest) -> None:
        store.catalog_store.add_key("alice", "orders", False)
        with store.database.reading() as connection:
            rows = connection.execute(sa.select(audit.c.actor, audit.c.action, audit.c.subject)).fetchall()
        assert ("alice", "add app key", "orders") in [tuple(row) for row in rows]


def _keys(store: StoreUnderTest) -> DeliveryKeys:
    """Of the store's subscription, as a server that looks now has them."""
    store.watch.run_once()
    keys = store.watch.current.subscriptions[store.subscription.number].keys
    assert keys is not None
    return keys


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

    def test_a_kept_lease_is_extended(self, store: StoreUnderTest) -> None:
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
