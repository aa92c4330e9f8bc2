"""The notices of an episode, which wait, are sent, or are withdrawn."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import sqlalchemy as sa

from tmc_server.domain.alerts import NoticeEvent
from tmc_server.store.tables import notice

WAITING = (notice.c.claim == 0, notice.c.due_ms.is_not(None), notice.c.event == int(NoticeEvent.RAISED))
"""Nobody is sending it, and further alerts are added to it."""


def of_episode(number: int, like: Any) -> tuple[sa.ColumnElement[bool], ...]:
    """like: a row with the episode's kind, topic_no and subscription_no, which lead to an index."""
    return (
        notice.c.kind == like.kind,
        notice.c.topic_no == like.topic_no,
        notice.c.subscription_no == like.subscription_no,
        notice.c.episode_id == number,
    )


def withdraw(connection: sa.Connection, episode: Any, *, also_first: bool) -> Collection[str]:
    """Delete reminders that wait. also_first: and first notices that wait.

    Returns: the sinks that know of the episode, or will.
    """
    query = sa.select(notice).where(*of_episode(episode.id, episode)).order_by(notice.c.id)
    sinks: set[str] = set()
    for each in connection.execute(query).fetchall():
        withdrawn = also_first or each.sink in sinks
        if withdrawn and connection.execute(notice.delete().where(notice.c.id == each.id, *WAITING)).rowcount:
            continue
        sinks.add(each.sink)
    return sorted(sinks)
