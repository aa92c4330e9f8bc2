"""Producer calls as wire messages and futures, shared by the blocking API, the asyncio API and transaction blocks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Required, TypedDict, TypeVar, Unpack

from tmc_client import codecs, errors
from tmc_client import tracing as spans
from tmc_client.codecs import Topic
from tmc_client.connecting import sender
from tmc_client.connecting.sender import Sender
from tmc_common import fields, tracing
from tmc_common.headers import context_of
from tmc_common.protocol import message_pb2

T = TypeVar("T")
Request = TypeVar("Request", message_pb2.PrepareRequest, message_pb2.PublishRequest)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A prepared message that awaits submit or rollback. attempt_id distinguishes attempts with the same key.

    context: the trace that it was prepared in, as headers.
    """

    message_id: str
    topic: str
    key: str
    attempt_id: bytes
    context: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)


def new_attempt_id() -> bytes:
    """16 random bytes."""
    return os.urandom(16)


def prepare_request(
    topic: Topic[Any] | str, body: object, *, ledger_id: bytes = b"", **content: Unpack[Content]
) -> message_pb2.PrepareRequest:
    """The wire form of a message to prepare. Raises CodecError, InvalidRequest."""
    values = _fields(topic, body, **content)
    return _made(message_pb2.PrepareRequest, lambda: {**values(), "ledger_id": ledger_id})


def publish_request(topic: Topic[Any] | str, body: object, **content: Unpack[Content]) -> message_pb2.PublishRequest:
    """The wire form of a message to publish. Raises CodecError, InvalidRequest."""
    return _made(message_pb2.PublishRequest, _fields(topic, body, **content))


class Content(TypedDict, total=False):
    """The values of a message besides topic and body. key is required; attempt_id None: a new attempt.

    is_replay: an operator sends it again, under a key and with a header that are reserved for that.
    """

    key: Required[str]
    order_key: str
    headers: Mapping[str, str] | None
    delay: timedelta
    attempt_id: bytes | None
    is_replay: bool


def _fields(
    topic: Topic[Any] | str,
    body: object,
    *,
    key: str,
    order_key: str = "",
    headers: Mapping[str, str] | None = None,
    delay: timedelta = timedelta(0),
    attempt_id: bytes | None = None,
    is_replay: bool = False,
) -> Callable[[], dict[str, Any]]:
    """Returns: makes the fields. Raises CodecError, InvalidRequest."""
    for name, value in (("key", key), ("order_key", order_key)):
        if not isinstance(value, str):
            raise errors.InvalidRequest(f"{name}={value!r} is no str: write {name}={str(value)!r}.", field=name)
    delay = duration("delay", delay)
    for name, value in (headers or {}).items():
        if not (isinstance(name, str) and isinstance(value, str)):
            raise errors.InvalidRequest(f"Header {name!r}: {value!r} is no str: write {str(value)!r}.", field="headers")
    data, content_type = codecs.encode(body)
    delay_ms = round(delay.total_seconds() * 1000)
    try:
        fields.topic(str(topic))
        (fields.key if is_replay else fields.producers_key)(key)
        if order_key:
            fields.key(order_key, "order_key")
        fields.content_type(content_type)
        fields.headers(headers or {}, may_replay=is_replay)
        fields.delay_ms(delay_ms)
    except fields.FieldInvalid as exc:
        raise refused(exc) from exc
    except UnicodeEncodeError as exc:  # half of a surrogate pair
        raise errors.InvalidRequest(f"This message cannot be sent: {exc}") from exc
    return lambda: {
        "topic": str(topic),
        "key": key,
        "order_key": order_key,
        "body": data,
        "content_type": content_type,
        "headers": spans.injected(headers or {}),
        "attempt_id": attempt_id or new_attempt_id(),
        "delay_ms": delay_ms,
    }


def refused(exc: fields.FieldInvalid) -> errors.InvalidRequest:
    """Return the error with which the center would refuse it."""
    return errors.InvalidRequest(str(exc), reason="FIELD_INVALID", field=exc.field)


def _made(request_class: type[Request], values: Callable[[], dict[str, Any]]) -> Request:
    """Make a request; whatever the values are made of, what cannot be sent is an InvalidRequest."""
    try:
        return request_class(**values())
    except (TypeError, ValueError) as exc:
        raise errors.InvalidRequest(f"This message cannot be sent: {exc}") from exc


def duration(name: str, value: timedelta) -> timedelta:
    """Return the value. Raises InvalidRequest for a plain number, whose unit would be ambiguous."""
    if not isinstance(value, timedelta):
        raise errors.InvalidRequest(
            f"{name}={value!r} is no timedelta: write {name}=timedelta(seconds=...).", field=name
        )
    return value


def wait(future: Future[T], timeout: timedelta) -> T:
    """The future's result. Raises TmcError; DeadlineExceeded when there is none in time."""
    try:
        return future.result(timeout.total_seconds())
    except FutureTimeout as exc:
        raise errors.DeadlineExceeded(
            "The center did not answer in time; the outcome is not known, a repeat with the same ids is safe."
        ) from exc


def submit_request(message: Prepared | str) -> message_pb2.SubmitRequest:
    return message_pb2.SubmitRequest(**_name_of(message))


def rollback_request(message: Prepared | str) -> message_pb2.RollbackRequest:
    return message_pb2.RollbackRequest(**_name_of(message))


def _name_of(message: Prepared | str) -> dict[str, Any]:
    """The fields that identify a message to decide: its id, and key and attempt in case the id never arrived.

    A submit queue needs the latter anyway; the center takes the id where there is one.
    """
    if isinstance(message, str):
        return {"message_id": message}
    return {
        "message_id": message.message_id,
        "topic": message.topic,
        "key": message.key,
        "attempt_id": message.attempt_id,
    }


def prepared_of(request: message_pb2.PrepareRequest, result: Any) -> Prepared:
    """The handle for submit and rollback."""
    return Prepared(
        message_id=result.message_id,
        topic=request.topic,
        key=request.key,
        attempt_id=request.attempt_id,
        context=context_of(request.headers),
    )


def within(message: Prepared | str) -> AbstractContextManager[None]:
    """Continue the trace in which the message was prepared, unless another one is current."""
    return tracing.within({} if isinstance(message, str) else message.context)


class Producer:
    """Producer calls that return futures of their results. timeout: how long the sender keeps retrying."""

    def __init__(self, calls: Sender) -> None:
        self._send = calls.send

    def prepare(self, request: message_pb2.PrepareRequest, timeout: timedelta) -> Future[Any]:
        return self._send(sender.PREPARE, request, timeout.total_seconds())

    def publish(self, request: message_pb2.PublishRequest, timeout: timedelta) -> Future[Any]:
        return self._send(sender.PUBLISH, request, timeout.total_seconds())

    def submit(self, message: Prepared | str, timeout: timedelta) -> Future[Any]:
        with within(message):
            return self._send(sender.SUBMIT, submit_request(message), timeout.total_seconds())

    def submit_in_turn(self, messages: Sequence[Prepared], timeout: timedelta) -> list[Future[Any]]:
        """Submit each after the answer to the one before. The first that fails fails all after it."""
        futures: list[Future[Any]] = [Future() for _ in messages]

        def send(number: int) -> None:
            try:
                call = self.submit(messages[number], timeout)
            except errors.TmcError as exc:
                fail(number, exc)
            else:
                call.add_done_callback(partial(answered, number))

        def answered(number: int, call: Future[Any]) -> None:
            exc = errors.Unavailable("the call was cancelled") if call.cancelled() else call.exception()
            if exc is not None:
                fail(number, exc)
                return
            futures[number].set_result(call.result())
            if number + 1 < len(futures):
                send(number + 1)

        def fail(number: int, exc: BaseException) -> None:
            for future in futures[number:]:
                future.set_exception(exc)

        if messages:
            send(0)
        return futures

    def rollback(self, message: Prepared | str, timeout: timedelta) -> Future[Any]:
        with within(message):
            return self._send(sender.ROLLBACK, rollback_request(message), timeout.total_seconds())
