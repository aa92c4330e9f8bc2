"""Delivery: where copies leave the center, what is known of queues, and the consumptions that are due."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec import Struct

from tmc_common.addresses import HostPort
from tmc_server.domain.catalog import Forward
from tmc_server.domain.consumption import QueueLook
from tmc_server.domain.numbers import Attempt, MessageNumber, Shard, SubscriptionNumber
from tmc_server.domain.operations import Answer


class Copy(Struct, frozen=True, kw_only=True):
    """One copy of a message for one subscription, ready to be handed over. shard, number, subscription name its row.

    redelivered: the copy before it was handed over, and nobody answered: its consumer may have died over it.
    """

    shard: Shard
    number: MessageNumber
    subscription: SubscriptionNumber
    attempt: Attempt
    topic: int
    producer: int
    key: str
    body: bytes
    content_type: str
    headers: Mapping[str, str]
    redelivered: bool = False


class Outlet(Protocol):
    """Where copies leave the center. Called from lane and duty threads; must not block and must not raise."""

    def reserve(self, subscription: SubscriptionNumber, wanted: int) -> int:
        """Return how many copies (0..wanted) may be handed over now. Each must be followed by `deliver` or `release`."""

    def release(self, subscription: SubscriptionNumber, count: int) -> None:
        """Give reserved room back: the transaction did not commit."""

    def deliver(self, copies: Sequence[Copy]) -> None:
        """Hand over reserved copies after their rows were committed. What cannot be delivered comes back as GiveBack."""

    def drained_until(self, subscription: SubscriptionNumber, tried_ms: int) -> None:
        """A consumer answered the attempt made at tried_ms: copies handed over earlier have left the queue too."""

    def look(self, subscription: SubscriptionNumber) -> QueueLook | None:
        """The state of this subscription's queue. None: unknown now. Blocks; from any thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueProgress:
    """What one server saw come out of a queue.

    passed_ms: when the newest delivery attempt was made whose copy came out; 0: none yet.
    moves: grows with everything that comes out, so that a change shows that consumers get something done.
    """

    queue: str
    passed_ms: int
    moves: int


class SharedProgress(Protocol):
    """What all servers saw come out of queues: acks may reach any of them. Blocks. Raises StoreUnavailable."""

    def share(self, seen: Sequence[QueueProgress]) -> bool:
        """Publish what this server saw; replaces what it published for these queues before.

        Returns False: nothing was written, this server's heartbeat is over.
        """

    def of(self, queue: str) -> Mapping[int, QueueProgress]:
        """Return what other server runs published for this queue, by incarnation."""


class ForwardAnswers(Protocol):
    """Takes the outcome of forwarded copies. Called from any thread; does not block."""

    def give_back(self, copies: Sequence[Copy], after_ms: int) -> None:
        """They reached nobody: due again after that time, uncounted."""

    def acknowledge(self, copies: Sequence[Copy]) -> None:
        """They were forwarded: that is all there was to do."""

    def refuse(self, copies: Sequence[Copy], error: str, *, final: bool = False) -> None:
        """The target refused them: a failed attempt, retried by the subscription's policy. final: never tried again."""

    def complain(self, subscription: SubscriptionNumber, detail: str) -> None:
        """Alert the owner: the target has been refusing for a while, uncounted."""


class ForwarderUnavailable(Exception):
    """This server cannot forward to targets of this kind, for example because their address is not configured."""


class Forwarding(Protocol):
    """Where subscriptions can forward to, as this server sees it."""

    @property
    def forwarder_kinds(self) -> Collection[str]:
        """The kinds of forwarding that this server can do."""

    def examine(self, forward: Forward) -> None:
        """Look whether the target exists, for kinds that can tell. Blocks. Raises ForwardRefused: it does not, or nobody says."""


class DeliveryStream(Protocol):
    """One connected consumer of built-in delivery. On the loop only."""

    async def next_batch(self, most: int, most_bytes: int) -> list[Copy]:
        """Wait for copies: at most `most`, and no more than `most_bytes` but for a single one. Raises ShuttingDown.

        Calling it again says that the copies before were written. Raises ShuttingDown, too, when that took too long: the
        stream was closed meanwhile.
        """

    def put_back(self, copies: Sequence[Copy]) -> None:
        """Put back what was taken and not written."""

    def add_credit(self, credit: int) -> None:
        """Let the consumer get `credit` more copies; it gets none before its first credit, and the sum is capped."""

    def close(self) -> None:
        """The consumer is gone: what was not written is given back."""


class DeliveryStreams(Protocol):
    """Built-in delivery as the RPC sees it."""

    def open(self, subscriptions: Iterable[SubscriptionNumber]) -> DeliveryStream:
        """A consumer connected. On the loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerAddress:
    """Where consumers find RabbitMQ. nodes: one or more, each as good as the others."""

    nodes: Sequence[HostPort]
    virtual_host: str
    tls: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """Rows that one pass processed, by outcome. held: an earlier copy may still wait in its queue."""

    delivered: int = 0
    failed: int = 0
    cancelled: int = 0
    held: int = 0

    @property
    def moved(self) -> int:
        return self.delivered + self.failed + self.cancelled + self.held

    def __add__(self, other: Claimed) -> Claimed:
        return Claimed(
            delivered=self.delivered + other.delivered,
            failed=self.failed + other.failed,
            cancelled=self.cancelled + other.cancelled,
            held=self.held + other.held,
        )


class Replaying(Protocol):
    """Sends what was acked again."""

    def replay(
        self, actor: str, shard: Shard, number: MessageNumber, subscription: SubscriptionNumber, reason: str
    ) -> Answer:
        """Store the replay of an acked delivery, audited; one that is there is answered as it is. Blocks."""


class DueWork(Protocol):
    """Due consumptions of the shards of one database that this server holds, for the redelivering duty. All block."""

    def due(self) -> list[tuple[Shard, SubscriptionNumber]]:
        """(shard, subscription number) with at least one row that is due by the database's clock."""

    def claim(
        self, shard: Shard, subscription: SubscriptionNumber, limit: int, look: QueueLook, exhausted_only: bool
    ) -> Claimed:
        """Process up to `limit` due rows and deliver copies of those claimed, as far as the outlet has room.

        exhausted_only: look only for rows whose budget is used up.
        """

    def held_shards(self) -> Mapping[Shard, int]:
        """Epoch of the lease by shard."""

    def rescue(self, shard: Shard, gone: Mapping[int, int]) -> int | None:
        """Make a page of what server runs that are gone handed over due again, uncounted.

        gone: since when, epoch ms, by incarnation.
        Returns: how many rows, 0: none is left; None: the lease of the shard is over, nothing was done.
        """
