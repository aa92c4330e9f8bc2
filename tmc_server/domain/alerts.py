"""Episodes of alerts: when they end, and what silences them.

Alerts of one kind, topic, subscription and fingerprint are one episode, from the first of them until it has ended.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, IntEnum, auto
from typing import Literal

from tmc_server.domain.numbers import NO_SUBSCRIPTION, SubscriptionNumber

Language = Literal["en", "zh"]
"""Of alerts for people."""

WebhookFormat = Literal["json", "slack", "teams", "discord", "dingtalk", "feishu", "wecom"]
"""What a webhook expects; json: an operator's own program."""

_MINUTE_MS = 60_000

OTHER_ERRORS = "other"
"""In place of a fingerprint: too many different errors to distinguish them."""

SETTLED_MS = 120_000
"""How long nothing must be left of an episode's failures: what was reactivated may fail again."""

MOST_OPEN = 20
"""Episodes with fingerprints of one kind, topic and subscription that are open at once."""

REMIND_AFTER_MS = tuple(minutes * _MINUTE_MS for minutes in (1, 10, 60, 360, 1_440))
"""From one notice of an episode to the next, if there are further alerts; the last one again and again."""


class NoticeEvent(IntEnum):
    """What a notice says. Numbers are stored; never reuse one."""

    RAISED = 1  #: there are alerts
    RESOLVED = 2


class Ending(Enum):
    """What ends an episode."""

    FAILURES = auto()  #: nothing has been left that failed with this fingerprint, for SETTLED_MS
    QUIET = auto()  #: no further alert for a while
    OPERATOR = auto()  #: an operator acknowledges it


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertKind:
    """quiet_ms: for Ending.QUIET; longer than the time after which a cause that persists is alerted again."""

    ending: Ending
    quiet_ms: int = 0
    about_a_message: bool = False


KINDS = {
    "delivery failed": AlertKind(ending=Ending.FAILURES, about_a_message=True),
    "check failed": AlertKind(ending=Ending.FAILURES, about_a_message=True),
    "handler hangs": AlertKind(ending=Ending.QUIET, quiet_ms=30 * _MINUTE_MS, about_a_message=True),
    "producer not reached": AlertKind(ending=Ending.QUIET, quiet_ms=150 * _MINUTE_MS, about_a_message=True),
    "contradiction": AlertKind(ending=Ending.OPERATOR, about_a_message=True),
    "forged copies": AlertKind(ending=Ending.QUIET, quiet_ms=60 * _MINUTE_MS),
    "no consumer": AlertKind(ending=Ending.QUIET, quiet_ms=25 * _MINUTE_MS),
    "unacked near limit": AlertKind(ending=Ending.QUIET, quiet_ms=25 * _MINUTE_MS),
    "no forwarder": AlertKind(ending=Ending.QUIET, quiet_ms=25 * _MINUTE_MS),
    "copies vanish": AlertKind(ending=Ending.QUIET, quiet_ms=30 * _MINUTE_MS, about_a_message=True),
    "submission refused": AlertKind(ending=Ending.QUIET, quiet_ms=30 * _MINUTE_MS),
    "queue missing": AlertKind(ending=Ending.QUIET, quiet_ms=30 * _MINUTE_MS),
    "queue refuses": AlertKind(ending=Ending.QUIET, quiet_ms=30 * _MINUTE_MS),
    "queue differs": AlertKind(ending=Ending.OPERATOR),
}
UNKNOWN_KIND = AlertKind(ending=Ending.OPERATOR)
ABOUT_A_MESSAGE = tuple(name for name, kind in KINDS.items() if kind.about_a_message)


def remind_after_ms(sent: int) -> int:
    """Return when the next notice may follow. sent: notices of this episode so far, 1 or more."""
    return REMIND_AFTER_MS[min(sent, len(REMIND_AFTER_MS)) - 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """No notices until then. kind "", topic 0, subscription 0: any. id: given by the catalog's database."""

    id: int
    kind: str = ""
    topic: int = 0
    subscription: SubscriptionNumber = NO_SUBSCRIPTION
    until_ms: int
    actor: str
    reason: str

    def covers(self, kind: str, topic: int, subscription: SubscriptionNumber) -> bool:
        return (
            self.kind in ("", kind)
            and self.topic in (0, topic)
            and self.subscription in (NO_SUBSCRIPTION, subscription)
        )


def silenced_until(
    silences: Iterable[Silence], kind: str, topic: int, subscription: SubscriptionNumber, now: int
) -> int | None:
    """The end of the longest silence that is in effect; None: there is none."""
    ends = [each.until_ms for each in silences if each.until_ms > now and each.covers(kind, topic, subscription)]
    return max(ends, default=None)
