"""What changes something: actions, and the switch that allows them."""

from __future__ import annotations

from google.protobuf import json_format
from starlette.responses import Response

from tmc_console.actions import ACTIONS, request_of
from tmc_console.center import Refused
from tmc_console.guards import local_path
from tmc_console.view import View


async def act(view: View) -> Response:
    """Call the RPC of an action with the fields of the form; then back to where the form was."""
    action = ACTIONS.get(view.request.path_params["action"])
    if action is None:
        raise Refused(404, "", "There is no such action.")
    if not view.may_write:
        raise Refused(403, "", "Actions are disabled: enable them first.")
    form = await view.request.form()
    next_path = local_path(str(form.get("next", "/")))
    answer = await view.ask(action.method, request_of(action, form))
    if action.shows:
        shown = json_format.MessageToDict(answer, preserving_proto_field_name=True)
        return view.page("result.html", answer=_flat(shown), next=next_path, method=action.method)
    view.session.notice = action.done
    return view.goto(next_path)


def _flat(shown: dict[str, object], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for name, value in shown.items():
        if isinstance(value, dict):
            rows += _flat(value, f"{prefix}{name}.")
        else:
            text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
            rows.append((f"{prefix}{name}", text))
    return rows


async def switch_writing(view: View) -> Response:
    form = await view.request.form()
    view.setting.sessions.switch_writing(view.session, form.get("on") == "1")
    return view.goto(local_path(str(form.get("next", "/"))))
