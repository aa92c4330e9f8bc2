from tmc_common.protocol import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class UnknownReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    UNKNOWN_REASON_UNSPECIFIED: _ClassVar[UnknownReason]
    UNKNOWN_REASON_NOT_NOW: _ClassVar[UnknownReason]
    UNKNOWN_REASON_WRONG_LEDGER: _ClassVar[UnknownReason]
UNKNOWN_REASON_UNSPECIFIED: UnknownReason
UNKNOWN_REASON_NOT_NOW: UnknownReason
UNKNOWN_REASON_WRONG_LEDGER: UnknownReason

class CheckRequest(_message.Message):
    __slots__ = ("message_id", "topic", "key", "attempt_id", "ledger_id", "created_ms")
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    LEDGER_ID_FIELD_NUMBER: _ClassVar[int]
    CREATED_MS_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    topic: str
    key: str
    attempt_id: bytes
    ledger_id: bytes
    created_ms: int
    def __init__(self, message_id: _Optional[str] = ..., topic: _Optional[str] = ..., key: _Optional[str] = ..., attempt_id: _Optional[bytes] = ..., ledger_id: _Optional[bytes] = ..., created_ms: _Optional[int] = ...) -> None: ...

class CheckResponse(_message.Message):
    __slots__ = ("verdict", "detail", "message_id", "unknown_reason")
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_REASON_FIELD_NUMBER: _ClassVar[int]
    verdict: _types_pb2.Verdict
    detail: str
    message_id: str
    unknown_reason: UnknownReason
    def __init__(self, verdict: _Optional[_Union[_types_pb2.Verdict, str]] = ..., detail: _Optional[str] = ..., message_id: _Optional[str] = ..., unknown_reason: _Optional[_Union[UnknownReason, str]] = ...) -> None: ...

class CheckManyRequest(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[CheckRequest]
    def __init__(self, items: _Optional[_Iterable[_Union[CheckRequest, _Mapping]]] = ...) -> None: ...

class CheckManyResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[CheckResponse]
    def __init__(self, results: _Optional[_Iterable[_Union[CheckResponse, _Mapping]]] = ...) -> None: ...
