"""The verdict: the books of the services against each other, and what the center asks humans to do. Pure functions."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from tmc_storm.shop.books import REPLAY

_CLOCK_MS = 20  # between the reading of a clock and the row
USUAL_ANSWERS = frozenset({"Unavailable", "DeadlineExceeded", "Overloaded", "Fenced"})
"""Errors of the SDK that a service in a storm must expect: try again, or the transaction took too long and was rolled back."""


@dataclass(frozen=True, kw_only=True)
class Sent:
    """A message whose transaction was committed. due_ms: it must not be handled before; 0: it has no delay."""

    topic: str
    is_refused: bool
    due_ms: int


@dataclass(frozen=True, kw_only=True)
class Effect:
    """The effect of one run of a handler.

    number: within its order key, which is empty for messages in no order.  is_intact: topic, key and body were what was sent.
    """

    key: str
    order_key: str
    number: int
    at_ms: int
    is_intact: bool = True


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer that a producer did not want. error: its class in the SDK or the library of its database."""

    key: str
    error: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Books:
    """Everything that observers wrote down.

    sent, begun: by the producers; of what is only begun, nobody knows whether the center heard it.
    effects: of each subscriber, in their order.  topics: that it subscribes to.
    refused, failed: ids of messages, per subscriber, that a handler refused for good, and that the center calls FAILED.
    undecided, check_failed: ids of messages that the center has not decided yet, or asks a human to decide.
    open: ids of messages that it will deliver again, or that wait for their turn.
    replays: keys of the messages that an operator sent again, to each subscriber.  uncertain_replays: how many more were
    tried, without an answer.
    cancelled: ids of messages of which an operator gave up a delivery that its handler had refused.
    unavailable: what did not work after the storm.  crashed: programs that ended though nothing had been done to them.
    """

    sent: Mapping[str, Sent]
    begun: Collection[str]
    effects: Mapping[str, Sequence[Effect]]
    topics: Mapping[str, Collection[str]]
    refused: Mapping[str, Collection[str]] = field(default_factory=dict)
    failed: Mapping[str, Collection[str]] = field(default_factory=dict)
    undecided: Collection[str] = ()
    check_failed: Collection[str] = ()
    open: Collection[str] = ()
    replays: Mapping[str, Collection[str]] = field(default_factory=dict)
    uncertain_replays: Mapping[str, int] = field(default_factory=dict)
    cancelled: Collection[str] = ()
    unavailable: Sequence[str] = ()
    crashed: Sequence[str] = ()
    answers: Sequence[Answer] = ()

    def wanted(self, app: str) -> set[str]:
        """Return the keys that a subscriber must have handled."""
        sent = {key for key, sent in self.sent.items() if sent.topic in self.topics[app] and not sent.is_refused}
        return sent.union(self.replays.get(app, ()))


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that must not be. kind: see KINDS.  what: which message, at which subscriber."""

    kind: str
    what: str


KINDS = (
    "lost",
    "ghost",
    "doubled",
    "altered",
    "out of order",
    "early",
    "unfinished",
    "human work",
    "wrong answer",
    "not available",
    "crashed",
)
"""The center promises that nothing of these happens, whatever breaks."""


def is_settled(books: Books) -> bool:
    """Return whether everything is decided and has arrived that must, and what handlers refused is FAILED."""
    return (
        not books.undecided
        and not books.open
        and all(
            not books.wanted(app) - {effect.key for effect in books.effects[app]}
            and set(books.refused.get(app, ())) <= {*books.failed.get(app, ()), *books.cancelled}
            for app in books.topics
        )
    )


def judge(books: Books) -> list[Finding]:
    """Compare the books of a world that has settled, or makes no progress any more."""
    found: list[Finding] = []
    for app, effects in books.effects.items():
        found += _of_subscriber(books, app, effects)
        for message_id in sorted(set(books.failed.get(app, ())) - set(books.refused.get(app, ()))):
            found.append(Finding(kind="human work", what=f"{message_id} is FAILED at {app}, and no handler refused it"))
    found += [Finding(kind="human work", what=f"{message_id} is CHECK_FAILED") for message_id in books.check_failed]
    found += [Finding(kind="unfinished", what=f"{message_id} is undecided") for message_id in books.undecided]
    found += [Finding(kind="unfinished", what=f"{message_id} is still to be delivered") for message_id in books.open]
    found += [Finding(kind="not available", what=what) for what in books.unavailable]
    found += [Finding(kind="crashed", what=what) for what in books.crashed]
    for answer in books.answers:
        if answer.error not in USUAL_ANSWERS:
            found.append(Finding(kind="wrong answer", what=f"{answer.key}: {answer.error}: {answer.text}"))
    return found


def _of_subscriber(books: Books, app: str, effects: Sequence[Effect]) -> list[Finding]:
    found: list[Finding] = []
    counts = Counter(effect.key for effect in effects)
    wanted = books.wanted(app)
    for key in sorted(wanted - counts.keys()):
        found.append(Finding(kind="lost", what=f"{key} at {app}"))
    unwanted = sorted(counts.keys() - wanted - (set(books.begun) - books.sent.keys()))
    replays = [key for key in unwanted if key.startswith(REPLAY)][: books.uncertain_replays.get(app, 0)]
    found += [Finding(kind="ghost", what=f"{key} at {app}") for key in unwanted if key not in replays]
    found += [Finding(kind="altered", what=f"{effect.key} at {app}") for effect in effects if not effect.is_intact]
    for key, count in counts.items():
        if count > 1:
            found.append(Finding(kind="doubled", what=f"{key} at {app}: {count} effects"))
    last: defaultdict[str, int] = defaultdict(int)
    for effect in effects:
        if effect.order_key:
            if effect.number < last[effect.order_key]:
                found.append(Finding(kind="out of order", what=f"{effect.key} at {app} after {last[effect.order_key]}"))
            last[effect.order_key] = effect.number
        sent = books.sent.get(effect.key)
        if sent is not None and effect.at_ms < sent.due_ms - _CLOCK_MS:
            found.append(Finding(kind="early", what=f"{effect.key} at {app}: {sent.due_ms - effect.at_ms} ms"))
    return found


@dataclass(frozen=True, kw_only=True)
class Relation:
    """The comparison of the founding documents, for one subscriber: committed <= consumed <= committed + unconfirmed."""

    app: str
    committed: int
    consumed: int
    unconfirmed: int

    @property
    def holds(self) -> bool:
        return self.committed <= self.consumed <= self.committed + self.unconfirmed


def relations(books: Books) -> list[Relation]:
    """Count what was committed, consumed, and begun without anybody knowing its end."""
    unconfirmed = len(set(books.begun) - books.sent.keys())
    return [
        Relation(
            app=app,
            committed=len(books.wanted(app)),
            consumed=len(effects),
            unconfirmed=unconfirmed + books.uncertain_replays.get(app, 0),
        )
        for app, effects in books.effects.items()
    ]
