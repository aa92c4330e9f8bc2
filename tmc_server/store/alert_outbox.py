"""The alerts of one database: stored with the changes they are about, sent as notices of episodes."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from tmc_server.domain.alerts import NoticeEvent, Silence, remind_after_ms, silenced_until
from tmc_server.domain.numbers import Shard, SubscriptionNumber
from tmc_server.domain.ports.alerts import Alert, alert_id
from tmc_server.domain.ports.catalog import CatalogSource
from tmc_server.store.engines import Database, StoreConflict, repeated, repeating
from tmc_server.store.episodes import Episodes, OpenEpisode, ended, groups_of, note_empty, samples_of
from tmc_server.store.notices import WAITING, of_episode, withdraw
from tmc_server.store.tables import alert, episode, notice

_AFTER_THE_FIRST_MS = 5_000
_UNSENT = sa.select(alert).where(alert.c.sent_ms.is_(None)).order_by(alert.c.id).limit(sa.bindparam("limit"))

_DUE_NOTICES = (
    sa.select(notice, episode.c.alerts.label("total"), episode.c.first_ms.label("since_ms"), episode.c.fingerprint)
    .select_from(notice.outerjoin(episode, episode.c.id == notice.c.episode_id))
    .where(notice.c.sink == sa.bindparam("sink"), notice.c.due_ms <= sa.bindparam("now"))
    .order_by(notice.c.due_ms, notice.c.id)
    .limit(sa.bindparam("limit"))
)


class SqlAlertOutbox:
    """domain.ports.alerts.AlertOutbox over the tables of one database."""

    def __init__(self, database: Database, shard: Shard, catalog: CatalogSource) -> None:
        """shard: one of this database, for the ids of alerts."""
        self._database = database
        self._shard = shard
        self._catalog = catalog
        self._me = secrets.randbits(62) + 1  # marks the claims of this run

    def unsent(self, limit: int) -> Sequence[Alert]:
        """Alerts that no notice tells of yet, oldest first."""
        with self._database.reading() as connection:
            return [
                Alert(
                    id=row.id,
                    kind=row.kind,
                    topic=row.topic_no,
                    shard=row.shard,
                    number=max(row.message_id, 0),
                    subscription=row.subscription_no,
                    attempt=row.attempt,
                    detail=row.detail,
                    created_ms=row.created_ms,
                    fingerprint=row.fingerprint,
                )
                for row in connection.execute(_UNSENT, {"limit": limit})
            ]

    def add(self, kind: str, topic: int, subscription: SubscriptionNumber, slot: int, detail: str) -> None:
        # An alert is known by kind, message, subscription and slot: what is about a topic alone has its number in them, too.
        message_id = 0 if subscription else -topic
        values = {
            "kind": kind,
            "topic_no": topic,
            "message_id": message_id,
            "shard": 0,
            "subscription_no": subscription,
        }

        def write() -> None:
            with self._database.transaction() as connection:
                now = self._database.now(connection)
                rest = {"attempt": slot, "detail": detail[:500], "created_ms": now, "sent_ms": None}
                connection.execute(alert.insert().values(**values, **rest))

        try:
            repeated(write)
        except sa.exc.IntegrityError:
            return  # another server has written it already

    @repeating
    def group(self, sinks: Sequence[str], limit: int) -> int:
        alerts = self.unsent(limit)
        if alerts:
            with self._database.transaction() as connection:
                now = self._database.now(connection)
                ids = [each.id for each in alerts]
                sent = alert.update().where(alert.c.id.in_(ids), alert.c.sent_ms.is_(None)).values(sent_ms=now)
                if connection.execute(sent).rowcount != len(ids):
                    raise StoreConflict("another server groups the same alerts")
                episodes = Episodes(connection)
                for alike in groups_of(alerts):
                    joined = episodes.join(alike)
                    for sink in sinks if not joined.is_acknowledged else ():
                        if not self._add_to_waiting(connection, sink, joined, alike):
                            self._begin_notice(connection, sink, joined, alike, now)
        return len(alerts)

    @staticmethod
    def _add_to_waiting(connection: sa.Connection, sink: str, joined: OpenEpisode, alike: Sequence[Alert]) -> bool:
        """Add alerts to an unclaimed notice of their episode. Returns: whether there was one."""
        mine = (*of_episode(joined.number, joined), notice.c.sink == sink, *WAITING)
        number = connection.execute(sa.select(notice.c.id).where(*mine).order_by(notice.c.id).limit(1)).scalar()
        values = {"alerts": notice.c.alerts + len(alike), "last_ms": max(each.created_ms for each in alike)}
        one = notice.update().where(notice.c.id == number, *WAITING).values(values)
        return number is not None and connection.execute(one).rowcount == 1

    @staticmethod
    def _begin_notice(
        connection: sa.Connection, sink: str, joined: OpenEpisode, alike: Sequence[Alert], now: int
    ) -> None:
        first = alike[0]
        before = connection.execute(
            sa.select(sa.func.count(), sa.func.max(sa.func.coalesce(notice.c.sent_ms, now)))
            .select_from(notice)
            .where(*of_episode(joined.number, joined), notice.c.sink == sink)
        ).one()
        due_ms = max(now, before[1] + remind_after_ms(before[0])) if before[0] else now
        connection.execute(
            notice.insert().values(
                sink=sink,
                kind=first.kind,
                topic_no=first.topic,
                subscription_no=first.subscription,
                shard=first.shard,
                message_id=first.number,
                attempt=first.attempt,
                detail=first.detail,
                samples=samples_of(alike),
                alerts=len(alike),
                first_ms=min(each.created_ms for each in alike),
                last_ms=max(each.created_ms for each in alike),
                claim=0,
                due_ms=due_ms,
                sent_ms=None,
                episode_id=joined.number,
                event=int(NoticeEvent.RAISED),
            )
        )

    def resolve(self) -> int:
        with self._database.reading() as connection:
            now = self._database.now(connection)
            over, turned = ended(connection, now)
        if turned:
            self._note_empty(turned, now)
        return sum(self.end(row) for row in over)

    @repeating
    def _note_empty(self, turned: Sequence[Any], now: int) -> None:
        with self._database.transaction() as connection:
            for row in turned:
                note_empty(connection, row, now)

    @repeating
    def end(self, row: Any) -> bool:
        """End an episode, unless there are further alerts. row: as it was read."""
        with self._database.transaction() as connection:
            now = self._database.now(connection)
            same = (episode.c.id == row.id, episode.c.open == 1, episode.c.alerts == row.alerts)
            if not connection.execute(episode.update().where(*same).values(open=None, resolved_ms=now)).rowcount:
                return False
            silences = self._catalog.current.silences
            silent = silenced_until(silences, row.kind, row.topic_no, row.subscription_no, now) is not None
            for sink in withdraw(connection, row, also_first=silent):
                connection.execute(notice.insert().values(_resolved(sink, row, now)))
            return True

    def claim(self, sink: str, limit: int, for_ms: int) -> Sequence[Alert]:
        due = self.due(sink, limit)
        return repeated(lambda: self.take(due, for_ms)) if due else []

    def due(self, sink: str, limit: int) -> Sequence[Any]:
        """Rows as they are; nothing is claimed."""
        with self._database.reading() as connection:
            now = self._database.now(connection)
            silenced = [_is_covered(each) for each in self._catalog.current.silences if each.until_ms > now]
            query = _DUE_NOTICES.where(sa.not_(sa.or_(*silenced))) if silenced else _DUE_NOTICES
            return list(connection.execute(query, {"sink": sink, "now": now, "limit": limit}))

    def take(self, due: Sequence[Any], for_ms: int) -> Sequence[Alert]:
        """Claim those that are still as they were read. That an episode is over waits until its first notice was sent."""
        with self._database.transaction() as connection:
            now = self._database.now(connection)
            mine = []
            for row in due:
                if row.event == NoticeEvent.RESOLVED and self._is_owed(connection, row):
                    self._move(connection, row, 0, now + _AFTER_THE_FIRST_MS)
                elif self._move(connection, row, self._me, now + for_ms):
                    mine.append(row)
        return [
            Alert(
                id=row.id,
                kind=row.kind,
                topic=row.topic_no,
                shard=row.shard,
                number=row.message_id,
                subscription=row.subscription_no,
                attempt=row.attempt,
                detail=row.detail,
                created_ms=row.first_ms,
                count=row.alerts,
                first_ms=row.first_ms,
                last_ms=row.last_ms,
                samples=[tuple(each) for each in json.loads(row.samples)],
                fingerprint=row.fingerprint or "",
                event=NoticeEvent(row.event),
                episode=alert_id(self._shard, row.episode_id) if row.episode_id else "",
                total=max(row.total or 0, row.alerts),
                since_ms=row.since_ms or row.first_ms,
            )
            for row in mine
        ]

    @staticmethod
    def _is_owed(connection: sa.Connection, row: Any) -> bool:
        """Return whether the sink has yet to hear of this episode."""
        owed = (notice.c.sink == row.sink, notice.c.event == int(NoticeEvent.RAISED), notice.c.due_ms.is_not(None))
        query = sa.select(notice.c.id).where(*of_episode(row.episode_id, row), *owed)
        return connection.execute(query.limit(1)).first() is not None

    def _move(self, connection: sa.Connection, row: Any, claim: int, due_ms: int) -> bool:
        """Change a notice unless somebody else did: another server took it, or added an alert that would be lost."""
        same = (
            notice.c.id == row.id,
            notice.c.claim == row.claim,
            notice.c.due_ms == row.due_ms,
            notice.c.alerts == row.alerts,
        )
        return connection.execute(notice.update().where(*same).values(claim=claim, due_ms=due_ms)).rowcount == 1

    @repeating
    def mark_sent(self, notices: Sequence[Alert]) -> None:
        with self._database.transaction() as connection:
            now = self._database.now(connection)
            connection.execute(self._mine(notices).values(due_ms=None, sent_ms=now))

    @repeating
    def put_back(self, notices: Sequence[Alert], after_ms: int) -> None:
        with self._database.transaction() as connection:
            due_ms = self._database.now(connection) + after_ms
            connection.execute(self._mine(notices).values(claim=0, due_ms=due_ms))

    def _mine(self, notices: Sequence[Alert]) -> sa.Update:
        return notice.update().where(
            notice.c.id.in_([each.id for each in notices]), notice.c.claim == self._me, notice.c.due_ms.is_not(None)
        )


def _is_covered(silence: Silence) -> sa.ColumnElement[bool]:
    """`Silence.covers` in SQL."""
    scope = (
        (notice.c.kind, silence.kind),
        (notice.c.topic_no, silence.topic),
        (notice.c.subscription_no, silence.subscription),
    )
    return sa.and_(sa.true(), *(column == value for column, value in scope if value))


def _resolved(sink: str, row: Any, now: int) -> Mapping[str, Any]:
    """A notice that an episode has ended. row: of the episode."""
    return {
        "sink": sink,
        "kind": row.kind,
        "topic_no": row.topic_no,
        "subscription_no": row.subscription_no,
        "shard": 0,
        "message_id": 0,
        "attempt": 0,
        "detail": row.detail,
        "samples": row.samples,
        "alerts": row.alerts,
        "first_ms": row.first_ms,
        "last_ms": row.last_ms,
        "claim": 0,
        "due_ms": now,
        "sent_ms": None,
        "episode_id": row.id,
        "event": int(NoticeEvent.RESOLVED),
    }
