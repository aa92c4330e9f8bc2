"""Convert gRPC statuses and item errors to our exceptions; the counterpart of the server's rpc/status.py."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2

from tmc_client import errors
from tmc_common.enums import name_of
from tmc_common.mismatch import spoken_instead
from tmc_common.protocol import types_pb2
from tmc_common.proxies import by_proxy

_BY_CODE: dict[grpc.StatusCode, type[errors.TmcError]] = {
    grpc.StatusCode.UNAVAILABLE: errors.Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    grpc.StatusCode.CANCELLED: errors.Unavailable,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.InvalidRequest,  # without our details: larger than the server takes
    grpc.StatusCode.UNAUTHENTICATED: errors.NotAuthenticated,
    grpc.StatusCode.PERMISSION_DENIED: errors.NotAuthenticated,
    grpc.StatusCode.NOT_FOUND: errors.NotFound,
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidRequest,
    grpc.StatusCode.FAILED_PRECONDITION: errors.InvalidRequest,
    grpc.StatusCode.ALREADY_EXISTS: errors.InvalidRequest,
    grpc.StatusCode.ABORTED: errors.Unavailable,  # by something at the same time
}


_STATUS = {status.value[0]: status for status in grpc.StatusCode}


def _kind(reason: str, code: grpc.StatusCode | None, retry_after: timedelta) -> type[errors.TmcError]:
    """Choose the class of an error by its reason.

    For a reason that only a newer center knows: by its status, and by whether it says when to repeat.
    """
    if reason in errors.BY_REASON:
        return errors.BY_REASON[reason]
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and retry_after:
        return errors.Overloaded
    return _BY_CODE.get(code, errors.CenterFault) if code is not None else errors.CenterFault


def from_item(item: types_pb2.ItemError) -> errors.TmcError:
    """The error of one item of a batch."""
    reason = name_of(types_pb2.Reason.DESCRIPTOR, item.reason)
    retry_after = timedelta(milliseconds=item.retry_after_ms)
    return _kind(reason, _STATUS.get(item.code), retry_after)(
        item.message,
        reason=reason,
        field=item.field,
        message_id=item.message_id,
        retry_after=retry_after,
    )


def _has_details(exc: Any) -> bool:
    """Return whether the center itself sent this error; without details it came from the transport."""
    return any(name == "grpc-status-details-bin" for name, _ in exc.trailing_metadata() or ())


def is_too_large(exc: Any) -> bool:
    """Return whether the transport rejected the size of the request, which then never reached the center."""
    return exc.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and not _has_details(exc)


def is_late(exc: Any) -> bool:
    """Return whether no answer came within the deadline."""
    return exc.code() is grpc.StatusCode.DEADLINE_EXCEEDED and not _has_details(exc)


def is_unanswered(exc: Any) -> bool:
    """Return whether another server may do better: this one was late, is unreachable, or is shutting down."""
    if not _has_details(exc):
        return exc.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
    return from_rpc(exc).reason == "SHUTTING_DOWN"


def from_rpc(exc: Any) -> errors.TmcError:
    """The error of a whole call."""
    code, text = exc.code(), exc.details() or ""
    for name, value in exc.trailing_metadata() or ():
        if name == "grpc-status-details-bin":
            return _from_details(value, code, text)
    if code is grpc.StatusCode.UNAVAILABLE and (instead := spoken_instead(text)):
        return errors.Unavailable(
            f"What answers at the center's address speaks {instead}: check the address, its port and tls=."
        )
    proxy = by_proxy() if code is grpc.StatusCode.UNAVAILABLE else ""
    return _BY_CODE.get(code, errors.CenterFault)(f"{code.name}: {text}{proxy}")


def _from_details(serialized: bytes, code: grpc.StatusCode, text: str) -> errors.TmcError:
    info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    for detail in status_pb2.Status.FromString(serialized).details:
        for known in (info, bad, retry):
            detail.Unpack(known)  # nothing, if it is of another type
    retry_after = retry.retry_delay.ToTimedelta()
    return _kind(info.reason, code, retry_after)(
        text,
        reason=info.reason,
        field=bad.field_violations[0].field if bad.field_violations else "",
        message_id=info.metadata.get("message_id", ""),
        retry_after=retry_after,
    )
