from services.rpc.generated import common_pb2 as _common_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class PutBlobRequest(_message.Message):
    __slots__ = ("digest", "size", "offset", "until", "data", "copies")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    size: int
    offset: int
    until: int
    data: bytes
    copies: int
    def __init__(self, digest: _Optional[bytes] = ..., size: _Optional[int] = ..., offset: _Optional[int] = ..., until: _Optional[int] = ..., data: _Optional[bytes] = ..., copies: _Optional[int] = ...) -> None: ...

class PutBlobReply(_message.Message):
    __slots__ = ("holders",)
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    holders: bytes
    def __init__(self, holders: _Optional[bytes] = ...) -> None: ...

class ReadBlobRequest(_message.Message):
    __slots__ = ("digest", "width", "begin", "end", "ranges")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    width: int
    begin: int
    end: int
    ranges: bytes
    def __init__(self, digest: _Optional[bytes] = ..., width: _Optional[int] = ..., begin: _Optional[int] = ..., end: _Optional[int] = ..., ranges: _Optional[bytes] = ...) -> None: ...

class ReadBlobReply(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...
