"""Checks: how producers are found and asked, and the messages whose checks are due."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tmc_common.addresses import HostPort
from tmc_server.domain.catalog import App
from tmc_server.domain.checks import CheckAnswer, CheckState, CheckTarget, Question
from tmc_server.domain.ids import MessageId
from tmc_server.domain.numbers import MessageNumber, Shard


@dataclass(frozen=True, slots=True)
class Instance:
    """One of a producer's service. address: host:port.  ledger_id: the one it answers for; b"": unknown, or several."""

    address: str
    ledger_id: bytes = b""


class Instances(Protocol):
    """Where the instances of a producer's service are. hint: what to look at when there are none."""

    hint: str

    def instances(self, app: App, tag: str) -> Sequence[Instance]:
        """Return those in the environment `tag`, in the order to try them in. Blocks. Raises Unavailable."""


class SeenSenders(Protocol):
    """Addresses that producers give with their calls, for centers without service discovery."""

    def saw(self, app: App, tag: str, instance: Instance) -> None:
        """Note where a producer was seen. Does not block."""

    def seen_at(self, app: int, tag: str) -> Sequence[Instance]:
        """The newest first. app: its number. Blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """An address that may be connected to. host: the name it stands for, or itself.  address: the one it resolved to.

    ledger_id: see Instance.
    """

    host: str
    address: str
    port: int
    ledger_id: bytes = field(default=b"", compare=False)

    def __str__(self) -> str:
        return self.authority

    @property
    def authority(self) -> str:
        return str(HostPort(self.host, self.port))

    @property
    def pinned(self) -> str:
        return str(HostPort(self.address, self.port))


class Asker(Protocol):
    """One kind of check. All methods block and are called from several threads at once.

    token: the check token of the app, shown to the endpoint with each call.
    """

    def accept(self, target: CheckTarget) -> None:
        """Raises CheckRefused: the options are not what this kind needs."""

    def asks_singly(self, target: CheckTarget) -> bool:
        """Return whether each question is a call of its own; otherwise up to `target.batch` share one. Does not block."""

    def examine(self, target: CheckTarget, endpoint: Endpoint, token: str) -> None:
        """Try it out without a message. Raises CheckRefused: it cannot work, with the reason."""

    def render(self, target: CheckTarget, question: Question) -> str:
        """Return what would be asked, as text."""

    def ask(
        self, target: CheckTarget, endpoint: Endpoint, token: str, questions: Sequence[Question], until: float
    ) -> list[CheckAnswer]:
        """One answer per question, in order. Never raises for anything that the other side does, and never guesses.

        until: monotonic seconds; what cannot be asked within the deadline before that is NOT_ASKED.
        """

    def close(self) -> None:
        """Close it: no more questions follow."""


class Asking(Protocol):
    """All kinds of checks, with discovery and the allow-list in front of them. Blocks."""

    def ask(
        self, target: CheckTarget, app: App, tag: str, questions: Sequence[Question], seconds: float
    ) -> list[CheckAnswer]:
        """One answer per question, in order, within `seconds`."""

    def asks_singly(self, target: CheckTarget) -> bool:
        """See Asker. False for a kind that this server does not have. Does not block."""

    def describe(self, target: CheckTarget, app: App, tag: str, question: Question) -> tuple[str, str]:
        """Return who would be asked, and what, as text."""

    def examine(self, target: CheckTarget, app: App, tag: str, untried: bool) -> None:
        """Raises CheckRefused: a target like this cannot work. untried: nobody may be there yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A PREPARED message whose check is due, as read. state: before or after the claim, as the caller knows.

    since_ms: when it was prepared, or its checks were reactivated.  context: the trace it was prepared in, as headers.
    """

    shard: Shard
    number: MessageNumber
    topic: int
    producer: int
    producer_tag: str
    key: str
    attempt_id: bytes
    ledger_id: bytes
    created_ms: int
    since_ms: int
    target: str
    state: CheckState
    context: Mapping[str, str] = field(default_factory=dict)

    def question(self, app: App, topic: str) -> Question:
        """The question to the producer. topic: its name."""
        message_id = str(MessageId(self.topic, self.producer, self.shard, self.number))
        return Question(
            message_id=message_id,
            topic=topic,
            key=self.key,
            biz_id=app.biz_id,
            attempt_id=self.attempt_id,
            ledger_id=self.ledger_id,
            created_ms=self.created_ms,
            context=self.context,
        )


@dataclass(frozen=True, slots=True)
class Checked:
    """What came of one check. pause_ms: how long to leave the service alone if it could not be asked."""

    pending: Pending
    answer: CheckAnswer
    pause_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What a page of answers did to its messages."""

    committed: int = 0
    rolled_back: int = 0
    failed: int = 0
    undecided: int = 0
    overtaken: int = 0
    overdue: bool = False  # the producer could not be reached for too long, and its owner was alerted


class DueChecks(Protocol):
    """Messages of one database whose checks are due, as far as this server holds their shards. All block."""

    def due(self) -> list[tuple[Shard, int]]:
        """(shard, topic number) with at least one message that is due by the database's clock."""

    def read(self, shard: Shard, topic: int, limit: int) -> list[Pending]:
        """The messages that are due longest. No locks."""

    def claim(self, shard: Shard, pending: Sequence[Pending], until_ms: int) -> list[Pending]:
        """Begin a check of each: increment its check number; it is not due again for `until_ms` milliseconds.

        Returns those that were claimed, as they are afterwards.
        """

    def hold(self, shard: Shard, pending: Sequence[Pending], pause_ms: int, detail: str) -> int:
        """Postpone checks, uncounted, because their service cannot be asked now. Returns: how many."""

    def record(self, shard: Shard, answers: Sequence[Checked], tell_overdue: bool) -> Recorded:
        """Write down what came of claimed checks: decisions with their consumption rows, alerts with their cause.

        tell_overdue: alert the owner that the service cannot be reached.
        """


class CheckStore(Protocol):
    """What operators do with undecided messages; each change with its audit row. All block."""

    def begin(self, actor: str, shard: Shard, number: MessageNumber, until_ms: int) -> Pending | None:
        """Begin a check now, whether it is due or not. None: the message is decided, or there is none."""

    def begin_trial(self, actor: str, shard: Shard, number: MessageNumber, target: str) -> tuple[Pending, bool] | None:
        """A message, decided or not, and whether its transaction may still be running: then it must not be asked about.

        target: for the audit. None: there is no such message.
        """

    def record(self, shard: Shard, answers: Sequence[Checked]) -> Recorded: ...

    def reactivate(self, actor: str, shard: Shard, numbers: Sequence[MessageNumber], reason: str) -> int:
        """CHECK_FAILED -> PREPARED, due at once. Returns: how many."""

    def failed_checks(
        self, shards: Sequence[Shard], topic: int, from_ms: int, to_ms: int, limit: int
    ) -> list[tuple[Shard, MessageNumber]]:
        """(shard, number) of CHECK_FAILED messages, oldest first in each shard."""

    def decide(self, actor: str, shard: Shard, number: MessageNumber, commit: bool, reason: str) -> None:
        """Raises MessageUnknown, AlreadyCommitted, AlreadyRolledBack."""
