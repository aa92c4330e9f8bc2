"""Typical mistakes of people who write consumers, and the one sentence that each of them gets.

MISTAKES is a table of docs/mistakes.md. Adding a mistake means adding a function and its row, then writing the page:
`python -m tests.integration.client.test_consumer_mistakes`. A sentence names the thing and the way out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

import tmc_client as tmc
from tests.support.center import RunningCenter
from tests.support.mistakes import Table
from tmc_client import aio
from tmc_storm.eventually import eventually

if TYPE_CHECKING:
    from decimal import Decimal as OnlyForTypeCheckers


@dataclass
class Bench:
    """A center where only `coupons` is subscribed, to `order.paid`; one where names are made at first use."""

    strict: RunningCenter
    dev: RunningCenter

    def center(self, app: str) -> tmc.Center:
        return tmc.connect(self.strict.address, app=app, key=self.strict.keys[app])


class _Service:
    """Neither a body nor made from one."""


def _listen(bench: Bench, handler: Callable[..., Any], **settings: Any) -> None:
    tmc.Consumer(bench.center("coupons")).listener("order.paid", **settings)(handler)


def _without_parentheses(bench: Bench) -> None:
    @tmc.Consumer(bench.center("coupons")).listener  # type: ignore[arg-type]
    def give_coupon(body: str) -> None: ...


def _no_body(bench: Bench) -> None:
    def give_coupon() -> None: ...

    _listen(bench, give_coupon)


def _message_first(bench: Bench) -> None:
    def give_coupon(message: tmc.Message) -> None: ...

    _listen(bench, give_coupon)


def _service_as_body(bench: Bench) -> None:
    def give_coupon(service: _Service) -> None: ...

    _listen(bench, give_coupon)


def _only_for_type_checkers(bench: Bench) -> None:
    def give_coupon(amount: OnlyForTypeCheckers) -> None: ...

    _listen(bench, give_coupon)


def _session_without_inbox(bench: Bench) -> None:
    def give_coupon(body: str, session: object) -> None: ...

    _listen(bench, give_coupon)


def _stranger_among_the_parameters(bench: Bench) -> None:
    def give_coupon(body: str, database: object) -> None: ...

    _listen(bench, give_coupon)


def _two_listeners(bench: Bench) -> None:
    consumer = tmc.Consumer(bench.center("coupons"))
    for _ in range(2):
        consumer.listener("order.paid")(lambda body: None)


def _nothing_to_consume(bench: Bench) -> None:
    tmc.Consumer(bench.center("coupons")).start()


def _address_instead_of_center(bench: Bench) -> None:
    tmc.Consumer("127.0.0.1:50051")  # type: ignore[arg-type]


def _seconds_as_limit(bench: Bench) -> None:
    _listen(bench, lambda body: None, max_handling=30)


def _batch_without_parentheses(bench: Bench) -> None:
    @tmc.Consumer(bench.center("coupons")).batch_listener  # type: ignore[arg-type]
    def give_coupons(bodies: list[str]) -> None: ...


def _batch_of_one(bench: Bench) -> None:
    @tmc.Consumer(bench.center("coupons")).batch_listener("order.paid")
    def give_coupons(paid: dict[str, Any]) -> None: ...


def _batch_beyond_prefetch(bench: Bench) -> None:
    tmc.Consumer(bench.center("coupons")).batch_listener("order.paid", max_messages=100)


def _function_as_inbox(bench: Bench) -> None:
    def connect() -> None: ...

    def give_coupon(body: str) -> None: ...

    _listen(bench, give_coupon, inbox=connect)


def _asyncio_and_one_thread(bench: Bench) -> None:
    async def give_coupon(body: str) -> None: ...

    _listen(bench, give_coupon, inbox=tmc.SqlInbox(lambda: None, stays_in_thread=True))


def _useless_inbox(bench: Bench, **settings: Any) -> None:
    """Of a database without our tables."""
    engine = sa.create_engine("sqlite://", **settings)
    consumer = tmc.Consumer(bench.center("coupons"))

    @consumer.listener("order.paid", inbox=tmc.SqlInbox(sessionmaker(engine)))
    def give_coupon(body: str, session: Session) -> None: ...

    with consumer:
        eventually(lambda: bench_log.said())
    engine.dispose()


def _until_said(bench: Bench, app: str, topic: str | None, running: RunningCenter | None = None) -> None:
    """Run a consumer until something is logged; the table says what."""
    center = bench.center(app) if running is None else tmc.connect(running.address, app=app)
    consumer = tmc.Consumer(center)
    if topic is None:
        consumer.attach(_Everything())
    else:
        consumer.listener(topic)(lambda body: None)
    with consumer:
        eventually(lambda: bench_log.said())
    center.close()


class _Everything:
    def consume(self, message: tmc.Message) -> None: ...


class _Log(logging.Handler):
    """What was said while a mistake was provoked, and what is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.wanted = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def said(self) -> list[str]:
        return [line for line in list(self.lines) if self.wanted in line]


bench_log = _Log()


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """words: what was done, for the page.  sentence: what it gets, or its beginning.  error: None, it is in the log."""

    id: str
    words: str
    make: Callable[[Bench], object]
    sentence: str
    error: type[Exception] | None

    @property
    def row(self) -> list[str]:
        return [self.words, f"`{self.error.__name__}`" if self.error else "in the log", self.sentence]


MISTAKES = [
    Mistake(
        id="listener without parentheses",
        words="`@consumer.listener` without parentheses",
        make=_without_parentheses,
        sentence='a listener needs its topic: write @consumer.listener("TOPIC") above give_coupon',
        error=TypeError,
    ),
    Mistake(
        id="handler without a body",
        words="a handler without parameters",
        make=_no_body,
        sentence="give_coupon() must take the body as its first parameter",
        error=TypeError,
    ),
    Mistake(
        id="message instead of the body",
        words="a handler whose first parameter is a `Message`",
        make=_message_first,
        sentence="give_coupon(): no body can be read as Message, the type of its first parameter",
        error=TypeError,
    ),
    Mistake(
        id="a service as the body",
        words="a handler whose first parameter is no body",
        make=_service_as_body,
        sentence="no body can be read as _Service, the type of its first parameter, which is the body: take bytes, str, dict, "
        "list, a dataclass, a pydantic model or a protobuf message",
        error=TypeError,
    ),
    Mistake(
        id="annotation for type checkers only",
        words="a body type imported under `TYPE_CHECKING` only",
        make=_only_for_type_checkers,
        sentence="an annotation cannot be resolved at runtime (name 'OnlyForTypeCheckers' is not defined): import it "
        "outside of TYPE_CHECKING",
        error=TypeError,
    ),
    Mistake(
        id="session without inbox",
        words="a `session` parameter without an inbox",
        make=_session_without_inbox,
        sentence="give_coupon() wants a session: give the listener inbox=SqlInbox(sessionmaker)",
        error=TypeError,
    ),
    Mistake(
        id="batch without parentheses",
        words="`@consumer.batch_listener` without parentheses",
        make=_batch_without_parentheses,
        sentence='a listener needs its topic: write @consumer.batch_listener("TOPIC") above give_coupons',
        error=TypeError,
    ),
    Mistake(
        id="batch of one",
        words="a batch listener that takes one body",
        make=_batch_of_one,
        sentence="give_coupons(): a batch listener takes a list of bodies: annotate paid: list[...]",
        error=TypeError,
    ),
    Mistake(
        id="function as inbox",
        words="a function as inbox",
        make=_function_as_inbox,
        sentence="give_coupon(): inbox= takes an inbox, not connect: write inbox=tmc.SqlInbox(sessionmaker(engine))",
        error=TypeError,
    ),
    Mistake(
        id="asyncio in one thread",
        words="an `async def` with an inbox of Django",
        make=_asyncio_and_one_thread,
        sentence="what its inbox writes with belongs to one thread, and an `async def` runs in another: write `def`",
        error=TypeError,
    ),
    Mistake(
        id="batch beyond prefetch",
        words="a batch larger than `prefetch`",
        make=_batch_beyond_prefetch,
        sentence="max_messages=100 needs a prefetch of at least that, this consumer has 32",
        error=ValueError,
    ),
    Mistake(
        id="unknown parameter",
        words="an unknown parameter",
        make=_stranger_among_the_parameters,
        sentence="give_coupon(): unknown parameters ['database']; known are the body, session or connection, and a tmc.Message",
        error=TypeError,
    ),
    Mistake(
        id="two listeners of one topic",
        words="two listeners of one topic in one consumer",
        make=_two_listeners,
        sentence="topic order.paid has a listener already: one function handles one topic",
        error=ValueError,
    ),
    Mistake(
        id="nothing to consume",
        words="a consumer without a listener",
        make=_nothing_to_consume,
        sentence="nothing to consume: decorate a function with @consumer.listener(topic) first",
        error=ValueError,
    ),
    Mistake(
        id="an address instead of a center",
        words='`Consumer("127.0.0.1:50051")`',
        make=_address_instead_of_center,
        sentence="Consumer needs a center as tmc_client.connect() returns it, not '127.0.0.1:50051'",
        error=TypeError,
    ),
    Mistake(
        id="max_handling in seconds",
        words="`max_handling=30`",
        make=_seconds_as_limit,
        sentence="max_handling must be a timedelta, for example timedelta(minutes=10), not 30",
        error=TypeError,
    ),
    Mistake(
        id="inbox without tables",
        words="an inbox whose tables are missing",
        make=_useless_inbox,
        sentence="The inbox of give_coupon(): There is no table tmc_inbox in this database: call tmc.create_tables(engine) once",
        error=None,
    ),
    Mistake(
        id="inbox in AUTOCOMMIT",
        words="an inbox whose engine is in AUTOCOMMIT",
        make=lambda bench: _useless_inbox(bench, isolation_level="AUTOCOMMIT"),
        sentence="This connection is in AUTOCOMMIT and would commit every statement of the handler with an inbox by itself",
        error=None,
    ),
    Mistake(
        id="app without this subscription",
        words="an app that is not subscribed to the topic",
        make=lambda bench: _until_said(bench, "stranger", "order.paid"),
        sentence="Subscribe this app first: tmc admin subscribe TOPIC stranger",
        error=None,
    ),
    Mistake(
        id="app without any subscription",
        words="an app without any subscription",
        make=lambda bench: _until_said(bench, "stranger", None),
        sentence="app stranger has no subscription to anything: subscribe this app first, with: tmc admin subscribe TOPIC "
        "stranger",
        error=None,
    ),
    Mistake(
        id="typo in a topic under tmc dev",
        words="a typo in a topic under `tmc dev`",
        make=lambda bench: _until_said(bench, "coupons", "order.piad", bench.dev),
        sentence="nobody has produced order.piad yet, coupons only consumes it: is the name spelled right?",
        error=None,
    ),
]

TABLE = Table(
    source="tests/integration/client/test_consumer_mistakes.py",
    columns=["mistake", "error", "sentence"],
    rows=[mistake.row for mistake in MISTAKES],
)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("mistakes")
    with (
        RunningCenter(f"sqlite:///{folder}/strict.db") as strict,
        RunningCenter(f"sqlite:///{folder}/dev.db", open_to_all=True) as dev,
    ):
        yield Bench(strict, dev)


@pytest.fixture(autouse=True)
def listening(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.INFO)  # as `tmc dev` shows it
    logging.getLogger().addHandler(bench_log)
    bench_log.lines.clear()
    yield
    logging.getLogger().removeHandler(bench_log)


@pytest.mark.parametrize("mistake", [pytest.param(mistake, id=mistake.id) for mistake in MISTAKES])
def test_a_mistake_gets_one_sentence_that_names_the_way_out(bench: Bench, mistake: Mistake) -> None:
    bench_log.wanted = mistake.sentence
    if mistake.error is None:
        mistake.make(bench)
        assert len(bench_log.said()) == 1
    else:
        with pytest.raises(mistake.error) as caught:
            mistake.make(bench)
        assert mistake.sentence in str(caught.value)
        assert "\n" not in str(caught.value)


def test_the_page_lists_every_mistake() -> None:
    assert TABLE.is_on_the_page()


async def _connected(address: str) -> aio.AsyncCenter:
    return aio.connect(address, app="from-asyncio")


def test_a_consumer_takes_an_asyncio_center(bench: Bench) -> None:
    import asyncio

    got: list[str] = []
    center = asyncio.run(_connected(bench.dev.address))
    consumer = tmc.Consumer(center)

    @consumer.listener("for.asyncio")
    async def handle(body: str) -> None:
        got.append(body)

    catalog = bench.dev.server.store.watch
    with consumer, tmc.connect(bench.dev.address, app="orders") as orders:
        eventually(lambda: "for.asyncio" in catalog.current.topic_by_name)
        eventually(
            lambda: any(
                s.topic == catalog.current.topic_by_name["for.asyncio"].number
                for s in catalog.current.subscriptions.values()
            )
        )
        orders.publish("for.asyncio", "hello", key="k")
        eventually(lambda: got == ["hello"])
    center.blocking.close()


def test_a_listener_accepts_what_can_be_read(bench: Bench) -> None:
    for body_type in (bytes, str, dict, list, dict[str, int], int, timedelta, Any):

        def handle(body: Any) -> None: ...

        handle.__annotations__["body"] = body_type
        _listen(bench, handle)


if __name__ == "__main__":
    TABLE.write()
