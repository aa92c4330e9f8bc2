"""Every kind of discrepancy that the auditor plants, as data: what is done to one honest message, and the verdict it must get.

Whoever adds a column that is compared adds a kind. A message of topic 1 goes to c1 and c4, of
topic 2 to c2 and c5, of topic 3 to c3 (tests/support/filled.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.support.filled import CONSUMERS, SUBSCRIPTIONS, TOPICS, FilledCenter
from tmc_server.domain.ids import EPOCH_MS

ORDERED = range(6)  # messages of an order key
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

    def again(self, suffix: int = 1, takes_key: bool = False) -> None:
        """One more message like it, with everybody's rows about it, as if the center had no key: a little later.

        takes_key: the key is the new one's.
        """
        number, live = self.number + suffix, 1 if takes_key else None
        for table, column in (("message", "id"), ("consumption", "message_id")):
            with self.center.sql(self.center.database_of(self.shard)) as run:
                name = f"tmc_{table}_{self.shard:02d}"
                rows = run.exec_driver_sql(f"SELECT * FROM {name} WHERE {column} = {self.number}").mappings().all()
                if table == "message" and takes_key:
                    run.exec_driver_sql(f"UPDATE {name} SET live = NULL WHERE id = {self.number}")
                for row in rows:
                    values = {**row, column: number, **({"live": live} if table == "message" else {})}
                    marks = ", ".join(["%s"] * len(values))
                    run.exec_driver_sql(
                        f"INSERT INTO {name} ({', '.join(values)}) VALUES ({marks})", tuple(values.values())
                    )
        public = self.id.replace(str(self.number), str(number))
        self._copy_rows(self.producer, "tmc_ledger", public)
        for _, consumer in self.subscriptions:
            self._copy_rows(consumer, "tmc_inbox", public)

    def _copy_rows(self, app: str, table: str, public: str) -> None:
        with self.center.sql(self.center.ledger(app)) as run:
            rows = run.exec_driver_sql(f"SELECT * FROM {table} WHERE message_id = '{self.id}'").mappings().all()
            for row in rows:
                values = {**row, "message_id": public}
                marks = ", ".join(["%s"] * len(values))
                run.exec_driver_sql(
                    f"INSERT INTO {table} ({', '.join(values)}) VALUES ({marks})", tuple(values.values())
                )

    def unsubscribed_before(self) -> None:
        """A delivery to a subscription that was removed a day before the submit, and its effect."""
        number = 50 + self.topic
        with self.center.sql() as run:
            run.exec_driver_sql(
                "INSERT IGNORE INTO tmc_subscription (subscription_no, topic_no, app_no, tag, kind, interval_ms, max_retry,"
                f" cap_ms, effective_ms, removed_ms, live) VALUES ({number}, {self.topic}, 4, 'old', 1, 10000, 5, 60000, 0,"
                f" {self.center.start_ms - 86_400_000}, NULL)"
            )
        self.add_delivery(number)

    def note_attempt(self) -> None:
        self.center.change(
            self.shard,
            "INSERT INTO tmc_attempt_{nn} (message_id, subscription_no, attempt, at_ms, incarnation, error)"
            f" VALUES ({self.number}, {self.subscriptions[0][0]}, 1, {self.center.start_ms}, 1, 'forged')",
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
    """plant: does it.  archived: to a message that the archive has, and the hot tables too.

    found: numbers that get the verdict, counted from that of the message.
    """

    verdict: str
    plant: Callable[[Planted], None]
    archived: bool = False
    found: tuple[int, ...] = (0,)


def _all(*steps: Callable[[Planted], None]) -> Callable[[Planted], None]:
    def plant(message: Planted) -> None:
        for step in steps:
            step(message)

    return plant


def _kind(
    verdict: str, *steps: Callable[[Planted], None], archived: bool = False, found: tuple[int, ...] = (0,)
) -> Kind:
    return Kind(verdict=verdict, plant=_all(*steps), archived=archived, found=found)


_LATE = f"{1_790_000_000_000 + _AHEAD_MS}"
_MICROSECONDS = "1790000000000000"

_IMPOSSIBLE = {
    "at no time": "NULL",
    "in 1970": "1000",
    "before its own number": "created_ms - 7200000",
    "before it was prepared": "created_ms - 2000",
    "next year": _LATE,
}
# What the archive has of a message, by column, and a change of it in the center's tables.
CHANGED = {
    "topic_no": ("identity differs", "topic_no = MOD(topic_no, 3) + 1"),
    "producer_no": ("identity differs", "producer_no = MOD(producer_no, 3) + 1"),
    "producer_tag": ("identity differs", "producer_tag = 'another'"),
    "message_key": ("identity differs", "message_key = CONCAT('x', message_key)"),
    "attempt_id": ("identity differs", "attempt_id = REVERSE(attempt_id)"),
    "ledger_id": ("identity differs", "ledger_id = REVERSE(ledger_id)"),
    "digest": ("body differs", "digest = REVERSE(digest)"),
    "state": ("state differs", "state = 3, live = NULL"),
    "content_type": ("body differs", "content_type = 'text/html'"),
    "headers": ("body differs", """headers = '{"traceparent": "00-1-2-01"}'"""),
    "body": ("body differs", "body = 'another'"),
    "delay_ms": ("body differs", "delay_ms = 5"),
    "created_ms": ("state differs", "created_ms = created_ms - 1"),
    "decided_ms": ("state differs", "decided_ms = decided_ms + 1"),
    "check_attempt": ("state differs", "check_attempt = 3"),
    "check_answer": ("state differs", "check_answer = 'UNKNOWN'"),
}
CHANGED_DELIVERY = {
    "subscription_no": ("ghost", "subscription_no = subscription_no + 60"),
    "state": ("state differs", "state = 4"),
    "attempt": ("state differs", "attempt = attempt + 1"),
    "tried": ("state differs", "tried = tried + 1"),
    "created_ms": ("state differs", "created_ms = created_ms + 1"),
    "closed_ms": ("state differs", "closed_ms = closed_ms + 1"),
    "tried_ms": ("state differs", "tried_ms = tried_ms + 1"),
    "sequence": ("state differs", "sequence = 5"),
}

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
    # -- impossible times, which excuse nothing -----------------------------------------------------------------------
    **{
        f"committed {when}, delivery and effect gone": _kind(
            "lost", lambda m, at=at: m.message(f"decided_ms = {at}"), lambda m: m.nobody_got_it()
        )
        for when, at in _IMPOSSIBLE.items()
    },
    **{
        f"committed {when}": _kind("state differs", lambda m, at=at: m.message(f"decided_ms = {at}"))
        for when, at in _IMPOSSIBLE.items()
    },
    **{
        f"rolled back by both {when}": _kind(
            "state differs",
            lambda m, at=at: m.message(f"state = 3, live = NULL, decided_ms = {at}"),
            lambda m: m.ledger("state = 2"),
            lambda m: m.nobody_got_it(),
        )
        for when, at in _IMPOSSIBLE.items()
    },
    "prepared in 1970": _kind("state differs", lambda m: m.message("created_ms = 0")),
    "prepared days after its number": _kind(
        "state differs", lambda m: m.message("created_ms = created_ms + 200000000")
    ),
    "undecided, with the time of a decision": _kind(
        "state differs", lambda m: m.message("state = 1"), lambda m: m.nobody_got_it()
    ),
    "acked at no time": _kind("state differs", lambda m: m.deliveries("closed_ms = NULL", first=True)),
    "acked in 1970": _kind("state differs", lambda m: m.deliveries("closed_ms = 1000", first=True)),
    "acked before it was scheduled": _kind("state differs", lambda m: m.deliveries("closed_ms = created_ms - 5000")),
    "acked in a year": _kind("state differs", lambda m: m.deliveries(f"closed_ms = {_LATE}", first=True)),
    "scheduled, with the time of an ack": _kind(
        "state differs", lambda m: m.deliveries("state = 1", first=True), lambda m: m.forget_inboxes(first=True)
    ),
    "scheduled before the submit": _kind("state differs", lambda m: m.deliveries("created_ms = created_ms - 60000")),
    "cancelled by nobody, backdated": _kind(
        "state differs", lambda m: m.deliveries("state = 4, created_ms = 0, closed_ms = 1", first=True)
    ),
    # -- what the center guarantees -----------------------------------------------------------------------------------
    "one key committed twice": _kind("duplicate message", lambda m: m.again(), found=(1,)),
    "one key committed twice, and the later one has it": _kind(
        "duplicate message", lambda m: m.again(takes_key=True), found=(0, 1)
    ),
    "one key committed three times": _kind(
        "duplicate message", lambda m: m.again(), lambda m: m.again(2), found=(1, 2)
    ),
    "a key that is free, and should not be": _kind("duplicate message", lambda m: m.message("live = NULL")),
    "archived, and committed again": _kind("duplicate message", lambda m: m.again(), archived=True, found=(1,)),
    "acked to a subscription that was removed before": _kind("ghost", lambda m: m.unsubscribed_before()),
    # -- notes under other names --------------------------------------------------------------------------------------
    "an inbox row under another topic number": _kind(
        "identity differs", lambda m: m.inbox(f"message_id = '{m.other}-{m.topic}-{m.shard:02d}-{m.number}'")
    ),
    "an inbox row under another producer number": _kind(
        "identity differs", lambda m: m.inbox(f"message_id = '{m.topic}-{m.other}-{m.shard:02d}-{m.number}'")
    ),
    "a ledger row under another topic number": _kind(
        "identity differs", lambda m: m.ledger(f"message_id = '{m.other}-{m.topic}-{m.shard:02d}-{m.number}'")
    ),
    "a ledger row under another producer number": _kind(
        "identity differs", lambda m: m.ledger(f"message_id = '{m.topic}-{m.other}-{m.shard:02d}-{m.number}'")
    ),
    # -- every column that the archive has ----------------------------------------------------------------------------
    **{
        f"archived with another {column}": _kind(verdict, lambda m, to=to: m.message(to), archived=True)
        for column, (verdict, to) in CHANGED.items()
    },
    **{
        f"archived with another {column} of a delivery": _kind(
            verdict, lambda m, to=to: m.deliveries(to, first=True), archived=True
        )
        for column, (verdict, to) in CHANGED_DELIVERY.items()
    },
    "archived without this failed attempt": _kind("state differs", lambda m: m.note_attempt(), archived=True),
}


def _as_replay(message: Planted, original: str) -> None:
    """Forge the header, the key and the digest as a producer of one's own could."""
    headers = f'{{"tmc-replay-of": "{original}"}}'
    hashed = (
        f"CONCAT('0:', LENGTH(body), ':', body, content_type, CHAR(0), '13:tmc-replay-of{len(original)}:{original}')"
    )
    message.message(f"headers = '{headers}', message_key = 'replay.{original}', digest = UNHEX(SHA2({hashed}, 256))")


# -- order keys: what is done to the messages of one, where the third is the planted one ------------------------------


@dataclass(frozen=True, kw_only=True)
class OrderKind:
    """plant: gets the messages of an order key in their order.  found: places of those that get the verdict."""

    verdict: str
    plant: Callable[[Sequence[Planted]], None]
    found: tuple[int, ...] = (2,)


def _sequence(message: Planted, of: Planted, add: int = 0) -> None:
    message.deliveries(f"sequence = {sequence_of(of.number) + add}")


def sequence_of(number: int) -> int:
    """As the tests give it: the microsecond of the submit, five milliseconds after the Prepare."""
    return ((number >> 22) + EPOCH_MS + 5) * 1000


def _swap(line: Sequence[Planted]) -> None:
    _sequence(line[2], of=line[3])
    _sequence(line[3], of=line[2])


def _inbox_sequence(line: Sequence[Planted], sequence: int) -> None:
    """The inbox has the sequence of the last message now."""
    last = line[-1]
    with last.center.sql(last.center.ledger("c3")) as run:
        run.exec_driver_sql(
            f"UPDATE tmc_inbox_order SET sequence = {sequence} WHERE sequence = {sequence_of(last.number)}"
        )


ORDER_KINDS: dict[str, OrderKind] = {
    "a sequence that was given before": OrderKind(
        verdict="out of order", plant=lambda line: _sequence(line[2], of=line[1])
    ),
    "two sequences swapped": OrderKind(verdict="out of order", plant=_swap, found=(3,)),
    "a sequence older than its submit": OrderKind(
        verdict="out of order", plant=lambda line: _sequence(line[2], of=line[1], add=1)
    ),
    "no sequence": OrderKind(verdict="out of order", plant=lambda line: line[2].deliveries("sequence = NULL")),
    "acked after its successor": OrderKind(
        verdict="out of order", plant=lambda line: line[2].deliveries("closed_ms = closed_ms + 100000")
    ),
    "acked after all others": OrderKind(
        verdict="out of order", plant=lambda line: line[0].deliveries("closed_ms = closed_ms + 500000"), found=(0,)
    ),
    "an inbox whose order went back": OrderKind(
        verdict="out of order",
        plant=lambda line: _inbox_sequence(line, sequence_of(line[1].number)),
        found=(len(ORDERED) - 1,),
    ),
    "an inbox that is ahead of the center": OrderKind(
        verdict="out of order",
        plant=lambda line: _inbox_sequence(line, sequence_of(line[-1].number) + 1),
        found=(len(ORDERED) - 1,),
    ),
}
