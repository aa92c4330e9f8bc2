"""Ask the broker whether an exchange exists before a subscription forwards to it, so that typos are refused at once.

Each query uses its own connection: queries are rare, and asking for a missing exchange closes the channel.
"""

from __future__ import annotations

import pika
from pika.exceptions import AMQPError, ChannelClosedByBroker

from tmc_common.amqp import Nodes, answered_within, connect
from tmc_server.domain.catalog import Forward
from tmc_server.errors import ForwardRefused

_PATIENCE_S = 5.0
_NOT_FOUND = 404


class RabbitExchanges:
    """The exchanges of one broker."""

    def __init__(self, url: str) -> None:
        self._nodes = Nodes(
            url,
            socket_timeout=_PATIENCE_S,
            stack_timeout=_PATIENCE_S,
            blocked_connection_timeout=_PATIENCE_S,
            client_properties={"connection_name": "tmc exchanges"},
        )

    def examine(self, forward: Forward) -> None:
        host = ", ".join(f"{node.host}:{node.port}" for node in self._nodes.each)
        place = f"virtual host {self._nodes.each[0].virtual_host!r} of the broker at {host}"
        try:
            self._look(forward.target)
        except ChannelClosedByBroker as exc:
            if exc.reply_code == _NOT_FOUND:
                raise ForwardRefused(
                    f"There is no exchange {forward.target!r} in {place}: check the name, declare it first, or say --untried."
                ) from exc
            raise ForwardRefused(
                f"The broker at {host} does not show the exchange {forward.target!r} ({exc.reply_text}): check the name "
                "and the rights of the center's user, or say --untried."
            ) from exc
        except (AMQPError, OSError) as exc:
            raise ForwardRefused(
                f"Nobody can say whether there is an exchange {forward.target!r}: the broker at {host} cannot be asked "
                f"({type(exc).__name__}). Repeat when it can, or say --untried."
            ) from exc

    def _look(self, exchange: str) -> None:
        connection = self._connect()
        try:
            with answered_within(connection, _PATIENCE_S):
                connection.channel().exchange_declare(exchange, passive=True)
        finally:
            if connection.is_open:
                connection.close()

    def _connect(self) -> pika.BlockingConnection:
        """Connect to the first node that answers."""
        for _ in self._nodes.each[1:]:
            try:
                return connect(self._nodes.next())
            except (AMQPError, OSError):
                continue
        return connect(self._nodes.next())
