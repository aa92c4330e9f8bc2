"""Refusals of consumers cost a few statements per batch, however many there are: a storm of it delays nobody else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import sqlalchemy as sa

from tests.support.store import DONE, POLICY, StoreUnderTest
from tmc_server.domain.consumption import ConsumptionState
from tmc_server.domain.operations import Operation
from tmc_server.domain.ports.catalog import NewSubscription
from tmc_server.store.tables import alert, failed

Answer = Callable[[StoreUnderTest, int], Operation]
_COUNT = 60


@pytest.mark.parametrize(
    ("answer", "at_most"),
    [
        pytest.param(lambda store, number: store.ack_of(number, 1), 3, id="ack"),
        pytest.param(lambda store, number: store.nack_of(number, 1), 4, id="nack"),
        pytest.param(lambda store, number: store.nack_of(number, 1, hangs=True), 6, id="hang"),
        pytest.param(lambda store, number: store.nack_of(number, 1, reject=True), 7, id="reject"),
        pytest.param(lambda store, number: store.extend_of(number, 1, run=1), 3, id="extend"),
        pytest.param(lambda store, number: store.give_back_of(number, 1), 3, id="give back"),
        pytest.param(lambda store, number: store.cancel_of(number), 4, id="cancel"),
    ],
)
def test_a_batch_of_equal_answers_takes_a_few_statements(store: StoreUnderTest, answer: Answer, at_most: int) -> None:
    operations = [answer(store, store.submitted(room=1)) for _ in range(_COUNT)]
    with store.counting() as counted:
        store.perform(*operations)
    assert len(counted.statements) <= at_most, list(counted.statements)
    assert counted.commits == 1


def test_rejects_are_alerted_once_each_with_the_error_of_their_own(store: StoreUnderTest) -> None:
    numbers = [store.submitted(room=1) for _ in range(5)]
    rejects = [store.nack_of(number, 1, reject=True, error=f"no stock of {number % 2}") for number in numbers]
    store.perform(*rejects)
    store.perform(*rejects)
    with store.database.reading() as connection:
        rows = connection.execute(sa.select(alert.c.message_id, alert.c.detail).order_by(alert.c.message_id)).fetchall()
        noted = connection.execute(sa.select(failed.c.message_id).order_by(failed.c.message_id)).scalars().all()
    assert [row.message_id for row in rows] == sorted(numbers) == list(noted)
    assert [f"no stock of {row.message_id % 2}" in row.detail for row in rows] == [True] * len(numbers)


def test_copies_of_an_earlier_registration_are_answered_in_sets(store: StoreUnderTest) -> None:
    """Each of them has to be looked for among the registrations before this one."""
    numbers = [store.submitted(room=1) for _ in range(_COUNT)]
    first = store.subscription
    for _ in range(2):
        store.removed()
        store.subscription = store.catalog_store.register_subscription(
            "test", NewSubscription(topic="order.paid", app="coupons", tag="", policy=POLICY)
        )
        store.watch.run_once()
    with store.counting() as counted:
        assert store.perform(*(store.ack_of(number) for number in numbers)) == [DONE] * _COUNT
    assert len(counted.statements) <= 7, list(counted.statements)
    store.subscription = first
    assert {store.consumption_state(number) for number in numbers} == {ConsumptionState.ACKED}


def test_equal_alerts_of_one_batch_are_one(store: StoreUnderTest) -> None:
    hanging = store.submitted(room=1)
    committed = store.prepared()
    store.perform(store.submit_of(committed.number))
    twice = [store.nack_of(hanging, 1, hangs=True) for _ in range(2)]
    store.perform(*twice, *(store.rollback_of(committed.number) for _ in range(2)))
    with store.database.reading() as connection:
        kinds = connection.execute(sa.select(alert.c.kind).order_by(alert.c.kind)).scalars().all()
    assert list(kinds) == ["contradiction", "handler hangs"]
