"""Failures by error, and undecided messages."""

from __future__ import annotations

from functools import partial

from starlette.responses import Response

from tmc_common.protocol import types_pb2
from tmc_console.view import PAGE_SIZE, View


async def page(view: View) -> Response:
    topic, app, tag = map(view.query, ("topic", "app", "tag"))
    found = await view.ask("ListFailureGroups", topic=topic, app=app, tag=tag, limit=200)
    return view.page("failures.html", found=found)


async def undecided(view: View) -> Response:
    """Show undecided messages: those whose checks failed first, then those that are being checked, oldest first."""
    topic, token = view.query("topic"), view.query("page")
    listed = partial(view.ask, "ListMessages", topic=topic, page_size=PAGE_SIZE)
    failed = await listed(state=types_pb2.MESSAGE_STATE_CHECK_FAILED, page_token=token)
    prepared = await listed(state=types_pb2.MESSAGE_STATE_PREPARED)
    return view.page("undecided.html", failed=failed, prepared=prepared, topic=topic)
