from services.rpc.generated import common_pb2 as _common_pb2
from services.rpc.generated import weights_pb2 as _weights_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class GenerateRequest(_message.Message):
    __slots__ = ("group",)
    GROUP_FIELD_NUMBER: _ClassVar[int]
    group: bytes
    def __init__(self, group: _Optional[bytes] = ...) -> None: ...

class GenerateReply(_message.Message):
    __slots__ = ("group",)
    GROUP_FIELD_NUMBER: _ClassVar[int]
    group: bytes
    def __init__(self, group: _Optional[bytes] = ...) -> None: ...

class SetLevelRequest(_message.Message):
    __slots__ = ("level", "keeps")
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    KEEPS_FIELD_NUMBER: _ClassVar[int]
    level: int
    keeps: bool
    def __init__(self, level: _Optional[int] = ..., keeps: bool = ...) -> None: ...
