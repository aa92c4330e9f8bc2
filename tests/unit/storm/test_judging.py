"""The judge finds what was planted in the books, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tmc_storm.judging import Answer, Books, Effect, Finding, Sent, is_settled, judge, relations

_PAID, _ACCOUNT = "paid", "account"


def _sent(topic: str = _PAID, *, is_refused: bool = False, due_ms: int = 0) -> Sent:
    return Sent(topic=topic, is_refused=is_refused, due_ms=due_ms)


def _effect(key: str, order_key: str = "", number: int = 0, at_ms: int = 1000) -> Effect:
    return Effect(key=key, order_key=order_key, number=number, at_ms=at_ms)


CLEAN = Books(
    sent={
        "a": _sent(),
        "late": _sent(due_ms=1000),
        "bad": _sent(is_refused=True),
        "o1": _sent(_ACCOUNT),
        "o2": _sent(_ACCOUNT),
    },
    begun={"o1", "o2", "maybe", "unheard"},
    effects={
        "stock": [_effect("late"), _effect("a"), _effect("o1", "o", 1), _effect("maybe"), _effect("o2", "o", 2)],
        "mail": [_effect("o1", "o", 1), _effect("o2", "o", 2)],
    },
    topics={"stock": {_PAID, _ACCOUNT}, "mail": {_ACCOUNT}},
    refused={"stock": ["id-bad"]},
    failed={"stock": ["id-bad"]},
    answers=[Answer(key="a", error="Unavailable", text="")],
)


def test_books_that_agree() -> None:
    assert judge(CLEAN) == []
    assert is_settled(CLEAN)
    assert [(one.app, one.committed, one.consumed, one.unconfirmed, one.holds) for one in relations(CLEAN)] == [
        ("stock", 4, 5, 2, True),
        ("mail", 2, 2, 2, True),
    ]


def _with_effects(*effects: Effect) -> Books:
    return replace(CLEAN, effects=CLEAN.effects | {"stock": [*CLEAN.effects["stock"], *effects]})


@pytest.mark.parametrize(
    ("books", "found"),
    [
        (_with_effects(_effect("invented")), Finding(kind="ghost", what="invented at stock")),
        (_with_effects(_effect("bad")), Finding(kind="ghost", what="bad at stock")),
        (_with_effects(_effect("a")), Finding(kind="doubled", what="a at stock: 2 effects")),
        (_with_effects(_effect("maybe", "o", 1)), Finding(kind="out of order", what="maybe at stock after 2")),
        (
            replace(CLEAN, sent=CLEAN.sent | {"b": _sent()}),
            Finding(kind="lost", what="b at stock"),
        ),
        (
            replace(CLEAN, sent=CLEAN.sent | {"late": _sent(due_ms=2000)}),
            Finding(kind="early", what="late at stock: 1000 ms"),
        ),
        (
            replace(CLEAN, failed={"stock": ["id-bad"], "mail": ["id-x"]}),
            Finding(kind="human work", what="id-x is FAILED at mail, and no handler refused it"),
        ),
        (_with_effects(replace(_effect("x"), is_intact=False)), Finding(kind="altered", what="x at stock")),
        (replace(CLEAN, open=["id-z"]), Finding(kind="unfinished", what="id-z is still to be delivered")),
        (replace(CLEAN, undecided=["id-z"]), Finding(kind="unfinished", what="id-z is undecided")),
        (replace(CLEAN, unavailable=["x"]), Finding(kind="not available", what="x")),
        (replace(CLEAN, crashed=["x"]), Finding(kind="crashed", what="x")),
        (replace(CLEAN, check_failed=["id-y"]), Finding(kind="human work", what="id-y is CHECK_FAILED")),
        (
            replace(CLEAN, answers=[Answer(key="a", error="CenterFault", text="oops")]),
            Finding(kind="wrong answer", what="a: CenterFault: oops"),
        ),
    ],
    ids=lambda value: value.kind if isinstance(value, Finding) else "",
)
def test_what_is_planted_is_found(books: Books, found: Finding) -> None:
    assert found in judge(books)
    assert {one.kind for one in judge(books)} <= {found.kind, "doubled", "ghost"}


def test_a_replay_has_an_effect_of_its_own() -> None:
    again = _with_effects(_effect("replay.1"))
    assert judge(again) == [Finding(kind="ghost", what="replay.1 at stock")]
    for known in ({"replays": {"stock": ["replay.1"]}}, {"uncertain_replays": {"stock": 1}}):
        assert judge(replace(again, **known)) == []
        assert all(one.holds for one in relations(replace(again, **known)))
    assert judge(replace(CLEAN, replays={"stock": ["replay.1"]})) == [Finding(kind="lost", what="replay.1 at stock")]
    assert judge(replace(CLEAN, uncertain_replays={"stock": 1})) == []


def test_what_was_refused_and_given_up_is_settled() -> None:
    assert is_settled(replace(CLEAN, failed={}, cancelled=["id-bad"]))


def test_a_confirmed_message_is_no_excuse_at_a_subscriber_who_does_not_get_it() -> None:
    books = replace(CLEAN, effects=CLEAN.effects | {"mail": [*CLEAN.effects["mail"], _effect("a")]}, begun={"a"})
    assert Finding(kind="ghost", what="a at mail") in judge(books)


def test_not_settled_while_something_is_to_come() -> None:
    assert not is_settled(replace(CLEAN, sent=CLEAN.sent | {"b": _sent()}))
    assert not is_settled(replace(CLEAN, failed={}))
    assert not is_settled(replace(CLEAN, undecided=["id-z"]))
    assert not is_settled(replace(CLEAN, open=["id-z"]))


def test_more_consumed_than_begun_breaks_the_relation() -> None:
    books = _with_effects(*[_effect(f"x{number}") for number in range(4)])
    assert [one.holds for one in relations(books)] == [False, True]
