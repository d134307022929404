"""The one module that knows both protobuf and Sluice's own types.

A protobuf message stands for a Struct with the same field names. A `bytes` field whose counterpart is not bytes holds
msgpack (`runtime.codec`). `METHODS` lists every method of every role with both sides' types: client and server share it.
"""

from __future__ import annotations

import typing
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
from google.protobuf.message import DecodeError, Message

from runtime import codec, commands, errors, status
from runtime.actor import Priority
from runtime.cluster import nodes
from runtime.rewards.remote_messages import RemoteScoreReply, RemoteScoreRequest
from runtime.types import SCHEMA_VERSION, GeneratedGroup, GroupRequest, LogprobRequest, ScoreRequest, Scores, StepResult
from services.rpc.generated import (
    common_pb2,
    coordinator_pb2,
    critic_pb2,
    reference_pb2,
    remote_reward_pb2,
    reward_pb2,
    rollout_pb2,
    trainer_pb2,
    weights_pb2,
)

PACKAGE = "sluice.v1"


@dataclass(frozen=True)
class MethodSide:
    """One direction of a method: its message, and the translation both ways."""

    message: type[Message]
    pack: Callable[[Any], Message]
    unpack: Callable[[Any], Any]

    def parse(self, data: bytes) -> Any:
        """The value in a serialized message. Raises InvalidMessage."""
        try:
            return self.unpack(self.message.FromString(data))
        except DecodeError as error:
            raise errors.InvalidMessage(f"not a {self.message.DESCRIPTOR.full_name}: {error}") from error


@dataclass(frozen=True)
class Method:
    """One method. Control goes before data in the mailbox, and does not wait for company on the stream."""

    service: str
    name: str
    request: MethodSide
    reply: MethodSide
    priority: Priority = Priority.DATA

    @property
    def path(self) -> str:
        return f"/{PACKAGE}.{self.service}/{self.name}"


def _write(message: Any, value: msgspec.Struct) -> None:
    for name in value.__struct_fields__:
        item, target = getattr(value, name), getattr(message, name)
        if isinstance(item, msgspec.Struct):
            target.SetInParent()
            _write(target, item)
        elif isinstance(target, bytes) and not isinstance(item, bytes):
            setattr(message, name, codec.encode(item))
        elif isinstance(item, dict):
            target.update(item)
        elif isinstance(item, (list, tuple)):
            if item and isinstance(item[0], msgspec.Struct):
                for one in item:
                    _write(target.add(), one)
            else:
                target.extend(item)
        elif item is not None:
            setattr(message, name, item)


@cache
def _fields(type_: type[msgspec.Struct]) -> tuple[tuple[str, Any], ...]:
    return tuple((field.name, field.type) for field in msgspec.structs.fields(type_))


def _value(message: Message, name: str, type_: Any) -> Any:
    """A field's value; None where it is declared `optional`, and so may be None, and is absent."""
    absent = type(None) in typing.get_args(type_) and not message.HasField(name)
    return None if absent else getattr(message, name)


def _read(item: Any, type_: Any) -> Any:
    if isinstance(item, Message):
        type_ = next((one for one in typing.get_args(type_) if one is not type(None)), type_)
        return type_(**{name: _read(_value(item, name, kind), kind) for name, kind in _fields(type_)})
    if isinstance(item, bytes) and type_ is not bytes:
        return codec.decode(type_, item)
    origin = typing.get_origin(type_)
    if origin in (list, tuple):
        return origin(_read(one, typing.get_args(type_)[0]) for one in item)
    return dict(item) if origin is dict else item


def _struct(message: Any, type_: Any) -> MethodSide:
    def pack(value: Any) -> Message:
        out = message()
        _write(out, value)
        return out

    return MethodSide(message, pack, lambda out: _read(out, type_))


def _bulk(message: Any, field: str, type_: Any) -> MethodSide:
    """A message whose one field holds the msgpack of `type_`."""
    return MethodSide(
        message, lambda value: message(**{field: codec.encode(value)}), lambda out: codec.decode(type_, getattr(out, field))
    )


def _raw(message: Any, field: str) -> MethodSide:
    """A message whose one field is handed on without decoding."""
    return MethodSide(message, lambda value: message(**{field: value}), lambda out: getattr(out, field))


def _raw_list(message: Any, field: str) -> MethodSide:
    """A message whose one field is a list of which each item is handed on without decoding."""
    return MethodSide(message, lambda values: message(**{field: values}), lambda out: list(getattr(out, field)))


_empty = MethodSide(common_pb2.Empty, lambda _: common_pb2.Empty(), lambda _: None)
_status = _struct(common_pb2.StatusReply, status.Status)
_onload = _struct(common_pb2.Empty, commands.Onload)
_offload = _struct(common_pb2.Empty, commands.Offload)
_join = _struct(weights_pb2.JoinWeightsRequest, commands.JoinWeights)


def _weights(type_: Any) -> MethodSide:
    return _struct(weights_pb2.WeightsRequest, type_)


METHODS: dict[tuple[str, str], Method] = {
    (method.service, method.name): method
    for method in (
        Method("Process", "Status", _empty, _status, Priority.CONTROL),
        Method("Process", "Stop", _struct(common_pb2.StopRequest, status.Stop), _empty, Priority.CONTROL),
        Method("Coordinator", "Register", _struct(coordinator_pb2.Registration, status.Registration), _empty),
        Method("Coordinator", "Processes", _empty, _struct(coordinator_pb2.Topology, status.Topology)),
        Method("Coordinator", "Watch", _empty, _struct(coordinator_pb2.Progress, status.Progress)),
        Method(
            "Coordinator",
            "Join",
            _struct(coordinator_pb2.NodeRegistration, nodes.NodeRegistration),
            _struct(coordinator_pb2.Assignment, nodes.Assignment),
        ),
        Method("Coordinator", "ReportPaths", _struct(coordinator_pb2.NodePaths, nodes.NodePaths), _empty),
        Method("Coordinator", "ReportDeath", _struct(coordinator_pb2.Death, nodes.Death), _empty),
        Method(
            "Coordinator",
            "Scale",
            _struct(coordinator_pb2.ScaleRequest, nodes.Scale),
            _struct(coordinator_pb2.ScaleReply, nodes.Scaled),
        ),
        Method(
            "Rollout",
            "Generate",
            _bulk(rollout_pb2.GenerateRequest, "group", GroupRequest),
            _bulk(rollout_pb2.GenerateReply, "group", GeneratedGroup),
        ),
        Method("Rollout", "Cancel", _struct(rollout_pb2.CancelRequest, commands.Cancel), _empty, Priority.CONTROL),
        Method("Rollout", "JoinWeights", _join, _empty, Priority.CONTROL),
        Method("Rollout", "ReceiveWeights", _weights(commands.ReceiveWeights), _empty, Priority.CONTROL),
        Method(
            "Rollout",
            "CommitWeights",
            _weights(commands.CommitWeights),
            _struct(weights_pb2.CommitWeightsReply, commands.WeightsCommitted),
            Priority.CONTROL,
        ),
        Method("Rollout", "AbortWeights", _weights(commands.AbortWeights), _empty, Priority.CONTROL),
        Method("Rollout", "Move", _struct(rollout_pb2.MoveRequest, commands.Move), _empty, Priority.CONTROL),
        Method(
            "Reward",
            "Score",
            _bulk(reward_pb2.ScoreRequest, "group", ScoreRequest),
            _bulk(reward_pb2.ScoreReply, "scores", Scores),
        ),
        Method(  # served by a process of the user's
            "RemoteReward",
            "Score",
            _struct(remote_reward_pb2.RemoteScoreRequest, RemoteScoreRequest),
            _struct(remote_reward_pb2.RemoteScoreReply, RemoteScoreReply),
        ),
        Method(
            "Reference",
            "Logprobs",
            _bulk(reference_pb2.LogprobRequest, "group", LogprobRequest),
            _raw(reference_pb2.LogprobReply, "logprobs"),
        ),
        Method(
            "ReferenceGroup",
            "Logprobs",
            _struct(reference_pb2.LogprobsPartRequest, commands.ComputeLogprobs),
            _raw_list(reference_pb2.LogprobsPartReply, "logprobs"),
        ),
        Method(
            "Trainer",
            "HostWeights",
            _struct(weights_pb2.HostWeightsRequest, commands.HostWeights),
            _struct(weights_pb2.HostWeightsReply, commands.WeightsHosted),
            Priority.CONTROL,
        ),
        Method(
            "Trainer",
            "SendWeights",
            _weights(commands.SendWeights),
            _struct(weights_pb2.SendWeightsReply, commands.WeightsSent),
        ),
        Method("Trainer", "AbortWeights", _weights(commands.AbortWeights), _empty, Priority.CONTROL),
        Method("Trainer", "Restore", _struct(trainer_pb2.RestoreRequest, commands.Restore), _empty),
        Method("Trainer", "BeginStep", _struct(trainer_pb2.StepRequest, commands.BeginStep), _empty),
        Method("Trainer", "Accumulate", _struct(trainer_pb2.AccumulateRequest, commands.Accumulate), _empty),
        Method(
            "Trainer",
            "Apply",
            _struct(trainer_pb2.ApplyRequest, commands.ApplyProbed),
            _bulk(trainer_pb2.ApplyReply, "result", StepResult),
        ),
        Method("Trainer", "Save", _struct(trainer_pb2.SaveRequest, commands.Save), _empty),
        Method("Trainer", "Export", _struct(trainer_pb2.ExportRequest, commands.Export), _empty),
        Method("Critic", "Restore", _struct(critic_pb2.CriticRestoreRequest, commands.Restore), _empty),
        Method("Critic", "BeginStep", _struct(critic_pb2.CriticStepRequest, commands.BeginStep), _empty),
        Method("Critic", "Accumulate", _struct(critic_pb2.CriticAccumulateRequest, commands.Accumulate), _empty),
        Method(
            "Critic",
            "Apply",
            _struct(critic_pb2.CriticStepRequest, commands.Apply),
            _bulk(critic_pb2.CriticApplyReply, "result", StepResult),
        ),
        Method("Critic", "Save", _struct(critic_pb2.CriticSaveRequest, commands.Save), _empty),
        Method(
            "Critic",
            "Values",
            _struct(critic_pb2.ValuesRequest, commands.ComputeValues),
            _raw_list(critic_pb2.ValuesReply, "values"),
        ),
        *(
            Method(service, name, side, _empty)
            for service in ("Trainer", "Critic", "Reference", "ReferenceGroup")
            for name, side in (("Onload", _onload), ("Offload", _offload))
        ),
    )
}


# The errors that arrive as they were. Unreachable and Unanswered are not among them: they are what a caller finds out about
# its own peer, and the caller's caller must not take them for its.
TOLD = (
    errors.UserError,
    errors.ConfigError,
    errors.InvalidMessage,
    errors.Overloaded,
    errors.Cancelled,
    errors.ServiceFault,
    errors.DeadlineExceeded,
    errors.InvariantViolated,
)


def error_to_wire(error: BaseException) -> common_pb2.Error:
    """Any exception as a message; what is not Sluice's own becomes a ServiceFault at the other end."""
    kind = next((kind for kind in type(error).__mro__ if kind in TOLD), type(error))
    out = common_pb2.Error(kind=kind.__name__, message=text(str(error)))
    if isinstance(error, errors.ServiceFault):
        out.service, out.phase, out.message = error.service, error.phase, text(error.reason)
        out.deadline = error.deadline or 0.0
    if isinstance(error, errors.Overloaded):
        out.retry_after = error.retry_after
    return out


def text(text: str) -> str:
    """What protobuf takes as a string: the name of a file, say, need not be UTF-8."""
    return text.encode(errors="replace").decode()


def error_from_wire(error: common_pb2.Error, service: str, phase: str) -> Exception:
    """The exception that `error_to_wire` saw; `service` and `phase` say where, when the message does not."""
    kind = getattr(errors, error.kind, None)
    if kind is errors.Overloaded:
        return errors.Overloaded(error.message, error.retry_after)
    if kind is errors.ConfigError:
        return errors.ConfigError(error.message.splitlines())
    if kind in (errors.InvalidMessage, errors.Cancelled, errors.UserError, errors.InvariantViolated):
        return kind(error.message)
    if kind in (errors.ServiceFault, errors.DeadlineExceeded):
        return kind(error.service, error.phase, error.message, error.deadline or None)
    return errors.ServiceFault(service, phase, f"{error.kind}: {error.message}")


def check_schema(schema: int) -> None:
    """Raises InvalidMessage for frames of another schema than ours."""
    if schema != SCHEMA_VERSION:
        raise errors.InvalidMessage(f"message schema {schema} is not supported; this process speaks {SCHEMA_VERSION}")
