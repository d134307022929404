from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RemoteItem(_message.Message):
    __slots__ = ("text", "label", "source", "tokens", "finish_reason", "prompt", "extra", "conversation")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    EXTRA_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    text: str
    label: str
    source: str
    tokens: int
    finish_reason: str
    prompt: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    extra: str
    conversation: str
    def __init__(self, text: _Optional[str] = ..., label: _Optional[str] = ..., source: _Optional[str] = ..., tokens: _Optional[int] = ..., finish_reason: _Optional[str] = ..., prompt: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., extra: _Optional[str] = ..., conversation: _Optional[str] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class RemoteScoreRequest(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[RemoteItem]
    def __init__(self, items: _Optional[_Iterable[_Union[RemoteItem, _Mapping]]] = ...) -> None: ...

class RemoteResult(_message.Message):
    __slots__ = ("value", "error")
    VALUE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    value: float
    error: str
    def __init__(self, value: _Optional[float] = ..., error: _Optional[str] = ...) -> None: ...

class RemoteScoreReply(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[RemoteResult]
    def __init__(self, results: _Optional[_Iterable[_Union[RemoteResult, _Mapping]]] = ...) -> None: ...
