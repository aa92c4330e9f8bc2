from tmc_common.protocol import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrepareRequest(_message.Message):
    __slots__ = ("topic", "key", "body", "content_type", "headers", "attempt_id", "delay_ms", "ledger_id", "check_target", "order_key", "transaction_time_ms")
    class HeadersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    CONTENT_TYPE_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    DELAY_MS_FIELD_NUMBER: _ClassVar[int]
    LEDGER_ID_FIELD_NUMBER: _ClassVar[int]
    CHECK_TARGET_FIELD_NUMBER: _ClassVar[int]
    ORDER_KEY_FIELD_NUMBER: _ClassVar[int]
    TRANSACTION_TIME_MS_FIELD_NUMBER: _ClassVar[int]
    topic: str
    key: str
    body: bytes
    content_type: str
    headers: _containers.ScalarMap[str, str]
    attempt_id: bytes
    delay_ms: int
    ledger_id: bytes
    check_target: str
    order_key: str
    transaction_time_ms: int
    def __init__(self, topic: _Optional[str] = ..., key: _Optional[str] = ..., body: _Optional[bytes] = ..., content_type: _Optional[str] = ..., headers: _Optional[_Mapping[str, str]] = ..., attempt_id: _Optional[bytes] = ..., delay_ms: _Optional[int] = ..., ledger_id: _Optional[bytes] = ..., check_target: _Optional[str] = ..., order_key: _Optional[str] = ..., transaction_time_ms: _Optional[int] = ...) -> None: ...

class PrepareResponse(_message.Message):
    __slots__ = ("message_id", "state")
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    state: _types_pb2.MessageState
    def __init__(self, message_id: _Optional[str] = ..., state: _Optional[_Union[_types_pb2.MessageState, str]] = ...) -> None: ...

class PrepareManyRequest(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[PrepareRequest]
    def __init__(self, items: _Optional[_Iterable[_Union[PrepareRequest, _Mapping]]] = ...) -> None: ...

class PrepareResult(_message.Message):
    __slots__ = ("message_id", "state", "error")
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    state: _types_pb2.MessageState
    error: _types_pb2.ItemError
    def __init__(self, message_id: _Optional[str] = ..., state: _Optional[_Union[_types_pb2.MessageState, str]] = ..., error: _Optional[_Union[_types_pb2.ItemError, _Mapping]] = ...) -> None: ...

class PrepareManyResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[PrepareResult]
    def __init__(self, results: _Optional[_Iterable[_Union[PrepareResult, _Mapping]]] = ...) -> None: ...

class PublishRequest(_message.Message):
    __slots__ = ("topic", "key", "body", "content_type", "headers", "attempt_id", "delay_ms", "order_key")
    class HeadersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    CONTENT_TYPE_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    DELAY_MS_FIELD_NUMBER: _ClassVar[int]
    ORDER_KEY_FIELD_NUMBER: _ClassVar[int]
    topic: str
    key: str
    body: bytes
    content_type: str
    headers: _containers.ScalarMap[str, str]
    attempt_id: bytes
    delay_ms: int
    order_key: str
    def __init__(self, topic: _Optional[str] = ..., key: _Optional[str] = ..., body: _Optional[bytes] = ..., content_type: _Optional[str] = ..., headers: _Optional[_Mapping[str, str]] = ..., attempt_id: _Optional[bytes] = ..., delay_ms: _Optional[int] = ..., order_key: _Optional[str] = ...) -> None: ...

class PublishResponse(_message.Message):
    __slots__ = ("message_id", "state")
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    state: _types_pb2.MessageState
    def __init__(self, message_id: _Optional[str] = ..., state: _Optional[_Union[_types_pb2.MessageState, str]] = ...) -> None: ...

class PublishManyRequest(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[PublishRequest]
    def __init__(self, items: _Optional[_Iterable[_Union[PublishRequest, _Mapping]]] = ...) -> None: ...

class PublishResult(_message.Message):
    __slots__ = ("message_id", "state", "error")
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    state: _types_pb2.MessageState
    error: _types_pb2.ItemError
    def __init__(self, message_id: _Optional[str] = ..., state: _Optional[_Union[_types_pb2.MessageState, str]] = ..., error: _Optional[_Union[_types_pb2.ItemError, _Mapping]] = ...) -> None: ...

class PublishManyResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[PublishResult]
    def __init__(self, results: _Optional[_Iterable[_Union[PublishResult, _Mapping]]] = ...) -> None: ...

class SubmitRequest(_message.Message):
    __slots__ = ("message_id", "topic", "key", "attempt_id")
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    topic: str
    key: str
    attempt_id: bytes
    def __init__(self, message_id: _Optional[str] = ..., topic: _Optional[str] = ..., key: _Optional[str] = ..., attempt_id: _Optional[bytes] = ...) -> None: ...

class SubmitResponse(_message.Message):
    __slots__ = ("message_id", "state")
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    state: _types_pb2.MessageState
    def __init__(self, message_id: _Optional[str] = ..., state: _Optional[_Union[_types_pb2.MessageState, str]] = ...) -> None: ...

class SubmitManyRequest(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[SubmitRequest]
    def __init__(self, items: _Optional[_Iterable[_Union[SubmitRequest, _Mapping]]] = ...) -> None: ...

class SubmitResult(_message.Message):
    __slots__ = ("message_id", "state", "error")
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    state: _types_pb2.MessageState
    error: _types_pb2.ItemError
    def __init__(self, message_id: _Optional[str] = ..., state: _Optional[_Union[_types_pb2.MessageState, str]] = ..., error: _Optional[_Union[_types_pb2.ItemError, _Mapping]] = ...) -> None: ...

class SubmitManyResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[SubmitResult]
    def __init__(self, results: _Optional[_Iterable[_Union[SubmitResult, _Mapping]]] = ...) -> None: ...

class RollbackRequest(_message.Message):
    __slots__ = ("message_id", "topic", "key", "attempt_id")
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    topic: str
    key: str
    attempt_id: bytes
    def __init__(self, message_id: _Optional[str] = ..., topic: _Optional[str] = ..., key: _Optional[str] = ..., attempt_id: _Optional[bytes] = ...) -> None: ...

class RollbackResponse(_message.Message):
    __slots__ = ("message_id", "state")
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    state: _types_pb2.MessageState
    def __init__(self, message_id: _Optional[str] = ..., state: _Optional[_Union[_types_pb2.MessageState, str]] = ...) -> None: ...

class RollbackManyRequest(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[RollbackRequest]
    def __init__(self, items: _Optional[_Iterable[_Union[RollbackRequest, _Mapping]]] = ...) -> None: ...

class RollbackResult(_message.Message):
    __slots__ = ("message_id", "state", "error")
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    state: _types_pb2.MessageState
    error: _types_pb2.ItemError
    def __init__(self, message_id: _Optional[str] = ..., state: _Optional[_Union[_types_pb2.MessageState, str]] = ..., error: _Optional[_Union[_types_pb2.ItemError, _Mapping]] = ...) -> None: ...

class RollbackManyResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[RollbackResult]
    def __init__(self, results: _Optional[_Iterable[_Union[RollbackResult, _Mapping]]] = ...) -> None: ...

class ProduceRequest(_message.Message):
    __slots__ = ("operations",)
    OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    operations: _containers.RepeatedCompositeFieldContainer[Operation]
    def __init__(self, operations: _Optional[_Iterable[_Union[Operation, _Mapping]]] = ...) -> None: ...

class Operation(_message.Message):
    __slots__ = ("id", "prepare", "submit", "rollback", "publish")
    ID_FIELD_NUMBER: _ClassVar[int]
    PREPARE_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    ROLLBACK_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_FIELD_NUMBER: _ClassVar[int]
    id: int
    prepare: PrepareRequest
    submit: SubmitRequest
    rollback: RollbackRequest
    publish: PublishRequest
    def __init__(self, id: _Optional[int] = ..., prepare: _Optional[_Union[PrepareRequest, _Mapping]] = ..., submit: _Optional[_Union[SubmitRequest, _Mapping]] = ..., rollback: _Optional[_Union[RollbackRequest, _Mapping]] = ..., publish: _Optional[_Union[PublishRequest, _Mapping]] = ...) -> None: ...

class ProduceResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[OperationResult]
    def __init__(self, results: _Optional[_Iterable[_Union[OperationResult, _Mapping]]] = ...) -> None: ...

class OperationResult(_message.Message):
    __slots__ = ("id", "message_id", "state", "error")
    ID_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    id: int
    message_id: str
    state: _types_pb2.MessageState
    error: _types_pb2.ItemError
    def __init__(self, id: _Optional[int] = ..., message_id: _Optional[str] = ..., state: _Optional[_Union[_types_pb2.MessageState, str]] = ..., error: _Optional[_Union[_types_pb2.ItemError, _Mapping]] = ...) -> None: ...

class GetMessageRequest(_message.Message):
    __slots__ = ("message_id", "topic", "key")
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    topic: str
    key: str
    def __init__(self, message_id: _Optional[str] = ..., topic: _Optional[str] = ..., key: _Optional[str] = ...) -> None: ...

class Message(_message.Message):
    __slots__ = ("message_id", "topic", "key", "producer", "producer_tag", "state", "body", "content_type", "headers", "delay_ms", "created_ms", "decided_ms", "attempt_id", "digest", "order_key")
    class HeadersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_TAG_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    CONTENT_TYPE_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    DELAY_MS_FIELD_NUMBER: _ClassVar[int]
    CREATED_MS_FIELD_NUMBER: _ClassVar[int]
    DECIDED_MS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    ORDER_KEY_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    topic: str
    key: str
    producer: str
    producer_tag: str
    state: _types_pb2.MessageState
    body: bytes
    content_type: str
    headers: _containers.ScalarMap[str, str]
    delay_ms: int
    created_ms: int
    decided_ms: int
    attempt_id: str
    digest: str
    order_key: str
    def __init__(self, message_id: _Optional[str] = ..., topic: _Optional[str] = ..., key: _Optional[str] = ..., producer: _Optional[str] = ..., producer_tag: _Optional[str] = ..., state: _Optional[_Union[_types_pb2.MessageState, str]] = ..., body: _Optional[bytes] = ..., content_type: _Optional[str] = ..., headers: _Optional[_Mapping[str, str]] = ..., delay_ms: _Optional[int] = ..., created_ms: _Optional[int] = ..., decided_ms: _Optional[int] = ..., attempt_id: _Optional[str] = ..., digest: _Optional[str] = ..., order_key: _Optional[str] = ...) -> None: ...

class DescribeChecksRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeChecksResponse(_message.Message):
    __slots__ = ("check_token",)
    CHECK_TOKEN_FIELD_NUMBER: _ClassVar[int]
    check_token: str
    def __init__(self, check_token: _Optional[str] = ...) -> None: ...
