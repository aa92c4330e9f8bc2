"""Search, and one message: what happened to it, why it waits, what can be done."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.responses import Response

from tmc_common.protocol import admin_pb2
from tmc_console.center import Refused
from tmc_console.view import PAGE_SIZE, View


async def search(view: View) -> Response:
    """q: an id or a key. Without it: by topic and state, newest first."""
    text, topic = view.query("q").strip(), view.query("topic").strip()
    state: Any = view.number("state")
    token = view.query("page")
    error = ""
    try:
        found = await _found(view, text, topic, state, token)
    except Refused as exc:  # the form stays, so that it can be corrected
        if exc.status not in (400, 404):
            raise
        found, error = admin_pb2.SearchMessagesResponse(), exc.sentence
    if text and len(found.messages) == 1 and not token:
        return view.goto(f"/messages/{found.messages[0].message_id}")
    return view.page(
        "search.html", 400 if error else 200, found=found, text=text, topic=topic, state=state, error=error
    )


async def _found(view: View, text: str, topic: str, state: Any, token: str) -> Any:
    if text:
        return await view.ask("SearchMessages", text=text, topic=topic, page_size=PAGE_SIZE, page_token=token)
    return await view.ask(
        "ListMessages", topic=topic, state=state, newest_first=True, page_size=PAGE_SIZE, page_token=token
    )


async def page(view: View) -> Response:
    """One message. body=1: with its body, which leaves an audit row."""
    id_ = view.request.path_params["id"]
    shows_body = view.query("body") == "1" and view.session.operator.reads_bodies
    detail, timeline, why = await asyncio.gather(
        view.ask("GetMessageDetail", message_id=id_, without_body=not shows_body),
        view.ask("GetTimeline", message_id=id_),
        view.ask("ExplainMessage", message_id=id_),
    )
    return view.page("message.html", detail=detail, timeline=timeline, why=why, shows_body=shows_body)
