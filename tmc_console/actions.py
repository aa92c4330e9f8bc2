"""What forms can do: each action is one admin RPC whose request is filled from the fields of the form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor
from starlette.datastructures import FormData

from tmc_common.admin_calls import SERVICE
from tmc_console.center import Refused

VIEWER, OPERATOR, ADMIN = 1, 2, 3
_NUMBERS = (
    FieldDescriptor.CPPTYPE_INT32,
    FieldDescriptor.CPPTYPE_INT64,
    FieldDescriptor.CPPTYPE_ENUM,
)


@dataclass(frozen=True, kw_only=True)
class Action:
    """role: below it the form is not shown; the center decides.  shows: the answer is shown once, such as a key.

    done: what is said afterwards.
    """

    method: str
    role: int = OPERATOR
    shows: bool = False
    done: str = "Done."


ACTIONS: Mapping[str, Action] = {
    "pause-topic": Action(method="PauseTopic", done="The topic was paused."),
    "resume-topic": Action(method="ResumeTopic", done="The topic was resumed."),
    "pause-subscription": Action(method="PauseSubscription", done="The subscription was paused."),
    "resume-subscription": Action(method="ResumeSubscription", done="The subscription was resumed."),
    "repair-order": Action(method="RepairOrder", shows=True),
    "reactivate": Action(method="ReactivateConsumption", done="The delivery was reactivated."),
    "deliver-now": Action(method="DeliverNow", done="The delivery is due now."),
    "cancel": Action(method="CancelConsumption", done="The delivery was cancelled."),
    "replay": Action(method="ReplayDelivery", done="The message was replayed."),
    "check-now": Action(method="CheckNow", shows=True),
    "try-check": Action(method="TryCheck", role=ADMIN, shows=True),
    "reactivate-check": Action(method="ReactivateCheck", done="The message will be checked again."),
    "decide": Action(method="DecideMessage", done="The message was decided."),
    "stop-bulk": Action(method="StopBulkJob", done="The job was stopped."),
    "approve": Action(method="ApproveProposal", done="The proposal was approved."),
    "reject": Action(method="RejectProposal", done="The proposal was rejected."),
    "drain": Action(method="DrainServer", done="The server is draining."),
    "undrain": Action(method="UndrainServer", done="The server accepts shards again."),
    "acknowledge": Action(method="AcknowledgeAlert", done="The alert was acknowledged."),
    "silence": Action(method="SilenceAlerts", done="The alerts were silenced."),
    "end-silence": Action(method="EndSilence", done="The silence was ended."),
    "update-topic": Action(method="UpdateTopic", role=ADMIN, done="The topic was updated."),
    "subscribe": Action(method="RegisterSubscription", role=ADMIN, done="The app was subscribed."),
    "unsubscribe": Action(method="RemoveSubscription", role=ADMIN, done="The subscription was removed."),
    "rotate-delivery-key": Action(method="RotateDeliveryKey", role=ADMIN, shows=True),
    "add-app-key": Action(method="AddAppKey", role=ADMIN, shows=True),
    "drop-old-app-key": Action(method="DropOldAppKey", role=ADMIN, done="The old key was dropped."),
    "rotate-check-token": Action(method="RotateCheckToken", role=ADMIN, done="The check token was rotated."),
    "disable-app": Action(method="DisableApp", role=ADMIN, done="The app was disabled."),
    "enable-app": Action(method="EnableApp", role=ADMIN, done="The app was enabled."),
    "register-app": Action(method="RegisterApp", role=ADMIN, shows=True),
    "register-topic": Action(method="RegisterTopic", role=ADMIN, done="The topic was registered."),
    "register-operator": Action(method="RegisterOperator", role=ADMIN, shows=True),
    "rotate-operator-token": Action(method="RotateOperatorToken", role=VIEWER, shows=True),
    "remove-operator": Action(method="RemoveOperator", role=ADMIN, done="The operator was removed."),
}


def request_of(action: Action, form: FormData) -> Any:
    """Fill the request; fields that are empty are not set. Raises Refused: a number is none."""
    request: Any = message_factory.GetMessageClass(SERVICE.methods_by_name[action.method].input_type)()
    _fill(request, form, "")
    return request


def _fill(request: Any, form: FormData, prefix: str) -> None:
    for field in request.DESCRIPTOR.fields:
        name = f"{prefix}{field.name}"
        values = [str(value).strip() for value in form.getlist(name)]
        values = [value for value in values if value]
        if field.message_type is not None and not field.is_repeated:
            if any(key.startswith(f"{name}.") for key in form):  # also without values: an empty mask changes nothing
                getattr(request, field.name).SetInParent()
                _fill(getattr(request, field.name), form, f"{name}.")
        elif field.message_type is not None and field.message_type.GetOptions().map_entry:
            _fill_map(getattr(request, field.name), form, f"{name}.")
        elif not values:
            continue
        elif field.is_repeated:
            getattr(request, field.name).extend(each for value in values for each in value.split())
        else:
            _set(request, field, name, values[-1])


def _fill_map(entries: Any, form: FormData, prefix: str) -> None:
    for key, value in form.multi_items():
        if key.startswith(prefix) and str(value).strip():
            entries[key.removeprefix(prefix)] = str(value).strip()


def _set(request: Any, field: FieldDescriptor, name: str, text: str) -> None:
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        setattr(request, field.name, text in ("1", "on", "true"))
    elif field.cpp_type in _NUMBERS:
        try:
            setattr(request, field.name, int(text))
        except ValueError:
            raise Refused(400, "FIELD_INVALID", f"{name} must be a number, and not that large.") from None
    else:
        setattr(request, field.name, text)
