"""The blocking API of the SDK: prepare, submit, roll back, publish, transactions.

`connect` opens no connection; threads and channels start on first use.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from tmc_client import errors
from tmc_client.checks.running import RunningServers
from tmc_client.codecs import Topic
from tmc_client.connecting import wire
from tmc_client.connecting.choosing import caller_of
from tmc_client.connecting.connection import Caller, Identity, Tls
from tmc_client.connecting.sender import Sender
from tmc_client.extras import needed_by
from tmc_client.forks import watch_forks
from tmc_client.producing.answered import Answered
from tmc_client.producing.producer import (
    Prepared,
    Producer,
    duration,
    prepare_request,
    prepared_of,
    publish_request,
    wait,
)
from tmc_common.protocol import message_pb2

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine
    from sqlalchemy.orm import Session

    from tmc_client.checks.answers import Checks, Outcome
    from tmc_client.embedded import Hold
    from tmc_client.local import LocalTransaction
    from tmc_client.local.engines import Source
    from tmc_client.outbox import Outbox
    from tmc_client.producing.transaction import Transaction
    from tmc_client.recording import RecordedTransaction

T = TypeVar("T")
DEFAULT_TIMEOUT = timedelta(seconds=5)
EMBEDDED = "embedded+"


class Center:
    """A connection to the center for one app. Thread-safe and fork-safe; share one per process."""

    def __init__(
        self,
        address: str,
        identity: Identity,
        tls: Tls | None,
        timeout: timedelta,
        *,
        insecure: bool = False,
        proxy: str | None = None,
        hold: Hold | None = None,
        serves_checks: bool = False,
        sender: Callable[[Caller], Sender] = Sender,
    ) -> None:
        """hold: on the server inside this process that listens on `address`.  serves_checks: see `checks`."""
        self.connection: Caller = caller_of(address, identity, tls, insecure=insecure, proxy=proxy)
        self._hold = hold
        self._serves_checks = serves_checks
        self._checks: list[Checks] = []
        self.sender: Sender = sender(self.connection)
        self.producer: Producer = Producer(self.sender)
        self.timeout: timedelta = duration("timeout", timeout)
        self._running = RunningServers()
        self._outcomes: dict[str, Outcome] = {}
        self._settler: Any = None
        self.answered: Answered = Answered()
        self._settler_lock = threading.Lock()
        watch_forks(self)

    def after_fork(self) -> None:
        """See forks.ForkAware: a thread of the parent may have held the lock."""
        self._settler_lock = threading.Lock()

    @property
    def identity(self) -> Identity:
        return self.connection.identity

    def __repr__(self) -> str:
        return f"Center({self.connection.address!r}, app={self.identity.app!r}, tag={self.identity.tag!r})"

    def prepare(
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
        """Store a message durably; it is delivered only after it is submitted.

        order_key: for ordered topics; messages of one order key are delivered one after another.
        attempt_id: the 16 bytes of an earlier attempt to retry; by default a new attempt.
        Raises: KeyInProgress, KeyCommitted for another attempt with this key; Unavailable; any TmcError.
        """
        request = prepare_request(
            topic, body, key=key, order_key=order_key, headers=headers, delay=delay, attempt_id=attempt_id
        )
        limit = duration("timeout", timeout or self.timeout)
        return prepared_of(request, wait(self.producer.prepare(request, limit), limit))

    def publish(
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
        """Prepare and submit in one commit, for messages that belong to no local transaction. Returns: message id."""
        request = publish_request(
            topic, body, key=key, order_key=order_key, headers=headers, delay=delay, attempt_id=attempt_id
        )
        limit = duration("timeout", timeout or self.timeout)
        return str(wait(self.producer.publish(request, limit), limit).message_id)

    def submit(self, message: Prepared | str, *, timeout: timedelta | None = None) -> str:
        """Submit a message after the local commit. Returns: message id. Raises Decided if it was rolled back."""
        limit = duration("timeout", timeout or self.timeout)
        return str(wait(self.producer.submit(message, limit), limit).message_id)

    def rollback(self, message: Prepared | str, *, timeout: timedelta | None = None) -> str:
        """Discard a message whose local transaction did not commit. Raises Decided if it was submitted."""
        limit = duration("timeout", timeout or self.timeout)
        return str(wait(self.producer.rollback(message, limit), limit).message_id)

    def get_message(self, message_id: str = "", *, topic: Topic[Any] | str = "", key: str = "") -> message_pb2.Message:
        """Look up one of your own messages by id, or by topic and key."""
        method = self.connection.unary("/tmc.v1.MessageService/GetMessage", message_pb2.Message)
        request = message_pb2.GetMessageRequest(message_id=message_id, topic=str(topic), key=key)
        try:
            found: message_pb2.Message = method(request, timeout=self.timeout.total_seconds())
        except grpc.RpcError as exc:
            raise wire.from_rpc(exc) from exc
        return found

    def transaction(
        self,
        session: Session | LocalTransaction | Any,
        *,
        prepare_timeout: timedelta = timedelta(seconds=2),
        fallback: Outbox | None = None,
        prepare_first: bool | timedelta = False,
    ) -> Transaction | RecordedTransaction:
        """Open a block that owns the commit of `session`: its messages are delivered if and only if it commits.

        session: an SQLAlchemy Session or Connection, a connection of sqlite3, mysqlclient, PyMySQL or psycopg, or a
        LocalTransaction of your own. Raises InvalidRequest for anything else.
        prepare_first: call the center with each tx.send(), and not at the end: send before you write, and no lock waits for it.
        A timedelta: and the block may take that long, a day at most, where that is longer than a topic's transaction time.
        fallback: where its messages are written if the center does not answer within `prepare_timeout`; without it, the
        block then fails.
        In tests inside recording.only_record(), a session may join an outer transaction: its messages are only recorded.
        """
        with needed_by("center.transaction()"):
            from tmc_client.local.choosing import local_of
            from tmc_client.producing.transaction import Transaction
            from tmc_client.recording import RecordedTransaction

        local = local_of(session, "center.transaction()")
        if getattr(local, "is_of_a_test", False):
            return RecordedTransaction(local)
        return Transaction(
            self.producer,
            self.settle,
            local,
            prepare_timeout,
            fallback=fallback,
            answered=self.answered,
            prepare_first=prepare_first,
        )

    def check(self, topic: Topic[Any] | str) -> Callable[[Outcome], Outcome]:
        """Decorate a function (Question) -> Verdict that answers a topic's checks from your own tables.

        Return ROLLBACK only if the transaction can no longer commit. The ledger guarantees that; a query of a table
        does not.
        """

        def register(outcome: Outcome) -> Outcome:
            if inspect.iscoroutinefunction(outcome):
                raise errors.InvalidRequest(
                    f"{outcome.__name__}() answers checks in a thread: write `def`, not `async def`."
                )
            self._outcomes[str(topic)] = outcome
            return outcome

        return register

    def checks(self, *engines: Source | AsyncEngine) -> Checks:
        """Answer the center's checks from the ledgers in these databases and from functions registered with `check`.

        engines: or functions that return a new connection of a driver. More can be added to what this returns.
        A center inside this process asks from now on; any other asks where you serve what this returns.
        """
        from tmc_client.checks.answers import Checks

        checks = Checks(self.connection, engines, self._outcomes, self._running)
        if self._serves_checks:
            if self._checks:
                raise errors.InvalidRequest(
                    "This Center answers checks already: call checks() once with all engines, or add() to what it returned."
                )
            checks.serve()
            checks.announce(self.identity.check_address)  # the center knows it when this returns
        self._checks.append(checks)
        return checks

    def resume(self, engine: Source) -> int:
        """Submit the messages in this ledger whose submit was never answered; call it when your service starts.

        engine: or a function that returns a new connection of a driver.
        Returns: the number of submitted messages. Raises Unavailable: nothing is lost, call it again.
        """
        with needed_by("center.resume()"):
            from tmc_client.producing.ledger import resume

        return resume(self.producer, engine)

    def settle(self, engine: Engine, message_ids: list[str]) -> None:
        """Mark these submits as answered in the ledger, in background batches."""
        from tmc_client.producing.ledger import Settler

        with self._settler_lock:
            if self._settler is None:
                self._settler = Settler()
        self._settler.add(engine, message_ids)

    def flush(self, timeout: timedelta = timedelta(seconds=5)) -> bool:
        """Wait until no call is queued or in flight. Returns False on timeout."""
        done = self.sender.flush(timeout.total_seconds())
        if self._settler is not None:
            self._settler.flush()
        return done

    def close(self) -> None:
        """Finish queued calls, then close. `resume` repeats unanswered submits from the ledger at the next start."""
        self._running.stop()
        for checks in self._checks:
            checks.close()
        self.sender.close()
        if self._settler is not None:
            self._settler.close()
        self.connection.close()
        if self._hold is not None:
            self._hold.close()

    def __enter__(self) -> Center:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
) -> Center:
    """Create a Center for one app. Opens no connection yet.

    address: host:port, several with commas; or consul://HOST:PORT/SERVICE?tag=TAG (`tmc-client[consul]`); or
    embedded+URL of an SQLite, PostgreSQL, MariaDB or MySQL database: a center inside this process, which starts now
    (`tmc-center[server]`); or, for producers, amqp+submit://USER:PASSWORD@HOST:PORT/VHOST or kafka+submit://HOST:PORT: a submit
    queue (`tmc-client[rabbitmq]`, `tmc-client[kafka]`).
    app, key: credentials; no key for a center inside this process, the submit secret for a submit queue.  timeout: of every call.
    tag: the environment you run in; "" is each topic's default.
    check_address: host:port where this service answers checks, for a center that learns it from producers' calls.
    insecure: without `tls`, allow sending the key in the clear to other machines (also TMC_INSECURE=1).
    proxy: http://HOST:PORT, which takes CONNECT (also TMC_PROXY). http_proxy and its like are not used.
    Raises: InvalidRequest if the key would be sent in the clear, or if the center inside this process cannot start.
    """
    if address.startswith(EMBEDDED):
        if key or tls is not None:
            raise errors.InvalidRequest("A center inside this process needs neither key= nor tls=: leave them out.")
        return _connect_here(
            address.removeprefix(EMBEDDED), Identity(app=app, tag=tag, check_address=check_address), timeout
        )
    identity = Identity(app=app, key=key, tag=tag, check_address=check_address)
    return Center(address, identity, tls, timeout, insecure=insecure, proxy=proxy)


def _connect_here(database: str, identity: Identity, timeout: timedelta) -> Center:
    """Raises InvalidRequest."""
    from tmc_client.embedded import Hold

    hold = Hold(database)
    running = hold.open()
    try:
        return Center(
            running.address, replace(identity, key=running.secret), None, timeout, hold=hold, serves_checks=True
        )
    except BaseException:
        hold.close()
        raise
