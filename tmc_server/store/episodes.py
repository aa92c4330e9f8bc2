"""Episodes of alerts in one database: where alerts join them, which of them are over, what operators see of them."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from tmc_server.domain.alerts import KINDS, MOST_OPEN, OTHER_ERRORS, SETTLED_MS, UNKNOWN_KIND, Ending
from tmc_server.domain.numbers import Shard, SubscriptionNumber
from tmc_server.domain.ports.alerts import Alert, Episode
from tmc_server.store.auditing import act, record
from tmc_server.store.engines import Database, repeating
from tmc_server.store.notices import withdraw
from tmc_server.store.records import record_of
from tmc_server.store.sql import number_of
from tmc_server.store.tables import episode, failed

_SAMPLES = 5
_PAGE = 500
_BEFORE_FINGERPRINTS = ""  # alerts of servers that knew none
_OPEN = episode.c.open == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenEpisode:
    """What its notices have to know."""

    number: int
    kind: str
    topic_no: int
    subscription_no: int
    is_acknowledged: bool


def groups_of(alerts: Sequence[Alert]) -> Collection[Sequence[Alert]]:
    """Return those of one kind, topic, subscription and fingerprint together."""
    groups: dict[tuple[str, int, int, str], list[Alert]] = {}
    for each in alerts:
        groups.setdefault((each.kind, each.topic, each.subscription, each.fingerprint), []).append(each)
    return groups.values()


def samples_of(alerts: Sequence[Alert]) -> str:
    """JSON: shards and numbers of the first messages."""
    return json.dumps([(each.shard, each.number) for each in alerts if each.number][:_SAMPLES])


class Episodes:
    """Those of one transaction, whose alerts nobody else groups."""

    def __init__(self, connection: sa.Connection) -> None:
        self._connection = connection

    def join(self, alike: Sequence[Alert]) -> OpenEpisode:
        """Add alerts of one group to its open episode, or begin one."""
        first = alike[0]
        same = (
            episode.c.kind == first.kind,
            episode.c.topic_no == first.topic,
            episode.c.subscription_no == first.subscription,
        )
        found = self._connection.execute(sa.select(episode).where(*same, _OPEN).with_for_update()).fetchall()
        by_fingerprint = {row.fingerprint: row for row in found}
        fingerprint = first.fingerprint
        if fingerprint not in by_fingerprint and len(found) >= MOST_OPEN:
            fingerprint = OTHER_ERRORS
        first_ms, last_ms = min(each.created_ms for each in alike), max(each.created_ms for each in alike)
        row = by_fingerprint.get(fingerprint)
        if row is not None:
            more = {"alerts": episode.c.alerts + len(alike), "last_ms": max(row.last_ms, last_ms), "empty_ms": None}
            self._connection.execute(episode.update().where(episode.c.id == row.id).values(more))
            return _open(row.id, first, row.acknowledged_ms is not None)
        begun = self._connection.execute(
            episode.insert().values(
                kind=first.kind,
                topic_no=first.topic,
                subscription_no=first.subscription,
                fingerprint=fingerprint,
                open=1,
                detail=first.detail,
                samples=samples_of(alike),
                alerts=len(alike),
                first_ms=first_ms,
                last_ms=last_ms,
            )
        )
        return _open(number_of(begun), first, False)


def _open(number: int, like: Alert, is_acknowledged: bool) -> OpenEpisode:
    return OpenEpisode(
        number=number,
        kind=like.kind,
        topic_no=like.topic,
        subscription_no=like.subscription,
        is_acknowledged=is_acknowledged,
    )


def ended(connection: sa.Connection, now: int) -> tuple[Sequence[Any], Sequence[Any]]:
    """Returns: rows of open episodes that are over, and of those of which nothing is left since now, or something is again."""
    over: list[Any] = []
    turned: list[Any] = []
    after = 0
    while True:
        page = sa.select(episode).where(_OPEN, episode.c.id > after).order_by(episode.c.id).limit(_PAGE)
        found = connection.execute(page).fetchall()
        for row in found:
            is_empty = _is_empty(connection, row, now)
            if is_empty and _is_settled(row, now):
                over.append(row)
            elif is_empty is (row.empty_ms is None):
                turned.append(row)
        if len(found) < _PAGE:
            return over, turned
        after = found[-1].id


def note_empty(connection: sa.Connection, row: Any, now: int) -> None:
    """Note that nothing is left of an episode, or that something is again; nothing if there are further alerts."""
    same = (episode.c.id == row.id, _OPEN, episode.c.alerts == row.alerts)
    empty_ms = now if row.empty_ms is None else None
    noted = connection.execute(episode.update().where(*same).values(empty_ms=empty_ms)).rowcount
    if noted and empty_ms is not None:
        withdraw(connection, row, also_first=False)


def _is_settled(row: Any, now: int) -> bool:
    if KINDS.get(row.kind, UNKNOWN_KIND).ending is not Ending.FAILURES:
        return True
    return row.empty_ms is not None and bool(row.empty_ms + SETTLED_MS <= now)


def _is_empty(connection: sa.Connection, row: Any, now: int) -> bool:
    kind = KINDS.get(row.kind, UNKNOWN_KIND)
    match kind.ending:
        case Ending.QUIET:
            return bool(row.last_ms + kind.quiet_ms <= now)
        case Ending.OPERATOR:
            return row.acknowledged_ms is not None
        case Ending.FAILURES:
            left = sa.select(failed.c.message_id).where(
                failed.c.topic_no == row.topic_no, failed.c.subscription_no == row.subscription_no
            )
            if row.fingerprint not in (OTHER_ERRORS, _BEFORE_FINGERPRINTS):
                left = left.where(failed.c.fingerprint == row.fingerprint)
            return connection.execute(left.limit(1)).first() is None


class SqlEpisodeStore:
    """domain.ports.alerts.EpisodeStore. shard: one of this database, for the ids."""

    def __init__(self, database: Database, shard: Shard) -> None:
        self._database = database
        self._shard = shard

    def episodes(self, open_only: bool, limit: int) -> Sequence[Episode]:
        query = sa.select(episode).order_by(episode.c.id.desc()).limit(limit)
        with self._database.reading() as connection:
            return [self._view(row) for row in connection.execute(query.where(_OPEN) if open_only else query)]

    def open_detail(self, kind: str, subscription: SubscriptionNumber) -> str:
        mine = (_OPEN, episode.c.kind == kind, episode.c.subscription_no == subscription)
        query = sa.select(episode.c.detail).where(*mine).order_by(episode.c.id.desc()).limit(1)
        with self._database.reading() as connection:
            return connection.execute(query).scalar() or ""

    @repeating
    def acknowledge(self, actor: str, number: int, reason: str) -> Episode | None:
        mine = episode.c.id == number
        with self._database.transaction() as connection:
            now = self._database.now(connection)
            done = episode.update().where(mine, _OPEN, episode.c.acknowledged_ms.is_(None))
            if connection.execute(done.values(acknowledged_ms=now, acknowledged_by=actor)).rowcount:
                record(connection, act(now, actor, "acknowledge alert", f"alert {number}", reason=reason))
            row = connection.execute(sa.select(episode).where(mine)).one_or_none()
            if row is not None and row.acknowledged_ms is not None:
                withdraw(connection, row, also_first=False)
        return self._view(row) if row is not None else None

    def _view(self, row: Any) -> Episode:
        return record_of(
            Episode,
            row,
            shard=self._shard,
            number=row.id,
            topic=row.topic_no,
            subscription=row.subscription_no,
            count=row.alerts,
            samples=[tuple(each) for each in json.loads(row.samples)],
        )
