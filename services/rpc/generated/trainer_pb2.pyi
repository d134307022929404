from services.rpc.generated import common_pb2 as _common_pb2
from services.rpc.generated import weights_pb2 as _weights_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StepRequest(_message.Message):
    __slots__ = ("step",)
    STEP_FIELD_NUMBER: _ClassVar[int]
    step: int
    def __init__(self, step: _Optional[int] = ...) -> None: ...

class ApplyRequest(_message.Message):
    __slots__ = ("step", "probes")
    STEP_FIELD_NUMBER: _ClassVar[int]
    PROBES_FIELD_NUMBER: _ClassVar[int]
    step: int
    probes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, step: _Optional[int] = ..., probes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class AccumulateRequest(_message.Message):
    __slots__ = ("step", "groups", "last")
    STEP_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    step: int
    groups: bytes
    last: bool
    def __init__(self, step: _Optional[int] = ..., groups: _Optional[bytes] = ..., last: bool = ...) -> None: ...

class ApplyReply(_message.Message):
    __slots__ = ("result",)
    RESULT_FIELD_NUMBER: _ClassVar[int]
    result: bytes
    def __init__(self, result: _Optional[bytes] = ...) -> None: ...

class RestoreRequest(_message.Message):
    __slots__ = ("folder", "place", "incarnation")
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    folder: str
    place: bytes
    incarnation: int
    def __init__(self, folder: _Optional[str] = ..., place: _Optional[bytes] = ..., incarnation: _Optional[int] = ...) -> None: ...

class VersionRequest(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: _common_pb2.PolicyVersion
    def __init__(self, version: _Optional[_Union[_common_pb2.PolicyVersion, _Mapping]] = ...) -> None: ...

class RecallReply(_message.Message):
    __slots__ = ("version", "reason")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    version: _common_pb2.PolicyVersion
    reason: str
    def __init__(self, version: _Optional[_Union[_common_pb2.PolicyVersion, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class SaveRequest(_message.Message):
    __slots__ = ("folder", "place", "keep")
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    folder: str
    place: bytes
    keep: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, folder: _Optional[str] = ..., place: _Optional[bytes] = ..., keep: _Optional[_Iterable[int]] = ...) -> None: ...

class SaveReply(_message.Message):
    __slots__ = ("parts",)
    PARTS_FIELD_NUMBER: _ClassVar[int]
    parts: bytes
    def __init__(self, parts: _Optional[bytes] = ...) -> None: ...

class ExportRequest(_message.Message):
    __slots__ = ("folder",)
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    folder: str
    def __init__(self, folder: _Optional[str] = ...) -> None: ...
