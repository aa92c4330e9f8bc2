"""Bulk jobs: count what a filter matches, then start the job that acts on it, watch it, stop it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from hashlib import blake2b

from tmc_server.domain.bulk import BulkAction, BulkItem, BulkJob, BulkProgress, Place, Selection
from tmc_server.domain.catalog import Subscription
from tmc_server.domain.consumption import ConsumptionState
from tmc_server.domain.numbers import NO_MESSAGE, BulkJobNumber, Shard
from tmc_server.domain.placement import shards_of
from tmc_server.domain.ports.bulk import BulkStore, Match, NewBulkJob
from tmc_server.domain.ports.catalog import CatalogSource
from tmc_server.errors import BulkJobUnknown, InvalidField
from tmc_server.requests import validation
from tmc_server.requests.listing import Covers, Listing, filled
from tmc_server.requests.proposals import Before, no_approval_needed

MOST = 1_000_000
_SAMPLES = 10
_MOST_PLACES = 2_000
_DRY_RUN = re.compile(r"([0-9]{13})-[0-9a-f]{16}", re.ASCII)
_DEFAULT_RATE, _MOST_RATE = 2_000, 10_000
_DEFAULT_HOLD_MS = 5_000


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkFilter:
    """As an operator gives it: at least a topic or an app. state 0: the usual one.  tag "": all."""

    action: int
    topic: str = ""
    app: str = ""
    tag: str = ""
    state: int = 0
    from_ms: int = 0
    to_ms: int = 0
    fingerprint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """id: what the job is started with."""

    id: str
    count: int
    samples: Sequence[Match]


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkReport:
    """A job, and how far it has come at `now_ms`."""

    job: BulkJob
    progress: BulkProgress
    now_ms: int


class BulkJobs:
    """What operators ask for."""

    def __init__(self, desk: BulkStore, catalog: CatalogSource) -> None:
        self._desk = desk
        self._catalog = catalog

    async def dry_run(self, wanted: BulkFilter) -> DryRun:
        """Count what the filter matches now. Raises InvalidField, TopicUnknown, AppUnknown."""
        return await asyncio.to_thread(self._dry_run, wanted)

    def _dry_run(self, wanted: BulkFilter) -> DryRun:
        as_of_ms = self._desk.now()
        selection = self._selection(wanted, as_of_ms)
        count, samples = self._desk.dry_run(selection, MOST, _SAMPLES)
        if count > MOST:
            raise InvalidField("filter", f"match at most {MOST} deliveries: narrow the time range")
        return DryRun(id=dry_run_id(wanted, as_of_ms, count), count=count, samples=samples)

    async def start(
        self,
        actor: str,
        wanted: BulkFilter,
        *,
        dry_run: str,
        count: int,
        reason: str,
        rate: int | None = None,
        hold_ms: int | None = None,
        before: Before = no_approval_needed,
        counts_again: bool = False,
    ) -> BulkReport:
        """Store the job; started again from the same dry run, it is answered as it is.

        counts_again: refuse a count that is too small: anyone can compute the id of a dry run that never took place.
        Raises InvalidField, and what `before` raises.
        """
        as_of_ms = _as_of(dry_run)
        if dry_run != dry_run_id(wanted, as_of_ms, count) or as_of_ms > await asyncio.to_thread(self._desk.now):
            raise InvalidField(
                "dry_run", "be the id of a dry run with this filter and count: copy the command it printed"
            )
        if not count:
            raise InvalidField("count", "be greater than 0: there is nothing to do")
        new = NewBulkJob(
            dry_run=dry_run,
            action=BulkAction(wanted.action),
            selection=self._selection(wanted, as_of_ms),
            count=count,
            rate=validation.between(_DEFAULT_RATE if rate is None else rate, "rate", 1, _MOST_RATE),
            hold_ms=validation.between(_DEFAULT_HOLD_MS if hold_ms is None else hold_ms, "hold_ms", 0, 86_400_000),
            actor=actor,
            reason=validation.reason(reason),
        )
        if counts_again:
            found, _ = await asyncio.to_thread(self._desk.dry_run, new.selection, count, 0)
            if found > count:
                raise InvalidField("count", "be what the dry run counted: make another one")
        await before()
        return await asyncio.to_thread(lambda: self._report(self._desk.start(new)))

    def selection_of(self, wanted: BulkFilter, dry_run: str) -> Selection:
        """Return what a job from this dry run would select. Raises InvalidField, TopicUnknown, AppUnknown."""
        return self._selection(wanted, _as_of(dry_run))

    async def stop(self, actor: str, number: int, reason: str) -> BulkReport:
        """Begin nothing new; a page that is under way is finished. Raises BulkJobUnknown."""
        why = validation.reason(reason)
        return await asyncio.to_thread(lambda: self._report(self._desk.stop(actor, BulkJobNumber(number), why)))

    async def get(self, number: int) -> BulkReport:
        """Raises BulkJobUnknown."""
        return await asyncio.to_thread(lambda: self._report(self._desk.job(BulkJobNumber(number))))

    async def jobs(self, page_size: int, page_token: str, covers: Covers) -> Listing[BulkReport]:
        """Newest first, without those with a topic that the operator may not see."""
        limit = validation.page_size(page_size)
        first = BulkJobNumber(validation.number_token(page_token)) if page_token else None

        def after(last: BulkJob | None, most: int) -> Sequence[BulkJob]:
            return self._desk.jobs(last.number if last is not None else first, most)

        def read() -> list[BulkReport]:
            jobs = filled(after, lambda job: all(map(covers, self.topics(job))), limit)
            return [self._report(job) for job in jobs]

        reports = await asyncio.to_thread(read)
        token = str(reports[-1].job.number) if len(reports) == limit else ""
        return Listing(rows=reports, next_token=token)

    def topics(self, job: BulkJob) -> set[str]:
        """The names of the topics that it is about; "": of one that this server does not know yet."""
        topics = self._catalog.current.topics
        return {topics[place.topic].name if place.topic in topics else "" for place in job.selection.places}

    async def items(self, number: int, failures_only: bool, page_size: int, page_token: str) -> Listing[BulkItem]:
        """failures_only: those that were not done. Raises BulkJobUnknown."""
        limit = validation.page_size(page_size)
        after = validation.page_token(page_token) or (Shard(0), NO_MESSAGE)
        job = (await self.get(number)).job
        found = await asyncio.to_thread(self._desk.items, job, after, limit, failures_only)
        token = f"{found[-1].place.shard}-{found[-1].number}" if len(found) >= limit else ""
        return Listing(rows=found, next_token=token)

    def _report(self, job: BulkJob | None) -> BulkReport:
        if job is None:
            raise BulkJobUnknown
        return BulkReport(job=job, progress=self._desk.progress(job), now_ms=self._desk.now())

    def _selection(self, wanted: BulkFilter, as_of_ms: int) -> Selection:
        if wanted.action not in tuple(BulkAction):
            raise InvalidField("action", f"be {', '.join(each.name for each in BulkAction)}")
        action = BulkAction(wanted.action)
        if wanted.state not in (0, *action.states):
            names = " or ".join(each.name for each in action.states)
            raise InvalidField("state", f"be {names}: {action.name} is for such deliveries")
        state = ConsumptionState(wanted.state or action.states[0])
        if wanted.fingerprint and state is not ConsumptionState.FAILED:
            raise InvalidField("fingerprint", "be left out: only FAILED deliveries have one")
        places = self._places(wanted)
        if action is BulkAction.REPLAY and len({place.subscription for place in places}) > 1:
            raise InvalidField("app", "select one subscription: a replay goes to one subscriber")
        if len(places) > _MOST_PLACES:
            raise InvalidField("filter", "name a topic: too many subscriptions match")
        return Selection(
            places=places,
            state=state,
            from_ms=validation.between(wanted.from_ms, "from_ms", 0, 2**53),
            to_ms=validation.between(wanted.to_ms, "to_ms", 0, 2**53),
            fingerprint=validation.fingerprint(wanted.fingerprint),
            as_of_ms=as_of_ms,
        )

    def _places(self, wanted: BulkFilter) -> tuple[Place, ...]:
        catalog = self._catalog.current
        found = [
            Place(shard=shard, topic=each.topic, subscription=each.number)
            for each in self._subscriptions(wanted)
            if not each.is_removed or wanted.action == BulkAction.CANCEL
            for shard in shards_of(catalog.topics[each.topic].table_index, catalog.topics[each.topic].spread)
        ]
        if not found:
            raise InvalidField("filter", "match a subscription: list them to see topic, app and tag")
        return tuple(sorted(found, key=lambda place: (place.shard, place.subscription)))

    def _subscriptions(self, wanted: BulkFilter) -> Sequence[Subscription]:
        catalog = self._catalog.current
        if not (wanted.topic or wanted.app):
            raise InvalidField("filter", "name a topic or an app")
        topic = catalog.topic_named(validation.topic(wanted.topic)) if wanted.topic else None
        app = catalog.app_named(validation.app_id(wanted.app, "app")) if wanted.app else None
        tag = validation.tag(wanted.tag)
        return [
            each
            for each in catalog.subscriptions.values()
            if (topic is None or each.topic == topic.number)
            and (app is None or each.app == app.number)
            and (not tag or each.tag == tag)
        ]


def dry_run_id(wanted: BulkFilter, as_of_ms: int, count: int) -> str:
    """Ties a job to what its operator has seen: this filter at this time, with this count."""
    seen = repr((astuple(wanted), as_of_ms, count)).encode()
    return f"{as_of_ms}-{blake2b(seen, digest_size=8).hexdigest()}"


def _as_of(dry_run: str) -> int:
    match = _DRY_RUN.fullmatch(dry_run)
    if match is None:
        raise InvalidField("dry_run", "be the id that a dry run gave")
    return int(match[1])
