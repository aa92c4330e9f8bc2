"""One action of an operator on many deliveries: what is selected, and how far it has come.

A dry run counts what a selection matches at one moment. The job acts only on deliveries that were in the selected state
since before that moment: what fails again later is not touched a second time, by this job or by another one. (What waits for
a retry may be delivered now more than once: nothing is counted.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from tmc_server.domain.consumption import ConsumptionState
from tmc_server.domain.numbers import BulkJobNumber, MessageNumber, Shard, SubscriptionNumber


class BulkAction(IntEnum):
    """Numbers are stored and sent; never reuse one."""

    REACTIVATE = 1
    CANCEL = 2
    REPLAY = 3
    DELIVER_NOW = 4

    @property
    def states(self) -> tuple[ConsumptionState, ...]:
        """The states that deliveries may be selected in; the first one is the usual one."""
        return _STATES[self]


_STATES = {
    BulkAction.REACTIVATE: (ConsumptionState.FAILED,),
    BulkAction.CANCEL: (ConsumptionState.FAILED, ConsumptionState.SCHEDULED, ConsumptionState.WAITING),
    BulkAction.REPLAY: (ConsumptionState.ACKED,),
    BulkAction.DELIVER_NOW: (ConsumptionState.SCHEDULED,),
}


class ItemOutcome(IntEnum):
    """Numbers are stored and sent; never reuse one."""

    DONE = 1
    UNCHANGED = 2  #: it was no longer in the selected state
    REFUSED = 3  #: the detail says why


class BulkState(IntEnum):
    """Numbers are sent; never reuse one."""

    HELD = 1  #: it begins at its start time; stopped before, nothing has happened
    RUNNING = 2
    FINISHED = 3
    STOPPED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The deliveries of one subscription in one shard. topic: number of the subscription's topic."""

    shard: Shard
    topic: int
    subscription: SubscriptionNumber


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which deliveries. places: ascending by shard and subscription.  fingerprint: of the error they failed with; "": any.

    from_ms, to_ms: when their messages were made, from <= time < to; to 0: no end.  as_of_ms: in this state since then or
    longer.
    """

    places: tuple[Place, ...]
    state: ConsumptionState
    from_ms: int
    to_ms: int
    fingerprint: str
    as_of_ms: int

    @property
    def shards(self) -> Sequence[Shard]:
        return sorted({place.shard for place in self.places})


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkJob:
    """As stored. dry_run: the id of the dry run that it was started from.  count: what that counted.

    rate: deliveries per second at most.  Times in milliseconds since the epoch.
    """

    number: BulkJobNumber
    dry_run: str
    action: BulkAction
    selection: Selection
    count: int
    rate: int
    actor: str
    reason: str
    created_ms: int
    start_ms: int
    stopped_ms: int | None = None
    finished_ms: int | None = None

    def state(self, now: int) -> BulkState:
        if self.finished_ms is not None:
            return BulkState.FINISHED
        if self.stopped_ms is not None:
            return BulkState.STOPPED
        return BulkState.HELD if now < self.start_ms else BulkState.RUNNING


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkProgress:
    """Deliveries by outcome. finished: shards that are done."""

    done: int = 0
    unchanged: int = 0
    refused: int = 0
    finished: int = 0

    def __add__(self, other: BulkProgress) -> BulkProgress:
        return BulkProgress(
            done=self.done + other.done,
            unchanged=self.unchanged + other.unchanged,
            refused=self.refused + other.refused,
            finished=self.finished + other.finished,
        )

    @property
    def processed(self) -> int:
        return self.done + self.unchanged + self.refused


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkItem:
    """What happened to one delivery. detail: of a replay, the new message's id; of a refusal, why."""

    place: Place
    number: MessageNumber
    outcome: ItemOutcome
    detail: str
    at_ms: int
