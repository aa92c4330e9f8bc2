"""Blocks inside the transaction of a django.test.TestCase: it never commits, so what they send is only recorded."""

from __future__ import annotations

from typing import Any, TypeVar

from tmc_client.block import Blocking
from tmc_client.codecs import Topic
from tmc_client.producer import publish_request
from tmc_common.protocol import message_pb2

T = TypeVar("T")

sent: list[message_pb2.PublishRequest] = []
"""Of all blocks that ended well; clear it in setUp()."""


class RecordedTransaction(Blocking[message_pb2.PublishRequest]):
    """As Transaction, without a center."""

    opened_by = "tmc_django.transaction()"

    def _request(self, topic: Topic[T] | str, body: T, **content: Any) -> message_pb2.PublishRequest:
        return publish_request(topic, body, **content)

    def _write(self) -> None:
        try:
            self._local.verify()
        except BaseException:
            self._local.roll_back()
            raise

    def _after_commit(self) -> None:
        sent.extend(self.requests)
