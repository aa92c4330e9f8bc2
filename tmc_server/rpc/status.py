"""One table from our errors to gRPC statuses, with rich details (ErrorInfo, BadRequest, RetryInfo)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

from tmc_common.protocol import types_pb2
from tmc_server import errors

if TYPE_CHECKING:
    from google.protobuf.message import Message

DOMAIN = "transaction-message-center"
CODES: dict[type[errors.TmcError], grpc.StatusCode] = {
    errors.InvalidField: grpc.StatusCode.INVALID_ARGUMENT,
    errors.MalformedRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.CredentialsMissing: grpc.StatusCode.UNAUTHENTICATED,
    errors.CredentialsInvalid: grpc.StatusCode.UNAUTHENTICATED,
    errors.AdminOnly: grpc.StatusCode.UNAUTHENTICATED,
    errors.RoleRequired: grpc.StatusCode.PERMISSION_DENIED,
    errors.TopicNotAllowed: grpc.StatusCode.PERMISSION_DENIED,
    errors.AppDisabled: grpc.StatusCode.PERMISSION_DENIED,
    errors.KeyOfAnotherTag: grpc.StatusCode.PERMISSION_DENIED,
    errors.CertificateOfAnother: grpc.StatusCode.PERMISSION_DENIED,
    errors.TopicUnknown: grpc.StatusCode.NOT_FOUND,
    errors.MessageUnknown: grpc.StatusCode.NOT_FOUND,
    errors.MessageGone: grpc.StatusCode.NOT_FOUND,
    errors.SubscriptionUnknown: grpc.StatusCode.NOT_FOUND,
    errors.AppUnknown: grpc.StatusCode.NOT_FOUND,
    errors.OperatorUnknown: grpc.StatusCode.NOT_FOUND,
    errors.AlertUnknown: grpc.StatusCode.NOT_FOUND,
    errors.BulkJobUnknown: grpc.StatusCode.NOT_FOUND,
    errors.ProposalUnknown: grpc.StatusCode.NOT_FOUND,
    errors.KeyCommitted: grpc.StatusCode.ALREADY_EXISTS,
    errors.ContentDiffers: grpc.StatusCode.ALREADY_EXISTS,
    errors.NameTaken: grpc.StatusCode.ALREADY_EXISTS,
    errors.KeyInProgress: grpc.StatusCode.ABORTED,
    errors.RowLocked: grpc.StatusCode.ABORTED,
    errors.AlreadyCommitted: grpc.StatusCode.FAILED_PRECONDITION,
    errors.AlreadyRolledBack: grpc.StatusCode.FAILED_PRECONDITION,
    errors.CheckRefused: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ForwardRefused: grpc.StatusCode.FAILED_PRECONDITION,
    errors.RotationOpen: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ApprovalRequired: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ProposalClosed: grpc.StatusCode.FAILED_PRECONDITION,
    errors.NotBuiltIn: grpc.StatusCode.FAILED_PRECONDITION,
    errors.DiscoveryUnavailable: grpc.StatusCode.UNAVAILABLE,
    errors.AttemptStale: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ConsumptionClosed: grpc.StatusCode.FAILED_PRECONDITION,
    errors.QueueFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.RateLimited: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.OpenLimit: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.UnackedLimit: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.StoreUnavailable: grpc.StatusCode.UNAVAILABLE,
    errors.CatalogStale: grpc.StatusCode.UNAVAILABLE,
    errors.ShuttingDown: grpc.StatusCode.UNAVAILABLE,
    errors.NoIdentity: grpc.StatusCode.UNAVAILABLE,
    errors.InternalFault: grpc.StatusCode.INTERNAL,
}


def item_error(error: errors.TmcError) -> types_pb2.ItemError:
    """The error of one item of a batch."""
    return types_pb2.ItemError(
        code=CODES[type(error)].value[0],
        reason=error.reason,
        message=error.sentence,
        field=error.field,
        retry_after_ms=error.retry_after_ms,
        message_id=error.message_id,
    )


def trailing(error: errors.TmcError) -> tuple[tuple[str, bytes], ...]:
    """The metadata that carries the rich details of a refused call."""
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)
    if error.message_id:
        info.metadata["message_id"] = error.message_id
    details: list[Message] = [info]
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.sentence)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_ms:
        wait = duration_pb2.Duration()
        wait.FromMilliseconds(error.retry_after_ms)
        details.append(error_details_pb2.RetryInfo(retry_delay=wait))
    status = status_pb2.Status(code=CODES[type(error)].value[0], message=error.sentence)
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return (("grpc-status-details-bin", status.SerializeToString()),)
