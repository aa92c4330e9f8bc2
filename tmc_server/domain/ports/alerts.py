"""Alerts: where they are stored with the changes they are about, and where they are sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tmc_server.domain.alerts import NoticeEvent
from tmc_server.domain.catalog import Catalog
from tmc_server.domain.numbers import Attempt, MessageNumber, Shard, SubscriptionNumber


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """An alert, or a notice of several alike: then message, attempt and detail are those of the first.

    id: within its outbox.  count: alerts.  first_ms, last_ms: when they were written.  samples: (shard, message number) of
    the first few that are about a message.  fingerprint: of the error; "": it has none.

    Of a notice: episode, the id of its episode, see `alert_id`; total, the alerts of the episode so far; since_ms, when
    the episode began; alike, further notices that are sent with it.
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
    fingerprint: str = ""
    event: NoticeEvent = NoticeEvent.RAISED
    episode: str = ""
    total: int = 1
    since_ms: int = 0
    alike: Sequence[Alert] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """Alerts that belong together. shard: one of the database that it is in.  resolved_ms None: it is open."""

    shard: Shard
    number: int
    kind: str
    topic: int
    subscription: SubscriptionNumber
    fingerprint: str
    detail: str
    count: int
    first_ms: int
    last_ms: int
    samples: Sequence[tuple[Shard, MessageNumber]] = ()
    acknowledged_ms: int | None = None
    acknowledged_by: str = ""
    resolved_ms: int | None = None

    @property
    def id(self) -> str:
        return alert_id(self.shard, self.number)


def alert_id(shard: Shard, number: int) -> str:
    """Return the id as people see it. shard: any of the database that the episode is in."""
    return f"{shard}-{number}"


class AlertOutbox(Protocol):
    """Alerts written with the changes they tell of, and the notices made of them. Shared by all servers. All block."""

    def add(self, kind: str, topic: int, subscription: SubscriptionNumber, slot: int, detail: str) -> None:
        """An alert about a subscription as a whole; one per slot of time."""

    def group(self, sinks: Sequence[str], limit: int) -> int:
        """Add at most `limit` alerts to their episodes, and make notices: one per sink and episode.

        The first notice of an episode is due at once; further alerts add up in a notice that waits, see
        `domain.alerts.REMIND_AFTER_MS`. Returns: how many alerts.
        """

    def resolve(self) -> int:
        """End episodes whose cause is gone, with a notice to each sink that knows of them. Returns: how many."""

    def claim(self, sink: str, limit: int, for_ms: int) -> Sequence[Alert]:
        """Notices that are due for this sink and not silenced, longest due first; nobody else gets them for `for_ms`."""

    def mark_sent(self, notices: Sequence[Alert]) -> None:
        """The sink has them."""

    def put_back(self, notices: Sequence[Alert], after_ms: int) -> None:
        """The sink did not take them: due again after that time."""


class EpisodeStore(Protocol):
    """Episodes of one database, for operators. All block."""

    def episodes(self, open_only: bool, limit: int) -> Sequence[Episode]:
        """Newest first."""

    def open_detail(self, kind: str, subscription: SubscriptionNumber) -> str:
        """Return what the newest open alert of this kind says about a subscription; "": there is none."""

    def acknowledge(self, actor: str, number: int, reason: str) -> Episode | None:
        """Send no further reminders; audited. None: there is no such episode."""


class AlertSink(Protocol):
    """Where alerts go. May raise: the alert is then sent again later."""

    def send(self, alert: Alert, catalog: Catalog) -> None: ...
