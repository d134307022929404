from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Description(_message.Message):
    __slots__ = ("name", "concurrency")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CONCURRENCY_FIELD_NUMBER: _ClassVar[int]
    name: str
    concurrency: int
    def __init__(self, name: _Optional[str] = ..., concurrency: _Optional[int] = ...) -> None: ...

class EpisodeRequest(_message.Message):
    __slots__ = ("id", "base_url", "api_key", "task", "seed", "purpose", "call_seconds", "tool_seconds", "setup_seconds", "score_seconds", "cleanup_seconds")
    ID_FIELD_NUMBER: _ClassVar[int]
    BASE_URL_FIELD_NUMBER: _ClassVar[int]
    API_KEY_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    CALL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOOL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SETUP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SCORE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CLEANUP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    id: str
    base_url: str
    api_key: str
    task: str
    seed: int
    purpose: str
    call_seconds: float
    tool_seconds: float
    setup_seconds: float
    score_seconds: float
    cleanup_seconds: float
    def __init__(self, id: _Optional[str] = ..., base_url: _Optional[str] = ..., api_key: _Optional[str] = ..., task: _Optional[str] = ..., seed: _Optional[int] = ..., purpose: _Optional[str] = ..., call_seconds: _Optional[float] = ..., tool_seconds: _Optional[float] = ..., setup_seconds: _Optional[float] = ..., score_seconds: _Optional[float] = ..., cleanup_seconds: _Optional[float] = ...) -> None: ...

class EpisodeEvent(_message.Message):
    __slots__ = ("phase", "reward", "turn", "completion_id", "branch", "log", "end")
    class LogEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    PHASE_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_ID_FIELD_NUMBER: _ClassVar[int]
    BRANCH_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    phase: str
    reward: float
    turn: int
    completion_id: str
    branch: str
    log: _containers.ScalarMap[str, float]
    end: EpisodeEnd
    def __init__(self, phase: _Optional[str] = ..., reward: _Optional[float] = ..., turn: _Optional[int] = ..., completion_id: _Optional[str] = ..., branch: _Optional[str] = ..., log: _Optional[_Mapping[str, float]] = ..., end: _Optional[_Union[EpisodeEnd, _Mapping]] = ...) -> None: ...

class EpisodeEnd(_message.Message):
    __slots__ = ("reward", "rewards", "left_out", "stop_reason", "failure", "reason")
    class RewardsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    REWARD_FIELD_NUMBER: _ClassVar[int]
    REWARDS_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    reward: float
    rewards: _containers.ScalarMap[str, float]
    left_out: bool
    stop_reason: str
    failure: str
    reason: str
    def __init__(self, reward: _Optional[float] = ..., rewards: _Optional[_Mapping[str, float]] = ..., left_out: bool = ..., stop_reason: _Optional[str] = ..., failure: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class CancelReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
