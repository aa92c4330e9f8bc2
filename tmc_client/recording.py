"""Blocks of a test inside a transaction that never commits: what they send is only recorded.

Django's TestCase, and SQLAlchemy's recipe of a session that joins an outer transaction with `create_savepoint`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from tmc_client.codecs import Topic
from tmc_client.producing.block import Block, Blocking
from tmc_client.producing.producer import publish_request
from tmc_common.protocol import message_pb2

T = TypeVar("T")

sent: list[message_pb2.PublishRequest] = []
"""Of all blocks that ended well; clear it before each test."""


_asked = 0


@contextmanager
def only_record() -> Iterator[None]:
    """Let blocks of sessions that join an outer transaction with `create_savepoint` only record.

    Asked for, since a program might commit its outer transaction: without this such a block is refused.
    """
    global _asked
    _asked += 1
    try:
        yield
    finally:
        _asked -= 1


def is_asked_for() -> bool:
    """Return whether `only_record` is on."""
    return _asked > 0


class Recorded(Block[message_pb2.PublishRequest]):
    """Without a center."""

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


class RecordedTransaction(Blocking[message_pb2.PublishRequest], Recorded):
    """As Transaction."""

    opened_by = "center.transaction()"
