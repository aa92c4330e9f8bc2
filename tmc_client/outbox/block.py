"""A block whose messages are written into the outbox with its commit, and sent directly after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from tmc_client.codecs import Topic
from tmc_client.local import LocalTransaction
from tmc_client.producing.block import Blocking, Writer
from tmc_client.producing.producer import publish_request
from tmc_client.tables import outbox, outbox_relay
from tmc_common.protocol import message_pb2

T = TypeVar("T")


class OutboxTransaction(Blocking[message_pb2.PublishRequest]):
    """Use it with `with`, once."""

    opened_by = "outbox.transaction(session)"
    otherwise = ""

    def __init__(self, writer: Writer, local: LocalTransaction) -> None:
        super().__init__(local)
        self._writer = writer
        self._send: Callable[[], None] = lambda: None

    def _request(self, topic: Topic[T] | str, body: T, **content: Any) -> message_pb2.PublishRequest:
        request = publish_request(topic, body, **content)
        self._writer.check(request)
        return request

    def _write(self) -> None:
        try:
            self._local.verify()
            self._close()
            if self.requests:
                self._send = self._writer.write(self._local, self.requests)
        except BaseException as exc:
            self._local.roll_back()
            self._local.explain(exc, outbox, outbox_relay)
            raise

    def _after_commit(self) -> None:
        self._send()
