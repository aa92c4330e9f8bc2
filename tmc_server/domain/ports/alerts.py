"""Alerts: where they are stored with the changes they are about, and where they are sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tmc_server.domain.catalog import Catalog
from tmc_server.domain.numbers import Attempt, MessageNumber, Shard, SubscriptionNumber

ABOUT_A_MESSAGE = ("delivery failed", "handler hangs", "check failed", "contradiction", "producer not reached")
"""Kinds of alerts about one message; the others are about a queue or a subscription."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """An alert, or a notice of several alike: then message, attempt and detail are those of the first.

    id: within its outbox.  count: alerts.  first_ms, last_ms: when they were written.  samples: (shard, message number) of
    the first few that are about a message.
    """

    id: int
    kind: str
    topic: int
    shard: Shard
    number: MessageNumber
    subscription: SubscriptionNumber
    attempt: Attempt
    detail: str
    created_ms: int
    count: int = 1
    first_ms: int = 0
    last_ms: int = 0
    samples: Sequence[tuple[Shard, MessageNumber]] = ()


class AlertOutbox(Protocol):
    """Alerts written with the changes they tell of, and the notices made of them. Shared by all servers. All block."""

    def add(self, kind: str, topic: int, subscription: SubscriptionNumber, episode: int, detail: str) -> None:
        """An alert about a subscription as a whole; one per episode."""

    def group(self, sinks: Sequence[str], limit: int) -> int:
        """Make notices of at most `limit` alerts, one per sink and group: kind, topic and subscription.

        A group whose notice was sent within the last minute waits for the minute to end, and its alerts add up meanwhile.
        Returns: how many alerts.
        """

    def claim(self, sink: str, limit: int, for_ms: int) -> Sequence[Alert]:
        """Notices that are due for this sink, longest due first; nobody else gets them for `for_ms`."""

    def mark_sent(self, notices: Sequence[Alert]) -> None:
        """The sink has them."""

    def put_back(self, notices: Sequence[Alert], after_ms: int) -> None:
        """The sink did not take them: due again after that time."""


class AlertSink(Protocol):
    """Where alerts go. May raise: the alert is then sent again later."""

    def send(self, alert: Alert, catalog: Catalog) -> None: ...
