"""What stands where, with what is wrong first; and the live numbers behind its chart."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.responses import Response, StreamingResponse

from tmc_console.center import Refused
from tmc_console.view import View

_EVERY_S = 2.0
MOST_OF_ONE = 30  # of an operator, in all sessions
MOST_STREAMS = 300  # of all: far below the connections that the console takes
_LATE_MS = 60_000
_VERY_LATE_MS = 600_000
_ORDER = {"red": 0, "amber": 1, "green": 2}


async def page(view: View) -> Response:
    found = await view.ask("GetOverview")
    alerts = await view.ask("ListAlerts", page_size=1_000)
    lights = {
        (topic.topic, each.app, each.tag, each.removed): _of_subscription(each, found.now_ms)
        for topic in found.topics
        for each in topic.subscriptions
    }
    rows = sorted(
        ((_of_topic(topic, found.now_ms), topic) for topic in found.topics),
        key=lambda row: _rank(row[0], row[1], lights),
    )
    return view.page(
        "overview.html",
        rows=rows,
        lights=lights,
        drain_ms=drain_ms,
        now=found.now_ms,
        totals=_totals(found),
        alerts=len(alerts.alerts),
    )


def _rank(
    light: tuple[str, str], topic: Any, lights: Mapping[tuple[str, str, str, bool], tuple[str, str]]
) -> tuple[int, str]:
    """Problems first, then by name."""
    all_of_it = [light, *(lights[topic.topic, each.app, each.tag, each.removed] for each in topic.subscriptions)]
    return min(_ORDER[color] for color, _ in all_of_it), topic.topic


def _of_topic(topic: Any, now_ms: int) -> tuple[str, str]:
    """The light, and why."""
    if topic.check_failed:
        return "red", "failed checks need a decision"
    late_ms = now_ms - topic.oldest_undecided_ms if topic.undecided else 0
    return _by_age(late_ms, topic.paused, "undecided for more than 10 minutes", "undecided for more than a minute")


def _of_subscription(subscription: Any, now_ms: int) -> tuple[str, str]:
    if subscription.failed:
        return "red", "failed deliveries need attention"
    late_ms = now_ms - subscription.oldest_backlog_ms if subscription.backlog else 0
    reasons = ("the backlog is older than 10 minutes", "the backlog is older than a minute")
    return _by_age(late_ms, subscription.paused, *reasons)


def _by_age(late_ms: int, is_paused: bool, very_late: str, late: str) -> tuple[str, str]:
    if late_ms >= _VERY_LATE_MS:
        return "red", very_late
    if is_paused:
        return "amber", "paused"
    return ("amber", late) if late_ms >= _LATE_MS else ("green", "")


def drain_ms(subscription: Any) -> int:
    """Return how long the backlog lasts at the present rate, milliseconds; 0: there is none, or nothing is acked."""
    if not subscription.acked_per_s:
        return 0
    return int(subscription.backlog / subscription.acked_per_s * 1000)


def _totals(found: Any) -> dict[str, float]:
    deliveries = [each for topic in found.topics for each in topic.subscriptions]
    return {
        "submitted": round(sum(topic.submitted_per_s for topic in found.topics), 2),
        "acked": round(sum(each.acked_per_s for each in deliveries), 2),
        "backlog": sum(each.backlog for each in deliveries),
        "failed": sum(each.failed for each in deliveries) + sum(topic.check_failed for topic in found.topics),
        "undecided": sum(topic.undecided for topic in found.topics),
    }


async def events(view: View) -> Response:
    """Server-sent events: the totals, every two seconds, until the session ends. Raises Refused: too many are open."""
    session = view.session
    sessions = view.setting.sessions
    if sessions.streams(session.operator.name) >= MOST_OF_ONE or sessions.streams() >= MOST_STREAMS:
        raise Refused(429, "", "Too many overviews are open: close some.")

    async def stream() -> AsyncIterator[str]:
        cookie = view.request.cookies.get(view.setting.cookie, "")
        session.streams += 1
        try:
            while sessions.find(cookie, is_used=False) is session and not await view.request.is_disconnected():
                try:
                    found = await view.ask("GetOverview")
                except Refused:
                    return
                yield f"data: {json.dumps({'now': found.now_ms, **_totals(found)})}\n\n"
                await asyncio.sleep(_EVERY_S)
        finally:
            session.streams -= 1

    return StreamingResponse(stream(), media_type="text/event-stream")
