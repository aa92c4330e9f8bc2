"""The asyncio API: the same calls as coroutines. The same sender thread does the work; nothing blocks the loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from tmc_client import center as blocking
from tmc_client import errors
from tmc_client.center import DEFAULT_TIMEOUT
from tmc_client.codecs import Topic
from tmc_client.connecting import sender
from tmc_client.connecting.connection import Tls
from tmc_client.extras import needed_by
from tmc_client.producing.producer import (
    Prepared,
    duration,
    prepare_request,
    prepared_of,
    publish_request,
    rollback_request,
    submit_request,
    within,
)
from tmc_common.protocol import message_pb2

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

    from tmc_client.checks.answers import Checks, Outcome
    from tmc_client.outbox import Outbox
    from tmc_client.producing.aio_transaction import AsyncRecordedTransaction, AsyncTransaction

__all__ = ["AsyncCenter", "connect", "create_tables"]

T = TypeVar("T")
log = logging.getLogger("tmc_client.aio")


async def awaited(future: Future[T] | asyncio.Future[T], timeout: timedelta) -> T:
    """Await a sender's future. Raises TmcError; DeadlineExceeded if there is no answer in time."""
    waited_for = asyncio.wrap_future(future) if isinstance(future, Future) else future
    try:
        async with asyncio.timeout(timeout.total_seconds()):
            return await waited_for
    except TimeoutError as exc:
        raise errors.DeadlineExceeded(
            "The center did not answer in time; the outcome is not known, a repeat with the same ids is safe."
        ) from exc


class AsyncCenter:
    """A connection to the center for one app; see tmc_client.Center for the meaning of each call."""

    def __init__(self, center: blocking.Center) -> None:
        self.blocking = center
        self._settling: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"Async{self.blocking!r}"

    async def _call(self, kind: sender.Kind, request: Any, limit: timedelta) -> Any:
        return await awaited(self.blocking.sender.send_from_loop(kind, request, limit.total_seconds()), limit)

    async def prepare(
        self,
        topic: Topic[T] | str,
        body: T,
        *,
        key: str,
        order_key: str = "",
        headers: Mapping[str, str] | None = None,
        delay: timedelta = timedelta(0),
        attempt_id: bytes | None = None,
        timeout: timedelta | None = None,
    ) -> Prepared:
        """Store a message durably; it is delivered only after it is submitted."""
        request = prepare_request(
            topic, body, key=key, order_key=order_key, headers=headers, delay=delay, attempt_id=attempt_id
        )
        limit = duration("timeout", timeout or self.blocking.timeout)
        return prepared_of(request, await self._call(sender.PREPARE, request, limit))

    async def publish(
        self,
        topic: Topic[T] | str,
        body: T,
        *,
        key: str,
        order_key: str = "",
        headers: Mapping[str, str] | None = None,
        delay: timedelta = timedelta(0),
        attempt_id: bytes | None = None,
        timeout: timedelta | None = None,
    ) -> str:
        """Prepare and submit in one commit. Returns: message id."""
        request = publish_request(
            topic, body, key=key, order_key=order_key, headers=headers, delay=delay, attempt_id=attempt_id
        )
        limit = duration("timeout", timeout or self.blocking.timeout)
        return str((await self._call(sender.PUBLISH, request, limit)).message_id)

    async def submit(self, message: Prepared | str, *, timeout: timedelta | None = None) -> str:
        """Submit a message after the local commit."""
        limit = duration("timeout", timeout or self.blocking.timeout)
        with within(message):
            call = self._call(sender.SUBMIT, submit_request(message), limit)
            return str((await call).message_id)

    async def rollback(self, message: Prepared | str, *, timeout: timedelta | None = None) -> str:
        """Discard a message whose local transaction did not commit."""
        limit = duration("timeout", timeout or self.blocking.timeout)
        with within(message):
            call = self._call(sender.ROLLBACK, rollback_request(message), limit)
            return str((await call).message_id)

    def transaction(
        self,
        session: AsyncSession,
        *,
        prepare_timeout: timedelta = timedelta(seconds=2),
        fallback: Outbox | None = None,
        prepare_first: bool | timedelta = False,
    ) -> AsyncTransaction | AsyncRecordedTransaction:
        """A block that owns the commit of `session`; use it with `async with`. Options: see tmc_client.Center."""
        with needed_by("center.transaction()"):
            from tmc_client.local.sessions import SessionTransaction
            from tmc_client.producing.aio_transaction import AsyncRecordedTransaction, AsyncTransaction, opened

        found = opened(session)
        if SessionTransaction(found.sync_session).is_of_a_test:
            return AsyncRecordedTransaction(found)
        return AsyncTransaction(
            self.blocking.producer,
            self._settle_later,
            found,
            prepare_timeout,
            fallback=fallback,
            answered=self.blocking.answered,
            prepare_first=prepare_first,
        )

    async def get_message(
        self, message_id: str = "", *, topic: Topic[Any] | str = "", key: str = ""
    ) -> message_pb2.Message:
        """One of your own messages, by id or by topic and key."""
        return await asyncio.to_thread(self.blocking.get_message, message_id, topic=topic, key=key)

    def check(self, topic: Topic[Any] | str) -> Callable[[Outcome], Outcome]:
        """See tmc_client.Center.check; the decorated function is called in a thread."""
        return self.blocking.check(topic)

    def checks(self, *engines: AsyncEngine | Engine) -> Checks:
        """Answer the center's checks, in threads and, for AsyncEngines, on a separate event loop."""
        return self.blocking.checks(*engines)

    async def resume(self, engine: AsyncEngine) -> int:
        """See tmc_client.Center.resume; await it when your service starts."""
        with needed_by("center.resume()"):
            from tmc_client.producing.aio_ledger import resume

        return await resume(self.submit, engine)

    def _settle_later(self, loop: asyncio.AbstractEventLoop, engine: Engine, message_id: str) -> None:
        """Settle a submit that was answered after its block ended. Called in the sender's thread."""
        try:
            loop.call_soon_threadsafe(self._start_settling, engine, message_id)
        except RuntimeError:  # the loop is closed
            log.info("message %s stays unsettled and is submitted again at the next start", message_id)

    def _start_settling(self, engine: Engine, message_id: str) -> None:
        from tmc_client.producing.aio_ledger import settle

        task = asyncio.create_task(settle(engine, [message_id]))
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    async def flush(self, timeout: timedelta = timedelta(seconds=5)) -> bool:
        """Wait until no call is queued or in flight. Returns False on timeout."""
        done = await asyncio.to_thread(self.blocking.flush, timeout)
        await self._settled()
        return done

    async def close(self) -> None:
        """Finish what is queued, then close."""
        await asyncio.to_thread(self.blocking.close)
        await self._settled()

    async def _settled(self) -> None:
        await asyncio.sleep(0)  # lets the tasks start that the sender's thread has just scheduled
        if self._settling:
            await asyncio.wait(self._settling)

    async def __aenter__(self) -> AsyncCenter:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def connect(
    address: str,
    *,
    app: str,
    key: str = "",
    tag: str = "",
    check_address: str = "",
    tls: Tls | None = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
    insecure: bool = False,
    proxy: str | None = None,
) -> AsyncCenter:
    """Connect as tmc_client.connect does, for asyncio programs."""
    return AsyncCenter(
        blocking.connect(
            address,
            app=app,
            key=key,
            tag=tag,
            check_address=check_address,
            tls=tls,
            timeout=timeout,
            insecure=insecure,
            proxy=proxy,
        )
    )


async def create_tables(engine: AsyncEngine) -> None:
    """Create the ledger and inbox tables where they are missing. Safe to repeat."""
    with needed_by("aio.create_tables()"):
        from tmc_client.producing.aio_ledger import create_tables as create

    await create(engine)
