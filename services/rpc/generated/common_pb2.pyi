from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PolicyVersion(_message.Message):
    __slots__ = ("incarnation", "step")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    step: int
    def __init__(self, incarnation: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("kind", "message", "service", "phase", "deadline")
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    kind: str
    message: str
    service: str
    phase: str
    deadline: float
    def __init__(self, kind: _Optional[str] = ..., message: _Optional[str] = ..., service: _Optional[str] = ..., phase: _Optional[str] = ..., deadline: _Optional[float] = ...) -> None: ...

class Call(_message.Message):
    __slots__ = ("id", "method", "timeout_ms", "body", "more", "cancel", "key")
    ID_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    id: int
    method: str
    timeout_ms: int
    body: bytes
    more: bool
    cancel: bool
    key: str
    def __init__(self, id: _Optional[int] = ..., method: _Optional[str] = ..., timeout_ms: _Optional[int] = ..., body: _Optional[bytes] = ..., more: bool = ..., cancel: bool = ..., key: _Optional[str] = ...) -> None: ...

class CallFrame(_message.Message):
    __slots__ = ("schema", "calls", "acknowledged", "term")
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    schema: int
    calls: _containers.RepeatedCompositeFieldContainer[Call]
    acknowledged: _containers.RepeatedScalarFieldContainer[str]
    term: int
    def __init__(self, schema: _Optional[int] = ..., calls: _Optional[_Iterable[_Union[Call, _Mapping]]] = ..., acknowledged: _Optional[_Iterable[str]] = ..., term: _Optional[int] = ...) -> None: ...

class Reply(_message.Message):
    __slots__ = ("id", "body", "more", "error")
    ID_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    id: int
    body: bytes
    more: bool
    error: Error
    def __init__(self, id: _Optional[int] = ..., body: _Optional[bytes] = ..., more: bool = ..., error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class ReplyFrame(_message.Message):
    __slots__ = ("schema", "replies")
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REPLIES_FIELD_NUMBER: _ClassVar[int]
    schema: int
    replies: _containers.RepeatedCompositeFieldContainer[Reply]
    def __init__(self, schema: _Optional[int] = ..., replies: _Optional[_Iterable[_Union[Reply, _Mapping]]] = ...) -> None: ...

class Empty(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Calls(_message.Message):
    __slots__ = ("open", "answered", "failed", "withdrawn", "seconds")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    ANSWERED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    WITHDRAWN_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    open: int
    answered: int
    failed: int
    withdrawn: int
    seconds: float
    def __init__(self, open: _Optional[int] = ..., answered: _Optional[int] = ..., failed: _Optional[int] = ..., withdrawn: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("role", "name", "state", "detail", "version", "calls", "rates", "gauges", "pid", "address", "uptime_seconds", "metrics")
    class RatesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class GaugesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    RATES_FIELD_NUMBER: _ClassVar[int]
    GAUGES_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    role: str
    name: str
    state: str
    detail: str
    version: PolicyVersion
    calls: Calls
    rates: _containers.ScalarMap[str, float]
    gauges: _containers.ScalarMap[str, float]
    pid: int
    address: str
    uptime_seconds: float
    metrics: str
    def __init__(self, role: _Optional[str] = ..., name: _Optional[str] = ..., state: _Optional[str] = ..., detail: _Optional[str] = ..., version: _Optional[_Union[PolicyVersion, _Mapping]] = ..., calls: _Optional[_Union[Calls, _Mapping]] = ..., rates: _Optional[_Mapping[str, float]] = ..., gauges: _Optional[_Mapping[str, float]] = ..., pid: _Optional[int] = ..., address: _Optional[str] = ..., uptime_seconds: _Optional[float] = ..., metrics: _Optional[str] = ...) -> None: ...

class StopRequest(_message.Message):
    __slots__ = ("drain_seconds", "term")
    DRAIN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    drain_seconds: float
    term: int
    def __init__(self, drain_seconds: _Optional[float] = ..., term: _Optional[int] = ...) -> None: ...

class ProfileRequest(_message.Message):
    __slots__ = ("step", "steps", "seconds", "memory")
    STEP_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    step: int
    steps: int
    seconds: float
    memory: bool
    def __init__(self, step: _Optional[int] = ..., steps: _Optional[int] = ..., seconds: _Optional[float] = ..., memory: bool = ...) -> None: ...

class ProfileReply(_message.Message):
    __slots__ = ("files",)
    FILES_FIELD_NUMBER: _ClassVar[int]
    files: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, files: _Optional[_Iterable[str]] = ...) -> None: ...
