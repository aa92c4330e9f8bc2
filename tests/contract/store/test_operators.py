"""Operators and their tokens on every database."""

from __future__ import annotations

from dataclasses import replace

import pytest
import sqlalchemy as sa

from tests.support.store import StoreUnderTest
from tmc_server.domain.operators import Operator, Role, Token
from tmc_server.errors import InvalidField, NameTaken, OperatorUnknown
from tmc_server.store.catalog_changes import hash_of
from tmc_server.store.operators import OperatorStore
from tmc_server.store.tables import audit, operator

ANN = Operator(name="ann", role=Role.VIEWER, topics=("order.", "pay."))


@pytest.fixture
def operators(store: StoreUnderTest) -> OperatorStore:
    made = OperatorStore(store.database, change_delay_ms=0)
    assert made.make_first()
    return made


def _token(store: StoreUnderTest, token: str) -> Token | None:
    store.watch.run_once()
    return store.watch.operators.tokens.get(hash_of(token))


def test_the_first_one_administers_everything(store: StoreUnderTest) -> None:
    operators = OperatorStore(store.database, change_delay_ms=0)
    token = operators.make_first()
    assert token
    assert operators.make_first() is None
    (first,) = operators.operators()
    assert (first.name, first.role, first.topics, first.reads_bodies) == ("admin", Role.ADMIN, (), True)
    again = operators.make_first(replace=True)
    assert again
    assert (_token(store, token), _token(store, again)) == (None, Token(operator=operators.operators()[0]))


@pytest.mark.parametrize("values", [{"role": 99}, {"topics": "["}, {"identities": "["}])
def test_one_whose_row_cannot_be_read_is_refused_and_others_are_not(
    store: StoreUnderTest, operators: OperatorStore, values: dict[str, object]
) -> None:
    tokens = [operators.register("admin", replace(ANN, name=name), None, "new")[1] for name in ("ann", "bob")]
    assert all(_token(store, token) for token in tokens)
    with store.database.transaction() as connection:
        connection.execute(operator.update().where(operator.c.name == "ann").values(values))
    operators.register("admin", replace(ANN, name="eve"), None, "new")
    assert [_token(store, token) is not None for token in tokens] == [False, True]


def test_registered_with_a_token_that_expires(store: StoreUnderTest, operators: OperatorStore) -> None:
    made, token = operators.register("admin", ANN, 60_000, "new here")
    assert (made.topics, made.reads_bodies, made.expires_ms) == (ANN.topics, False, store.clock() + 60_000)
    found = _token(store, token)
    assert found == Token(operator=made, expires_ms=made.expires_ms)
    assert found.is_valid(store.clock() + 59_999)
    assert not found.is_valid(store.clock() + 60_000)
    assert operators.register("admin", ANN, 60_000, "again") == (made, "")
    with pytest.raises(NameTaken):
        operators.register("admin", Operator(name="ann", role=Role.ADMIN), None, "more")


def test_only_the_named_rights_change(operators: OperatorStore) -> None:
    operators.register("admin", ANN, None, "new here")
    wanted = Operator(name="ann", role=Role.OPERATOR, reads_bodies=True)
    changed = operators.update("admin", wanted, ["role"], "on call")
    assert (changed.role, changed.topics, changed.reads_bodies) == (Role.OPERATOR, ANN.topics, False)
    changed = operators.update("admin", wanted, ["topics", "reads_bodies"], "trusted")
    assert (changed.topics, changed.reads_bodies) == ((), True)
    with pytest.raises(OperatorUnknown):
        operators.update("admin", Operator(name="nobody", role=Role.VIEWER), ["role"], "x")


def test_the_token_before_stays_valid_for_the_overlap_and_never_longer_than_it_was(
    store: StoreUnderTest, operators: OperatorStore
) -> None:
    _, first = operators.register("admin", ANN, 10_000, "new here")
    now = store.clock()
    made, second = operators.rotate_token("ann", "ann", 90_000, 60_000, "monthly")
    assert (made.expires_ms, made.previous_expires_ms) == (now + 90_000, now + 10_000)
    old, new = _token(store, first), _token(store, second)
    assert old is not None
    assert new is not None
    assert (old.expires_ms, new.expires_ms) == (now + 10_000, now + 90_000)
    _, third = operators.rotate_token("ann", "ann", None, 0, "leaked")
    assert (_token(store, first), _token(store, second)) == (None, None)
    assert _token(store, third) is not None


def test_removed(store: StoreUnderTest, operators: OperatorStore) -> None:
    _, token = operators.register("admin", ANN, None, "new here")
    operators.remove("admin", "ann", "left")
    assert _token(store, token) is None
    for gone in (
        lambda: operators.remove("admin", "ann", "x"),
        lambda: operators.rotate_token("a", "ann", None, 0, "x"),
    ):
        with pytest.raises(OperatorUnknown):
            gone()


def test_an_administrator_of_all_topics_remains(operators: OperatorStore) -> None:
    operators.register("admin", Operator(name="ben", role=Role.ADMIN, topics=("order.",)), None, "of orders")
    for change in (
        lambda: operators.remove("admin", "admin", "x"),
        lambda: operators.update("admin", Operator(name="admin", role=Role.OPERATOR), ["role"], "x"),
        lambda: operators.update("admin", Operator(name="admin", role=Role.ADMIN, topics=("a",)), ["topics"], "x"),
    ):
        with pytest.raises(InvalidField, match="last administrator"):
            change()
    operators.register("admin", Operator(name="eve", role=Role.ADMIN), 60_000, "for a minute")
    with pytest.raises(InvalidField, match="does not expire"):
        operators.remove("eve", "admin", "left")
    with pytest.raises(InvalidField, match="does not expire"):
        operators.rotate_token("admin", "admin", 60_000, 0, "monthly")
    operators.rotate_token("admin", "eve", None, 0, "stays")
    operators.remove("eve", "admin", "left")


def test_what_changes_nothing_leaves_no_row(store: StoreUnderTest, operators: OperatorStore) -> None:
    operators.register("admin", ANN, None, "new here")
    with store.database.reading() as connection:
        before = connection.execute(sa.select(sa.func.count()).select_from(audit)).scalar_one()
    assert operators.register("admin", ANN, None, "again")[1] == ""
    assert operators.make_first() is None
    with store.database.reading() as connection:
        assert connection.execute(sa.select(sa.func.count()).select_from(audit)).scalar_one() == before
