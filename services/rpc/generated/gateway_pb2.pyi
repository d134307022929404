from services.rpc.generated import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RunEpisodesRequest(_message.Message):
    __slots__ = ("group",)
    GROUP_FIELD_NUMBER: _ClassVar[int]
    group: bytes
    def __init__(self, group: _Optional[bytes] = ...) -> None: ...

class RunEpisodesReply(_message.Message):
    __slots__ = ("group",)
    GROUP_FIELD_NUMBER: _ClassVar[int]
    group: bytes
    def __init__(self, group: _Optional[bytes] = ...) -> None: ...

class PeerAddress(_message.Message):
    __slots__ = ("name", "incarnation", "address", "machine", "slots", "token")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    name: str
    incarnation: int
    address: str
    machine: str
    slots: int
    token: str
    def __init__(self, name: _Optional[str] = ..., incarnation: _Optional[int] = ..., address: _Optional[str] = ..., machine: _Optional[str] = ..., slots: _Optional[int] = ..., token: _Optional[str] = ...) -> None: ...

class UpdateEndpointsRequest(_message.Message):
    __slots__ = ("rollouts", "key", "environments")
    ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENTS_FIELD_NUMBER: _ClassVar[int]
    rollouts: _containers.RepeatedCompositeFieldContainer[PeerAddress]
    key: str
    environments: _containers.RepeatedCompositeFieldContainer[PeerAddress]
    def __init__(self, rollouts: _Optional[_Iterable[_Union[PeerAddress, _Mapping]]] = ..., key: _Optional[str] = ..., environments: _Optional[_Iterable[_Union[PeerAddress, _Mapping]]] = ...) -> None: ...

class FinishGroupRequest(_message.Message):
    __slots__ = ("group_id",)
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    group_id: int
    def __init__(self, group_id: _Optional[int] = ...) -> None: ...
