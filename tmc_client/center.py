"""The face of the SDK for blocking programs: prepare, submit, roll back, publish, transactions.

`connect` opens nothing; threads and channel start at first use. Methods ending in `_later` return futures; the asyncio
face awaits those, so there is one implementation.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from tmc_client import codecs, errors, sender, wire
from tmc_client.codecs import Topic
from tmc_client.connection import Connection, Identity, Tls
from tmc_client.protocol import message_pb2
from tmc_client.sender import Sender

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.orm import Session

    from tmc_client.transaction import Transaction

T = TypeVar("T")
DEFAULT_TIMEOUT = timedelta(seconds=5)


@dataclass(frozen=True)
class Prepared:
    """A stored message that waits for submit or rollback. attempt_id tells this attempt from any other with its key."""

    message_id: str
    topic: str
    key: str
    attempt_id: bytes


def new_attempt_id() -> bytes:
    """16 random bytes."""
    return os.urandom(16)


def request_of(
    topic: Topic[Any] | str,
    body: object,
    key: str,
    headers: Mapping[str, str] | None,
    delay: timedelta,
    attempt_id: bytes | None,
    ledger_id: bytes = b"",
) -> message_pb2.PrepareRequest:
    """Build the wire form of a message. Raises CodecError, InvalidRequest."""
    data, content_type = codecs.encode(body)
    try:
        return message_pb2.PrepareRequest(
            topic=str(topic),
            key=key,
            body=data,
            content_type=content_type,
            headers=dict(headers or {}),
            attempt_id=attempt_id or new_attempt_id(),
            delay_ms=round(delay.total_seconds() * 1000),
            ledger_id=ledger_id,
        )
    except (TypeError, ValueError) as exc:
        raise errors.InvalidRequest(f"This message cannot be sent: {exc}") from exc


def wait(future: Future[T], timeout: timedelta) -> T:
    """The future's result. Raises TmcError; DeadlineExceeded when there is none in time."""
    try:
        return future.result(timeout.total_seconds())
    except FutureTimeout as exc:
        raise errors.DeadlineExceeded(
            "The center did not answer in time; the outcome is not known, a repeat with the same ids is safe."
        ) from exc


class Center:
    """A connection to the center for one app. Thread-safe and fork-safe; share one per process."""

    def __init__(self, address: str, identity: Identity, tls: Tls | None, timeout: timedelta) -> None:
        self.connection = Connection(address, identity, tls)
        self.sender = Sender(self.connection)
        self.timeout = timeout
        self._settler: Any = None
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
        request = request_of(topic, body, key, headers, delay, attempt_id)
        limit = timeout or self.timeout
        return prepared_of(request, wait(self.prepare_later(request, limit), limit))

    def prepare_later(self, request: message_pb2.PrepareRequest, timeout: timedelta) -> Future[Any]:
        return self.sender.send(sender.PREPARE, request, timeout.total_seconds())

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
        request = request_of(topic, body, key, headers, delay, attempt_id)
        limit = timeout or self.timeout
        result: str = wait(self.publish_later(request, limit), limit).message_id
        return result

    def publish_later(self, request: message_pb2.PrepareRequest, timeout: timedelta) -> Future[Any]:
        return self.sender.send(sender.PUBLISH, request, timeout.total_seconds())

    def submit(self, message: Prepared | str, *, timeout: timedelta | None = None) -> str:
        """The local transaction committed: deliver. Returns: message id. Raises Decided when it was rolled back."""
        return self._decide(sender.SUBMIT, message, timeout)

    def rollback(self, message: Prepared | str, *, timeout: timedelta | None = None) -> str:
        """The local transaction did not commit: forget the message. Raises Decided when it was submitted."""
        return self._decide(sender.ROLLBACK, message, timeout)

    def _decide(self, kind: sender.Kind, message: Prepared | str, timeout: timedelta | None) -> str:
        limit = timeout or self.timeout
        result: str = wait(self.decide_later(kind, message, limit), limit).message_id
        return result

    def decide_later(self, kind: sender.Kind, message: Prepared | str, timeout: timedelta) -> Future[Any]:
        return self.sender.send(kind, reference(message), timeout.total_seconds())

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

        return Transaction(self, session, prepare_timeout)

    def resume(self, engine: Engine) -> int:
        """Submit what this database's ledger says was committed and never answered; call it when your service starts.

        Returns: how many messages were submitted. Raises Unavailable: nothing is lost, call it again.
        """
        from tmc_client.ledger import resume

        return resume(self, engine)

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
        self.sender.close()
        if self._settler is not None:
            self._settler.close()
        self.connection.close()

    def __enter__(self) -> Center:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def reference(message: Prepared | str) -> message_pb2.DecideRequest:
    """How a decision names its message: by id, or by key and attempt when the id never arrived."""
    if isinstance(message, str):
        return message_pb2.DecideRequest(message_id=message)
    if message.message_id:
        return message_pb2.DecideRequest(message_id=message.message_id)
    return message_pb2.DecideRequest(topic=message.topic, key=message.key, attempt_id=message.attempt_id)


def prepared_of(request: message_pb2.PrepareRequest, result: Any) -> Prepared:
    """The handle for submit and rollback."""
    return Prepared(result.message_id, request.topic, request.key, request.attempt_id)


def connect(
    address: str,
    *,
    app: str,
    key: str = "",
    tag: str = "",
    tls: Tls | None = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
) -> Center:
    """A connection to the center at host:port. Opens nothing yet.

    app, key: who you are.  tag: the environment you run in; "" is each topic's default.  timeout: of every call.
    """
    return Center(address, Identity(app, key, tag), tls, timeout)
