"""Additions to pika's connections: writing many frames at once, and closing without waiting for the other side.

Frames written together take one system call, where the library makes three per message.
"""

from __future__ import annotations

import itertools
import random
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pika
from pika.adapters.select_connection import SelectConnection
from pika.adapters.utils.connection_workflow import AMQPConnectorException
from pika.exceptions import (
    AMQPConnectionError,
    AMQPError,
    InvalidFieldTypeException,
    ProbableAccessDeniedError,
    ProbableAuthenticationError,
    StreamLostError,
)

from tmc_common.addresses import each_host

DAMAGED = "tmc-damaged"
"""The only header of a message whose properties cannot be decoded."""


class Nodes:
    """The nodes of a broker, each with these settings of the library. Whoever connects again takes the next one.

    url: amqp://user:password@host:5672/%2F, also with several hosts: host:5672,other:5672.
    """

    def __init__(self, url: str, **settings: Any) -> None:
        each = [pika.URLParameters(one) for one in each_host(url)]
        for parameters in each:
            for name, value in settings.items():
                setattr(parameters, name, value)
        self.each = each
        start = random.randrange(len(each))  # or everybody would be on the first one
        self._turns = itertools.cycle([*each[start:], *each[:start]])

    def next(self) -> pika.connection.Parameters:
        return next(self._turns)


def connect(parameters: pika.connection.Parameters) -> pika.BlockingConnection:
    """Open a BlockingConnection. Raises AMQPConnectionError, whatever the broker does.

    For a broker that accepts the connection and stays silent, the library raises an error of another family; for one that
    resets the connection in the instant it is accepted, a ValueError.
    """
    try:
        return pika.BlockingConnection(parameters)
    except (AMQPConnectorException, ValueError) as exc:
        raise AMQPConnectionError(str(exc) or type(exc).__name__) from exc


def text_of(reason: object) -> str:
    """Say what is behind an error of the library, whose own text is empty where TLS or a proxy refuses the connection."""
    for each in _inner(reason):
        if text := text_of(each):
            return text
    return str(reason) or type(reason).__name__


def is_login_refused(reason: object) -> bool:
    """Return whether the broker knows no such user, password or virtual host."""
    if any(map(is_login_refused, _inner(reason))):
        return True
    is_probable = isinstance(reason, ProbableAuthenticationError | ProbableAccessDeniedError)
    return is_probable and "ClosedByBroker" in repr(reason)  # the library also takes a broker that goes away for that


def refused_login(parameters: pika.connection.Parameters) -> str:
    """Log in and out. Returns: why that does not work; "": it works."""
    try:
        connect(parameters).close()
    except AMQPError as exc:
        advice = "Check user, password and virtual host: " if is_login_refused(exc) else ""
        return f"{advice}{text_of(exc)}"
    return ""


def _inner(reason: object) -> list[BaseException]:
    """Return the errors that an error of the library wraps."""
    inner = [*getattr(reason, "exceptions", ()), getattr(reason, "exception", None), *getattr(reason, "args", ())]
    return [each for each in inner if isinstance(each, BaseException)]


def hang_up(connection: Any) -> None:
    """Drop a connection whose peer no longer responds; its callbacks run as for any lost connection."""
    if not connection.is_closed:
        connection._terminate_stream(StreamLostError("the other side does not answer"))


def close_with_consumers(channel: Any) -> None:
    """Close a channel and leave it to the broker to end its consumers.

    The library would end them first, and RabbitMQ would give the next single active consumer what is ready before it takes
    back what this channel holds: out of order. Closed at once, all of it goes back first.
    """
    channel._consumers.clear()
    channel.close()


def give_up(connection: Any, seconds: float) -> None:
    """Close a connection whose peer does not respond; if it does not answer the close either, hang up."""
    if connection.is_open:
        connection.close()
    connection.ioloop.call_later(seconds, lambda: hang_up(connection))


@contextmanager
def answered_within(connection: Any, seconds: float) -> Iterator[None]:
    """Hang up a BlockingConnection if a call inside the block is not answered in time: it then raises AMQPError.

    The library's own `call_later` runs nothing while a call waits for its answer.
    """
    implementation = connection._impl
    timer = implementation._adapter_call_later(seconds, lambda: hang_up(implementation))
    try:
        yield
    finally:
        implementation._adapter_remove_timeout(timer)


def decoded(buffer: bytes) -> tuple[int, Any]:
    """Return the first frame of a buffer and its size, as the library's `decode_frame`.

    Properties that the library cannot decode, such as a timestamp in the year 10000, become DAMAGED ones: it would drop the
    connection, get the same message again, and never end.
    """
    try:
        found: tuple[int, Any] = pika.frame.decode_frame(buffer)
        return found
    except (ValueError, OSError, OverflowError, LookupError, struct.error, InvalidFieldTypeException):
        kind, channel, size = struct.unpack_from(">BHL", buffer)
        if kind != pika.spec.FRAME_HEADER:
            raise
        (body_size,) = struct.unpack_from(">Q", buffer, pika.spec.FRAME_HEADER_SIZE + 4)
        header = pika.frame.Header(channel, body_size, pika.spec.BasicProperties(headers={DAMAGED: True}))
        return pika.spec.FRAME_HEADER_SIZE + size + pika.spec.FRAME_END_SIZE, header


class CorkedConnection(SelectConnection):  # type: ignore[misc]  # the library has no types
    """A connection that can write many frames at once. Like all pika connections, use it on its own thread only."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        self._held: list[bytes] | None = None
        super().__init__(*args, **keywords)

    @contextmanager
    def corked(self) -> Iterator[None]:
        """Hold back frames sent inside the block and write them at its end, in order."""
        self._held = []
        try:
            yield
        finally:
            held, self._held = self._held, None
            if held and self.is_open:
                self._adapter_emit_data(b"".join(held))

    def _read_frame(self) -> tuple[int, Any]:
        """Override the library's, see pika.connection."""
        return decoded(self._frame_buffer)

    def _adapter_emit_data(self, data: bytes) -> None:
        """Override the adapter's write method, see pika.adapters.base_connection."""
        if self._held is None:
            super()._adapter_emit_data(data)
        else:
            self._held.append(data)


class NeverOpened(AMQPConnectionError):  # type: ignore[misc]  # the library has no types
    """The broker accepted the connection and reset it at once, for which the library raises a ValueError."""


def run_connection(
    parameters: pika.connection.Parameters,
    ioloop: Any,
    *,
    on_open: Callable[[Any], None],
    on_open_error: Callable[[Any, object], None],
    on_close: Callable[[Any, object], None],
) -> None:
    """Run a CorkedConnection in this thread until its callbacks stop the loop.

    Raises NeverOpened; what a callback raised, once the connection has ended.
    """
    opened: list[Any] = []

    def opening(connection: Any) -> None:
        opened.append(connection)
        on_open(connection)

    connection = CorkedConnection(
        parameters,
        on_open_callback=opening,
        on_open_error_callback=on_open_error,
        on_close_callback=on_close,
        custom_ioloop=ioloop,
    )
    try:
        ioloop.start()
    except Exception as exc:
        if not opened and not connection.is_open:
            raise NeverOpened(str(exc) or type(exc).__name__) from exc
        if connection.is_open:
            hang_up(connection)  # nobody would answer its heartbeats
            ioloop.start()  # until its end was noticed
        raise
