"""Carries letters through RabbitMQ. Answers come to the connection's own direct replies. Needs `tmc-client[rabbitmq]`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pika
from pika.exceptions import AMQPError, ChannelClosedByBroker

from tmc_client import errors
from tmc_client.connecting.submit_queue import Letter
from tmc_client.forks import abandon
from tmc_common import submission
from tmc_common.amqp import Nodes, answered_within, connect, is_login_refused, text_of

_CONNECT_S = 5.0
_CLOSE_S = 1.0
_HEARTBEAT_S = 600  # nobody answers between calls: the broker drops who is gone, and what it closed is replaced
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
_ACCESS_REFUSED, _NOT_FOUND, _PRECONDITION_FAILED = 403, 404, 406


class AmqpCarrier:
    """See submit_queue.Carrier. url: amqp:// or amqps://, also with several hosts."""

    def __init__(self, url: str, app: str, tag: str) -> None:
        """Raises ValueError: it is no URL of a broker."""
        self._nodes = Nodes(url, heartbeat=_HEARTBEAT_S, tcp_options=_KEEPALIVE, blocked_connection_timeout=_CONNECT_S)
        self._routing_key = submission.routing_key_of(app, tag)
        self._connection: Any = None
        self._channel: Any = None
        self._answers: dict[str, bytes] = {}
        self._is_returned = False

    def after_fork(self) -> None:
        """See submit_queue.Carrier."""
        abandon(self._connection, self._channel)
        self._connection = self._channel = None

    def reply(self, _correlation: str) -> Mapping[str, str]:
        """Return nothing: properties say where to answer."""
        return {}

    def send(self, letters: Mapping[str, Letter], seconds: float) -> None:
        """See submit_queue.Carrier."""
        try:
            if self._connection is None:
                self._open(min(seconds, _CONNECT_S))
            with answered_within(self._connection, max(seconds, 0.0)):
                for correlation, letter in letters.items():
                    properties = _properties(correlation, letter)
                    self._channel.basic_publish(
                        submission.EXCHANGE, self._routing_key, letter.body, properties, mandatory=True
                    )
        except AMQPError as exc:
            self.close()
            raise _translated(exc) from exc

    def receive(self, seconds: float) -> Mapping[str, bytes]:
        """See submit_queue.Carrier."""
        try:
            self._connection.process_data_events(seconds)
        except AMQPError as exc:
            self.close()
            raise _translated(exc) from exc
        if self._is_returned:
            self._is_returned = False
            raise errors.Unavailable(
                f"No queue at the broker takes what {self._routing_key} submits: is it open (`tmc admin open-submit-queue`), and"
                " [submission] rabbitmq set at the center?"
            )
        answers, self._answers = self._answers, {}
        return answers

    def _open(self, seconds: float) -> None:
        """Raises AMQPError."""
        node = self._nodes.next()
        node.socket_timeout = node.stack_timeout = max(seconds, 0.1)
        self._connection = connect(node)
        self._answers, self._is_returned = {}, False
        with answered_within(self._connection, seconds):
            self._channel = self._connection.channel()
            self._channel.add_on_return_callback(self._on_return)
            self._channel.basic_consume(submission.DIRECT_REPLIES, self._on_answer, auto_ack=True)

    def _on_answer(self, _channel: Any, _method: Any, properties: Any, body: bytes) -> None:
        self._answers[properties.correlation_id] = body

    def _on_return(self, *_: object) -> None:
        self._is_returned = True

    def close(self) -> None:
        """Close the connection, also one that was lost: the library leaves its sockets open."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        with suppress(AMQPError, ValueError), answered_within(connection, _CLOSE_S):
            connection.close()
        connection._impl.ioloop.close()


def _properties(correlation: str, letter: Letter) -> pika.BasicProperties:
    attributes = {submission.AMQP_PREFIX + name: text for name, text in letter.attributes.items()}
    return pika.BasicProperties(
        headers={**submission.own_headers(letter.headers), **attributes},
        content_type=letter.content_type or None,
        reply_to=submission.DIRECT_REPLIES,
        correlation_id=correlation,
        delivery_mode=2,
    )


def _translated(exc: AMQPError) -> errors.TmcError:
    text = text_of(exc)
    if is_login_refused(exc):
        return errors.NotAuthenticated(f"RabbitMQ does not let this user in: {text}")
    code = exc.reply_code if isinstance(exc, ChannelClosedByBroker) else 0
    if code == _ACCESS_REFUSED:
        return errors.NotAuthenticated(f"RabbitMQ does not let this user submit: {text}")
    if code == _PRECONDITION_FAILED:
        return errors.InvalidRequest(f"RabbitMQ does not take this: {text}")
    if code == _NOT_FOUND:
        return errors.Unavailable(
            f"RabbitMQ has no submit queues: is [submission] rabbitmq set at the center, and one open? ({text})"
        )
    return errors.Unavailable(f"RabbitMQ does not take what is submitted: {text}")
