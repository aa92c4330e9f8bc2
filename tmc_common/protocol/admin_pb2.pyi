from google.protobuf import field_mask_pb2 as _field_mask_pb2
from tmc_common.protocol import message_pb2 as _message_pb2
from tmc_common.protocol import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EventKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EVENT_KIND_UNSPECIFIED: _ClassVar[EventKind]
    EVENT_KIND_PREPARED: _ClassVar[EventKind]
    EVENT_KIND_CHECKED: _ClassVar[EventKind]
    EVENT_KIND_OPERATOR: _ClassVar[EventKind]
    EVENT_KIND_DECIDED: _ClassVar[EventKind]
    EVENT_KIND_HANDED_OVER: _ClassVar[EventKind]
    EVENT_KIND_ATTEMPT_FAILED: _ClassVar[EventKind]
    EVENT_KIND_UNANSWERED: _ClassVar[EventKind]
    EVENT_KIND_CLOSED: _ClassVar[EventKind]
    EVENT_KIND_ALERT: _ClassVar[EventKind]

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_VIEWER: _ClassVar[Role]
    ROLE_OPERATOR: _ClassVar[Role]
    ROLE_ADMIN: _ClassVar[Role]

class BulkAction(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BULK_ACTION_UNSPECIFIED: _ClassVar[BulkAction]
    BULK_ACTION_REACTIVATE: _ClassVar[BulkAction]
    BULK_ACTION_CANCEL: _ClassVar[BulkAction]
    BULK_ACTION_REPLAY: _ClassVar[BulkAction]
    BULK_ACTION_DELIVER_NOW: _ClassVar[BulkAction]

class BulkState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BULK_STATE_UNSPECIFIED: _ClassVar[BulkState]
    BULK_STATE_HELD: _ClassVar[BulkState]
    BULK_STATE_RUNNING: _ClassVar[BulkState]
    BULK_STATE_FINISHED: _ClassVar[BulkState]
    BULK_STATE_STOPPED: _ClassVar[BulkState]

class BulkOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BULK_OUTCOME_UNSPECIFIED: _ClassVar[BulkOutcome]
    BULK_OUTCOME_DONE: _ClassVar[BulkOutcome]
    BULK_OUTCOME_UNCHANGED: _ClassVar[BulkOutcome]
    BULK_OUTCOME_REFUSED: _ClassVar[BulkOutcome]

class MoveStep(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MOVE_STEP_UNSPECIFIED: _ClassVar[MoveStep]
    MOVE_STEP_UNDOING: _ClassVar[MoveStep]
    MOVE_STEP_COPYING: _ClassVar[MoveStep]
    MOVE_STEP_FOLLOWING: _ClassVar[MoveStep]
    MOVE_STEP_FROZEN: _ClassVar[MoveStep]
    MOVE_STEP_MOVED: _ClassVar[MoveStep]

class ProposalState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PROPOSAL_STATE_UNSPECIFIED: _ClassVar[ProposalState]
    PROPOSAL_STATE_PENDING: _ClassVar[ProposalState]
    PROPOSAL_STATE_APPROVED: _ClassVar[ProposalState]
    PROPOSAL_STATE_REJECTED: _ClassVar[ProposalState]
    PROPOSAL_STATE_EXPIRED: _ClassVar[ProposalState]
EVENT_KIND_UNSPECIFIED: EventKind
EVENT_KIND_PREPARED: EventKind
EVENT_KIND_CHECKED: EventKind
EVENT_KIND_OPERATOR: EventKind
EVENT_KIND_DECIDED: EventKind
EVENT_KIND_HANDED_OVER: EventKind
EVENT_KIND_ATTEMPT_FAILED: EventKind
EVENT_KIND_UNANSWERED: EventKind
EVENT_KIND_CLOSED: EventKind
EVENT_KIND_ALERT: EventKind
ROLE_UNSPECIFIED: Role
ROLE_VIEWER: Role
ROLE_OPERATOR: Role
ROLE_ADMIN: Role
BULK_ACTION_UNSPECIFIED: BulkAction
BULK_ACTION_REACTIVATE: BulkAction
BULK_ACTION_CANCEL: BulkAction
BULK_ACTION_REPLAY: BulkAction
BULK_ACTION_DELIVER_NOW: BulkAction
BULK_STATE_UNSPECIFIED: BulkState
BULK_STATE_HELD: BulkState
BULK_STATE_RUNNING: BulkState
BULK_STATE_FINISHED: BulkState
BULK_STATE_STOPPED: BulkState
BULK_OUTCOME_UNSPECIFIED: BulkOutcome
BULK_OUTCOME_DONE: BulkOutcome
BULK_OUTCOME_UNCHANGED: BulkOutcome
BULK_OUTCOME_REFUSED: BulkOutcome
MOVE_STEP_UNSPECIFIED: MoveStep
MOVE_STEP_UNDOING: MoveStep
MOVE_STEP_COPYING: MoveStep
MOVE_STEP_FOLLOWING: MoveStep
MOVE_STEP_FROZEN: MoveStep
MOVE_STEP_MOVED: MoveStep
PROPOSAL_STATE_UNSPECIFIED: ProposalState
PROPOSAL_STATE_PENDING: ProposalState
PROPOSAL_STATE_APPROVED: ProposalState
PROPOSAL_STATE_REJECTED: ProposalState
PROPOSAL_STATE_EXPIRED: ProposalState

class App(_message.Message):
    __slots__ = ("id", "number", "service_name", "biz_id", "alert_email", "alert_phone", "keys", "disabled", "tag_keys", "submit_queues")
    ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SERVICE_NAME_FIELD_NUMBER: _ClassVar[int]
    BIZ_ID_FIELD_NUMBER: _ClassVar[int]
    ALERT_EMAIL_FIELD_NUMBER: _ClassVar[int]
    ALERT_PHONE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    DISABLED_FIELD_NUMBER: _ClassVar[int]
    TAG_KEYS_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_QUEUES_FIELD_NUMBER: _ClassVar[int]
    id: str
    number: int
    service_name: str
    biz_id: str
    alert_email: str
    alert_phone: str
    keys: int
    disabled: bool
    tag_keys: _containers.RepeatedCompositeFieldContainer[TagKeys]
    submit_queues: _containers.RepeatedCompositeFieldContainer[SubmitQueue]
    def __init__(self, id: _Optional[str] = ..., number: _Optional[int] = ..., service_name: _Optional[str] = ..., biz_id: _Optional[str] = ..., alert_email: _Optional[str] = ..., alert_phone: _Optional[str] = ..., keys: _Optional[int] = ..., disabled: bool = ..., tag_keys: _Optional[_Iterable[_Union[TagKeys, _Mapping]]] = ..., submit_queues: _Optional[_Iterable[_Union[SubmitQueue, _Mapping]]] = ...) -> None: ...

class SubmitQueue(_message.Message):
    __slots__ = ("tag", "queue", "secrets")
    TAG_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    SECRETS_FIELD_NUMBER: _ClassVar[int]
    tag: str
    queue: str
    secrets: int
    def __init__(self, tag: _Optional[str] = ..., queue: _Optional[str] = ..., secrets: _Optional[int] = ...) -> None: ...

class TagKeys(_message.Message):
    __slots__ = ("tag", "keys")
    TAG_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    tag: str
    keys: int
    def __init__(self, tag: _Optional[str] = ..., keys: _Optional[int] = ...) -> None: ...

class RegisterAppRequest(_message.Message):
    __slots__ = ("id", "service_name", "biz_id", "alert_email", "alert_phone")
    ID_FIELD_NUMBER: _ClassVar[int]
    SERVICE_NAME_FIELD_NUMBER: _ClassVar[int]
    BIZ_ID_FIELD_NUMBER: _ClassVar[int]
    ALERT_EMAIL_FIELD_NUMBER: _ClassVar[int]
    ALERT_PHONE_FIELD_NUMBER: _ClassVar[int]
    id: str
    service_name: str
    biz_id: str
    alert_email: str
    alert_phone: str
    def __init__(self, id: _Optional[str] = ..., service_name: _Optional[str] = ..., biz_id: _Optional[str] = ..., alert_email: _Optional[str] = ..., alert_phone: _Optional[str] = ...) -> None: ...

class RegisterAppResponse(_message.Message):
    __slots__ = ("app", "key", "effective_ms")
    APP_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    EFFECTIVE_MS_FIELD_NUMBER: _ClassVar[int]
    app: App
    key: str
    effective_ms: int
    def __init__(self, app: _Optional[_Union[App, _Mapping]] = ..., key: _Optional[str] = ..., effective_ms: _Optional[int] = ...) -> None: ...

class AddAppKeyRequest(_message.Message):
    __slots__ = ("id", "replace_newest", "tag")
    ID_FIELD_NUMBER: _ClassVar[int]
    REPLACE_NEWEST_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    id: str
    replace_newest: bool
    tag: str
    def __init__(self, id: _Optional[str] = ..., replace_newest: bool = ..., tag: _Optional[str] = ...) -> None: ...

class AddAppKeyResponse(_message.Message):
    __slots__ = ("key", "effective_ms")
    KEY_FIELD_NUMBER: _ClassVar[int]
    EFFECTIVE_MS_FIELD_NUMBER: _ClassVar[int]
    key: str
    effective_ms: int
    def __init__(self, key: _Optional[str] = ..., effective_ms: _Optional[int] = ...) -> None: ...

class DropOldAppKeyRequest(_message.Message):
    __slots__ = ("id", "tag", "drop_newest")
    ID_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    DROP_NEWEST_FIELD_NUMBER: _ClassVar[int]
    id: str
    tag: str
    drop_newest: bool
    def __init__(self, id: _Optional[str] = ..., tag: _Optional[str] = ..., drop_newest: bool = ...) -> None: ...

class DropOldAppKeyResponse(_message.Message):
    __slots__ = ("effective_ms",)
    EFFECTIVE_MS_FIELD_NUMBER: _ClassVar[int]
    effective_ms: int
    def __init__(self, effective_ms: _Optional[int] = ...) -> None: ...

class RotateCheckTokenRequest(_message.Message):
    __slots__ = ("id", "reason")
    ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    id: str
    reason: str
    def __init__(self, id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class RotateCheckTokenResponse(_message.Message):
    __slots__ = ("effective_ms",)
    EFFECTIVE_MS_FIELD_NUMBER: _ClassVar[int]
    effective_ms: int
    def __init__(self, effective_ms: _Optional[int] = ...) -> None: ...

class OpenSubmitQueueRequest(_message.Message):
    __slots__ = ("id", "tag", "unsigned", "replace_newest")
    ID_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    UNSIGNED_FIELD_NUMBER: _ClassVar[int]
    REPLACE_NEWEST_FIELD_NUMBER: _ClassVar[int]
    id: str
    tag: str
    unsigned: bool
    replace_newest: bool
    def __init__(self, id: _Optional[str] = ..., tag: _Optional[str] = ..., unsigned: bool = ..., replace_newest: bool = ...) -> None: ...

class OpenSubmitQueueResponse(_message.Message):
    __slots__ = ("queue", "secret", "effective_ms")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    EFFECTIVE_MS_FIELD_NUMBER: _ClassVar[int]
    queue: SubmitQueue
    secret: str
    effective_ms: int
    def __init__(self, queue: _Optional[_Union[SubmitQueue, _Mapping]] = ..., secret: _Optional[str] = ..., effective_ms: _Optional[int] = ...) -> None: ...

class DropOldSubmitSecretRequest(_message.Message):
    __slots__ = ("id", "tag")
    ID_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    id: str
    tag: str
    def __init__(self, id: _Optional[str] = ..., tag: _Optional[str] = ...) -> None: ...

class DropOldSubmitSecretResponse(_message.Message):
    __slots__ = ("effective_ms",)
    EFFECTIVE_MS_FIELD_NUMBER: _ClassVar[int]
    effective_ms: int
    def __init__(self, effective_ms: _Optional[int] = ...) -> None: ...

class CloseSubmitQueueRequest(_message.Message):
    __slots__ = ("id", "tag", "reason")
    ID_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    id: str
    tag: str
    reason: str
    def __init__(self, id: _Optional[str] = ..., tag: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class CloseSubmitQueueResponse(_message.Message):
    __slots__ = ("effective_ms",)
    EFFECTIVE_MS_FIELD_NUMBER: _ClassVar[int]
    effective_ms: int
    def __init__(self, effective_ms: _Optional[int] = ...) -> None: ...

class DisableAppRequest(_message.Message):
    __slots__ = ("id", "reason")
    ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    id: str
    reason: str
    def __init__(self, id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class DisableAppResponse(_message.Message):
    __slots__ = ("effective_ms",)
    EFFECTIVE_MS_FIELD_NUMBER: _ClassVar[int]
    effective_ms: int
    def __init__(self, effective_ms: _Optional[int] = ...) -> None: ...

class EnableAppRequest(_message.Message):
    __slots__ = ("id", "reason")
    ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    id: str
    reason: str
    def __init__(self, id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class EnableAppResponse(_message.Message):
    __slots__ = ("effective_ms",)
    EFFECTIVE_MS_FIELD_NUMBER: _ClassVar[int]
    effective_ms: int
    def __init__(self, effective_ms: _Optional[int] = ...) -> None: ...

class ListAppsRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListAppsResponse(_message.Message):
    __slots__ = ("apps", "next_page_token")
    APPS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    apps: _containers.RepeatedCompositeFieldContainer[App]
    next_page_token: str
    def __init__(self, apps: _Optional[_Iterable[_Union[App, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class Topic(_message.Message):
    __slots__ = ("name", "number", "owner", "default_tag", "table_index", "spread", "transaction_time_ms", "open_limit", "effective_ms", "queue_mode", "unsigned_copies", "ordered", "paused", "unacked_limit")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_TAG_FIELD_NUMBER: _ClassVar[int]
    TABLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    SPREAD_FIELD_NUMBER: _ClassVar[int]
    TRANSACTION_TIME_MS_FIELD_NUMBER: _ClassVar[int]
    OPEN_LIMIT_FIELD_NUMBER: _ClassVar[int]
    EFFECTIVE_MS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MODE_FIELD_NUMBER: _ClassVar[int]
    UNSIGNED_COPIES_FIELD_NUMBER: _ClassVar[int]
    ORDERED_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    UNACKED_LIMIT_FIELD_NUMBER: _ClassVar[int]
    name: str
    number: int
    owner: str
    default_tag: str
    table_index: int
    spread: int
    transaction_time_ms: int
    open_limit: int
    effective_ms: int
    queue_mode: _types_pb2.QueueMode
    unsigned_copies: bool
    ordered: bool
    paused: bool
    unacked_limit: int
    def __init__(self, name: _Optional[str] = ..., number: _Optional[int] = ..., owner: _Optional[str] = ..., default_tag: _Optional[str] = ..., table_index: _Optional[int] = ..., spread: _Optional[int] = ..., transaction_time_ms: _Optional[int] = ..., open_limit: _Optional[int] = ..., effective_ms: _Optional[int] = ..., queue_mode: _Optional[_Union[_types_pb2.QueueMode, str]] = ..., unsigned_copies: bool = ..., ordered: bool = ..., paused: bool = ..., unacked_limit: _Optional[int] = ...) -> None: ...

class RegisterTopicRequest(_message.Message):
    __slots__ = ("name", "owner", "default_tag", "table_index", "spread", "transaction_time_ms", "open_limit", "queue_mode", "unsigned_copies", "ordered", "unacked_limit")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_TAG_FIELD_NUMBER: _ClassVar[int]
    TABLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    SPREAD_FIELD_NUMBER: _ClassVar[int]
    TRANSACTION_TIME_MS_FIELD_NUMBER: _ClassVar[int]
    OPEN_LIMIT_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MODE_FIELD_NUMBER: _ClassVar[int]
    UNSIGNED_COPIES_FIELD_NUMBER: _ClassVar[int]
    ORDERED_FIELD_NUMBER: _ClassVar[int]
    UNACKED_LIMIT_FIELD_NUMBER: _ClassVar[int]
    name: str
    owner: str
    default_tag: str
    table_index: int
    spread: int
    transaction_time_ms: int
    open_limit: int
    queue_mode: _types_pb2.QueueMode
    unsigned_copies: bool
    ordered: bool
    unacked_limit: int
    def __init__(self, name: _Optional[str] = ..., owner: _Optional[str] = ..., default_tag: _Optional[str] = ..., table_index: _Optional[int] = ..., spread: _Optional[int] = ..., transaction_time_ms: _Optional[int] = ..., open_limit: _Optional[int] = ..., queue_mode: _Optional[_Union[_types_pb2.QueueMode, str]] = ..., unsigned_copies: bool = ..., ordered: bool = ..., unacked_limit: _Optional[int] = ...) -> None: ...

class UpdateTopicRequest(_message.Message):
    __slots__ = ("name", "transaction_time_ms", "open_limit", "unacked_limit")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TRANSACTION_TIME_MS_FIELD_NUMBER: _ClassVar[int]
    OPEN_LIMIT_FIELD_NUMBER: _ClassVar[int]
    UNACKED_LIMIT_FIELD_NUMBER: _ClassVar[int]
    name: str
    transaction_time_ms: int
    open_limit: int
    unacked_limit: int
    def __init__(self, name: _Optional[str] = ..., transaction_time_ms: _Optional[int] = ..., open_limit: _Optional[int] = ..., unacked_limit: _Optional[int] = ...) -> None: ...

class ListTopicsRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListTopicsResponse(_message.Message):
    __slots__ = ("topics", "next_page_token")
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    topics: _containers.RepeatedCompositeFieldContainer[Topic]
    next_page_token: str
    def __init__(self, topics: _Optional[_Iterable[_Union[Topic, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class Subscription(_message.Message):
    __slots__ = ("number", "topic", "app", "tag", "retry", "effective_ms", "removed_ms", "forward", "queue", "order", "paused")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    APP_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    RETRY_FIELD_NUMBER: _ClassVar[int]
    EFFECTIVE_MS_FIELD_NUMBER: _ClassVar[int]
    REMOVED_MS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    number: int
    topic: str
    app: str
    tag: str
    retry: _types_pb2.RetryPolicy
    effective_ms: int
    removed_ms: int
    forward: _types_pb2.Forward
    queue: str
    order: _types_pb2.OrderMode
    paused: bool
    def __init__(self, number: _Optional[int] = ..., topic: _Optional[str] = ..., app: _Optional[str] = ..., tag: _Optional[str] = ..., retry: _Optional[_Union[_types_pb2.RetryPolicy, _Mapping]] = ..., effective_ms: _Optional[int] = ..., removed_ms: _Optional[int] = ..., forward: _Optional[_Union[_types_pb2.Forward, _Mapping]] = ..., queue: _Optional[str] = ..., order: _Optional[_Union[_types_pb2.OrderMode, str]] = ..., paused: bool = ...) -> None: ...

class RegisterSubscriptionRequest(_message.Message):
    __slots__ = ("topic", "app", "tag", "retry", "forward", "update_mask", "untried", "order")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    APP_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    RETRY_FIELD_NUMBER: _ClassVar[int]
    FORWARD_FIELD_NUMBER: _ClassVar[int]
    UPDATE_MASK_FIELD_NUMBER: _ClassVar[int]
    UNTRIED_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    topic: str
    app: str
    tag: str
    retry: _types_pb2.RetryPolicy
    forward: _types_pb2.Forward
    update_mask: _field_mask_pb2.FieldMask
    untried: bool
    order: _types_pb2.OrderMode
    def __init__(self, topic: _Optional[str] = ..., app: _Optional[str] = ..., tag: _Optional[str] = ..., retry: _Optional[_Union[_types_pb2.RetryPolicy, _Mapping]] = ..., forward: _Optional[_Union[_types_pb2.Forward, _Mapping]] = ..., update_mask: _Optional[_Union[_field_mask_pb2.FieldMask, _Mapping]] = ..., untried: bool = ..., order: _Optional[_Union[_types_pb2.OrderMode, str]] = ...) -> None: ...

class RemoveSubscriptionRequest(_message.Message):
    __slots__ = ("topic", "app", "tag")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    APP_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    topic: str
    app: str
    tag: str
    def __init__(self, topic: _Optional[str] = ..., app: _Optional[str] = ..., tag: _Optional[str] = ...) -> None: ...

class ListSubscriptionsRequest(_message.Message):
    __slots__ = ("topic", "page_size", "page_token")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    topic: str
    page_size: int
    page_token: str
    def __init__(self, topic: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListSubscriptionsResponse(_message.Message):
    __slots__ = ("subscriptions", "next_page_token")
    SUBSCRIPTIONS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    subscriptions: _containers.RepeatedCompositeFieldContainer[Subscription]
    next_page_token: str
    def __init__(self, subscriptions: _Optional[_Iterable[_Union[Subscription, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class GetDeliveryKeysRequest(_message.Message):
    __slots__ = ("topic", "app", "tag")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    APP_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    topic: str
    app: str
    tag: str
    def __init__(self, topic: _Optional[str] = ..., app: _Optional[str] = ..., tag: _Optional[str] = ...) -> None: ...

class RotateDeliveryKeyRequest(_message.Message):
    __slots__ = ("topic", "app", "tag", "drop_previous")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    APP_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    DROP_PREVIOUS_FIELD_NUMBER: _ClassVar[int]
    topic: str
    app: str
    tag: str
    drop_previous: bool
    def __init__(self, topic: _Optional[str] = ..., app: _Optional[str] = ..., tag: _Optional[str] = ..., drop_previous: bool = ...) -> None: ...

class DeliveryKeys(_message.Message):
    __slots__ = ("key", "previous")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_FIELD_NUMBER: _ClassVar[int]
    key: str
    previous: str
    def __init__(self, key: _Optional[str] = ..., previous: _Optional[str] = ...) -> None: ...

class GetMessageDetailRequest(_message.Message):
    __slots__ = ("message_id", "topic", "key", "without_body")
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_BODY_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    topic: str
    key: str
    without_body: bool
    def __init__(self, message_id: _Optional[str] = ..., topic: _Optional[str] = ..., key: _Optional[str] = ..., without_body: bool = ...) -> None: ...

class MessageDetail(_message.Message):
    __slots__ = ("message", "consumptions", "failed_attempts", "check", "body_withheld")
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    CONSUMPTIONS_FIELD_NUMBER: _ClassVar[int]
    FAILED_ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    CHECK_FIELD_NUMBER: _ClassVar[int]
    BODY_WITHHELD_FIELD_NUMBER: _ClassVar[int]
    message: _message_pb2.Message
    consumptions: _containers.RepeatedCompositeFieldContainer[Consumption]
    failed_attempts: _containers.RepeatedCompositeFieldContainer[FailedAttempt]
    check: CheckProgress
    body_withheld: bool
    def __init__(self, message: _Optional[_Union[_message_pb2.Message, _Mapping]] = ..., consumptions: _Optional[_Iterable[_Union[Consumption, _Mapping]]] = ..., failed_attempts: _Optional[_Iterable[_Union[FailedAttempt, _Mapping]]] = ..., check: _Optional[_Union[CheckProgress, _Mapping]] = ..., body_withheld: bool = ...) -> None: ...

class CheckProgress(_message.Message):
    __slots__ = ("attempt", "checked", "due_ms", "unreached_ms", "target", "last_answer")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CHECKED_FIELD_NUMBER: _ClassVar[int]
    DUE_MS_FIELD_NUMBER: _ClassVar[int]
    UNREACHED_MS_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    LAST_ANSWER_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    checked: int
    due_ms: int
    unreached_ms: int
    target: str
    last_answer: str
    def __init__(self, attempt: _Optional[int] = ..., checked: _Optional[int] = ..., due_ms: _Optional[int] = ..., unreached_ms: _Optional[int] = ..., target: _Optional[str] = ..., last_answer: _Optional[str] = ...) -> None: ...

class CheckTarget(_message.Message):
    __slots__ = ("name", "kind", "address", "options", "deadline_ms", "concurrency", "batch", "tls")
    class OptionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    CONCURRENCY_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    TLS_FIELD_NUMBER: _ClassVar[int]
    name: str
    kind: str
    address: str
    options: _containers.ScalarMap[str, str]
    deadline_ms: int
    concurrency: int
    batch: int
    tls: bool
    def __init__(self, name: _Optional[str] = ..., kind: _Optional[str] = ..., address: _Optional[str] = ..., options: _Optional[_Mapping[str, str]] = ..., deadline_ms: _Optional[int] = ..., concurrency: _Optional[int] = ..., batch: _Optional[int] = ..., tls: bool = ...) -> None: ...

class SetTopicCheckRequest(_message.Message):
    __slots__ = ("topic", "targets", "retry", "untried", "update_mask", "removed_targets")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    RETRY_FIELD_NUMBER: _ClassVar[int]
    UNTRIED_FIELD_NUMBER: _ClassVar[int]
    UPDATE_MASK_FIELD_NUMBER: _ClassVar[int]
    REMOVED_TARGETS_FIELD_NUMBER: _ClassVar[int]
    topic: str
    targets: _containers.RepeatedCompositeFieldContainer[CheckTarget]
    retry: _types_pb2.RetryPolicy
    untried: bool
    update_mask: _field_mask_pb2.FieldMask
    removed_targets: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, topic: _Optional[str] = ..., targets: _Optional[_Iterable[_Union[CheckTarget, _Mapping]]] = ..., retry: _Optional[_Union[_types_pb2.RetryPolicy, _Mapping]] = ..., untried: bool = ..., update_mask: _Optional[_Union[_field_mask_pb2.FieldMask, _Mapping]] = ..., removed_targets: _Optional[_Iterable[str]] = ...) -> None: ...

class GetTopicCheckRequest(_message.Message):
    __slots__ = ("topic",)
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    topic: str
    def __init__(self, topic: _Optional[str] = ...) -> None: ...

class TopicCheck(_message.Message):
    __slots__ = ("topic", "targets", "retry", "effective_ms")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    RETRY_FIELD_NUMBER: _ClassVar[int]
    EFFECTIVE_MS_FIELD_NUMBER: _ClassVar[int]
    topic: str
    targets: _containers.RepeatedCompositeFieldContainer[CheckTarget]
    retry: _types_pb2.RetryPolicy
    effective_ms: int
    def __init__(self, topic: _Optional[str] = ..., targets: _Optional[_Iterable[_Union[CheckTarget, _Mapping]]] = ..., retry: _Optional[_Union[_types_pb2.RetryPolicy, _Mapping]] = ..., effective_ms: _Optional[int] = ...) -> None: ...

class CheckNowRequest(_message.Message):
    __slots__ = ("message_id",)
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    def __init__(self, message_id: _Optional[str] = ...) -> None: ...

class CheckNowResponse(_message.Message):
    __slots__ = ("target", "request", "answer", "verdict", "reason", "elapsed_ms", "state")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_MS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    target: str
    request: str
    answer: str
    verdict: _types_pb2.Verdict
    reason: str
    elapsed_ms: int
    state: _types_pb2.MessageState
    def __init__(self, target: _Optional[str] = ..., request: _Optional[str] = ..., answer: _Optional[str] = ..., verdict: _Optional[_Union[_types_pb2.Verdict, str]] = ..., reason: _Optional[str] = ..., elapsed_ms: _Optional[int] = ..., state: _Optional[_Union[_types_pb2.MessageState, str]] = ...) -> None: ...

class ReactivateCheckRequest(_message.Message):
    __slots__ = ("message_id", "reason")
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    reason: str
    def __init__(self, message_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class ReactivateChecksRequest(_message.Message):
    __slots__ = ("topic", "from_ms", "to_ms", "limit", "dry_run", "reason")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    FROM_MS_FIELD_NUMBER: _ClassVar[int]
    TO_MS_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    topic: str
    from_ms: int
    to_ms: int
    limit: int
    dry_run: bool
    reason: str
    def __init__(self, topic: _Optional[str] = ..., from_ms: _Optional[int] = ..., to_ms: _Optional[int] = ..., limit: _Optional[int] = ..., dry_run: bool = ..., reason: _Optional[str] = ...) -> None: ...

class ReactivateChecksResponse(_message.Message):
    __slots__ = ("matched", "more")
    MATCHED_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    matched: int
    more: bool
    def __init__(self, matched: _Optional[int] = ..., more: bool = ...) -> None: ...

class DecideMessageRequest(_message.Message):
    __slots__ = ("message_id", "verdict", "reason")
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    verdict: _types_pb2.Verdict
    reason: str
    def __init__(self, message_id: _Optional[str] = ..., verdict: _Optional[_Union[_types_pb2.Verdict, str]] = ..., reason: _Optional[str] = ...) -> None: ...

class Consumption(_message.Message):
    __slots__ = ("message_id", "topic", "app", "tag", "state", "attempt", "tried", "due_ms", "created_ms", "closed_ms", "sequence", "waits_for", "extended", "key", "last_error", "fingerprint")
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    APP_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TRIED_FIELD_NUMBER: _ClassVar[int]
    DUE_MS_FIELD_NUMBER: _ClassVar[int]
    CREATED_MS_FIELD_NUMBER: _ClassVar[int]
    CLOSED_MS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    EXTENDED_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    LAST_ERROR_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    topic: str
    app: str
    tag: str
    state: _types_pb2.ConsumptionState
    attempt: int
    tried: int
    due_ms: int
    created_ms: int
    closed_ms: int
    sequence: int
    waits_for: str
    extended: int
    key: str
    last_error: str
    fingerprint: str
    def __init__(self, message_id: _Optional[str] = ..., topic: _Optional[str] = ..., app: _Optional[str] = ..., tag: _Optional[str] = ..., state: _Optional[_Union[_types_pb2.ConsumptionState, str]] = ..., attempt: _Optional[int] = ..., tried: _Optional[int] = ..., due_ms: _Optional[int] = ..., created_ms: _Optional[int] = ..., closed_ms: _Optional[int] = ..., sequence: _Optional[int] = ..., waits_for: _Optional[str] = ..., extended: _Optional[int] = ..., key: _Optional[str] = ..., last_error: _Optional[str] = ..., fingerprint: _Optional[str] = ...) -> None: ...

class GetOverviewRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetOverviewResponse(_message.Message):
    __slots__ = ("now_ms", "topics")
    NOW_MS_FIELD_NUMBER: _ClassVar[int]
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    now_ms: int
    topics: _containers.RepeatedCompositeFieldContainer[TopicOverview]
    def __init__(self, now_ms: _Optional[int] = ..., topics: _Optional[_Iterable[_Union[TopicOverview, _Mapping]]] = ...) -> None: ...

class TopicOverview(_message.Message):
    __slots__ = ("topic", "paused", "prepared", "undecided", "check_failed", "oldest_undecided_ms", "oldest_check_failed_ms", "subscriptions", "submitted_per_s")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    PREPARED_FIELD_NUMBER: _ClassVar[int]
    UNDECIDED_FIELD_NUMBER: _ClassVar[int]
    CHECK_FAILED_FIELD_NUMBER: _ClassVar[int]
    OLDEST_UNDECIDED_MS_FIELD_NUMBER: _ClassVar[int]
    OLDEST_CHECK_FAILED_MS_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTIONS_FIELD_NUMBER: _ClassVar[int]
    SUBMITTED_PER_S_FIELD_NUMBER: _ClassVar[int]
    topic: str
    paused: bool
    prepared: int
    undecided: int
    check_failed: int
    oldest_undecided_ms: int
    oldest_check_failed_ms: int
    subscriptions: _containers.RepeatedCompositeFieldContainer[SubscriptionOverview]
    submitted_per_s: float
    def __init__(self, topic: _Optional[str] = ..., paused: bool = ..., prepared: _Optional[int] = ..., undecided: _Optional[int] = ..., check_failed: _Optional[int] = ..., oldest_undecided_ms: _Optional[int] = ..., oldest_check_failed_ms: _Optional[int] = ..., subscriptions: _Optional[_Iterable[_Union[SubscriptionOverview, _Mapping]]] = ..., submitted_per_s: _Optional[float] = ...) -> None: ...

class SubscriptionOverview(_message.Message):
    __slots__ = ("app", "tag", "paused", "scheduled", "backlog", "waiting", "failed", "oldest_backlog_ms", "oldest_failed_ms", "removed", "acked_per_s")
    APP_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    SCHEDULED_FIELD_NUMBER: _ClassVar[int]
    BACKLOG_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    OLDEST_BACKLOG_MS_FIELD_NUMBER: _ClassVar[int]
    OLDEST_FAILED_MS_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    ACKED_PER_S_FIELD_NUMBER: _ClassVar[int]
    app: str
    tag: str
    paused: bool
    scheduled: int
    backlog: int
    waiting: int
    failed: int
    oldest_backlog_ms: int
    oldest_failed_ms: int
    removed: bool
    acked_per_s: float
    def __init__(self, app: _Optional[str] = ..., tag: _Optional[str] = ..., paused: bool = ..., scheduled: _Optional[int] = ..., backlog: _Optional[int] = ..., waiting: _Optional[int] = ..., failed: _Optional[int] = ..., oldest_backlog_ms: _Optional[int] = ..., oldest_failed_ms: _Optional[int] = ..., removed: bool = ..., acked_per_s: _Optional[float] = ...) -> None: ...

class ExplainMessageRequest(_message.Message):
    __slots__ = ("message_id", "topic", "key")
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    topic: str
    key: str
    def __init__(self, message_id: _Optional[str] = ..., topic: _Optional[str] = ..., key: _Optional[str] = ...) -> None: ...

class Explanation(_message.Message):
    __slots__ = ("app", "tag", "why", "sentence", "remedy", "next_ms", "waits_for", "commands")
    APP_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    REMEDY_FIELD_NUMBER: _ClassVar[int]
    NEXT_MS_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    app: str
    tag: str
    why: _types_pb2.Why
    sentence: str
    remedy: str
    next_ms: int
    waits_for: str
    commands: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, app: _Optional[str] = ..., tag: _Optional[str] = ..., why: _Optional[_Union[_types_pb2.Why, str]] = ..., sentence: _Optional[str] = ..., remedy: _Optional[str] = ..., next_ms: _Optional[int] = ..., waits_for: _Optional[str] = ..., commands: _Optional[_Iterable[str]] = ...) -> None: ...

class ExplainMessageResponse(_message.Message):
    __slots__ = ("message_id", "explanations")
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    EXPLANATIONS_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    explanations: _containers.RepeatedCompositeFieldContainer[Explanation]
    def __init__(self, message_id: _Optional[str] = ..., explanations: _Optional[_Iterable[_Union[Explanation, _Mapping]]] = ...) -> None: ...

class GetTimelineRequest(_message.Message):
    __slots__ = ("message_id", "topic", "key")
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    topic: str
    key: str
    def __init__(self, message_id: _Optional[str] = ..., topic: _Optional[str] = ..., key: _Optional[str] = ...) -> None: ...

class TimelineEvent(_message.Message):
    __slots__ = ("at_ms", "kind", "sentence", "app", "tag", "attempt")
    AT_MS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    APP_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    at_ms: int
    kind: EventKind
    sentence: str
    app: str
    tag: str
    attempt: int
    def __init__(self, at_ms: _Optional[int] = ..., kind: _Optional[_Union[EventKind, str]] = ..., sentence: _Optional[str] = ..., app: _Optional[str] = ..., tag: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class GetTimelineResponse(_message.Message):
    __slots__ = ("message_id", "events")
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    events: _containers.RepeatedCompositeFieldContainer[TimelineEvent]
    def __init__(self, message_id: _Optional[str] = ..., events: _Optional[_Iterable[_Union[TimelineEvent, _Mapping]]] = ...) -> None: ...

class FailedAttempt(_message.Message):
    __slots__ = ("app", "attempt", "at_ms", "error", "tag", "tried_ms", "unanswered")
    APP_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    AT_MS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    TRIED_MS_FIELD_NUMBER: _ClassVar[int]
    UNANSWERED_FIELD_NUMBER: _ClassVar[int]
    app: str
    attempt: int
    at_ms: int
    error: str
    tag: str
    tried_ms: int
    unanswered: bool
    def __init__(self, app: _Optional[str] = ..., attempt: _Optional[int] = ..., at_ms: _Optional[int] = ..., error: _Optional[str] = ..., tag: _Optional[str] = ..., tried_ms: _Optional[int] = ..., unanswered: bool = ...) -> None: ...

class ListMessagesRequest(_message.Message):
    __slots__ = ("topic", "state", "from_ms", "to_ms", "page_size", "page_token", "newest_first", "older_than_ms")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    FROM_MS_FIELD_NUMBER: _ClassVar[int]
    TO_MS_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIRST_FIELD_NUMBER: _ClassVar[int]
    OLDER_THAN_MS_FIELD_NUMBER: _ClassVar[int]
    topic: str
    state: _types_pb2.MessageState
    from_ms: int
    to_ms: int
    page_size: int
    page_token: str
    newest_first: bool
    older_than_ms: int
    def __init__(self, topic: _Optional[str] = ..., state: _Optional[_Union[_types_pb2.MessageState, str]] = ..., from_ms: _Optional[int] = ..., to_ms: _Optional[int] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., newest_first: bool = ..., older_than_ms: _Optional[int] = ...) -> None: ...

class ListMessagesResponse(_message.Message):
    __slots__ = ("messages", "next_page_token")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[_message_pb2.Message]
    next_page_token: str
    def __init__(self, messages: _Optional[_Iterable[_Union[_message_pb2.Message, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class ListConsumptionsRequest(_message.Message):
    __slots__ = ("topic", "app", "state", "page_size", "page_token", "from_ms", "to_ms", "newest_first", "older_than_ms", "fingerprint", "tag")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    APP_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    FROM_MS_FIELD_NUMBER: _ClassVar[int]
    TO_MS_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIRST_FIELD_NUMBER: _ClassVar[int]
    OLDER_THAN_MS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    topic: str
    app: str
    state: _types_pb2.ConsumptionState
    page_size: int
    page_token: str
    from_ms: int
    to_ms: int
    newest_first: bool
    older_than_ms: int
    fingerprint: str
    tag: str
    def __init__(self, topic: _Optional[str] = ..., app: _Optional[str] = ..., state: _Optional[_Union[_types_pb2.ConsumptionState, str]] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., from_ms: _Optional[int] = ..., to_ms: _Optional[int] = ..., newest_first: bool = ..., older_than_ms: _Optional[int] = ..., fingerprint: _Optional[str] = ..., tag: _Optional[str] = ...) -> None: ...

class ListConsumptionsResponse(_message.Message):
    __slots__ = ("consumptions", "next_page_token")
    CONSUMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    consumptions: _containers.RepeatedCompositeFieldContainer[Consumption]
    next_page_token: str
    def __init__(self, consumptions: _Optional[_Iterable[_Union[Consumption, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class ReactivateConsumptionRequest(_message.Message):
    __slots__ = ("message_id", "app", "tag", "reason")
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    APP_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    app: str
    tag: str
    reason: str
    def __init__(self, message_id: _Optional[str] = ..., app: _Optional[str] = ..., tag: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class DeliverNowRequest(_message.Message):
    __slots__ = ("message_id", "app", "tag", "reason")
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    APP_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    app: str
    tag: str
    reason: str
    def __init__(self, message_id: _Optional[str] = ..., app: _Optional[str] = ..., tag: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class CancelConsumptionRequest(_message.Message):
    __slots__ = ("message_id", "app", "tag", "reason")
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    APP_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    app: str
    tag: str
    reason: str
    def __init__(self, message_id: _Optional[str] = ..., app: _Optional[str] = ..., tag: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class ReplayDeliveryRequest(_message.Message):
    __slots__ = ("message_id", "app", "tag", "reason")
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    APP_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    app: str
    tag: str
    reason: str
    def __init__(self, message_id: _Optional[str] = ..., app: _Optional[str] = ..., tag: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class Alert(_message.Message):
    __slots__ = ("alert_id", "kind", "topic", "app", "tag", "fingerprint", "detail", "count", "first_ms", "last_ms", "message_ids", "acknowledged_ms", "acknowledged_by", "resolved_ms", "silenced_until_ms")
    ALERT_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    APP_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    FIRST_MS_FIELD_NUMBER: _ClassVar[int]
    LAST_MS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_IDS_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_MS_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_BY_FIELD_NUMBER: _ClassVar[int]
    RESOLVED_MS_FIELD_NUMBER: _ClassVar[int]
    SILENCED_UNTIL_MS_FIELD_NUMBER: _ClassVar[int]
    alert_id: str
    kind: str
    topic: str
    app: str
    tag: str
    fingerprint: str
    detail: str
    count: int
    first_ms: int
    last_ms: int
    message_ids: _containers.RepeatedScalarFieldContainer[str]
    acknowledged_ms: int
    acknowledged_by: str
    resolved_ms: int
    silenced_until_ms: int
    def __init__(self, alert_id: _Optional[str] = ..., kind: _Optional[str] = ..., topic: _Optional[str] = ..., app: _Optional[str] = ..., tag: _Optional[str] = ..., fingerprint: _Optional[str] = ..., detail: _Optional[str] = ..., count: _Optional[int] = ..., first_ms: _Optional[int] = ..., last_ms: _Optional[int] = ..., message_ids: _Optional[_Iterable[str]] = ..., acknowledged_ms: _Optional[int] = ..., acknowledged_by: _Optional[str] = ..., resolved_ms: _Optional[int] = ..., silenced_until_ms: _Optional[int] = ...) -> None: ...

class ListAlertsRequest(_message.Message):
    __slots__ = ("resolved", "page_size", "page_token")
    RESOLVED_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    resolved: bool
    page_size: int
    page_token: str
    def __init__(self, resolved: bool = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListAlertsResponse(_message.Message):
    __slots__ = ("alerts", "next_page_token")
    ALERTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    alerts: _containers.RepeatedCompositeFieldContainer[Alert]
    next_page_token: str
    def __init__(self, alerts: _Optional[_Iterable[_Union[Alert, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class AcknowledgeAlertRequest(_message.Message):
    __slots__ = ("alert_id", "reason")
    ALERT_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    alert_id: str
    reason: str
    def __init__(self, alert_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class SilenceAlertsRequest(_message.Message):
    __slots__ = ("topic", "app", "tag", "kind", "for_ms", "reason")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    APP_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    FOR_MS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    topic: str
    app: str
    tag: str
    kind: str
    for_ms: int
    reason: str
    def __init__(self, topic: _Optional[str] = ..., app: _Optional[str] = ..., tag: _Optional[str] = ..., kind: _Optional[str] = ..., for_ms: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Silence(_message.Message):
    __slots__ = ("silence", "topic", "app", "tag", "kind", "until_ms", "actor", "reason")
    SILENCE_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    APP_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    UNTIL_MS_FIELD_NUMBER: _ClassVar[int]
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    silence: int
    topic: str
    app: str
    tag: str
    kind: str
    until_ms: int
    actor: str
    reason: str
    def __init__(self, silence: _Optional[int] = ..., topic: _Optional[str] = ..., app: _Optional[str] = ..., tag: _Optional[str] = ..., kind: _Optional[str] = ..., until_ms: _Optional[int] = ..., actor: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class EndSilenceRequest(_message.Message):
    __slots__ = ("silence", "reason")
    SILENCE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    silence: int
    reason: str
    def __init__(self, silence: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class ListSilencesRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListSilencesResponse(_message.Message):
    __slots__ = ("silences", "next_page_token")
    SILENCES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    silences: _containers.RepeatedCompositeFieldContainer[Silence]
    next_page_token: str
    def __init__(self, silences: _Optional[_Iterable[_Union[Silence, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class SearchMessagesRequest(_message.Message):
    __slots__ = ("text", "topic", "page_size", "page_token")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    text: str
    topic: str
    page_size: int
    page_token: str
    def __init__(self, text: _Optional[str] = ..., topic: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class SearchMessagesResponse(_message.Message):
    __slots__ = ("messages", "next_page_token")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[_message_pb2.Message]
    next_page_token: str
    def __init__(self, messages: _Optional[_Iterable[_Union[_message_pb2.Message, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class ListFailureGroupsRequest(_message.Message):
    __slots__ = ("topic", "app", "tag", "limit")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    APP_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    topic: str
    app: str
    tag: str
    limit: int
    def __init__(self, topic: _Optional[str] = ..., app: _Optional[str] = ..., tag: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class ListFailureGroupsResponse(_message.Message):
    __slots__ = ("groups", "more", "now_ms")
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    NOW_MS_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[FailureGroup]
    more: bool
    now_ms: int
    def __init__(self, groups: _Optional[_Iterable[_Union[FailureGroup, _Mapping]]] = ..., more: bool = ..., now_ms: _Optional[int] = ...) -> None: ...

class FailureGroup(_message.Message):
    __slots__ = ("topic", "app", "tag", "fingerprint", "count", "first_ms", "last_ms", "per_minute", "error", "message_id")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    APP_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    FIRST_MS_FIELD_NUMBER: _ClassVar[int]
    LAST_MS_FIELD_NUMBER: _ClassVar[int]
    PER_MINUTE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    topic: str
    app: str
    tag: str
    fingerprint: str
    count: int
    first_ms: int
    last_ms: int
    per_minute: _containers.RepeatedScalarFieldContainer[int]
    error: str
    message_id: str
    def __init__(self, topic: _Optional[str] = ..., app: _Optional[str] = ..., tag: _Optional[str] = ..., fingerprint: _Optional[str] = ..., count: _Optional[int] = ..., first_ms: _Optional[int] = ..., last_ms: _Optional[int] = ..., per_minute: _Optional[_Iterable[int]] = ..., error: _Optional[str] = ..., message_id: _Optional[str] = ...) -> None: ...

class ListAuditRequest(_message.Message):
    __slots__ = ("actor", "action", "subject", "message_id", "from_ms", "to_ms", "page_size", "page_token")
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    FROM_MS_FIELD_NUMBER: _ClassVar[int]
    TO_MS_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    actor: str
    action: str
    subject: str
    message_id: str
    from_ms: int
    to_ms: int
    page_size: int
    page_token: str
    def __init__(self, actor: _Optional[str] = ..., action: _Optional[str] = ..., subject: _Optional[str] = ..., message_id: _Optional[str] = ..., from_ms: _Optional[int] = ..., to_ms: _Optional[int] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class AuditEntry(_message.Message):
    __slots__ = ("at_ms", "actor", "action", "subject", "reason", "origin", "change")
    AT_MS_FIELD_NUMBER: _ClassVar[int]
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    at_ms: int
    actor: str
    action: str
    subject: str
    reason: str
    origin: str
    change: str
    def __init__(self, at_ms: _Optional[int] = ..., actor: _Optional[str] = ..., action: _Optional[str] = ..., subject: _Optional[str] = ..., reason: _Optional[str] = ..., origin: _Optional[str] = ..., change: _Optional[str] = ...) -> None: ...

class ListAuditResponse(_message.Message):
    __slots__ = ("entries", "next_page_token")
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[AuditEntry]
    next_page_token: str
    def __init__(self, entries: _Optional[_Iterable[_Union[AuditEntry, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class VerifyAuditRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class VerifyAuditResponse(_message.Message):
    __slots__ = ("databases",)
    DATABASES_FIELD_NUMBER: _ClassVar[int]
    databases: _containers.RepeatedCompositeFieldContainer[AuditSeal]
    def __init__(self, databases: _Optional[_Iterable[_Union[AuditSeal, _Mapping]]] = ...) -> None: ...

class AuditSeal(_message.Message):
    __slots__ = ("database", "verified", "unsealed", "fault", "head", "head_number", "unkeyed")
    DATABASE_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    UNSEALED_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    HEAD_NUMBER_FIELD_NUMBER: _ClassVar[int]
    UNKEYED_FIELD_NUMBER: _ClassVar[int]
    database: str
    verified: int
    unsealed: int
    fault: str
    head: str
    head_number: int
    unkeyed: int
    def __init__(self, database: _Optional[str] = ..., verified: _Optional[int] = ..., unsealed: _Optional[int] = ..., fault: _Optional[str] = ..., head: _Optional[str] = ..., head_number: _Optional[int] = ..., unkeyed: _Optional[int] = ...) -> None: ...

class Operator(_message.Message):
    __slots__ = ("name", "role", "topics", "reads_bodies", "expires_ms", "previous_expires_ms", "created_ms", "identities")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    READS_BODIES_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_MS_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_EXPIRES_MS_FIELD_NUMBER: _ClassVar[int]
    CREATED_MS_FIELD_NUMBER: _ClassVar[int]
    IDENTITIES_FIELD_NUMBER: _ClassVar[int]
    name: str
    role: Role
    topics: _containers.RepeatedScalarFieldContainer[str]
    reads_bodies: bool
    expires_ms: int
    previous_expires_ms: int
    created_ms: int
    identities: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., topics: _Optional[_Iterable[str]] = ..., reads_bodies: bool = ..., expires_ms: _Optional[int] = ..., previous_expires_ms: _Optional[int] = ..., created_ms: _Optional[int] = ..., identities: _Optional[_Iterable[str]] = ...) -> None: ...

class WhoAmIRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RegisterOperatorRequest(_message.Message):
    __slots__ = ("name", "role", "topics", "reads_bodies", "valid_ms", "reason", "identities", "without_token")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    READS_BODIES_FIELD_NUMBER: _ClassVar[int]
    VALID_MS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    IDENTITIES_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    name: str
    role: Role
    topics: _containers.RepeatedScalarFieldContainer[str]
    reads_bodies: bool
    valid_ms: int
    reason: str
    identities: _containers.RepeatedScalarFieldContainer[str]
    without_token: bool
    def __init__(self, name: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., topics: _Optional[_Iterable[str]] = ..., reads_bodies: bool = ..., valid_ms: _Optional[int] = ..., reason: _Optional[str] = ..., identities: _Optional[_Iterable[str]] = ..., without_token: bool = ...) -> None: ...

class RegisterOperatorResponse(_message.Message):
    __slots__ = ("operator", "token")
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    operator: Operator
    token: str
    def __init__(self, operator: _Optional[_Union[Operator, _Mapping]] = ..., token: _Optional[str] = ...) -> None: ...

class UpdateOperatorRequest(_message.Message):
    __slots__ = ("name", "role", "topics", "reads_bodies", "update_mask", "reason", "identities", "without_token")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    READS_BODIES_FIELD_NUMBER: _ClassVar[int]
    UPDATE_MASK_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    IDENTITIES_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    name: str
    role: Role
    topics: _containers.RepeatedScalarFieldContainer[str]
    reads_bodies: bool
    update_mask: _field_mask_pb2.FieldMask
    reason: str
    identities: _containers.RepeatedScalarFieldContainer[str]
    without_token: bool
    def __init__(self, name: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., topics: _Optional[_Iterable[str]] = ..., reads_bodies: bool = ..., update_mask: _Optional[_Union[_field_mask_pb2.FieldMask, _Mapping]] = ..., reason: _Optional[str] = ..., identities: _Optional[_Iterable[str]] = ..., without_token: bool = ...) -> None: ...

class RotateOperatorTokenRequest(_message.Message):
    __slots__ = ("name", "valid_ms", "overlap_ms", "reason")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALID_MS_FIELD_NUMBER: _ClassVar[int]
    OVERLAP_MS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    name: str
    valid_ms: int
    overlap_ms: int
    reason: str
    def __init__(self, name: _Optional[str] = ..., valid_ms: _Optional[int] = ..., overlap_ms: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class RotateOperatorTokenResponse(_message.Message):
    __slots__ = ("operator", "token")
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    operator: Operator
    token: str
    def __init__(self, operator: _Optional[_Union[Operator, _Mapping]] = ..., token: _Optional[str] = ...) -> None: ...

class RemoveOperatorRequest(_message.Message):
    __slots__ = ("name", "reason")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    name: str
    reason: str
    def __init__(self, name: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class RemoveOperatorResponse(_message.Message):
    __slots__ = ("effective_ms",)
    EFFECTIVE_MS_FIELD_NUMBER: _ClassVar[int]
    effective_ms: int
    def __init__(self, effective_ms: _Optional[int] = ...) -> None: ...

class ListOperatorsRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListOperatorsResponse(_message.Message):
    __slots__ = ("operators", "next_page_token")
    OPERATORS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    operators: _containers.RepeatedCompositeFieldContainer[Operator]
    next_page_token: str
    def __init__(self, operators: _Optional[_Iterable[_Union[Operator, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class BulkFilter(_message.Message):
    __slots__ = ("action", "topic", "app", "tag", "state", "from_ms", "to_ms", "fingerprint")
    ACTION_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    APP_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    FROM_MS_FIELD_NUMBER: _ClassVar[int]
    TO_MS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    action: BulkAction
    topic: str
    app: str
    tag: str
    state: _types_pb2.ConsumptionState
    from_ms: int
    to_ms: int
    fingerprint: str
    def __init__(self, action: _Optional[_Union[BulkAction, str]] = ..., topic: _Optional[str] = ..., app: _Optional[str] = ..., tag: _Optional[str] = ..., state: _Optional[_Union[_types_pb2.ConsumptionState, str]] = ..., from_ms: _Optional[int] = ..., to_ms: _Optional[int] = ..., fingerprint: _Optional[str] = ...) -> None: ...

class DryRunBulkJobRequest(_message.Message):
    __slots__ = ("filter",)
    FILTER_FIELD_NUMBER: _ClassVar[int]
    filter: BulkFilter
    def __init__(self, filter: _Optional[_Union[BulkFilter, _Mapping]] = ...) -> None: ...

class DryRunBulkJobResponse(_message.Message):
    __slots__ = ("dry_run", "count", "samples")
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    dry_run: str
    count: int
    samples: _containers.RepeatedCompositeFieldContainer[BulkSample]
    def __init__(self, dry_run: _Optional[str] = ..., count: _Optional[int] = ..., samples: _Optional[_Iterable[_Union[BulkSample, _Mapping]]] = ...) -> None: ...

class BulkSample(_message.Message):
    __slots__ = ("message_id", "topic", "app", "tag", "error", "fingerprint")
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    APP_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    topic: str
    app: str
    tag: str
    error: str
    fingerprint: str
    def __init__(self, message_id: _Optional[str] = ..., topic: _Optional[str] = ..., app: _Optional[str] = ..., tag: _Optional[str] = ..., error: _Optional[str] = ..., fingerprint: _Optional[str] = ...) -> None: ...

class StartBulkJobRequest(_message.Message):
    __slots__ = ("filter", "dry_run", "count", "reason", "rate", "hold_ms")
    FILTER_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RATE_FIELD_NUMBER: _ClassVar[int]
    HOLD_MS_FIELD_NUMBER: _ClassVar[int]
    filter: BulkFilter
    dry_run: str
    count: int
    reason: str
    rate: int
    hold_ms: int
    def __init__(self, filter: _Optional[_Union[BulkFilter, _Mapping]] = ..., dry_run: _Optional[str] = ..., count: _Optional[int] = ..., reason: _Optional[str] = ..., rate: _Optional[int] = ..., hold_ms: _Optional[int] = ...) -> None: ...

class StopBulkJobRequest(_message.Message):
    __slots__ = ("job", "reason")
    JOB_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    job: int
    reason: str
    def __init__(self, job: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class GetBulkJobRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: int
    def __init__(self, job: _Optional[int] = ...) -> None: ...

class BulkJob(_message.Message):
    __slots__ = ("job", "action", "state", "count", "done", "unchanged", "refused", "rate", "actor", "reason", "created_ms", "start_ms", "stopped_ms", "finished_ms", "selection")
    JOB_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    UNCHANGED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    RATE_FIELD_NUMBER: _ClassVar[int]
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CREATED_MS_FIELD_NUMBER: _ClassVar[int]
    START_MS_FIELD_NUMBER: _ClassVar[int]
    STOPPED_MS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_MS_FIELD_NUMBER: _ClassVar[int]
    SELECTION_FIELD_NUMBER: _ClassVar[int]
    job: int
    action: BulkAction
    state: BulkState
    count: int
    done: int
    unchanged: int
    refused: int
    rate: int
    actor: str
    reason: str
    created_ms: int
    start_ms: int
    stopped_ms: int
    finished_ms: int
    selection: str
    def __init__(self, job: _Optional[int] = ..., action: _Optional[_Union[BulkAction, str]] = ..., state: _Optional[_Union[BulkState, str]] = ..., count: _Optional[int] = ..., done: _Optional[int] = ..., unchanged: _Optional[int] = ..., refused: _Optional[int] = ..., rate: _Optional[int] = ..., actor: _Optional[str] = ..., reason: _Optional[str] = ..., created_ms: _Optional[int] = ..., start_ms: _Optional[int] = ..., stopped_ms: _Optional[int] = ..., finished_ms: _Optional[int] = ..., selection: _Optional[str] = ...) -> None: ...

class ListBulkJobsRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListBulkJobsResponse(_message.Message):
    __slots__ = ("jobs", "next_page_token")
    JOBS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[BulkJob]
    next_page_token: str
    def __init__(self, jobs: _Optional[_Iterable[_Union[BulkJob, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class ListBulkItemsRequest(_message.Message):
    __slots__ = ("job", "failures_only", "page_size", "page_token")
    JOB_FIELD_NUMBER: _ClassVar[int]
    FAILURES_ONLY_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    job: int
    failures_only: bool
    page_size: int
    page_token: str
    def __init__(self, job: _Optional[int] = ..., failures_only: bool = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListBulkItemsResponse(_message.Message):
    __slots__ = ("items", "next_page_token")
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[BulkItem]
    next_page_token: str
    def __init__(self, items: _Optional[_Iterable[_Union[BulkItem, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class BulkItem(_message.Message):
    __slots__ = ("message_id", "app", "tag", "outcome", "detail", "at_ms")
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    APP_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    AT_MS_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    app: str
    tag: str
    outcome: BulkOutcome
    detail: str
    at_ms: int
    def __init__(self, message_id: _Optional[str] = ..., app: _Optional[str] = ..., tag: _Optional[str] = ..., outcome: _Optional[_Union[BulkOutcome, str]] = ..., detail: _Optional[str] = ..., at_ms: _Optional[int] = ...) -> None: ...

class PauseTopicRequest(_message.Message):
    __slots__ = ("name", "reason")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    name: str
    reason: str
    def __init__(self, name: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class ResumeTopicRequest(_message.Message):
    __slots__ = ("name", "reason")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    name: str
    reason: str
    def __init__(self, name: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class PauseSubscriptionRequest(_message.Message):
    __slots__ = ("topic", "app", "tag", "reason")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    APP_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    topic: str
    app: str
    tag: str
    reason: str
    def __init__(self, topic: _Optional[str] = ..., app: _Optional[str] = ..., tag: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class ResumeSubscriptionRequest(_message.Message):
    __slots__ = ("topic", "app", "tag", "reason")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    APP_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    topic: str
    app: str
    tag: str
    reason: str
    def __init__(self, topic: _Optional[str] = ..., app: _Optional[str] = ..., tag: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class RepairOrderRequest(_message.Message):
    __slots__ = ("topic", "app", "tag", "reason")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    APP_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    topic: str
    app: str
    tag: str
    reason: str
    def __init__(self, topic: _Optional[str] = ..., app: _Optional[str] = ..., tag: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class RepairOrderResponse(_message.Message):
    __slots__ = ("scheduled", "released", "cancelled", "dropped")
    SCHEDULED_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    scheduled: int
    released: int
    cancelled: int
    dropped: int
    def __init__(self, scheduled: _Optional[int] = ..., released: _Optional[int] = ..., cancelled: _Optional[int] = ..., dropped: _Optional[int] = ...) -> None: ...

class ListServersRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListServersResponse(_message.Message):
    __slots__ = ("servers", "next_page_token")
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    servers: _containers.RepeatedCompositeFieldContainer[Server]
    next_page_token: str
    def __init__(self, servers: _Optional[_Iterable[_Union[Server, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class GetShardMapRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetShardMapResponse(_message.Message):
    __slots__ = ("shards",)
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    shards: _containers.RepeatedCompositeFieldContainer[ShardPlace]
    def __init__(self, shards: _Optional[_Iterable[_Union[ShardPlace, _Mapping]]] = ...) -> None: ...

class ShardPlace(_message.Message):
    __slots__ = ("shard", "database", "address", "move")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    DATABASE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MOVE_FIELD_NUMBER: _ClassVar[int]
    shard: int
    database: str
    address: str
    move: ShardMove
    def __init__(self, shard: _Optional[int] = ..., database: _Optional[str] = ..., address: _Optional[str] = ..., move: _Optional[_Union[ShardMove, _Mapping]] = ...) -> None: ...

class ShardMove(_message.Message):
    __slots__ = ("database", "address", "step", "copied_rows", "expected_rows", "started_ms", "updated_ms")
    DATABASE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    COPIED_ROWS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_ROWS_FIELD_NUMBER: _ClassVar[int]
    STARTED_MS_FIELD_NUMBER: _ClassVar[int]
    UPDATED_MS_FIELD_NUMBER: _ClassVar[int]
    database: str
    address: str
    step: MoveStep
    copied_rows: int
    expected_rows: int
    started_ms: int
    updated_ms: int
    def __init__(self, database: _Optional[str] = ..., address: _Optional[str] = ..., step: _Optional[_Union[MoveStep, str]] = ..., copied_rows: _Optional[int] = ..., expected_rows: _Optional[int] = ..., started_ms: _Optional[int] = ..., updated_ms: _Optional[int] = ...) -> None: ...

class Server(_message.Message):
    __slots__ = ("name", "incarnation", "started_ms", "expires_ms", "alive", "shards", "catalog_version", "drained")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STARTED_MS_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_MS_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    CATALOG_VERSION_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    name: str
    incarnation: str
    started_ms: int
    expires_ms: int
    alive: bool
    shards: _containers.RepeatedScalarFieldContainer[int]
    catalog_version: int
    drained: bool
    def __init__(self, name: _Optional[str] = ..., incarnation: _Optional[str] = ..., started_ms: _Optional[int] = ..., expires_ms: _Optional[int] = ..., alive: bool = ..., shards: _Optional[_Iterable[int]] = ..., catalog_version: _Optional[int] = ..., drained: bool = ...) -> None: ...

class DrainServerRequest(_message.Message):
    __slots__ = ("server", "reason")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    server: str
    reason: str
    def __init__(self, server: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class UndrainServerRequest(_message.Message):
    __slots__ = ("server", "reason")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    server: str
    reason: str
    def __init__(self, server: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class ListInstancesRequest(_message.Message):
    __slots__ = ("app", "tag", "page_size", "page_token")
    APP_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    app: str
    tag: str
    page_size: int
    page_token: str
    def __init__(self, app: _Optional[str] = ..., tag: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListInstancesResponse(_message.Message):
    __slots__ = ("addresses", "next_page_token")
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    addresses: _containers.RepeatedScalarFieldContainer[str]
    next_page_token: str
    def __init__(self, addresses: _Optional[_Iterable[str]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class GetConfigurationRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetConfigurationResponse(_message.Message):
    __slots__ = ("version", "settings", "server")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    version: str
    settings: _containers.RepeatedCompositeFieldContainer[Setting]
    server: str
    def __init__(self, version: _Optional[str] = ..., settings: _Optional[_Iterable[_Union[Setting, _Mapping]]] = ..., server: _Optional[str] = ...) -> None: ...

class Setting(_message.Message):
    __slots__ = ("name", "value", "changed", "secret", "description")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: str
    changed: bool
    secret: bool
    description: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ..., changed: bool = ..., secret: bool = ..., description: _Optional[str] = ...) -> None: ...

class Proposal(_message.Message):
    __slots__ = ("proposal", "action", "topic", "subject", "actor", "reason", "created_ms", "expires_ms", "state", "decided_by", "decided_ms", "decision_reason")
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CREATED_MS_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_MS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DECIDED_BY_FIELD_NUMBER: _ClassVar[int]
    DECIDED_MS_FIELD_NUMBER: _ClassVar[int]
    DECISION_REASON_FIELD_NUMBER: _ClassVar[int]
    proposal: int
    action: str
    topic: str
    subject: str
    actor: str
    reason: str
    created_ms: int
    expires_ms: int
    state: ProposalState
    decided_by: str
    decided_ms: int
    decision_reason: str
    def __init__(self, proposal: _Optional[int] = ..., action: _Optional[str] = ..., topic: _Optional[str] = ..., subject: _Optional[str] = ..., actor: _Optional[str] = ..., reason: _Optional[str] = ..., created_ms: _Optional[int] = ..., expires_ms: _Optional[int] = ..., state: _Optional[_Union[ProposalState, str]] = ..., decided_by: _Optional[str] = ..., decided_ms: _Optional[int] = ..., decision_reason: _Optional[str] = ...) -> None: ...

class ListProposalsRequest(_message.Message):
    __slots__ = ("pending_only", "page_size", "page_token")
    PENDING_ONLY_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    pending_only: bool
    page_size: int
    page_token: str
    def __init__(self, pending_only: bool = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListProposalsResponse(_message.Message):
    __slots__ = ("proposals", "next_page_token")
    PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    proposals: _containers.RepeatedCompositeFieldContainer[Proposal]
    next_page_token: str
    def __init__(self, proposals: _Optional[_Iterable[_Union[Proposal, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class ApproveProposalRequest(_message.Message):
    __slots__ = ("proposal", "reason")
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    proposal: int
    reason: str
    def __init__(self, proposal: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class ApproveProposalResponse(_message.Message):
    __slots__ = ("proposal", "message", "job")
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    proposal: Proposal
    message: _message_pb2.Message
    job: BulkJob
    def __init__(self, proposal: _Optional[_Union[Proposal, _Mapping]] = ..., message: _Optional[_Union[_message_pb2.Message, _Mapping]] = ..., job: _Optional[_Union[BulkJob, _Mapping]] = ...) -> None: ...

class RejectProposalRequest(_message.Message):
    __slots__ = ("proposal", "reason")
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    proposal: int
    reason: str
    def __init__(self, proposal: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class TryCheckRequest(_message.Message):
    __slots__ = ("message_id", "target")
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    target: CheckTarget
    def __init__(self, message_id: _Optional[str] = ..., target: _Optional[_Union[CheckTarget, _Mapping]] = ...) -> None: ...

class TryCheckResponse(_message.Message):
    __slots__ = ("tried", "stored")
    TRIED_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    tried: CheckNowResponse
    stored: CheckNowResponse
    def __init__(self, tried: _Optional[_Union[CheckNowResponse, _Mapping]] = ..., stored: _Optional[_Union[CheckNowResponse, _Mapping]] = ...) -> None: ...
