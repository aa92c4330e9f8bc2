"""Topics with their subscriptions, and apps with their keys."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from tmc_console.view import View

_ALL = 1_000


async def topics(view: View) -> Response:
    """topic: one of them; without it all."""
    name = view.query("topic")
    found = (await view.ask("ListTopics", page_size=_ALL)).topics
    by_topic: dict[str, list[Any]] = {}
    for each in (await view.ask("ListSubscriptions", topic=name, page_size=_ALL)).subscriptions:
        if not each.removed_ms:
            by_topic.setdefault(each.topic, []).append(each)
    shown = [topic for topic in found if name in ("", topic.name)]
    return view.page("topics.html", topics=shown, subscriptions=by_topic, name=name)


async def apps(view: View) -> Response:
    found = await view.ask("ListApps", page_size=_ALL)
    return view.page("apps.html", apps=found.apps)
