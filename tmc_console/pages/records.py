"""Alerts, the audit trail, operators, and what they propose."""

from __future__ import annotations

import csv
import io
from typing import Any

from starlette.responses import Response

from tmc_common.spreadsheets import cell_of
from tmc_console.view import PAGE_SIZE, View
from tmc_console.words import utc

_MOST_EXPORTED = 100_000
_PAGE = 1_000


async def alerts(view: View) -> Response:
    resolved = view.query("resolved") == "1"
    found = await view.ask("ListAlerts", resolved=resolved, page_size=PAGE_SIZE, page_token=view.query("page"))
    silences = await view.ask("ListSilences", page_size=_PAGE)
    return view.page("alerts.html", found=found, silences=silences.silences, resolved=resolved)


async def _entries(view: View, page_size: int, token: str) -> Any:
    return await view.ask(
        "ListAudit",
        actor=view.query("actor"),
        action=view.query("action"),
        subject=view.query("subject"),
        message_id=view.query("message"),
        page_size=page_size,
        page_token=token,
    )


async def audit(view: View) -> Response:
    found = await _entries(view, PAGE_SIZE, view.query("page"))
    return view.page("audit.html", found=found)


async def audit_csv(view: View) -> Response:
    """The same filter, as a file. A spreadsheet takes no cell for a formula."""
    text = io.StringIO()
    write = csv.writer(text)
    write.writerow(("time", "operator", "from", "action", "subject", "reason", "change"))
    count, token = 0, ""
    while count < _MOST_EXPORTED:
        found = await _entries(view, _PAGE, token)
        for entry in found.entries:
            cells = (entry.actor, entry.origin, entry.action, entry.subject, entry.reason, entry.change)
            write.writerow((utc(entry.at_ms), *map(cell_of, cells)))
        count, token = count + len(found.entries), found.next_page_token
        if not token:
            break
    if token:
        write.writerow(("", "", "", f"There are more than {_MOST_EXPORTED} rows: narrow the filter.", "", "", ""))
    headers = {"content-disposition": 'attachment; filename="audit.csv"'}
    return Response(text.getvalue(), media_type="text/csv; charset=utf-8", headers=headers)


async def proposals(view: View) -> Response:
    pending = view.query("all") != "1"
    found = await view.ask("ListProposals", pending_only=pending, page_size=PAGE_SIZE, page_token=view.query("page"))
    return view.page("proposals.html", found=found, pending=pending)


async def operators(view: View) -> Response:
    found = await view.ask("ListOperators", page_size=_PAGE)
    seals = await view.ask("VerifyAudit") if view.query("verify") == "1" else None
    return view.page("operators.html", operators=found.operators, seals=seals)
