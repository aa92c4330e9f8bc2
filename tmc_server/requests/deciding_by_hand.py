"""What operators do about undecided messages: configure, run and repeat checks, decide by hand. All audited."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tmc_server.domain.catalog import App, Catalog, Topic
from tmc_server.domain.checks import CheckAnswer, CheckPolicy, CheckReason, CheckTarget, Question, Verdict
from tmc_server.domain.ids import MessageId
from tmc_server.domain.message import MessageEvent, MessageState, decide
from tmc_server.domain.numbers import MessageNumber, Shard
from tmc_server.domain.placement import shards_of
from tmc_server.domain.ports.catalog import CatalogEditor, CatalogSource, ChangeEverywhere, CheckChange
from tmc_server.domain.ports.checks import Asking, Checked, CheckStore
from tmc_server.domain.ports.reading import RowReader
from tmc_server.domain.retry import RetryPolicy
from tmc_server.domain.views import MessageView
from tmc_server.errors import CheckRefused, InvalidField, MessageUnknown, TmcError
from tmc_server.requests import validation
from tmc_server.requests.proposals import Before, no_approval_needed

_MOST_TARGETS = 16
_PAGE = 200
_SPARE_MS = 10_000
_NO_SUCH = "There is no such message: check the id."


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """One check, as an operator reads it. elapsed_ms: from question to answer."""

    target: str
    request: str
    answer: CheckAnswer
    elapsed_ms: int
    state: MessageState


class DecidingByHand:
    """change: runs a change of the catalog and makes this server's copy current."""

    def __init__(
        self,
        editor: CatalogEditor,
        catalog: CatalogSource,
        desk: CheckStore,
        reader: RowReader,
        asking: Asking,
        change: ChangeEverywhere,
    ) -> None:
        self._editor = editor
        self._catalog = catalog
        self._desk = desk
        self._reader = reader
        self._asking = asking
        self._change = change

    @property
    def catalog(self) -> Catalog:
        return self._catalog.current

    def topic(self, name: str) -> Topic:
        """Raises TopicUnknown."""
        return self.catalog.topic_named(validation.topic(name))

    async def set_topic_check(
        self,
        actor: str,
        name: str,
        targets: Sequence[CheckTarget],
        retry: RetryPolicy | None,
        untried: bool,
        change: CheckChange | None = None,
    ) -> tuple[Topic, int]:
        """change None: replace all targets and the policy.

        Raises CheckRefused: a check like this cannot work. Returns: topic, time of effect.
        """
        topic = self.topic(name)
        owner = self.catalog.apps.get(topic.owner)
        if owner is None:
            raise CheckRefused("Nobody owns this topic yet: let its producer name it first.")
        names = {target.name for target in targets}
        kept = set(topic.checks.targets) - set(change.removed_targets) if change is not None else set()
        if len(names | kept) > _MOST_TARGETS or len(names) != len(targets):
            raise InvalidField("targets", f"be at most {_MOST_TARGETS}, each name once")
        for target in targets:
            _validate(target)
            await asyncio.to_thread(self._asking.examine, target, owner, topic.default_tag, untried)
        policy = CheckPolicy({target.name: target for target in targets}, retry or topic.checks.retry)
        return await self._change(self._editor.set_topic_check, actor, topic.name, policy, change)

    async def check_now(self, actor: str, message_id: str) -> CheckReport:
        """Ask about one message, and act on the answer. Raises MessageUnknown."""
        return await asyncio.to_thread(self._check_now, actor, validation.message_id(message_id))

    def _check_now(self, actor: str, wanted: MessageId) -> CheckReport:
        view = self._existing(wanted)
        topic, app = self.catalog.topics[view.topic], self.catalog.apps[view.producer]
        target = topic.checks.targets.get(view.check.target) or CheckTarget(name=view.check.target, kind="")
        pending = self._desk.begin(actor, wanted.shard, wanted.number, 2 * target.deadline_ms + _SPARE_MS)
        if pending is None:
            nobody = CheckAnswer.unknown(CheckReason.NOT_ASKED, "It is decided: nobody was asked.")
            return CheckReport(target="", request="", answer=nobody, elapsed_ms=0, state=self._existing(wanted).state)
        report = self._ask(target, app, view, pending.question(app, topic.name))
        self._desk.record(wanted.shard, [Checked(pending, report.answer, topic.checks.retry.delay_after_ms(1))])
        return replace(report, state=self._existing(wanted).state)

    async def try_check(
        self, actor: str, message_id: str, target: CheckTarget
    ) -> tuple[CheckReport, CheckReport | None]:
        """Ask a target, and the stored one, and change nothing. Raises MessageUnknown, CheckRefused, InvalidField."""
        wanted = validation.message_id(message_id)
        _validate(target)
        return await asyncio.to_thread(self._try_check, actor, wanted, target)

    def _try_check(self, actor: str, wanted: MessageId, target: CheckTarget) -> tuple[CheckReport, CheckReport | None]:
        view = self._existing(wanted)
        topic, app = self.catalog.topics[view.topic], self.catalog.apps[view.producer]
        self._asking.examine(target, app, view.producer_tag, True)
        asked = f"{target.kind} {target.address or app.service_name}"
        found = self._desk.begin_trial(actor, wanted.shard, wanted.number, asked)
        if found is None:
            raise MessageUnknown(_NO_SUCH)
        pending, may_run = found
        if may_run:
            raise CheckRefused(
                "Its transaction may still be running, and a question could make it fail: wait until it is due."
            )
        question = pending.question(app, topic.name)
        stored = topic.checks.targets.get(view.check.target)
        tried = self._ask(target, app, view, question)
        return tried, self._ask(stored, app, view, question) if stored is not None else None

    def _ask(self, target: CheckTarget, app: App, view: MessageView, question: Question) -> CheckReport:
        shown = replace(question, ledger_id=b"")  # with it, who knows the check token can fence
        where, text = self._asking.describe(target, app, view.producer_tag, shown)
        began = time.monotonic()
        answer = self._asking.ask(target, app, view.producer_tag, [question], 2 * target.deadline_ms / 1000)[0]
        elapsed_ms = round((time.monotonic() - began) * 1000)
        return CheckReport(target=where, request=text, answer=answer, elapsed_ms=elapsed_ms, state=view.state)

    async def reactivate(self, actor: str, message_id: str, reason: str) -> MessageView:
        """CHECK_FAILED -> PREPARED. Raises MessageUnknown, CheckRefused."""
        wanted = validation.message_id(message_id)
        reason = validation.reason(reason)
        before = await asyncio.to_thread(self._existing, wanted)
        if not await asyncio.to_thread(self._desk.reactivate, actor, wanted.shard, [wanted.number], reason):
            raise CheckRefused(f"The message is {before.state.name}: only CHECK_FAILED ones are asked for again.")
        return await asyncio.to_thread(self._existing, wanted)

    async def reactivate_many(
        self, actor: str, name: str, from_ms: int, to_ms: int, limit: int | None, dry_run: bool, reason: str
    ) -> tuple[int, bool]:
        """Returns: how many, and whether there are more than the limit."""
        topic = self.topic(name)
        most = validation.between(1_000 if limit is None else limit, "limit", 1, 10_000)
        validation.between(from_ms, "from_ms", 0, 2**53)
        validation.between(to_ms, "to_ms", 0, 2**53)
        reason = validation.reason(reason)
        shards = shards_of(topic.table_index, topic.spread)
        found = await asyncio.to_thread(self._desk.failed_checks, shards, topic.number, from_ms, to_ms, most + 1)
        more, found = len(found) > most, found[:most]
        if dry_run:
            return len(found), more
        done = 0
        for shard, numbers in _by_shard(found).items():
            for start in range(0, len(numbers), _PAGE):
                page = numbers[start : start + _PAGE]
                done += await asyncio.to_thread(self._desk.reactivate, actor, shard, page, reason)
        return done, more

    async def decide(
        self, actor: str, message_id: str, verdict: int, reason: str, before: Before = no_approval_needed
    ) -> MessageView:
        """A human decides. Raises MessageUnknown, AlreadyCommitted, AlreadyRolledBack, and what `before` raises."""
        if verdict not in (Verdict.COMMIT, Verdict.ROLLBACK):
            raise InvalidField("verdict", "be COMMIT or ROLLBACK")
        wanted = validation.message_id(message_id)
        reason = validation.reason(reason)
        view = await asyncio.to_thread(self._existing, wanted)
        outcome = decide(view.state, MessageEvent.SUBMIT if verdict == Verdict.COMMIT else MessageEvent.ROLLBACK)
        if isinstance(outcome, TmcError):
            raise outcome
        await before()
        commit = verdict == Verdict.COMMIT
        await asyncio.to_thread(self._desk.decide, actor, wanted.shard, wanted.number, commit, reason)
        return await asyncio.to_thread(self._existing, wanted)

    def _existing(self, wanted: MessageId) -> MessageView:
        found = self._reader.message(wanted.shard, wanted.number)
        if found is None or (found.topic, found.producer) != (wanted.topic, wanted.app):
            raise MessageUnknown(_NO_SUCH)
        return found


def _by_shard(found: Sequence[tuple[Shard, MessageNumber]]) -> Mapping[Shard, list[MessageNumber]]:
    shards: dict[Shard, list[MessageNumber]] = {}
    for shard, number in found:
        shards.setdefault(shard, []).append(number)
    return shards


def _validate(target: CheckTarget) -> None:
    validation.check_target(target.name, "targets.name")
    validation.line(target.kind, "targets.kind", 32, least=1)
    validation.address(target.address, "targets.address")
    validation.between(target.deadline_ms, "targets.deadline_ms", 100, 60_000)
    validation.between(target.concurrency, "targets.concurrency", 1, 256)
    validation.between(target.batch, "targets.batch", 1, 1_000)
    if len(target.options) > 16 or sum(len(name) + len(text) for name, text in target.options.items()) > 4_096:
        raise InvalidField("targets.options", "be at most 16 entries and 4,096 characters in all")
