"""What forms can do: each action is one admin RPC whose request is filled from the fields of the form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor
from starlette.datastructures import FormData

from tmc_console.center import SERVICE, Refused

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
    "pause-topic": Action(method="PauseTopic", done="The topic is paused."),
    "resume-topic": Action(method="ResumeTopic", done="The topic is delivered again."),
    "pause-subscription": Action(method="PauseSubscription", done="The subscription is paused."),
    "resume-subscription": Action(method="ResumeSubscription", done="The subscription is delivered again."),
    "repair-order": Action(method="RepairOrder", shows=True),
    "reactivate": Action(method="ReactivateConsumption", done="The delivery is tried again."),
    "cancel": Action(method="CancelConsumption", done="The delivery is cancelled."),
    "replay": Action(method="ReplayDelivery", done="The message is sent again."),
    "check-now": Action(method="CheckNow", shows=True),
    "reactivate-check": Action(method="ReactivateCheck", done="The message is checked again."),
    "decide": Action(method="DecideMessage", done="The message is decided."),
    "stop-bulk": Action(method="StopBulkJob", done="The job begins nothing new."),
    "drain": Action(method="DrainServer", done="The server gives its shards away."),
    "undrain": Action(method="UndrainServer", done="The server takes part again."),
    "acknowledge": Action(method="AcknowledgeAlert", done="The alert is acknowledged."),
    "silence": Action(method="SilenceAlerts", done="The alerts are silenced."),
    "end-silence": Action(method="EndSilence", done="The silence has ended."),
    "update-topic": Action(method="UpdateTopic", role=ADMIN, done="The topic is changed."),
    "subscribe": Action(method="RegisterSubscription", role=ADMIN, done="The app is subscribed."),
    "unsubscribe": Action(method="RemoveSubscription", role=ADMIN, done="The subscription is removed."),
    "rotate-delivery-key": Action(method="RotateDeliveryKey", role=ADMIN, shows=True),
    "add-app-key": Action(method="AddAppKey", role=ADMIN, shows=True),
    "drop-old-app-key": Action(method="DropOldAppKey", role=ADMIN, done="The old key is refused."),
    "rotate-check-token": Action(method="RotateCheckToken", role=ADMIN, done="Checks show another token."),
    "disable-app": Action(method="DisableApp", role=ADMIN, done="The app's calls are refused."),
    "enable-app": Action(method="EnableApp", role=ADMIN, done="The app's calls are accepted."),
    "register-app": Action(method="RegisterApp", role=ADMIN, shows=True),
    "register-topic": Action(method="RegisterTopic", role=ADMIN, done="The topic is registered."),
    "register-operator": Action(method="RegisterOperator", role=ADMIN, shows=True),
    "rotate-operator-token": Action(method="RotateOperatorToken", role=VIEWER, shows=True),
    "remove-operator": Action(method="RemoveOperator", role=ADMIN, done="The operator's tokens are refused."),
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
        elif not values:
            continue
        elif field.is_repeated:
            getattr(request, field.name).extend(each for value in values for each in value.split())
        else:
            _set(request, field, name, values[-1])


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
