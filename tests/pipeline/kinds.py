"""Every kind of discrepancy that the auditor plants, as data: what is done to one honest message, and the verdict it must get.

Whoever adds a column that is compared adds a kind. A message of topic 1 goes to c1 and c4, of
topic 2 to c2 and c5, of topic 3 to c3 (tests/support/filled.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.support.filled import CONSUMERS, SUBSCRIPTIONS, TOPICS, FilledCenter

_AHEAD_MS = 400 * 86_400_000


@dataclass(frozen=True, kw_only=True)
class Planted:
    """One message of a filled center with everybody's rows about it."""

    center: FilledCenter
    shard: int
    number: int
    topic: int
    key: str

    @property
    def id(self) -> str:
        return f"{self.topic}-{self.topic}-{self.shard:02d}-{self.number}"

    @property
    def producer(self) -> str:
        return f"p{self.topic}"

    @property
    def subscriptions(self) -> list[tuple[int, str]]:
        """(number, consumer) of its topic."""
        return [
            (number, CONSUMERS[consumer - 1])
            for number, (topic, consumer) in enumerate(SUBSCRIPTIONS, 1)
            if topic == self.topic
        ]

    def message(self, change: str) -> None:
        plain = change.replace("{", "{{").replace("}", "}}")
        self.center.change(self.shard, f"UPDATE tmc_message_{{nn}} SET {plain} WHERE id = {self.number}")

    def forget_message(self) -> None:
        self.center.change(self.shard, f"DELETE FROM tmc_message_{{nn}} WHERE id = {self.number}")

    def deliveries(self, change: str, first: bool = False) -> None:
        self.center.change(self.shard, f"UPDATE tmc_consumption_{{nn}} SET {change} WHERE {self._delivery(first)}")

    def forget_deliveries(self, first: bool = False) -> None:
        self.center.change(self.shard, f"DELETE FROM tmc_consumption_{{nn}} WHERE {self._delivery(first)}")

    def _delivery(self, first: bool) -> str:
        return f"message_id = {self.number}" + (f" AND subscription_no = {self.subscriptions[0][0]}" if first else "")

    def add_delivery(self, subscription: int) -> None:
        columns = "state, attempt, tried, incarnation, created_ms, closed_ms, tried_ms"
        self.center.change(
            self.shard,
            f"INSERT INTO tmc_consumption_{{nn}} (message_id, subscription_no, {columns})"
            f" SELECT message_id, {subscription}, {columns} FROM tmc_consumption_{{nn}}"
            f" WHERE message_id = {self.number} LIMIT 1",
        )

    def ledger(self, change: str) -> None:
        self._run(self.producer, f"UPDATE tmc_ledger SET {change} WHERE message_id = '{self.id}'")

    def forget_ledger(self) -> None:
        self._run(self.producer, f"DELETE FROM tmc_ledger WHERE message_id = '{self.id}'")

    def note_in(self, producer: str, move: bool = False) -> None:
        """The same row in another app's ledger. move: and not in its own."""
        own = self.center.ledger(self.producer)
        self._run(producer, f"INSERT INTO tmc_ledger SELECT * FROM {own}.tmc_ledger WHERE message_id = '{self.id}'")
        if move:
            self.forget_ledger()

    def inbox(self, change: str) -> None:
        """Of the first subscriber."""
        self._run(self.subscriptions[0][1], f"UPDATE tmc_inbox SET {change} WHERE message_id = '{self.id}'")

    def forget_inboxes(self, first: bool = False) -> None:
        for _, consumer in self.subscriptions[: 1 if first else None]:
            self._run(consumer, f"DELETE FROM tmc_inbox WHERE message_id = '{self.id}'")

    def add_effect(self, consumer: str, subscriber: str) -> None:
        values = f"'{subscriber}', '{self.id}', {self.center.start_ms}"
        self._run(consumer, f"INSERT INTO tmc_inbox (subscriber, message_id, received_ms) VALUES ({values})")

    def nobody_got_it(self) -> None:
        self.forget_deliveries()
        self.forget_inboxes()

    def _run(self, app: str, statement: str) -> None:
        with self.center.sql(self.center.ledger(app)) as run:
            run.exec_driver_sql(statement)

    @property
    def other(self) -> int:
        """Another topic, and the producer of the same number."""
        return self.topic % 3 + 1


@dataclass(frozen=True, kw_only=True)
class Kind:
    """plant: does it.  archived: to a message that the archive has, and the hot tables too."""

    verdict: str
    plant: Callable[[Planted], None]
    archived: bool = False


def _all(*steps: Callable[[Planted], None]) -> Callable[[Planted], None]:
    def plant(message: Planted) -> None:
        for step in steps:
            step(message)

    return plant


def _kind(verdict: str, *steps: Callable[[Planted], None], archived: bool = False) -> Kind:
    return Kind(verdict=verdict, plant=_all(*steps), archived=archived)


_LATE = f"{1_790_000_000_000 + _AHEAD_MS}"
_MICROSECONDS = "1790000000000000"

KINDS: dict[str, Kind] = {
    # -- lost ---------------------------------------------------------------------------------------------------------
    "the center has nothing of it": _kind("lost", lambda m: m.forget_message(), lambda m: m.nobody_got_it()),
    "the message is gone, its inbox rows are there": _kind(
        "lost", lambda m: m.forget_message(), lambda m: m.forget_deliveries()
    ),
    "the message is gone, an inbox row is left": _kind(
        "lost", lambda m: m.forget_message(), lambda m: m.forget_deliveries(), lambda m: m.forget_inboxes(first=True)
    ),
    "deliveries and effects are gone, of everybody": _kind("lost", lambda m: m.nobody_got_it()),
    "delivery and effect are gone, of one": _kind(
        "lost", lambda m: m.forget_deliveries(first=True), lambda m: m.forget_inboxes(first=True)
    ),
    "a delivery is gone, its effect is there": _kind("lost", lambda m: m.forget_deliveries(first=True)),
    "all deliveries are gone, their effects are there": _kind("lost", lambda m: m.forget_deliveries()),
    "acked without effect, everybody": _kind("lost", lambda m: m.forget_inboxes()),
    "acked without effect, one": _kind("lost", lambda m: m.forget_inboxes(first=True)),
    "lost, the ledger's clock ahead": _kind(
        "lost", lambda m: m.forget_message(), lambda m: m.nobody_got_it(), lambda m: m.ledger(f"created_ms = {_LATE}")
    ),
    "lost, the ledger in microseconds": _kind(
        "lost",
        lambda m: m.forget_message(),
        lambda m: m.nobody_got_it(),
        lambda m: m.ledger(f"created_ms = {_MICROSECONDS}"),
    ),
    "acked without effect, the center's clock ahead": _kind(
        "lost", lambda m: m.forget_inboxes(), lambda m: m.deliveries(f"closed_ms = {_LATE}")
    ),
    "acked without effect, the try in microseconds": _kind(
        "lost", lambda m: m.forget_inboxes(), lambda m: m.deliveries(f"tried_ms = {_MICROSECONDS}")
    ),
    # -- ghost --------------------------------------------------------------------------------------------------------
    "no transaction behind it": _kind("ghost", lambda m: m.forget_ledger()),
    "no transaction behind it, prepared ahead": _kind(
        "ghost", lambda m: m.forget_ledger(), lambda m: m.message(f"created_ms = {_LATE}")
    ),
    "no transaction behind it, decided in microseconds": _kind(
        "ghost", lambda m: m.forget_ledger(), lambda m: m.message(f"decided_ms = {_MICROSECONDS}")
    ),
    "effects of nothing": _kind(
        "ghost", lambda m: m.forget_ledger(), lambda m: m.forget_message(), lambda m: m.forget_deliveries()
    ),
    "effects of nothing, ahead": _kind(
        "ghost",
        lambda m: m.forget_ledger(),
        lambda m: m.forget_message(),
        lambda m: m.forget_deliveries(),
        lambda m: m.inbox(f"received_ms = {_LATE}"),
    ),
    "an effect under an unknown name": _kind("ghost", lambda m: m.inbox("subscriber = 'nobody.default'")),
    "an effect more under an unknown name": _kind("ghost", lambda m: m.add_effect(m.subscriptions[0][1], "x.y")),
    "an effect under another tag": _kind("ghost", lambda m: m.inbox(f"subscriber = '{m.subscriptions[0][1]}.another'")),
    "an effect of another topic's subscriber": _kind(
        "ghost", lambda m: m.add_effect(f"c{m.other}", f"c{m.other}.default")
    ),
    "acked to an unknown subscription": _kind("ghost", lambda m: m.add_delivery(99)),
    "acked to a subscription of another topic": _kind("ghost", lambda m: m.add_delivery(m.other)),
    "a replay of nothing": _kind(
        "ghost", lambda m: m.forget_ledger(), lambda m: _as_replay(m, f"{m.topic}-{m.topic}-{m.shard:02d}-4711")
    ),
    "a replay of itself": _kind("ghost", lambda m: m.forget_ledger(), lambda m: _as_replay(m, m.id)),
    "a replay that names no message": _kind("ghost", lambda m: m.forget_ledger(), lambda m: _as_replay(m, "what")),
    # -- state differs ------------------------------------------------------------------------------------------------
    "rolled back here, committed there": _kind(
        "state differs", lambda m: m.message("state = 3, live = NULL"), lambda m: m.nobody_got_it()
    ),
    "rolled back here, committed there, decided ahead": _kind(
        "state differs",
        lambda m: m.message(f"state = 3, live = NULL, decided_ms = {_LATE}"),
        lambda m: m.nobody_got_it(),
    ),
    "committed here, rolled back there": _kind("state differs", lambda m: m.ledger("state = 2")),
    "rolled back, yet acked and consumed": _kind("state differs", lambda m: m.message("state = 3, live = NULL")),
    "rolled back by both, yet acked and consumed": _kind(
        "state differs", lambda m: m.message("state = 3, live = NULL"), lambda m: m.ledger("state = 2")
    ),
    "undecided, yet acked and consumed": _kind("state differs", lambda m: m.message("state = 1, decided_ms = NULL")),
    "nobody knew, yet acked and consumed": _kind("state differs", lambda m: m.message("state = 4, decided_ms = NULL")),
    "cancelled on a live subscription": _kind("state differs", lambda m: m.deliveries("state = 4", first=True)),
    "cancelled on a live subscription, without effect": _kind(
        "state differs", lambda m: m.deliveries("state = 4", first=True), lambda m: m.forget_inboxes(first=True)
    ),
    "all cancelled on live subscriptions": _kind(
        "state differs", lambda m: m.deliveries("state = 4"), lambda m: m.forget_inboxes()
    ),
    "archived as committed, rolled back now": _kind(
        "state differs", lambda m: m.message("state = 3, live = NULL"), lambda m: m.ledger("state = 2"), archived=True
    ),
    "archived as committed, undecided now": _kind(
        "state differs", lambda m: m.message("state = 1, decided_ms = NULL"), archived=True
    ),
    "archived as acked, scheduled now": _kind(
        "state differs", lambda m: m.deliveries("state = 1, closed_ms = NULL", first=True), archived=True
    ),
    "archived as acked, given up now": _kind("state differs", lambda m: m.deliveries("state = 3"), archived=True),
    "archived with a delivery that is gone": _kind(
        "state differs", lambda m: m.forget_deliveries(first=True), archived=True
    ),
    # -- body differs -------------------------------------------------------------------------------------------------
    "another body": _kind("body differs", lambda m: m.message("body = 'another'")),
    "one bit of the body": _kind(
        "body differs", lambda m: m.message("body = INSERT(body, 9, 1, CHAR(ASCII(SUBSTRING(body, 9, 1)) ^ 1))")
    ),
    "an empty body": _kind("body differs", lambda m: m.message("body = ''")),
    "another content type": _kind("body differs", lambda m: m.message("content_type = 'text/html'")),
    "a header more": _kind("body differs", lambda m: m.message("""headers = '{"color": "red"}'""")),
    "headers that are no JSON": _kind("body differs", lambda m: m.message("headers = 'what'")),
    "another delay": _kind("body differs", lambda m: m.message("delay_ms = 5")),
    "another digest": _kind("body differs", lambda m: m.message("digest = REVERSE(digest)")),
    "archived with another body": _kind("body differs", lambda m: m.message("body = 'another'"), archived=True),
    "archived with another body and its digest": _kind(
        "body differs",
        lambda m: m.message(
            "body = 'another', digest = UNHEX(SHA2(CONCAT('0:', LENGTH(body), ':', body, content_type), 256))"
        ),
        archived=True,
    ),
    # -- identity differs ---------------------------------------------------------------------------------------------
    "another key": _kind("identity differs", lambda m: m.message(f"message_key = 'x{m.key}'")),
    "another key in the ledger": _kind("identity differs", lambda m: m.ledger("message_key = 'x'")),
    "another topic in the ledger": _kind("identity differs", lambda m: m.ledger(f"topic = '{TOPICS[m.other - 1]}'")),
    "another attempt id in the ledger": _kind(
        "identity differs", lambda m: m.ledger("attempt_id = REVERSE(attempt_id)")
    ),
    "another attempt id": _kind("identity differs", lambda m: m.message("attempt_id = REVERSE(attempt_id)")),
    "another topic": _kind("identity differs", lambda m: m.message(f"topic_no = {m.other}")),
    "another producer": _kind("identity differs", lambda m: m.message(f"producer_no = {m.other}")),
    "two ledgers claim it": _kind("identity differs", lambda m: m.note_in(f"p{m.other}")),
    "another app's ledger has it": _kind("identity differs", lambda m: m.note_in(f"p{m.other}", move=True)),
    "its ledger id was removed": _kind("identity differs", lambda m: m.message("ledger_id = NULL")),
    # -- more ---------------------------------------------------------------------------------------------------------
    "an effect under the other subscriber's name": _kind(
        "duplicate effect",
        lambda m: m.add_effect("c2" if m.topic == 1 else "c1", f"{m.subscriptions[0][1]}.default"),
    ),
    "a state of a later version": _kind("unknown state", lambda m: m.message("state = 9"), lambda m: m.nobody_got_it()),
    "a delivery in a state of a later version": _kind("unknown state", lambda m: m.deliveries("state = 9", first=True)),
    "a ledger row in a state of a later version": _kind("unknown state", lambda m: m.ledger("state = 9")),
}


def _as_replay(message: Planted, original: str) -> None:
    """Forge the header, the key and the digest as a producer of one's own could."""
    headers = f'{{"tmc-replay-of": "{original}"}}'
    hashed = (
        f"CONCAT('0:', LENGTH(body), ':', body, content_type, CHAR(0), '13:tmc-replay-of{len(original)}:{original}')"
    )
    message.message(f"headers = '{headers}', message_key = 'replay.{original}', digest = UNHEX(SHA2({hashed}, 256))")
