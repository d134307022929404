from services.rpc import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Registration(_message.Message):
    __slots__ = ("role", "name", "rank", "address", "pid", "host", "seconds", "incarnation", "machine")
    class SecondsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    role: str
    name: str
    rank: int
    address: str
    pid: int
    host: str
    seconds: _containers.ScalarMap[str, float]
    incarnation: int
    machine: str
    def __init__(self, role: _Optional[str] = ..., name: _Optional[str] = ..., rank: _Optional[int] = ..., address: _Optional[str] = ..., pid: _Optional[int] = ..., host: _Optional[str] = ..., seconds: _Optional[_Mapping[str, float]] = ..., incarnation: _Optional[int] = ..., machine: _Optional[str] = ...) -> None: ...

class Loss(_message.Message):
    __slots__ = ("name", "incarnation", "reason")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    name: str
    incarnation: int
    reason: str
    def __init__(self, name: _Optional[str] = ..., incarnation: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("phase", "step", "steps", "done", "total", "detail", "lost")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    phase: str
    step: int
    steps: int
    done: int
    total: int
    detail: str
    lost: _containers.RepeatedCompositeFieldContainer[Loss]
    def __init__(self, phase: _Optional[str] = ..., step: _Optional[int] = ..., steps: _Optional[int] = ..., done: _Optional[int] = ..., total: _Optional[int] = ..., detail: _Optional[str] = ..., lost: _Optional[_Iterable[_Union[Loss, _Mapping]]] = ...) -> None: ...

class Topology(_message.Message):
    __slots__ = ("processes",)
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    processes: _containers.RepeatedCompositeFieldContainer[Registration]
    def __init__(self, processes: _Optional[_Iterable[_Union[Registration, _Mapping]]] = ...) -> None: ...
