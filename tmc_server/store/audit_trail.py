"""The audit rows of all databases as one list. A row is where the change is: with the catalog, or with the message."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import islice
from typing import Any

import sqlalchemy as sa

from tmc_server.domain.ports.reading import AuditFilter
from tmc_server.domain.views import OperatorAct, SealReport
from tmc_server.errors import InvalidField
from tmc_server.store.audit_seals import AuditSeals
from tmc_server.store.auditing import act, act_of, record
from tmc_server.store.engines import Database
from tmc_server.store.tables import audit

_NEWEST = (1 << 63) - 1


class SqlAuditTrail:
    """domain.ports.reading.AuditTrail. Each database is read backward by its own numbers, and the pages are merged by time.

    databases: the catalog's first.  seals: of each.
    """

    def __init__(self, databases: Sequence[Database], seals: Sequence[AuditSeals]) -> None:
        self._databases = databases
        self._seals = seals

    def verify(self) -> list[SealReport]:
        return [seals.verify() for seals in self._seals]

    def add(self, actor: str, action: str, subject: str, reason: str) -> None:
        catalog = self._databases[0]
        with catalog.transaction() as connection:
            record(connection, act(catalog.now(connection), actor, action, subject, reason=reason))

    def page(self, wanted: AuditFilter, after: Sequence[int], limit: int) -> tuple[list[OperatorAct], list[int]]:
        ends = list(after) or [_NEWEST] * len(self._databases)
        if len(ends) != len(self._databases):
            raise InvalidField("page_token", "be of this listing: databases were added or removed since, begin again")
        pages = [self._read(place, wanted, end, limit) for place, end in enumerate(ends)]
        # A page of each stays in the order of its numbers, also where a clock went back: what is left out comes next.
        shown = list(islice(heapq.merge(*pages, key=lambda row: -row[1].at_ms), limit))
        for place, row in shown:
            ends[place] = row.id
        acts = [act_of(row) for _, row in shown]
        return acts, ends if len(shown) == limit else []

    def _read(self, place: int, wanted: AuditFilter, end: int, limit: int) -> list[tuple[int, Any]]:
        with self._databases[place].reading() as connection:
            return [(place, row) for row in connection.execute(_query(wanted, end, limit))]


def _query(wanted: AuditFilter, end: int, limit: int) -> sa.Select[Any]:
    query = sa.select(audit).where(audit.c.id < end).order_by(audit.c.id.desc()).limit(limit)
    if wanted.actor:
        query = query.where(audit.c.actor == wanted.actor)
    if wanted.action:
        query = query.where(audit.c.action == wanted.action)
    if wanted.subject:
        whole = audit.c.subject == wanted.subject
        query = query.where(whole | audit.c.subject.startswith(f"{wanted.subject} ", autoescape=True))
    if wanted.from_ms:
        query = query.where(audit.c.at_ms >= wanted.from_ms)
    if wanted.to_ms:
        query = query.where(audit.c.at_ms < wanted.to_ms)
    return query
