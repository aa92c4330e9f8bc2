from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MessageState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MESSAGE_STATE_UNSPECIFIED: _ClassVar[MessageState]
    MESSAGE_STATE_PREPARED: _ClassVar[MessageState]
    MESSAGE_STATE_COMMITTED: _ClassVar[MessageState]
    MESSAGE_STATE_ROLLED_BACK: _ClassVar[MessageState]
    MESSAGE_STATE_CHECK_FAILED: _ClassVar[MessageState]

class ConsumptionState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CONSUMPTION_STATE_UNSPECIFIED: _ClassVar[ConsumptionState]
    CONSUMPTION_STATE_SCHEDULED: _ClassVar[ConsumptionState]
    CONSUMPTION_STATE_ACKED: _ClassVar[ConsumptionState]
    CONSUMPTION_STATE_FAILED: _ClassVar[ConsumptionState]
    CONSUMPTION_STATE_CANCELLED: _ClassVar[ConsumptionState]
    CONSUMPTION_STATE_WAITING: _ClassVar[ConsumptionState]

class Verdict(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VERDICT_UNSPECIFIED: _ClassVar[Verdict]
    VERDICT_COMMIT: _ClassVar[Verdict]
    VERDICT_ROLLBACK: _ClassVar[Verdict]
    VERDICT_UNKNOWN: _ClassVar[Verdict]

class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REASON_UNSPECIFIED: _ClassVar[Reason]
    MALFORMED_REQUEST: _ClassVar[Reason]
    FIELD_INVALID: _ClassVar[Reason]
    CREDENTIALS_MISSING: _ClassVar[Reason]
    CREDENTIALS_INVALID: _ClassVar[Reason]
    ADMIN_ONLY: _ClassVar[Reason]
    TOPIC_UNKNOWN: _ClassVar[Reason]
    MESSAGE_UNKNOWN: _ClassVar[Reason]
    SUBSCRIPTION_UNKNOWN: _ClassVar[Reason]
    APP_UNKNOWN: _ClassVar[Reason]
    KEY_COMMITTED: _ClassVar[Reason]
    CONTENT_DIFFERS: _ClassVar[Reason]
    NAME_TAKEN: _ClassVar[Reason]
    KEY_IN_PROGRESS: _ClassVar[Reason]
    ROW_LOCKED: _ClassVar[Reason]
    ALREADY_COMMITTED: _ClassVar[Reason]
    ALREADY_ROLLED_BACK: _ClassVar[Reason]
    ATTEMPT_STALE: _ClassVar[Reason]
    CONSUMPTION_CLOSED: _ClassVar[Reason]
    QUEUE_FULL: _ClassVar[Reason]
    RATE_LIMITED: _ClassVar[Reason]
    OPEN_LIMIT: _ClassVar[Reason]
    STORE_UNAVAILABLE: _ClassVar[Reason]
    CATALOG_STALE: _ClassVar[Reason]
    SHUTTING_DOWN: _ClassVar[Reason]
    NO_IDENTITY: _ClassVar[Reason]
    INTERNAL_FAULT: _ClassVar[Reason]
    ROTATION_OPEN: _ClassVar[Reason]
    NOT_BUILT_IN: _ClassVar[Reason]
    DISCOVERY_UNAVAILABLE: _ClassVar[Reason]
    CHECK_REFUSED: _ClassVar[Reason]
    MESSAGE_GONE: _ClassVar[Reason]
    FORWARD_REFUSED: _ClassVar[Reason]
    APP_DISABLED: _ClassVar[Reason]
    KEY_OF_ANOTHER_TAG: _ClassVar[Reason]
    CERTIFICATE_OF_ANOTHER: _ClassVar[Reason]
    BULK_JOB_UNKNOWN: _ClassVar[Reason]
    ALERT_UNKNOWN: _ClassVar[Reason]
    ROLE_REQUIRED: _ClassVar[Reason]
    TOPIC_NOT_ALLOWED: _ClassVar[Reason]
    OPERATOR_UNKNOWN: _ClassVar[Reason]
    APPROVAL_REQUIRED: _ClassVar[Reason]
    PROPOSAL_UNKNOWN: _ClassVar[Reason]
    PROPOSAL_CLOSED: _ClassVar[Reason]
    UNACKED_LIMIT: _ClassVar[Reason]

class QueueMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    QUEUE_MODE_UNSPECIFIED: _ClassVar[QueueMode]
    QUEUE_MODE_SINGLE: _ClassVar[QueueMode]
    QUEUE_MODE_MULTI: _ClassVar[QueueMode]

class OrderMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ORDER_MODE_UNSPECIFIED: _ClassVar[OrderMode]
    ORDER_MODE_STRICT: _ClassVar[OrderMode]
    ORDER_MODE_SKIP: _ClassVar[OrderMode]
    ORDER_MODE_OFF: _ClassVar[OrderMode]

class Why(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WHY_UNSPECIFIED: _ClassVar[Why]
    WHY_IN_TRANSACTION: _ClassVar[Why]
    WHY_CHECK_SCHEDULED: _ClassVar[Why]
    WHY_PRODUCER_UNREACHABLE: _ClassVar[Why]
    WHY_PRODUCER_RESTS: _ClassVar[Why]
    WHY_CHECK_BROKEN: _ClassVar[Why]
    WHY_CHECK_FAILED: _ClassVar[Why]
    WHY_ROLLED_BACK: _ClassVar[Why]
    WHY_NO_SUBSCRIBER: _ClassVar[Why]
    WHY_DELAYED: _ClassVar[Why]
    WHY_DUE: _ClassVar[Why]
    WHY_RETRY_SCHEDULED: _ClassVar[Why]
    WHY_AWAITS_ACK: _ClassVar[Why]
    WHY_EXTENDED: _ClassVar[Why]
    WHY_NO_CONSUMER: _ClassVar[Why]
    WHY_BROKER_AWAY: _ClassVar[Why]
    WHY_TOPIC_PAUSED: _ClassVar[Why]
    WHY_SUBSCRIPTION_PAUSED: _ClassVar[Why]
    WHY_BEHIND: _ClassVar[Why]
    WHY_BLOCKED: _ClassVar[Why]
    WHY_TO_BE_RELEASED: _ClassVar[Why]
    WHY_REMOVED: _ClassVar[Why]
    WHY_FAILED: _ClassVar[Why]
    WHY_ACKED: _ClassVar[Why]
    WHY_CANCELLED: _ClassVar[Why]
    WHY_CHECK_TARGET_WRONG: _ClassVar[Why]
    WHY_NO_FORWARDER: _ClassVar[Why]

class RetryKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RETRY_KIND_UNSPECIFIED: _ClassVar[RetryKind]
    RETRY_KIND_LINEAR: _ClassVar[RetryKind]
    RETRY_KIND_EXPONENTIAL: _ClassVar[RetryKind]
MESSAGE_STATE_UNSPECIFIED: MessageState
MESSAGE_STATE_PREPARED: MessageState
MESSAGE_STATE_COMMITTED: MessageState
MESSAGE_STATE_ROLLED_BACK: MessageState
MESSAGE_STATE_CHECK_FAILED: MessageState
CONSUMPTION_STATE_UNSPECIFIED: ConsumptionState
CONSUMPTION_STATE_SCHEDULED: ConsumptionState
CONSUMPTION_STATE_ACKED: ConsumptionState
CONSUMPTION_STATE_FAILED: ConsumptionState
CONSUMPTION_STATE_CANCELLED: ConsumptionState
CONSUMPTION_STATE_WAITING: ConsumptionState
VERDICT_UNSPECIFIED: Verdict
VERDICT_COMMIT: Verdict
VERDICT_ROLLBACK: Verdict
VERDICT_UNKNOWN: Verdict
REASON_UNSPECIFIED: Reason
MALFORMED_REQUEST: Reason
FIELD_INVALID: Reason
CREDENTIALS_MISSING: Reason
CREDENTIALS_INVALID: Reason
ADMIN_ONLY: Reason
TOPIC_UNKNOWN: Reason
MESSAGE_UNKNOWN: Reason
SUBSCRIPTION_UNKNOWN: Reason
APP_UNKNOWN: Reason
KEY_COMMITTED: Reason
CONTENT_DIFFERS: Reason
NAME_TAKEN: Reason
KEY_IN_PROGRESS: Reason
ROW_LOCKED: Reason
ALREADY_COMMITTED: Reason
ALREADY_ROLLED_BACK: Reason
ATTEMPT_STALE: Reason
CONSUMPTION_CLOSED: Reason
QUEUE_FULL: Reason
RATE_LIMITED: Reason
OPEN_LIMIT: Reason
STORE_UNAVAILABLE: Reason
CATALOG_STALE: Reason
SHUTTING_DOWN: Reason
NO_IDENTITY: Reason
INTERNAL_FAULT: Reason
ROTATION_OPEN: Reason
NOT_BUILT_IN: Reason
DISCOVERY_UNAVAILABLE: Reason
CHECK_REFUSED: Reason
MESSAGE_GONE: Reason
FORWARD_REFUSED: Reason
APP_DISABLED: Reason
KEY_OF_ANOTHER_TAG: Reason
CERTIFICATE_OF_ANOTHER: Reason
BULK_JOB_UNKNOWN: Reason
ALERT_UNKNOWN: Reason
ROLE_REQUIRED: Reason
TOPIC_NOT_ALLOWED: Reason
OPERATOR_UNKNOWN: Reason
APPROVAL_REQUIRED: Reason
PROPOSAL_UNKNOWN: Reason
PROPOSAL_CLOSED: Reason
UNACKED_LIMIT: Reason
QUEUE_MODE_UNSPECIFIED: QueueMode
QUEUE_MODE_SINGLE: QueueMode
QUEUE_MODE_MULTI: QueueMode
ORDER_MODE_UNSPECIFIED: OrderMode
ORDER_MODE_STRICT: OrderMode
ORDER_MODE_SKIP: OrderMode
ORDER_MODE_OFF: OrderMode
WHY_UNSPECIFIED: Why
WHY_IN_TRANSACTION: Why
WHY_CHECK_SCHEDULED: Why
WHY_PRODUCER_UNREACHABLE: Why
WHY_PRODUCER_RESTS: Why
WHY_CHECK_BROKEN: Why
WHY_CHECK_FAILED: Why
WHY_ROLLED_BACK: Why
WHY_NO_SUBSCRIBER: Why
WHY_DELAYED: Why
WHY_DUE: Why
WHY_RETRY_SCHEDULED: Why
WHY_AWAITS_ACK: Why
WHY_EXTENDED: Why
WHY_NO_CONSUMER: Why
WHY_BROKER_AWAY: Why
WHY_TOPIC_PAUSED: Why
WHY_SUBSCRIPTION_PAUSED: Why
WHY_BEHIND: Why
WHY_BLOCKED: Why
WHY_TO_BE_RELEASED: Why
WHY_REMOVED: Why
WHY_FAILED: Why
WHY_ACKED: Why
WHY_CANCELLED: Why
WHY_CHECK_TARGET_WRONG: Why
WHY_NO_FORWARDER: Why
RETRY_KIND_UNSPECIFIED: RetryKind
RETRY_KIND_LINEAR: RetryKind
RETRY_KIND_EXPONENTIAL: RetryKind

class ItemError(_message.Message):
    __slots__ = ("code", "reason", "message", "field", "retry_after_ms", "message_id")
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    code: int
    reason: Reason
    message: str
    field: str
    retry_after_ms: int
    message_id: str
    def __init__(self, code: _Optional[int] = ..., reason: _Optional[_Union[Reason, str]] = ..., message: _Optional[str] = ..., field: _Optional[str] = ..., retry_after_ms: _Optional[int] = ..., message_id: _Optional[str] = ...) -> None: ...

class Forward(_message.Message):
    __slots__ = ("kind", "target", "key")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    kind: str
    target: str
    key: str
    def __init__(self, kind: _Optional[str] = ..., target: _Optional[str] = ..., key: _Optional[str] = ...) -> None: ...

class RetryPolicy(_message.Message):
    __slots__ = ("kind", "interval_ms", "max_retry", "cap_ms", "max_age_ms", "jitter_percent")
    KIND_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_RETRY_FIELD_NUMBER: _ClassVar[int]
    CAP_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    JITTER_PERCENT_FIELD_NUMBER: _ClassVar[int]
    kind: RetryKind
    interval_ms: int
    max_retry: int
    cap_ms: int
    max_age_ms: int
    jitter_percent: int
    def __init__(self, kind: _Optional[_Union[RetryKind, str]] = ..., interval_ms: _Optional[int] = ..., max_retry: _Optional[int] = ..., cap_ms: _Optional[int] = ..., max_age_ms: _Optional[int] = ..., jitter_percent: _Optional[int] = ...) -> None: ...
