from tmc_common.protocol import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AckRequest(_message.Message):
    __slots__ = ("message_id", "attempt")
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    attempt: int
    def __init__(self, message_id: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class AckResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AckManyRequest(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[AckRequest]
    def __init__(self, items: _Optional[_Iterable[_Union[AckRequest, _Mapping]]] = ...) -> None: ...

class AckResult(_message.Message):
    __slots__ = ("error",)
    ERROR_FIELD_NUMBER: _ClassVar[int]
    error: _types_pb2.ItemError
    def __init__(self, error: _Optional[_Union[_types_pb2.ItemError, _Mapping]] = ...) -> None: ...

class AckManyResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[AckResult]
    def __init__(self, results: _Optional[_Iterable[_Union[AckResult, _Mapping]]] = ...) -> None: ...

class NackRequest(_message.Message):
    __slots__ = ("message_id", "attempt", "error", "reject", "retry_after_ms", "handler_hangs", "missing_signature", "not_begun", "run")
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    REJECT_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    HANDLER_HANGS_FIELD_NUMBER: _ClassVar[int]
    MISSING_SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    NOT_BEGUN_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    attempt: int
    error: str
    reject: bool
    retry_after_ms: int
    handler_hangs: bool
    missing_signature: bool
    not_begun: bool
    run: int
    def __init__(self, message_id: _Optional[str] = ..., attempt: _Optional[int] = ..., error: _Optional[str] = ..., reject: bool = ..., retry_after_ms: _Optional[int] = ..., handler_hangs: bool = ..., missing_signature: bool = ..., not_begun: bool = ..., run: _Optional[int] = ...) -> None: ...

class NackResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NackManyRequest(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[NackRequest]
    def __init__(self, items: _Optional[_Iterable[_Union[NackRequest, _Mapping]]] = ...) -> None: ...

class NackResult(_message.Message):
    __slots__ = ("error",)
    ERROR_FIELD_NUMBER: _ClassVar[int]
    error: _types_pb2.ItemError
    def __init__(self, error: _Optional[_Union[_types_pb2.ItemError, _Mapping]] = ...) -> None: ...

class NackManyResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[NackResult]
    def __init__(self, results: _Optional[_Iterable[_Union[NackResult, _Mapping]]] = ...) -> None: ...

class ExtendRequest(_message.Message):
    __slots__ = ("message_id", "attempt", "extend_ms", "run")
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    EXTEND_MS_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    attempt: int
    extend_ms: int
    run: int
    def __init__(self, message_id: _Optional[str] = ..., attempt: _Optional[int] = ..., extend_ms: _Optional[int] = ..., run: _Optional[int] = ...) -> None: ...

class ExtendResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ExtendManyRequest(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[ExtendRequest]
    def __init__(self, items: _Optional[_Iterable[_Union[ExtendRequest, _Mapping]]] = ...) -> None: ...

class ExtendResult(_message.Message):
    __slots__ = ("error",)
    ERROR_FIELD_NUMBER: _ClassVar[int]
    error: _types_pb2.ItemError
    def __init__(self, error: _Optional[_Union[_types_pb2.ItemError, _Mapping]] = ...) -> None: ...

class ExtendManyResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[ExtendResult]
    def __init__(self, results: _Optional[_Iterable[_Union[ExtendResult, _Mapping]]] = ...) -> None: ...

class SubscribeRequest(_message.Message):
    __slots__ = ("topics", "credit")
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    topics: _containers.RepeatedScalarFieldContainer[str]
    credit: int
    def __init__(self, topics: _Optional[_Iterable[str]] = ..., credit: _Optional[int] = ...) -> None: ...

class SubscribeResponse(_message.Message):
    __slots__ = ("deliveries",)
    DELIVERIES_FIELD_NUMBER: _ClassVar[int]
    deliveries: _containers.RepeatedCompositeFieldContainer[Delivery]
    def __init__(self, deliveries: _Optional[_Iterable[_Union[Delivery, _Mapping]]] = ...) -> None: ...

class Delivery(_message.Message):
    __slots__ = ("message_id", "topic", "key", "body", "content_type", "headers", "attempt", "producer", "subscriber", "retry_interval_ms", "redelivered")
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
    BODY_FIELD_NUMBER: _ClassVar[int]
    CONTENT_TYPE_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIBER_FIELD_NUMBER: _ClassVar[int]
    RETRY_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    REDELIVERED_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    topic: str
    key: str
    body: bytes
    content_type: str
    headers: _containers.ScalarMap[str, str]
    attempt: int
    producer: str
    subscriber: str
    retry_interval_ms: int
    redelivered: bool
    def __init__(self, message_id: _Optional[str] = ..., topic: _Optional[str] = ..., key: _Optional[str] = ..., body: _Optional[bytes] = ..., content_type: _Optional[str] = ..., headers: _Optional[_Mapping[str, str]] = ..., attempt: _Optional[int] = ..., producer: _Optional[str] = ..., subscriber: _Optional[str] = ..., retry_interval_ms: _Optional[int] = ..., redelivered: bool = ...) -> None: ...

class DescribeSubscriptionsRequest(_message.Message):
    __slots__ = ("verifies",)
    VERIFIES_FIELD_NUMBER: _ClassVar[int]
    verifies: bool
    def __init__(self, verifies: bool = ...) -> None: ...

class DescribeSubscriptionsResponse(_message.Message):
    __slots__ = ("subscriptions", "broker")
    SUBSCRIPTIONS_FIELD_NUMBER: _ClassVar[int]
    BROKER_FIELD_NUMBER: _ClassVar[int]
    subscriptions: _containers.RepeatedCompositeFieldContainer[SubscriptionInfo]
    broker: BrokerAddress
    def __init__(self, subscriptions: _Optional[_Iterable[_Union[SubscriptionInfo, _Mapping]]] = ..., broker: _Optional[_Union[BrokerAddress, _Mapping]] = ...) -> None: ...

class BrokerAddress(_message.Message):
    __slots__ = ("host", "port", "virtual_host", "tls", "others")
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    VIRTUAL_HOST_FIELD_NUMBER: _ClassVar[int]
    TLS_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    host: str
    port: int
    virtual_host: str
    tls: bool
    others: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, host: _Optional[str] = ..., port: _Optional[int] = ..., virtual_host: _Optional[str] = ..., tls: bool = ..., others: _Optional[_Iterable[str]] = ...) -> None: ...

class SubscriptionInfo(_message.Message):
    __slots__ = ("topic", "tag", "retry", "queue", "delivery_keys", "signed_since_ms")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    RETRY_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    DELIVERY_KEYS_FIELD_NUMBER: _ClassVar[int]
    SIGNED_SINCE_MS_FIELD_NUMBER: _ClassVar[int]
    topic: str
    tag: str
    retry: _types_pb2.RetryPolicy
    queue: str
    delivery_keys: _containers.RepeatedScalarFieldContainer[str]
    signed_since_ms: int
    def __init__(self, topic: _Optional[str] = ..., tag: _Optional[str] = ..., retry: _Optional[_Union[_types_pb2.RetryPolicy, _Mapping]] = ..., queue: _Optional[str] = ..., delivery_keys: _Optional[_Iterable[str]] = ..., signed_since_ms: _Optional[int] = ...) -> None: ...

class ReportForgedCopiesRequest(_message.Message):
    __slots__ = ("topic", "count", "message_id")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    topic: str
    count: int
    message_id: str
    def __init__(self, topic: _Optional[str] = ..., count: _Optional[int] = ..., message_id: _Optional[str] = ...) -> None: ...

class ReportForgedCopiesResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
