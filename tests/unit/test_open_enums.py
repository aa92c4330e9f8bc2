"""Numbers and reasons that only a newer center knows: numbers are shown, and reasons are classified by their status."""

from __future__ import annotations

import ast
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

import tmc_client as tmc
from tmc_client.connecting.wire import from_item, from_rpc
from tmc_common.enums import name_of
from tmc_common.protocol import admin_pb2, consumption_pb2, message_pb2, types_pb2

ROOT = Path(__file__).parents[2]
UNKNOWN: Any = 999
ENUMS = [
    pytest.param(enum, id=enum.full_name)
    for module in (admin_pb2, consumption_pb2, message_pb2, types_pb2)
    for enum in module.DESCRIPTOR.enum_types_by_name.values()
]


@pytest.mark.parametrize("enum", ENUMS)
def test_a_number_that_is_not_known_is_shown(enum: Any) -> None:
    assert name_of(enum, UNKNOWN) == "999"
    assert enum.values_by_number[0].name.endswith(name_of(enum, 0))


def test_every_face_asks_for_names_in_this_way() -> None:
    """`Name` of an enum raises ValueError for such a number: one item of a batch then spoils those after it."""
    asked = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for package in ("tmc_client", "tmc_cli", "tmc_console")
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "Name"
    ]
    assert asked == []


UNKNOWN_REASONS = [
    (grpc.StatusCode.RESOURCE_EXHAUSTED, 250, tmc.Overloaded),
    (grpc.StatusCode.RESOURCE_EXHAUSTED, 0, tmc.InvalidRequest),
    (grpc.StatusCode.UNAVAILABLE, 250, tmc.Unavailable),
    (grpc.StatusCode.INVALID_ARGUMENT, 0, tmc.InvalidRequest),
    (grpc.StatusCode.NOT_FOUND, 0, tmc.NotFound),
    (grpc.StatusCode.PERMISSION_DENIED, 0, tmc.NotAuthenticated),
    (grpc.StatusCode.FAILED_PRECONDITION, 0, tmc.InvalidRequest),
    (grpc.StatusCode.ALREADY_EXISTS, 0, tmc.InvalidRequest),
    (grpc.StatusCode.ABORTED, 250, tmc.Unavailable),
    (grpc.StatusCode.INTERNAL, 0, tmc.CenterFault),
]


@pytest.mark.parametrize(("status", "retry_after_ms", "kind"), UNKNOWN_REASONS)
def test_an_item_with_a_reason_that_is_not_known(
    status: grpc.StatusCode, retry_after_ms: int, kind: type[tmc.TmcError]
) -> None:
    number: Any = status.value[0]
    item = types_pb2.ItemError(code=number, reason=UNKNOWN, message="Do this.", retry_after_ms=retry_after_ms)
    error = from_item(item)
    assert (type(error), error.reason, str(error)) == (kind, "999", "Do this.")
    assert error.retry_after == timedelta(milliseconds=retry_after_ms)


class _Refused:
    """As much of a grpc.RpcError as is read."""

    def __init__(self, status: grpc.StatusCode, retry_after_ms: int) -> None:
        details = [error_details_pb2.ErrorInfo(reason="OF_A_NEWER_CENTER", domain="tmc")]
        packed = [any_pb2.Any() for _ in range(2)]
        packed[0].Pack(details[0])
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(retry_after_ms)
        packed[1].Pack(error_details_pb2.RetryInfo(retry_delay=delay))
        self._status = status
        self._details = status_pb2.Status(code=status.value[0], details=packed[: 2 if retry_after_ms else 1])

    def code(self) -> grpc.StatusCode:
        return self._status

    def details(self) -> str:
        return "Do this."

    def trailing_metadata(self) -> list[tuple[str, bytes]]:
        return [("grpc-status-details-bin", self._details.SerializeToString())]


@pytest.mark.parametrize(("status", "retry_after_ms", "kind"), UNKNOWN_REASONS)
def test_a_call_with_a_reason_that_is_not_known(
    status: grpc.StatusCode, retry_after_ms: int, kind: type[tmc.TmcError]
) -> None:
    error = from_rpc(_Refused(status, retry_after_ms))
    assert (type(error), error.reason, str(error)) == (kind, "OF_A_NEWER_CENTER", "Do this.")
    assert error.retry_after == timedelta(milliseconds=retry_after_ms)
