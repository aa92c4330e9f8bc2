"""What a check is: the question, where it is asked, the answer, and what follows from it for the message.

Only answers count toward the limit. A service that is unreachable, fails or answers garbage is asked again for as
long as the message exists: nothing is ever guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum

from tmc_server.domain.numbers import MessageNumber
from tmc_server.domain.retry import RetryPolicy

UNREACHED_ALERT_MS = 3_600_000  # after a producer could not be reached for this long, its owner gets one alert
FIRST_BACK_OFF_MS = 1_000
LONGEST_BACK_OFF_MS = 60_000


DECIDED_BY_CHECK = "decided by this check"
"""What stands beside a message that a check decided; the pipeline's report counts it."""


class Verdict(IntEnum):
    """Numbers are sent; never reuse one."""

    COMMIT = 1
    ROLLBACK = 2
    UNKNOWN = 3


class CheckReason(Enum):
    """Why an answer is UNKNOWN, with what an operator does about it. The names are shown and documented."""

    ANSWERED = "The producer said so."
    NOT_NOW = "The producer cannot know now: its database is down, or the transaction is still running."
    WRONG_LEDGER = "No instance has the ledger that the message was prepared with: start one that does."
    NOT_UNDERSTOOD = "The answer is none of the enumerated ones: compare the endpoint with docs/checks.md."
    OTHER_MESSAGE = "The answer is about another message: the endpoint mixes up its answers."
    FIELD_ABSENT = "The field of the verdict is not set in the answer: an empty answer decides nothing."
    NO_TARGET = "The topic has no such target: `tmc admin set-check`."
    NO_INSTANCE = "Discovery knows no instance in that environment: start one, check its tag, or set an address."
    REFUSED_TARGET = "The address is outside [checks] allow: allow it, or correct the target."
    WRONG_PROTOCOL = "What answers there does not speak the target's protocol: `tmc admin set-check`."
    UNREACHABLE = "Nobody could be connected to at the address."
    TIMED_OUT = "There was no complete answer within the deadline."
    TOO_LARGE = "The answer is larger than an answer can be."
    FAILED = "The endpoint answered with an error of its own."
    DENIED = "The endpoint refused the center: compare its check token."
    NO_METHOD = "There is no such method: deploy it, or correct the target."
    NO_REFLECTION = "The service does not offer reflection, or broke down while it was described."
    BAD_DESCRIPTION = "What the service says about its own method cannot be used: too large, circular, or streaming."
    ASKER_FAILED = "The center could not put the question: its log says why."
    NOT_ASKED = "The page's time was over, or the service failed the questions before it: its turn comes."

    @property
    def counts(self) -> bool:
        """Return whether it counts toward the limit: only an answer does, garbage does not."""
        return self is CheckReason.ANSWERED

    @property
    def of_service(self) -> bool:
        """The service as a whole cannot be asked; other reasons are about one question."""
        return self in _OF_SERVICE


_OF_SERVICE = {
    CheckReason.NO_TARGET,
    CheckReason.NO_INSTANCE,
    CheckReason.REFUSED_TARGET,
    CheckReason.WRONG_PROTOCOL,
    CheckReason.UNREACHABLE,
    CheckReason.TIMED_OUT,
    CheckReason.DENIED,
    CheckReason.NO_METHOD,
    CheckReason.NO_REFLECTION,
    CheckReason.BAD_DESCRIPTION,
    CheckReason.ASKER_FAILED,
    CheckReason.NOT_ASKED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckTarget:
    """One approved way to ask about the messages of a topic.

    name: "" is the topic's usual one.  kind: grpc, http, reflection, or the name of an entry point.
    address: host:port; "": the instances of the producer's service, as discovery knows them.
    options: what the kind needs (path, method, template, ...), checked by it.  deadline_ms: of one call.
    concurrency: calls at once into one service.  batch: questions of one call.
    """

    name: str
    kind: str
    address: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    deadline_ms: int = 3_000
    concurrency: int = 16
    batch: int = 500
    tls: bool = False


@dataclass(frozen=True, slots=True)
class CheckPolicy:
    """How a topic's messages are checked: by default over gRPC where discovery finds the producer's service.

    retry: delays and limit for UNKNOWN answers.
    """

    targets: Mapping[str, CheckTarget] = field(default_factory=lambda: {"": CheckTarget(name="", kind="grpc")})
    retry: RetryPolicy = field(default_factory=lambda: RetryPolicy(max_retry=15))


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """About one message. message_id: the public one.  created_ms: the center's clock at prepare.

    context: the trace it was prepared in, as headers.
    """

    message_id: str
    topic: str
    key: str
    biz_id: str
    attempt_id: bytes
    ledger_id: bytes
    created_ms: int
    context: Mapping[str, str] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class CheckAnswer:
    """detail: what an operator should read, one line of at most 500 characters."""

    verdict: Verdict
    reason: CheckReason = CheckReason.ANSWERED
    detail: str = ""

    @property
    def service_responded(self) -> bool:
        """The service answered something, even garbage: it can be asked."""
        return not self.reason.of_service

    @classmethod
    def unknown(cls, reason: CheckReason, detail: str = "") -> CheckAnswer:
        return cls(Verdict.UNKNOWN, reason, detail)

    @property
    def counts_toward_limit(self) -> bool:
        return self.reason.counts


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckState:
    """The columns of a PREPARED message that checks change.

    attempt: number of the check, never decreases.  checked: UNKNOWN answers, counted toward the limit.
    unreached_ms: since when checks have gone unanswered; None: the last one was answered.
    """

    attempt: int
    checked: int
    unreached_ms: int | None
    due_ms: int | None


@dataclass(frozen=True, slots=True)
class AfterUnknown:
    """What an UNKNOWN answer means for the message. failed: CHECK_FAILED, with an alert.  overdue: alert the owner."""

    state: CheckState
    failed: bool = False
    overdue: bool = False


def decide_after_unknown(
    row: CheckState,
    answer: CheckAnswer,
    policy: RetryPolicy,
    now: int,
    *,
    number: MessageNumber,
    age_ms: int,
    pause_ms: int = 0,
) -> AfterUnknown:
    """Decide after an UNKNOWN answer: check again later, or give up at the limit (CHECK_FAILED).

    age_ms: since the prepare, or the reactivation.
    pause_ms: back-off of the whole service; 0: it can be asked, and only this question failed.
    """
    if answer.reason is CheckReason.NOT_ASKED:
        return AfterUnknown(replace(row, due_ms=now + pause_ms))
    if not answer.counts_toward_limit:
        since = now if row.unreached_ms is None else row.unreached_ms
        own_ms = min(LONGEST_BACK_OFF_MS, max(FIRST_BACK_OFF_MS, now - since))  # doubles by itself
        state = replace(row, unreached_ms=since, due_ms=now + max(pause_ms, own_ms))
        return AfterUnknown(state, overdue=now - since >= UNREACHED_ALERT_MS)
    checked = row.checked + 1
    wait_ms = policy.delay_for_ms(checked, number)
    counted = replace(row, checked=checked, unreached_ms=None)
    if policy.is_used_up(checked, age_ms + wait_ms):
        return AfterUnknown(replace(counted, due_ms=None), failed=True)
    return AfterUnknown(replace(counted, due_ms=now + wait_ms))
