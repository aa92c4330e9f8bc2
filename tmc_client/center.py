"""The face of the SDK for blocking programs: prepare, submit, roll back, publish, transactions.

`connect` opens nothing; threads and channel start at first use.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from tmc_client import errors, wire
from tmc_client.checks.running import RunningServers
from tmc_client.codecs import Topic
from tmc_client.connection import Connection, Identity, Tls, watch_forks
from tmc_client.producer import Prepared, Producer, duration, prepare_request, prepared_of, publish_request, wait
from tmc_client.sender import Sender
from tmc_common.protocol import message_pb2

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine
    from sqlalchemy.orm import Session

    from tmc_client.checks.answers import Checks, Outcome
    from tmc_client.transaction import Transaction

T = TypeVar("T")
DEFAULT_TIMEOUT = timedelta(seconds=5)


class Center:
    """A connection to the center for one app. Thread-safe and fork-safe; share one per process."""

    def __init__(
        self, address: str, identity: Identity, tls: Tls | None, timeout: timedelta, insecure: bool = False
    ) -> None:
        self.connection = Connection(address, identity, tls, insecure=insecure)
        self.sender = Sender(self.connection)
        self.producer = Producer(self.sender)
        self.timeout = duration("timeout", timeout)
        self._running = RunningServers()
        self._outcomes: dict[str, Outcome] = {}
        self._settler: Any = None
        self._settler_lock = threading.Lock()
        watch_forks(self)

    def after_fork(self) -> None:
        """See connection.ForkAware: a thread of the parent may have held the lock."""
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
        headers: Mapping[str, str] | None = None,
        delay: timedelta = timedelta(0),
        attempt_id: bytes | None = None,
        timeout: timedelta | None = None,
    ) -> Prepared:
        """Store a message that nobody receives before it is submitted. It is durable when this returns.

        attempt_id: 16 bytes to repeat an earlier try with; by default a new attempt.
        Raises: KeyInProgress, KeyCommitted for another attempt with this key; Unavailable; any TmcError.
        """
        request = prepare_request(topic, body, key, headers, delay, attempt_id)
        limit = duration("timeout", timeout or self.timeout)
        return prepared_of(request, wait(self.producer.prepare(request, limit), limit))

    def publish(
        self,
        topic: Topic[T] | str,
        body: T,
        *,
        key: str,
        headers: Mapping[str, str] | None = None,
        delay: timedelta = timedelta(0),
        attempt_id: bytes | None = None,
        timeout: timedelta | None = None,
    ) -> str:
        """Prepare and submit in one commit, for messages that belong to no local transaction. Returns: message id."""
        request = publish_request(topic, body, key, headers, delay, attempt_id)
        limit = duration("timeout", timeout or self.timeout)
        result: str = wait(self.producer.publish(request, limit), limit).message_id
        return result

    def submit(self, message: Prepared | str, *, timeout: timedelta | None = None) -> str:
        """The local transaction committed: deliver. Returns: message id. Raises Decided when it was rolled back."""
        limit = duration("timeout", timeout or self.timeout)
        result: str = wait(self.producer.submit(message, limit), limit).message_id
        return result

    def rollback(self, message: Prepared | str, *, timeout: timedelta | None = None) -> str:
        """The local transaction did not commit: forget the message. Raises Decided when it was submitted."""
        limit = duration("timeout", timeout or self.timeout)
        result: str = wait(self.producer.rollback(message, limit), limit).message_id
        return result

    def get_message(self, message_id: str = "", *, topic: Topic[Any] | str = "", key: str = "") -> message_pb2.Message:
        """One of your own messages, by id or by topic and key."""
        method = self.connection.unary("/tmc.v1.MessageService/GetMessage", message_pb2.Message)
        request = message_pb2.GetMessageRequest(message_id=message_id, topic=str(topic), key=key)
        try:
            found: message_pb2.Message = method(request, timeout=self.timeout.total_seconds())
        except grpc.RpcError as exc:
            raise wire.from_rpc(exc) from exc
        return found

    def transaction(self, session: Session, *, prepare_timeout: timedelta = timedelta(seconds=2)) -> Transaction:
        """A block that owns the commit of `session`: what is sent inside is delivered if and only if it commits."""
        from tmc_client.transaction import Transaction

        return Transaction(self.producer, self.settle, session, prepare_timeout)

    def check(self, topic: Topic[Any] | str) -> Callable[[Outcome], Outcome]:
        """Answer checks about a topic from your own tables: decorate a function (Question) -> Verdict.

        Say ROLLBACK only when the transaction cannot commit any more; the ledger knows how, a look at a table does not.
        """

        def register(outcome: Outcome) -> Outcome:
            if inspect.iscoroutinefunction(outcome):
                raise errors.InvalidRequest(
                    f"{outcome.__name__}() answers checks in a thread: write `def`, not `async def`."
                )
            self._outcomes[str(topic)] = outcome
            return outcome

        return register

    def checks(self, engine: Engine | AsyncEngine | None = None) -> Checks:
        """Answers to the center's questions, from the ledger in this database and from functions made with `check`."""
        from tmc_client.checks.answers import Checks

        return Checks(self.connection, engine, self._outcomes, self._running)

    def resume(self, engine: Engine) -> int:
        """Submit what this database's ledger says was committed and never answered; call it when your service starts.

        Returns: how many messages were submitted. Raises Unavailable: nothing is lost, call it again.
        """
        from tmc_client.ledger import resume

        return resume(self.producer, engine)

    def settle(self, engine: Engine, message_ids: list[str]) -> None:
        """Remember in the ledger that these submits were answered; in the background, in batches."""
        from tmc_client.ledger import Settler

        with self._settler_lock:
            if self._settler is None:
                self._settler = Settler()
        self._settler.add(engine, message_ids)

    def flush(self, timeout: timedelta = timedelta(seconds=5)) -> bool:
        """Wait until nothing is on its way. Returns False when the time is over."""
        done = self.sender.flush(timeout.total_seconds())
        if self._settler is not None:
            self._settler.flush()
        return done

    def close(self) -> None:
        """Finish what is queued, then close. What the center did not answer is settled by its ledger at the next start."""
        self._running.stop()
        self.sender.close()
        if self._settler is not None:
            self._settler.close()
        self.connection.close()

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
) -> Center:
    """A connection to the center. Opens nothing yet.

    address: host:port, several with commas, or consul://HOST:PORT/SERVICE?tag=TAG (`tmc-center[consul]`).
    app, key: who you are.  tag: the environment you run in; "" is each topic's default.  timeout: of every call.
    check_address: host:port where this service answers checks, for a center that finds producers by what they say.
    insecure: without `tls`, send the key in the clear to other machines than this one (also TMC_INSECURE=1).
    Raises: InvalidRequest where the key would travel in the clear.
    """
    return Center(address, Identity(app=app, key=key, tag=tag, check_address=check_address), tls, timeout, insecure)
