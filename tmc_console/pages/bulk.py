"""Bulk jobs: a dry run, the reason and the typed count, then progress, outcomes and a stop."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.responses import Response

from tmc_common.protocol import admin_pb2
from tmc_console.center import Refused
from tmc_console.view import PAGE_SIZE, View

HOLD_MS = 30_000  # the undo window: nothing is changed before
_FIELDS = ("topic", "app", "tag", "fingerprint")


async def jobs(view: View) -> Response:
    found = await view.ask("ListBulkJobs", page_size=PAGE_SIZE, page_token=view.query("page"))
    return view.page("bulk_jobs.html", found=found)


async def new(view: View) -> Response:
    """The filter is in the address. With one, it is counted."""
    wanted = _filter({name: view.query(name) for name in (*_FIELDS, "action", "state")})
    dry_run = None
    if wanted.action:
        dry_run = await view.ask("DryRunBulkJob", filter=wanted)
    return view.page("bulk_new.html", wanted=wanted, dry_run=dry_run, hold_ms=HOLD_MS)


async def start(view: View) -> Response:
    """The count is typed by hand, and has to be that of the dry run."""
    form = await view.request.form()
    if not view.may_write:
        raise Refused(403, "", "Actions are disabled: enable them first.")
    text = {
        name: str(form.get(name, "")).strip()
        for name in (*_FIELDS, "action", "state", "count", "counted", "dry_run", "reason")
    }
    if text["count"] != text["counted"] or not _number(text["count"]):
        raise Refused(
            400, "FIELD_INVALID", f"The typed count is not that of the dry run, {text['counted']}: nothing was started."
        )
    job = await view.ask(
        "StartBulkJob",
        filter=_filter(text),
        dry_run=text["dry_run"],
        count=_number(text["count"]),
        reason=text["reason"],
        hold_ms=HOLD_MS,
    )
    return view.goto(f"/bulk/{job.job}")


def _filter(text: Mapping[str, str]) -> admin_pb2.BulkFilter:
    wanted = admin_pb2.BulkFilter()
    for name in _FIELDS:
        setattr(wanted, name, text[name])
    for name in ("action", "state"):
        setattr(wanted, name, _number(text[name]))
    return wanted


def _job(view: View) -> int:
    return min(int(view.request.path_params["job"]), (1 << 63) - 1)


def _number(text: str) -> int:
    """0: it is none."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0


async def job(view: View) -> Response:
    number, token = _job(view), view.query("page")
    found = await view.ask("GetBulkJob", job=number)
    only_failures = view.query("failures") == "1"
    items = await view.ask(
        "ListBulkItems", job=number, failures_only=only_failures, page_size=PAGE_SIZE, page_token=token
    )
    return view.page("bulk_job.html", job=found, items=items, only_failures=only_failures)


async def progress(view: View) -> Response:
    """The part of the page that is asked for every second while the job runs."""
    return view.page("bulk_progress.html", job=await view.ask("GetBulkJob", job=_job(view)))
