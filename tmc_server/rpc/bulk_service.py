"""The RPCs about bulk jobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tmc_common.protocol import admin_pb2
from tmc_server.domain.bulk import BulkItem, Place, Selection
from tmc_server.domain.catalog import Catalog
from tmc_server.domain.ids import MessageId
from tmc_server.domain.numbers import MessageNumber, SubscriptionNumber
from tmc_server.domain.operators import Operator
from tmc_server.domain.ports.bulk import Match
from tmc_server.errors import BulkJobUnknown
from tmc_server.requests.bulk import BulkFilter, BulkReport
from tmc_server.requests.explanations import at
from tmc_server.rpc.admin_parts import AdminParts
from tmc_server.rpc.convert import app_name, subscriber, topic_name
from tmc_server.rpc.filling import filled, record_from

_MOST_NAMES = 3


class BulkServicer(AdminParts):
    """The part of AdminService about bulk jobs."""

    async def DryRunBulkJob(self, _operator: Operator, request: admin_pb2.DryRunBulkJobRequest) -> Any:
        found = await self.bulk.dry_run(filter_from(request.filter))
        catalog = self.catalog
        return admin_pb2.DryRunBulkJobResponse(
            dry_run=found.id, count=found.count, samples=[_sample(each, catalog) for each in found.samples]
        )

    async def StopBulkJob(self, operator: Operator, request: admin_pb2.StopBulkJobRequest) -> Any:
        await self._demand(operator, request.job)
        return job_to(await self.bulk.stop(operator.name, request.job, request.reason), self.catalog)

    async def GetBulkJob(self, operator: Operator, request: admin_pb2.GetBulkJobRequest) -> Any:
        await self._demand(operator, request.job)
        return job_to(await self.bulk.get(request.job), self.catalog)

    async def ListBulkJobs(self, operator: Operator, request: admin_pb2.ListBulkJobsRequest) -> Any:
        page = await self.bulk.jobs(request.page_size, request.page_token, operator.covers)
        jobs = [job_to(report, self.catalog) for report in page.rows]
        return admin_pb2.ListBulkJobsResponse(jobs=jobs, next_page_token=page.next_token)

    async def ListBulkItems(self, operator: Operator, request: admin_pb2.ListBulkItemsRequest) -> Any:
        await self._demand(operator, request.job)
        page = await self.bulk.items(request.job, request.failures_only, request.page_size, request.page_token)
        catalog = self.catalog
        items = [_item(each, catalog) for each in page.rows]
        return admin_pb2.ListBulkItemsResponse(items=items, next_page_token=page.next_token)

    async def _demand(self, operator: Operator, job: int) -> None:
        """Raises BulkJobUnknown, also for one with a topic of others."""
        if operator.is_limited and not all(map(operator.covers, self.bulk.topics((await self.bulk.get(job)).job))):
            raise BulkJobUnknown


def filter_from(sent: admin_pb2.BulkFilter) -> BulkFilter:
    """Return the filter as it was sent."""
    return record_from(BulkFilter, sent)


def _named(place: Place, number: MessageNumber, catalog: Catalog) -> dict[str, str]:
    subscription = catalog.subscriptions[place.subscription]
    owner = catalog.topics[place.topic].owner
    return {
        "message_id": str(MessageId(place.topic, owner, place.shard, number)),
        "app": app_name(catalog, subscription.app),
        "tag": subscription.tag,
    }


def _sample(match: Match, catalog: Catalog) -> admin_pb2.BulkSample:
    return admin_pb2.BulkSample(
        topic=topic_name(catalog, match.place.topic),
        error=match.error,
        fingerprint=match.fingerprint,
        **_named(match.place, match.number, catalog),
    )


def _item(item: BulkItem, catalog: Catalog) -> admin_pb2.BulkItem:
    return filled(admin_pb2.BulkItem, item, **_named(item.place, item.number, catalog))


def in_words(selection: Selection, catalog: Catalog) -> str:
    """Return what is selected, for people."""
    numbers = sorted({place.subscription for place in selection.places})
    topics = sorted({topic_name(catalog, place.topic) or f"topic {place.topic}" for place in selection.places})
    subscribers = sorted({_subscriber(catalog, number) for number in numbers})
    limits = [
        f"since {at(selection.as_of_ms)} or longer",
        f"made at {at(selection.from_ms)} or later" if selection.from_ms else "",
        f"made before {at(selection.to_ms)}" if selection.to_ms else "",
        f"with fingerprint {selection.fingerprint}" if selection.fingerprint else "",
    ]
    of = f"{selection.state.name} deliveries of {_few(topics, 'topics')} to {_few(subscribers, 'subscribers')}"
    return ", ".join([of, *filter(None, limits)])


def _few(names: Sequence[str], what: str) -> str:
    return ", ".join(names) if len(names) <= _MOST_NAMES else f"{len(names)} {what}"


def _subscriber(catalog: Catalog, number: SubscriptionNumber) -> str:
    app, tag = subscriber(catalog, number)
    return f"{app} ({tag})" if app else f"subscription {number}"


def job_to(report: BulkReport, catalog: Catalog) -> admin_pb2.BulkJob:
    """A job, and how far it has come."""
    job, progress = report.job, report.progress
    return filled(
        admin_pb2.BulkJob,
        job,
        job=job.number,
        state=job.state(report.now_ms),
        done=progress.done,
        unchanged=progress.unchanged,
        refused=progress.refused,
        selection=in_words(job.selection, catalog),
    )
