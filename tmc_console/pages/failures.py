"""Failures by error, and undecided messages."""

from __future__ import annotations

from starlette.responses import Response

from tmc_common.protocol import admin_pb2, types_pb2
from tmc_console.view import PAGE_SIZE, View


async def page(view: View) -> Response:
    request = admin_pb2.ListFailureGroupsRequest(
        topic=view.query("topic"), app=view.query("app"), tag=view.query("tag"), limit=200
    )
    return view.page("failures.html", found=await view.ask("ListFailureGroups", request))


async def undecided(view: View) -> Response:
    """Show undecided messages: those whose checks failed first, then those that are being checked, oldest first."""
    topic, token = view.query("topic"), view.query("page")
    failed = await view.ask(
        "ListMessages",
        admin_pb2.ListMessagesRequest(
            topic=topic, state=types_pb2.MESSAGE_STATE_CHECK_FAILED, page_size=PAGE_SIZE, page_token=token
        ),
    )
    prepared = await view.ask(
        "ListMessages",
        admin_pb2.ListMessagesRequest(topic=topic, state=types_pb2.MESSAGE_STATE_PREPARED, page_size=PAGE_SIZE),
    )
    return view.page("undecided.html", failed=failed, prepared=prepared, topic=topic)
