from services.rpc.generated import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GroupAddress(_message.Message):
    __slots__ = ("epoch", "host", "port", "rank", "world_size", "backend", "timeout", "full_every", "names", "senders", "key", "machines", "workers")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    FULL_EVERY_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    SENDERS_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    MACHINES_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    host: str
    port: int
    rank: int
    world_size: int
    backend: str
    timeout: float
    full_every: int
    names: _containers.RepeatedScalarFieldContainer[str]
    senders: int
    key: bytes
    machines: _containers.RepeatedScalarFieldContainer[str]
    workers: int
    def __init__(self, epoch: _Optional[int] = ..., host: _Optional[str] = ..., port: _Optional[int] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ..., backend: _Optional[str] = ..., timeout: _Optional[float] = ..., full_every: _Optional[int] = ..., names: _Optional[_Iterable[str]] = ..., senders: _Optional[int] = ..., key: _Optional[bytes] = ..., machines: _Optional[_Iterable[str]] = ..., workers: _Optional[int] = ...) -> None: ...

class TensorSpec(_message.Message):
    __slots__ = ("name", "dtype", "shape")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class Sharding(_message.Message):
    __slots__ = ("members", "cuts", "cut_of")
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    CUTS_FIELD_NUMBER: _ClassVar[int]
    CUT_OF_FIELD_NUMBER: _ClassVar[int]
    members: int
    cuts: bytes
    cut_of: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, members: _Optional[int] = ..., cuts: _Optional[bytes] = ..., cut_of: _Optional[_Iterable[int]] = ...) -> None: ...

class Manifest(_message.Message):
    __slots__ = ("tensors", "bucket_bytes", "base", "source", "target", "window_bytes")
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    BUCKET_BYTES_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    WINDOW_BYTES_FIELD_NUMBER: _ClassVar[int]
    tensors: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    bucket_bytes: int
    base: str
    source: Sharding
    target: Sharding
    window_bytes: int
    def __init__(self, tensors: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., bucket_bytes: _Optional[int] = ..., base: _Optional[str] = ..., source: _Optional[_Union[Sharding, _Mapping]] = ..., target: _Optional[_Union[Sharding, _Mapping]] = ..., window_bytes: _Optional[int] = ...) -> None: ...

class InitWeightGroupRequest(_message.Message):
    __slots__ = ("epoch", "names", "machines")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    MACHINES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    names: _containers.RepeatedScalarFieldContainer[str]
    machines: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, epoch: _Optional[int] = ..., names: _Optional[_Iterable[str]] = ..., machines: _Optional[_Iterable[str]] = ...) -> None: ...

class InitWeightGroupReply(_message.Message):
    __slots__ = ("address", "manifest")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    address: GroupAddress
    manifest: Manifest
    def __init__(self, address: _Optional[_Union[GroupAddress, _Mapping]] = ..., manifest: _Optional[_Union[Manifest, _Mapping]] = ...) -> None: ...

class JoinWeightsRequest(_message.Message):
    __slots__ = ("address", "manifest")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    address: GroupAddress
    manifest: Manifest
    def __init__(self, address: _Optional[_Union[GroupAddress, _Mapping]] = ..., manifest: _Optional[_Union[Manifest, _Mapping]] = ...) -> None: ...

class WeightsRequest(_message.Message):
    __slots__ = ("version", "epoch")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    version: _common_pb2.PolicyVersion
    epoch: int
    def __init__(self, version: _Optional[_Union[_common_pb2.PolicyVersion, _Mapping]] = ..., epoch: _Optional[int] = ...) -> None: ...

class ReceiveWeightsReply(_message.Message):
    __slots__ = ("wait_seconds", "copy_seconds", "hash_seconds", "stage_seconds")
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COPY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    HASH_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STAGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    wait_seconds: float
    copy_seconds: float
    hash_seconds: float
    stage_seconds: float
    def __init__(self, wait_seconds: _Optional[float] = ..., copy_seconds: _Optional[float] = ..., hash_seconds: _Optional[float] = ..., stage_seconds: _Optional[float] = ...) -> None: ...

class CommitWeightsReply(_message.Message):
    __slots__ = ("pause_seconds",)
    PAUSE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    pause_seconds: float
    def __init__(self, pause_seconds: _Optional[float] = ...) -> None: ...

class SendWeightsReply(_message.Message):
    __slots__ = ("bytes", "seconds", "gather_seconds")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    GATHER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    seconds: float
    gather_seconds: float
    def __init__(self, bytes: _Optional[int] = ..., seconds: _Optional[float] = ..., gather_seconds: _Optional[float] = ...) -> None: ...
