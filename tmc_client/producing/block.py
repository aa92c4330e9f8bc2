"""A block that owns the commit of a local transaction, and the messages that are recorded in it.

What is written with the commit, and what happens after it, is up to its kind: transaction.py prepares and submits at the
center, outbox/block.py writes into the outbox.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any, Generic, NoReturn, Protocol, Self, TypeVar

from tmc_client import errors
from tmc_client.codecs import Topic
from tmc_client.local import LocalTransaction
from tmc_client.local.loops import HANDLERS
from tmc_common.protocol import message_pb2

log = logging.getLogger("tmc_client.transaction")

T = TypeVar("T")
Request = TypeVar("Request", message_pb2.PrepareRequest, message_pb2.PublishRequest)


class Writer(Protocol):
    """An Outbox: messages are written there with the commit of a block."""

    def check(self, request: message_pb2.PublishRequest) -> None: ...

    def write(self, local: LocalTransaction, requests: Sequence[message_pb2.PublishRequest]) -> Callable[[], None]: ...


class Block(ABC, Generic[Request]):
    """opened_by, otherwise: the call that opens one, and the one without a transaction, for error messages."""

    opened_by = "center.transaction(session)"
    otherwise = ", or use center.publish()"

    def __init__(self, local: LocalTransaction) -> None:
        self.requests: list[Request] = []
        self._local = local
        self._closed_because = f"before its block: enter `with {self.opened_by} as tx` first."
        self._used = False

    def send(
        self,
        topic: Topic[T] | str,
        body: T,
        *,
        key: str,
        order_key: str = "",
        headers: Mapping[str, str] | None = None,
        delay: timedelta = timedelta(0),
    ) -> None:
        """Record a message: it is delivered if and only if the block's transaction commits.

        Messages recorded since a savepoint are discarded if it is rolled back. Raises InvalidRequest outside the
        block and after its transaction was rolled back. order_key: messages with the same one are delivered in order.
        """
        if self._closed_because:
            raise errors.InvalidRequest(f"tx.send() {self._closed_because}")
        self._local.check()
        request = self._request(topic, body, key=key, order_key=order_key, headers=headers, delay=delay)
        self._record(request)
        self.requests.append(request)

    @abstractmethod
    def _request(self, topic: Topic[T] | str, body: T, **content: Any) -> Request:
        """Raises InvalidRequest, CodecError."""

    def _record(self, request: Request) -> None:
        """Take each message before it counts as recorded. Raises TmcError: it does not."""

    def _abandon(self) -> None:
        """The block was left by an exception, and rolled back."""

    def position(self) -> int:
        """See local.Recorder."""
        return len(self.requests)

    def forget_since(self, position: int) -> None:
        """See local.Recorder."""
        del self.requests[position:]

    def _begin(self) -> None:
        """Start the block. Raises InvalidRequest if it was used before or cannot own the commit."""
        if self._used:
            raise errors.InvalidRequest(f"This transaction block was used before: call {self.opened_by} for each.")
        self._local.begin("transaction block", recorder=self)
        self._used, self._closed_because = True, ""

    def _end(self, exc: BaseException | None) -> None:
        try:
            if exc is not None:
                self._local.roll_back()
                self._abandon()
                return
            self._write()
            self._commit()
        finally:
            self._close()
            self._local.stop()
        self._after_commit()

    def _commit(self) -> None:
        """Raises what the commit raised: the database refused it, or its answer was lost."""
        try:
            self._local.commit()
        except BaseException:
            self._undo()
            raise

    def _undo(self) -> None:
        """Roll back after a commit that raised: the program's next commit of this session must not commit what failed here."""
        try:
            self._local.roll_back()
        except Exception:
            log.warning("the rollback failed", exc_info=True)

    def _close(self) -> None:
        self._closed_because = f"after the end of its block: send inside it{self.otherwise}."

    @abstractmethod
    def _write(self) -> None:
        """Write what is committed with the program's rows. Raises: nothing takes effect, it is rolled back."""

    @abstractmethod
    def _after_commit(self) -> None:
        """Send what was committed. Must not raise."""


def _in_a_loop() -> bool:
    """Return whether this thread runs an event loop of the program's; on a consumer's, an inbox may make blocking sessions."""
    if threading.current_thread().name == HANDLERS:
        return False
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class Blocking(Block[Request]):
    """Used with `with`."""

    @contextmanager
    def savepoint(self) -> Iterator[Any]:
        """A savepoint: if its body raises, it is rolled back alone, with the messages that were recorded in it."""
        if self._closed_because:
            raise errors.InvalidRequest(f"tx.savepoint() {self._closed_because}")
        with self._local.savepoint() as handle:
            yield handle

    def __enter__(self) -> Self:
        if _in_a_loop():
            warnings.warn(
                f"{self.opened_by} stops the event loop while it waits: in async code connect with tmc_client.aio and write "
                "`async with`, or run this in a thread.",
                RuntimeWarning,
                stacklevel=2,
            )
        self._begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(exc)

    async def __aenter__(self) -> NoReturn:
        raise TypeError(f"Write `with {self.opened_by} as tx`, without async: this is a blocking one.")

    async def __aexit__(self, *_: object) -> None: ...
