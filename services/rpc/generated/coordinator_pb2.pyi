from services.rpc.generated import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Registration(_message.Message):
    __slots__ = ("role", "name", "rank", "address", "pid", "host", "seconds", "incarnation", "machine", "metrics")
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
    METRICS_FIELD_NUMBER: _ClassVar[int]
    role: str
    name: str
    rank: int
    address: str
    pid: int
    host: str
    seconds: _containers.ScalarMap[str, float]
    incarnation: int
    machine: str
    metrics: str
    def __init__(self, role: _Optional[str] = ..., name: _Optional[str] = ..., rank: _Optional[int] = ..., address: _Optional[str] = ..., pid: _Optional[int] = ..., host: _Optional[str] = ..., seconds: _Optional[_Mapping[str, float]] = ..., incarnation: _Optional[int] = ..., machine: _Optional[str] = ..., metrics: _Optional[str] = ...) -> None: ...

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
    __slots__ = ("phase", "step", "steps", "done", "total", "detail", "lost", "alarm", "stopping")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    ALARM_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    phase: str
    step: int
    steps: int
    done: int
    total: int
    detail: str
    lost: _containers.RepeatedCompositeFieldContainer[Loss]
    alarm: str
    stopping: bool
    def __init__(self, phase: _Optional[str] = ..., step: _Optional[int] = ..., steps: _Optional[int] = ..., done: _Optional[int] = ..., total: _Optional[int] = ..., detail: _Optional[str] = ..., lost: _Optional[_Iterable[_Union[Loss, _Mapping]]] = ..., alarm: _Optional[str] = ..., stopping: bool = ...) -> None: ...

class Topology(_message.Message):
    __slots__ = ("processes",)
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    processes: _containers.RepeatedCompositeFieldContainer[Registration]
    def __init__(self, processes: _Optional[_Iterable[_Union[Registration, _Mapping]]] = ...) -> None: ...

class NodeRegistration(_message.Message):
    __slots__ = ("name", "address", "devices", "machine", "config", "version", "ports", "pid", "running", "blobs")
    class RunningEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PORTS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    BLOBS_FIELD_NUMBER: _ClassVar[int]
    name: str
    address: str
    devices: int
    machine: str
    config: str
    version: str
    ports: _containers.RepeatedScalarFieldContainer[int]
    pid: int
    running: _containers.ScalarMap[str, int]
    blobs: str
    def __init__(self, name: _Optional[str] = ..., address: _Optional[str] = ..., devices: _Optional[int] = ..., machine: _Optional[str] = ..., config: _Optional[str] = ..., version: _Optional[str] = ..., ports: _Optional[_Iterable[int]] = ..., pid: _Optional[int] = ..., running: _Optional[_Mapping[str, int]] = ..., blobs: _Optional[str] = ...) -> None: ...

class NodePaths(_message.Message):
    __slots__ = ("node", "found", "parts")
    class FoundEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NODE_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    node: str
    found: _containers.ScalarMap[str, str]
    parts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, node: _Optional[str] = ..., found: _Optional[_Mapping[str, str]] = ..., parts: _Optional[_Iterable[str]] = ...) -> None: ...

class Rendezvous(_message.Message):
    __slots__ = ("host", "port", "key", "other")
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    OTHER_FIELD_NUMBER: _ClassVar[int]
    host: str
    port: int
    key: bytes
    other: int
    def __init__(self, host: _Optional[str] = ..., port: _Optional[int] = ..., key: _Optional[bytes] = ..., other: _Optional[int] = ...) -> None: ...

class Launch(_message.Message):
    __slots__ = ("role", "name", "ranks", "devices", "incarnation", "rendezvous")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RENDEZVOUS_FIELD_NUMBER: _ClassVar[int]
    role: str
    name: str
    ranks: _containers.RepeatedScalarFieldContainer[int]
    devices: _containers.RepeatedScalarFieldContainer[int]
    incarnation: int
    rendezvous: Rendezvous
    def __init__(self, role: _Optional[str] = ..., name: _Optional[str] = ..., ranks: _Optional[_Iterable[int]] = ..., devices: _Optional[_Iterable[int]] = ..., incarnation: _Optional[int] = ..., rendezvous: _Optional[_Union[Rendezvous, _Mapping]] = ...) -> None: ...

class Holder(_message.Message):
    __slots__ = ("node", "address")
    NODE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    node: str
    address: str
    def __init__(self, node: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class Assignment(_message.Message):
    __slots__ = ("config", "launches", "run", "peer")
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    LAUNCHES_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    config: str
    launches: _containers.RepeatedCompositeFieldContainer[Launch]
    run: str
    peer: Holder
    def __init__(self, config: _Optional[str] = ..., launches: _Optional[_Iterable[_Union[Launch, _Mapping]]] = ..., run: _Optional[str] = ..., peer: _Optional[_Union[Holder, _Mapping]] = ...) -> None: ...

class Death(_message.Message):
    __slots__ = ("node", "name", "incarnation", "reason", "mistake")
    NODE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MISTAKE_FIELD_NUMBER: _ClassVar[int]
    node: str
    name: str
    incarnation: int
    reason: str
    mistake: bool
    def __init__(self, node: _Optional[str] = ..., name: _Optional[str] = ..., incarnation: _Optional[int] = ..., reason: _Optional[str] = ..., mistake: bool = ...) -> None: ...

class ScaleRequest(_message.Message):
    __slots__ = ("role", "replicas")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    role: str
    replicas: int
    def __init__(self, role: _Optional[str] = ..., replicas: _Optional[int] = ...) -> None: ...

class ScaleReply(_message.Message):
    __slots__ = ("started", "stopped", "pending")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    started: _containers.RepeatedScalarFieldContainer[str]
    stopped: _containers.RepeatedScalarFieldContainer[str]
    pending: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, started: _Optional[_Iterable[str]] = ..., stopped: _Optional[_Iterable[str]] = ..., pending: _Optional[_Iterable[str]] = ...) -> None: ...
