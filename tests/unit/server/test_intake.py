"""Intakes of submit queues over a store that fails on request, on the manual clock."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from tmc_common import submission as wire
from tmc_common.signatures import sign
from tmc_server.domain.catalog import App, Catalog, SubmitQueue, Topic
from tmc_server.domain.ids import MessageId
from tmc_server.domain.message import MessageState
from tmc_server.domain.numbers import MessageNumber
from tmc_server.domain.operations import Answer, Decide, Operation, Prepare, Stored
from tmc_server.domain.placement import shard_of
from tmc_server.errors import AlreadyRolledBack, KeyInProgress, MessageUnknown, QueueFull, StoreUnavailable, TmcError
from tmc_server.requests.caller import Allowance, Budget, RateLimiter
from tmc_server.requests.deciding import Deciding
from tmc_server.requests.preparing import Preparing
from tmc_server.submission.intake import Described, Desk, Intake, Outcome
from tmc_server.submission.letters import Letter, Place

SECRET = bytes(range(32))
PLACE = Place(app="orders", tag="default")


@dataclass
class Store:
    """Performer. stored: attempts that were prepared.  trouble: raised for all.  locked: keys that are refused for now.

    unstorable: keys that cannot be prepared for now.  refusal: the answer to each operation.
    """

    batches: list[list[str]] = field(default_factory=list)
    stored: set[bytes] = field(default_factory=set)
    trouble: TmcError | None = None
    locked: set[str] = field(default_factory=set)
    unstorable: set[str] = field(default_factory=set)
    refusal: TmcError | None = None

    async def perform(self, operations: Sequence[Operation]) -> list[Answer]:
        self.batches.append([self._name(each) for each in operations])
        if self.trouble is not None:
            raise self.trouble
        return [self._answer(each) for each in operations]

    @staticmethod
    def _name(operation: Operation) -> str:
        if isinstance(operation, Prepare):
            return f"{'publish' if operation.publish else 'prepare'} {operation.key}"
        assert isinstance(operation, Decide)
        return f"{'submit' if operation.commit else 'rollback'} {operation.key}"

    def _answer(self, operation: Operation) -> Answer:
        assert isinstance(operation, Prepare | Decide)
        if self.refusal is not None:
            return self.refusal
        if operation.key in self.locked:
            return StoreUnavailable()
        message_id = MessageId(1, 1, operation.shard, MessageNumber(1))
        if isinstance(operation, Prepare):
            if operation.key in self.unstorable:
                return StoreUnavailable()
            self.stored.add(operation.attempt_id)
            return Stored(message_id=message_id, state=MessageState.PREPARED)
        if operation.attempt_id not in self.stored:
            return MessageUnknown() if operation.commit else Stored(message_id=None, state=MessageState.ROLLED_BACK)
        return Stored(message_id=message_id, state=MessageState.COMMITTED)


class _Gauge:
    def open(self, topic: int) -> int:
        return 0

    def unacked(self, topic: int) -> int:
        return 0

    def moved(self, topic: int, by: int) -> None: ...


class _Senders:
    def __init__(self) -> None:
        self.seen: list[str] = []

    def saw(self, app: App, tag: str, instance: Any) -> None:
        self.seen.append(f"{app.id} {tag} {instance.address}")

    def seen_at(self, app: int, tag: str) -> Sequence[Any]:
        return []


class _Ids:
    def next(self) -> MessageNumber:
        return MessageNumber(1)


class Bench:
    """An intake, and what it settled."""

    def __init__(self, secrets: tuple[bytes, ...] = (), items_per_second: int = 0) -> None:
        self.store = Store()
        self.senders = _Senders()
        self.now = 100.0
        self.done: list[tuple[int, str]] = []
        self.app = App(
            id="orders",
            biz_id="7",
            number=1,
            key_hashes=(),
            check_token="token",
            submit_queues=(SubmitQueue(tag="default", secrets=secrets),),
        )
        topic = Topic(name="order.paid", number=1, owner=1, effective_ms=1, transaction_time_ms=2_000)
        lines = replace(topic, name="order.lines", number=2, ordered=True)
        self.current = Catalog(apps={1: self.app}, topics={1: topic, 2: lines})
        rate = RateLimiter(items_per_second, lambda: self.now)
        preparing = Preparing(self, _Ids(), self.store, rate, _Gauge(), 1_000, self.senders)  # type: ignore[arg-type]
        deciding = Deciding(self, self.store, rate, _Gauge())
        desk = Desk(catalog=self, preparing=preparing, deciding=deciding, budget=Budget(Allowance()))
        self.intake = Intake(PLACE, desk, self._settle, lambda: self.now)

    def in_use(self) -> tuple[Catalog, bool]:
        return self.current, False

    def _settle(self, done: Sequence[tuple[Letter, Outcome]]) -> None:
        for letter, outcome in done:
            if isinstance(outcome, Stored):
                said = outcome.state.name
            elif isinstance(outcome, Described):
                said = outcome.check_token
            else:
                said = getattr(outcome, "reason", repr(outcome))
            self.done.append((letter.number, said))

    def run(self, work: Callable[[], Awaitable[None]]) -> None:
        async def whole() -> None:
            task = asyncio.create_task(self.intake.run())
            await work()
            self.intake.close()
            await task

        asyncio.run(whole())


async def _a_while() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


ATTEMPT = os.urandom(16)


def letter(number: int, op: str, key: str = "k", attempt: bytes = ATTEMPT, **attributes: str) -> Letter:
    given = {
        "specversion": "1.0",
        "id": attempt.hex(),
        "type": attributes.pop("topic", "order.paid"),
        "subject": key,
        "tmcop": op,
        **attributes,
    }
    return Letter(number=number, attributes=given, headers={}, content_type="", body=b"")


def signed(one: Letter, secret: bytes = SECRET) -> Letter:
    content = wire.signed(PLACE.queue, one.attributes, one.content_type, one.body, one.headers)
    return replace(one, attributes={**one.attributes, wire.SIGNATURE: sign(secret, content)})


def _of(bench: Bench, *letters: Letter) -> list[str]:
    """Return what became of letters that arrive together."""

    async def work() -> None:
        bench.intake.arrived(letters)
        await _a_while()

    bench.run(work)
    return [said for _, said in sorted(bench.done)]


def test_a_life_is_one_batch() -> None:
    bench = Bench()
    assert _of(bench, letter(1, "prepare"), letter(2, "submit")) == ["PREPARED", "COMMITTED"]
    assert bench.store.batches == [["prepare k"], ["submit k"]]  # both calls are made before either is answered


def test_a_message_whose_key_was_decided_begins_a_batch() -> None:
    bench, other = Bench(), os.urandom(16)
    several = [
        letter(1, "prepare"),
        letter(2, "rollback"),
        letter(3, "prepare", attempt=other),
        letter(4, "prepare", "j"),
    ]
    assert len(_of(bench, *several)) == 4
    assert bench.store.batches == [["prepare k"], ["rollback k"], ["prepare k", "prepare j"]]


def test_publishes_of_an_ordered_topic_stay_behind_its_submits() -> None:
    bench = Bench()
    of_lines = {"topic": "order.lines"}
    several = [
        letter(1, "prepare", "a", tmcorderkey="alice", **of_lines),
        letter(2, "submit", "a", **of_lines),
        letter(3, "publish", "b", tmcorderkey="alice", **of_lines),
        letter(4, "submit", "c", attempt=bytes(16), **of_lines),
    ]
    _of(bench, *several)
    assert bench.store.batches[:3] == [["prepare a"], ["submit a"], ["publish b"]]


def test_an_outage_keeps_everything_and_its_order() -> None:
    bench = Bench()

    async def work() -> None:
        bench.store.trouble = StoreUnavailable()
        bench.intake.arrived([letter(1, "prepare"), letter(2, "submit")])
        await _a_while()
        assert (bench.done, bench.intake.waiting) == ([], 2)
        bench.intake.arrived([letter(3, "prepare", "j")])
        bench.store.trouble = None
        bench.now += 10
        await asyncio.wait_for(_until(lambda: len(bench.done) == 3), 30)

    bench.run(work)
    assert bench.done == [(1, "PREPARED"), (2, "COMMITTED"), (3, "PREPARED")]


async def _until(probe: Callable[[], bool]) -> None:
    while not probe():
        await asyncio.sleep(0.01)


def test_a_submit_is_held_with_its_prepare() -> None:
    """Otherwise it would be refused after the transaction time, although its message is about to be stored."""
    bench = Bench()

    async def work() -> None:
        bench.store.unstorable = {"k"}
        bench.intake.arrived([letter(1, "prepare"), letter(2, "submit"), letter(3, "prepare", "j", bytes(16))])
        await _a_while()
        assert bench.done == [(3, "PREPARED")]
        bench.now += 60
        await asyncio.wait_for(_until(lambda: len(bench.store.batches) >= 4), 30)
        assert bench.done == [(3, "PREPARED")]
        bench.store.unstorable = set()
        bench.now += 3_600
        await asyncio.wait_for(_until(lambda: len(bench.done) == 3), 30)

    bench.run(work)
    assert sorted(bench.done) == [(1, "PREPARED"), (2, "COMMITTED"), (3, "PREPARED")]


def test_a_full_queue_keeps_what_was_refused() -> None:
    bench = Bench()

    async def work() -> None:
        bench.store.trouble = QueueFull()
        bench.intake.arrived([letter(1, "publish")])
        await _a_while()
        bench.store.trouble = None
        bench.now += 10
        await asyncio.wait_for(_until(lambda: bool(bench.done)), 30)

    bench.run(work)
    assert bench.done == [(1, "PREPARED")]


def test_an_early_submit_waits_for_its_prepare_and_holds_up_nothing() -> None:
    bench = Bench()

    async def work() -> None:
        bench.intake.arrived([letter(1, "submit")])
        await _a_while()
        bench.intake.arrived([letter(2, "prepare", "j", bytes(16))])
        await _a_while()
        assert (bench.done, bench.intake.waiting) == ([(2, "PREPARED")], 1)
        bench.now += 1.9
        bench.intake.arrived([letter(3, "prepare")])
        await _a_while()

    bench.run(work)
    assert sorted(bench.done) == [(1, "COMMITTED"), (2, "PREPARED"), (3, "PREPARED")]


def test_an_early_submit_is_refused_after_the_transaction_time() -> None:
    bench = Bench()

    async def work() -> None:
        bench.intake.arrived([letter(1, "submit")])
        await _a_while()
        bench.now += 2.1
        bench.intake.arrived([])
        await asyncio.wait_for(_until(lambda: bool(bench.done)), 30)

    bench.run(work)
    assert bench.done == [(1, "MESSAGE_UNKNOWN")]


def test_a_submit_that_knows_the_id_was_answered_its_prepare_and_does_not_wait() -> None:
    bench = Bench()

    async def work() -> None:
        shard = shard_of(bench.current.topics[1].table_index, 1, "k")
        known = str(MessageId(1, 1, shard, MessageNumber(4)))
        bench.intake.arrived([letter(1, "submit", tmcmessage=known)])
        await asyncio.wait_for(_until(lambda: bool(bench.done)), 30)

    bench.run(work)
    assert bench.done == [(1, "MESSAGE_UNKNOWN")]


def test_what_is_above_the_apps_rate_waits() -> None:
    bench = Bench(items_per_second=10)

    async def work() -> None:
        bench.intake.arrived([letter(i, "publish", f"k{i}") for i in range(10)])
        await _a_while()
        bench.intake.arrived([letter(10, "publish", "k10")])
        await _a_while()
        assert (len(bench.done), bench.intake.waiting) == (10, 1)
        bench.now += 1
        await asyncio.wait_for(_until(lambda: len(bench.done) == 11), 30)

    bench.run(work)
    assert len(bench.store.batches) == 2


def test_another_attempt_with_the_same_key_is_answered() -> None:
    bench = Bench()
    bench.store.refusal = KeyInProgress()
    assert _of(bench, letter(1, "prepare")) == ["KEY_IN_PROGRESS"]


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (signed(letter(1, "prepare")), "PREPARED"),
        (letter(1, "prepare"), "CREDENTIALS_INVALID"),
        (signed(letter(1, "prepare"), b"x" * 32), "CREDENTIALS_INVALID"),
        (replace(signed(letter(1, "prepare")), body=b"other"), "CREDENTIALS_INVALID"),
        (replace(signed(letter(1, "prepare")), headers={"a": "b"}), "CREDENTIALS_INVALID"),
        (replace(signed(letter(1, "prepare")), content_type="text/plain"), "CREDENTIALS_INVALID"),
        (
            replace(
                signed(letter(1, "prepare")), attributes={**signed(letter(1, "prepare")).attributes, "tmcop": "submit"}
            ),
            "CREDENTIALS_INVALID",
        ),
        (Letter(number=1, attributes={}, headers={}, content_type="", body=b"{}"), "CREDENTIALS_INVALID"),
        (signed(replace(letter(1, "prepare"), reply_to="tmc.reply.orders.a")), "PREPARED"),
        (signed(replace(letter(1, "prepare"), reply_to="tmc.submit.coupons.default")), "FIELD_INVALID"),
        (signed(replace(letter(1, "prepare"), reply_to="tmc.reply.ordersandmore")), "FIELD_INVALID"),
        (signed(replace(letter(1, "describe"), reply_to="tmc.reply.orders.a")), "token"),
        (signed(letter(1, "describe")), "FIELD_INVALID"),
    ],
)
def test_a_signed_queue_takes_what_its_secret_signed(made: Letter, said: str) -> None:
    assert _of(Bench((SECRET,)), made) == [said]


def test_either_of_two_secrets_signs() -> None:
    several = [signed(letter(1, "prepare")), signed(letter(2, "prepare", "j", bytes(16)), b"x" * 32)]
    assert _of(Bench((b"x" * 32, SECRET)), *several) == ["PREPARED", "PREPARED"]


def test_an_unsigned_queue_never_shows_the_check_token() -> None:
    asked = replace(letter(1, "describe"), reply_to="tmc.reply.orders.a")
    assert _of(Bench(), asked) == ["FIELD_INVALID"]


def test_a_producer_says_where_it_answers_checks() -> None:
    bench, made = Bench((SECRET,)), letter(1, "prepare", tmccheckaddress="10.0.0.5:8080")
    assert _of(bench, signed(made)) == ["PREPARED"]
    assert bench.senders.seen == ["orders default 10.0.0.5:8080"]


def test_in_an_unsigned_queue_nobody_says_where_to_ask() -> None:
    """The center would show its check token there."""
    bench = Bench()
    assert _of(bench, letter(1, "prepare", tmccheckaddress="10.0.0.5:8080")) == ["FIELD_INVALID"]
    assert bench.senders.seen == []


def test_a_prepare_that_comes_again_after_its_rollback_needs_nobody() -> None:
    """Both come again when an acknowledgment was lost. A sender that waits for an answer gets it."""
    bench = Bench()
    bench.store.refusal = AlreadyRolledBack()
    several = [
        letter(1, "prepare"),
        replace(letter(2, "prepare"), reply_to="tmc.reply.orders.a"),
        letter(3, "publish", "j"),
    ]
    assert _of(bench, *several) == ["ROLLED_BACK", "ALREADY_ROLLED_BACK", "ALREADY_ROLLED_BACK"]


def test_a_held_submit_keeps_its_place_before_a_publish_of_its_topic() -> None:
    bench = Bench()
    of_lines = {"topic": "order.lines"}

    async def work() -> None:
        bench.store.stored.add(ATTEMPT)
        bench.store.locked = {"a"}
        bench.intake.arrived([letter(1, "submit", "a", **of_lines)])
        await _a_while()
        bench.intake.arrived([letter(2, "publish", "b", tmcorderkey="alice", **of_lines)])
        bench.now += 10
        await asyncio.wait_for(_until(lambda: len(bench.store.batches) >= 2), 30)
        bench.store.locked = set()
        bench.now += 10
        await asyncio.wait_for(_until(lambda: len(bench.done) == 2), 30)

    bench.run(work)
    assert bench.store.batches == [["submit a"], ["submit a"], ["submit a"], ["publish b"]]


def test_what_is_held_does_not_keep_decisions_away() -> None:
    """Prepares above a limit wait for the very decisions that are behind them."""
    bench = Bench()

    async def work() -> None:
        bench.store.locked = {f"k{i}" for i in range(400)}
        bench.intake.arrived([letter(i, "prepare", f"k{i}", os.urandom(16)) for i in range(400)])
        await _a_while()
        bench.store.stored.add(ATTEMPT)
        bench.intake.arrived([letter(400, "submit", "open")])
        bench.now += 10
        await asyncio.wait_for(_until(lambda: (400, "COMMITTED") in bench.done), 30)

    bench.run(work)
    assert bench.done == [(400, "COMMITTED")]


def _trust(**fields: object) -> Letter:
    import json

    given: dict[str, object] = {
        "forwardTopic": "order.paid",
        "messageKey": "k",
        "messageStatus": 1,
        "bizID": 7,
        **fields,
    }
    return Letter(number=1, attributes={}, headers={}, content_type="", body=json.dumps(given).encode())


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (_trust(message="text", forwardKey="there", verifyInfo={"url": "http://elsewhere"}), "PREPARED"),
        (_trust(messageStatus=4), "FIELD_INVALID"),
        (_trust(messageStatus="1"), "FIELD_INVALID"),
        (_trust(bizID=8), "FIELD_INVALID"),
        (_trust(bizID="7"), "PREPARED"),
        (_trust(messageKey=None), "FIELD_INVALID"),
        (_trust(message=["no text"]), "FIELD_INVALID"),
        (_trust(message="\ud800"), "FIELD_INVALID"),
        (replace(_trust(), body=b"[1]"), "FIELD_INVALID"),
        (replace(_trust(), body=b"\xff"), "FIELD_INVALID"),
        (replace(_trust(), body=b"[" * 1_000_000), "FIELD_INVALID"),
    ],
)
def test_the_json_of_trust_message(made: Letter, said: str) -> None:
    assert _of(Bench(), made) == [said]


def test_all_steps_of_trust_message_are_one_attempt() -> None:
    assert _of(Bench(), _trust(), replace(_trust(messageStatus=2), number=2)) == ["PREPARED", "COMMITTED"]


@pytest.mark.parametrize(
    ("changed", "value"),
    [
        ("specversion", "0.3"),
        ("tmcop", "commit"),
        ("id", "not-an-id"),
        ("id", ""),
        ("tmcdelay", "1.5"),
        ("tmcdelay", "9" * 30),
        ("tmctime", "soon"),
        ("tmcledger", "zz"),
        ("tmccheckaddress", "nowhere"),
        ("tmcdely", "5"),
    ],
)
def test_attributes_that_are_none_are_refused(changed: str, value: str) -> None:
    made = letter(1, "prepare")
    assert _of(Bench(), replace(made, attributes={**made.attributes, changed: value})) == ["FIELD_INVALID"]


def test_a_uuid_is_an_attempt_id() -> None:
    made = letter(1, "prepare")
    text = (
        f"{ATTEMPT.hex()[:8]}-{ATTEMPT.hex()[8:12]}-{ATTEMPT.hex()[12:16]}-{ATTEMPT.hex()[16:20]}-{ATTEMPT.hex()[20:]}"
    )
    same = replace(letter(2, "submit"), attributes={**letter(2, "submit").attributes, "id": text.upper()})
    assert _of(Bench(), made, same) == ["PREPARED", "COMMITTED"]


def test_nothing_is_taken_of_a_queue_that_is_closed() -> None:
    bench = Bench()

    async def work() -> None:
        bench.current = Catalog(apps={1: replace(bench.app, submit_queues=())}, topics=bench.current.topics)
        bench.intake.arrived([letter(1, "prepare")])
        await _a_while()

    bench.run(work)
    assert (bench.done, bench.store.batches) == ([], [])


def test_the_page_has_the_vector() -> None:
    from pathlib import Path

    page = (Path(__file__).parents[3] / "docs" / "submit-queues.md").read_text()
    given = {
        "id": bytes(range(16)).hex(),
        "specversion": "1.0",
        "subject": "order-7",
        "tmcop": "prepare",
        "type": "order.paid",
        "tmcsignature": "not signed",
    }
    content = wire.signed("tmc.submit.orders.prod", given, "application/json", b'{"order": 7}', {"shop": "Zürich"})
    assert f"{content.decode()}\n{sign(SECRET, content)}" in page
