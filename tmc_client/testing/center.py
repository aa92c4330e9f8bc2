"""The center of one test."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Protocol

from tmc_client import aio, errors
from tmc_client.center import DEFAULT_TIMEOUT, Center
from tmc_client.codecs import Topic, decode, encode
from tmc_client.connecting.connection import Connection, Identity
from tmc_client.consuming.consumer import Consumer
from tmc_client.embedded import RunningServer, entry_point
from tmc_client.producing.producer import duration
from tmc_client.testing.faults import Call, Faults, FaultySender, Point
from tmc_common.protocol import admin_pb2, types_pb2

_PATIENCE_S = 30.0  # of this process's own clock, for handlers and calls under way
_PAUSE_S = 0.0005
_PAGE = 1000
_DONE = {
    types_pb2.WHY_ACKED,
    types_pb2.WHY_CANCELLED,
    types_pb2.WHY_NO_SUBSCRIBER,
    types_pb2.WHY_REMOVED,
    types_pb2.WHY_ROLLED_BACK,
}


class DrivenServer(RunningServer, Protocol):
    """The server behind a ManualCenter: see tmc_server.app.manual."""

    @property
    def now_ms(self) -> int: ...
    def copies_for(self, app: str) -> int: ...
    def set_clock(self, now_ms: int) -> None: ...
    def run_duties(self) -> None: ...
    def next_due_ms(self) -> int | None: ...
    def room(self, topic: str, app: str, tag: str) -> int: ...
    def waits_for_room(self) -> bool: ...
    def redeliver(self, message_id: str) -> int: ...


@dataclass(frozen=True, kw_only=True)
class Published:
    """A message that its producer submitted. body: as JSON, str or bytes, by its content type."""

    message_id: str
    topic: str
    key: str
    body: Any
    headers: dict[str, str]


class ManualCenter:
    """The real center in this process, on an SQLite file in memory and a manual clock. Use it with `with`.

    Nothing happens by itself after what the code under test has called: `settle` delivers what is due now, `advance` lets
    time pass. Apps, topics and subscriptions are made when they are first named, as by `tmc dev`.
    """

    def __init__(self) -> None:
        """Raises InvalidRequest: the server is not installed."""
        self._server: DrivenServer = entry_point("manual")()
        self._faults = Faults()
        self._centers: list[Center] = []
        self._consumers: list[Consumer] = []
        self._operator = Connection(self.address, Identity(app="test"))
        self._closing = ExitStack()  # consumers first, the server last, each whatever became of the others
        self._closing.callback(self._server.stop)
        self._closing.callback(self._operator.close)

    @property
    def address(self) -> str:
        """host:port, for code that connects by itself; calls of such a Center cannot be made to fail or crash."""
        return self._server.address

    @property
    def now(self) -> datetime:
        """The center's clock."""
        return datetime.fromtimestamp(self._server.now_ms / 1000, UTC)

    def connect(self, app: str, *, tag: str = "") -> Center:
        """A Center for the code under test, closed at the end."""
        center = Center(
            self.address,
            Identity(app=app, tag=tag),
            None,
            DEFAULT_TIMEOUT,
            serves_checks=True,
            sender=partial(FaultySender, faults=self._faults),
        )
        self._centers.append(center)
        self._closing.callback(center.close)
        return center

    def connect_async(self, app: str, *, tag: str = "") -> aio.AsyncCenter:
        """The same for asyncio."""
        return aio.AsyncCenter(self.connect(app, tag=tag))

    def consume(self, *consumers: Consumer) -> None:
        """Start these consumers, and stop them at the end. What is published from now on reaches their handlers."""
        for consumer in consumers:
            self._start(consumer)
        self.settle()

    def _start(self, consumer: Consumer) -> None:
        """Raises TypeError, ValueError."""
        if not isinstance(consumer, Consumer):
            raise TypeError(f"consume() takes tmc.Consumers, not {consumer!r}")
        if consumer.address != self.address:
            raise ValueError(
                "consume() takes consumers of this center: make them with tmc.Consumer(tmc_center.connect(app=...))"
            )
        app, tag = consumer.identity.app, consumer.identity.tag
        before = {topic: self._server.room(topic, app, tag) for topic in consumer.topics}
        consumer.start()
        self._consumers.append(consumer)
        self._closing.callback(consumer.stop)
        self._wait(
            lambda: all(self._server.room(topic, app, tag) > room for topic, room in before.items()),
            lambda: f"{app} could not subscribe to {', '.join(before)}: the log of tmc_client.consumer says why.",
        )

    def settle(self) -> None:
        """Deliver what is due now, run the checks that are due now, and wait until all handlers are done.

        Raises AssertionError: handlers still run after thirty seconds of real time.
        """
        if not self._server.is_running:
            raise RuntimeError("this center is closed")
        while True:
            before = self._copies()
            self._flush()
            self._server.run_duties()
            self._wait(self._is_handled, self._unhandled)
            self._flush()
            if self._copies() == before and not self._server.waits_for_room():
                return

    def advance(self, by: timedelta) -> None:
        """Let time pass at the center: every check and every delivery happens at its own moment, in order."""
        if duration("by", by) < timedelta(0):
            raise ValueError(f"by={by!r}: time does not go back")
        target = self._server.now_ms + round(by.total_seconds() * 1000)
        self.settle()
        while (due := self._server.next_due_ms()) is not None and due <= target:
            self._server.set_clock(due)
            self.settle()
        self._server.set_clock(target)
        self.settle()

    def fail_next(self, call: Call, error: errors.TmcError | None = None) -> None:
        """Let the next call of this kind fail before it reaches the center; several calls of this add up.

        error: by default Unavailable. Raises AssertionError at the end of the test if no such call came.
        """
        self._faults.fail_next(call, error)

    def crash_after(self, point: Point) -> AbstractContextManager[None]:
        """Let the process of the code under test die in a `with` block, at a point of its next transaction in this thread.

        point: "prepare", its answer was the last thing the process saw; "local_commit", before it submits; "submit".
        What the dead Center should still send is lost; the block ends, and the test continues as another process.
        """
        return self._faults.crash_after(point)

    def redeliver(self, topic: Topic[Any] | str, key: str) -> None:
        """Deliver another copy of a message that was delivered, as happens when an ack is lost.

        Raises AssertionError: no running consumer has had it.
        """
        self.settle()  # a copy that comes while the handler runs would share its outcome
        found = [each for each in self._submitted(str(topic)) if each.key == key]
        if not (found and self._server.redeliver(found[-1].message_id)):
            raise AssertionError(f"{topic} {key} was delivered to none of the running consumers.")
        self.settle()

    def published(self, topic: Topic[Any] | str) -> list[Published]:
        """The submitted messages of a topic, oldest first."""
        self.settle()
        return [self._read(each) for each in self._submitted(str(topic))]

    def assert_published(
        self, topic: Topic[Any] | str, *, key: str | None = None, body: Any = ..., times: int = 1
    ) -> None:
        """Raises AssertionError unless that many messages of this topic, key and body were submitted."""
        found = self.published(topic)
        wanted = decode(*encode(body), Any) if body is not ... else ...
        fitting = [
            each for each in found if (key is None or each.key == key) and (wanted is ... or each.body == wanted)
        ]
        if len(fitting) != times:
            what = (
                f"{topic}" + (f" {key}" if key is not None else "") + (f" with {wanted!r}" if body is not ... else "")
            )
            listed = "\n".join(f"  {each.key}: {each.body!r}" for each in found) or "  none"
            raise AssertionError(
                f"{what} was published {len(fitting)} times, not {times}. Of this topic there are:\n{listed}"
            )

    def assert_nothing_open(self) -> None:
        """Raises AssertionError, with the reason for each, if a message is undecided or a delivery not done."""
        self.settle()
        open_ = [line for topic in self._topics() for each in self._messages(topic) for line in self._open(each)]
        if open_:
            raise AssertionError("Still open:\n" + "\n".join(f"  {line}" for line in open_))

    def _open(self, message: Any) -> Iterator[str]:
        why = self._ask(
            admin_pb2.ExplainMessageRequest(message_id=message.message_id), admin_pb2.ExplainMessageResponse
        )
        for each in why.explanations:
            if each.why not in _DONE:
                yield f"{message.topic} {message.key}{f' for {each.app}' if each.app else ''}: {each.sentence}"

    def _submitted(self, topic: str) -> list[Any]:
        return [each for each in self._messages(topic) if each.state == types_pb2.MESSAGE_STATE_COMMITTED]

    def _topics(self) -> list[str]:
        found = self._ask(admin_pb2.ListTopicsRequest(page_size=_PAGE), admin_pb2.ListTopicsResponse)
        return [topic.name for topic in found.topics]

    def _messages(self, topic: str) -> Iterator[Any]:
        """Oldest first."""
        if topic not in self._topics():
            return
        request = admin_pb2.ListMessagesRequest(topic=topic, page_size=_PAGE)
        while True:
            page = self._ask(request, admin_pb2.ListMessagesResponse)
            yield from page.messages
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    def _read(self, message: Any) -> Published:
        detail = self._ask(admin_pb2.GetMessageDetailRequest(message_id=message.message_id), admin_pb2.MessageDetail)
        found = detail.message
        return Published(
            message_id=found.message_id,
            topic=found.topic,
            key=found.key,
            body=decode(found.body, found.content_type, Any),
            headers=dict(found.headers),
        )

    def _ask(self, request: Any, response_class: Any) -> Any:
        """Call the admin service: its requests are named after its methods."""
        name = type(request).__name__.removesuffix("Request")
        return self._operator.unary(f"/tmc.v1.AdminService/{name}", response_class)(request, timeout=_PATIENCE_S)

    def _flush(self) -> None:
        for center in self._centers:
            center.flush()

    def _copies(self) -> int:
        """Return how many went to our consumers, and to others of the same apps."""
        return sum(map(self._server.copies_for, {consumer.identity.app for consumer in self._consumers}))

    def _came(self) -> int:
        return sum(consumer.received_copies for consumer in self._consumers)

    def _is_handled(self) -> bool:
        return self._came() >= self._copies() and all(consumer.is_idle for consumer in self._consumers)

    def _unhandled(self) -> str:
        busy = [", ".join(consumer.topics) for consumer in self._consumers if not consumer.is_idle]
        if busy:
            return f"Handlers of {'; '.join(busy)} still run."
        return (
            f"{self._copies()} copies were delivered and {self._came()} came to the consumers of consume(): does another "
            "consumer of the same app run?"
        )

    def _wait(self, condition: Callable[[], bool], why: Callable[[], str]) -> None:
        """Raises AssertionError."""
        end = time.monotonic() + _PATIENCE_S
        while not condition():
            if time.monotonic() > end:
                raise AssertionError(f"After {_PATIENCE_S:g} seconds: {why()}")
            time.sleep(_PAUSE_S)

    def close(self) -> None:
        """Stop consumers, centers and the server; no thread is left."""
        self._closing.close()

    def __enter__(self) -> ManualCenter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close()
        if kind is None and (unused := self._faults.unused):
            raise AssertionError(f"fail_next({unused[0]!r}): no such call came.")
