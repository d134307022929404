"""Translation between protobuf messages and Sluice's types, errors included. No other module does this.

A protobuf message stands for a Struct with the same field names. A `bytes` field whose counterpart is not bytes holds msgpack
(`runtime.types`). Each method has one row, see `Method`. Its messages come from proto/, by its name. A role's servicer has a
method of the same name in snake case."""

from __future__ import annotations

import asyncio
import enum
import importlib
import pkgutil
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import msgspec
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message

from runtime import blobs, commands, errors, status, timeouts, types
from runtime.cluster import nodes
from runtime.commands import Priority
from runtime.config import Config
from runtime.environments.messages import CancelRequest, EnvironmentDescription, EpisodeEvent, EpisodeRequest
from runtime.process import keys
from runtime.rewards.remote import RemoteScoreReply, RemoteScoreRequest
from runtime.trainer.rows import balance, balance_each
from runtime.types import SCHEMA_VERSION, SMALL, Body, Parts, parts_of, snake
from services.rpc import generated
from services.rpc.generated import common_pb2

# ---- Streams
# Both ends of a `Session` stream: small messages are joined into frames, large bodies are split.


CHUNK = 1 << 20  # bytes of one body that one frame carries
FRAME = 4 << 20  # bytes after which a frame is full
MAX_BATCH = 32  # messages that fill a frame too: it leaves at once, and the peer works on it while the next is made
LARGEST = 1 << 30  # bytes of one body; a sender puts all of a body on its way before the next
# Bytes of unfinished bodies of all streams of a service: those of the coordinator and of the earlier one.
HELD_IN_ALL = 2 * (LARGEST + (64 << 20))


def size_of(body: Body) -> int:
    return len(body) if isinstance(body, bytes) else sum(map(len, body))


def wire_field(number: int, parts: Parts) -> Parts:
    """Return `parts` as the field `number` of a protobuf message, of type bytes, string or message: its tag and length come
    first (https://protobuf.dev/programming-guides/encoding). Bytes appended to a serialized message are a field of it."""
    return [_varint(number << 3 | 2) + _varint(size_of(parts)), *parts]


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))


class LargeBody(NamedTuple):
    """A Call or Reply, and its large body beside it."""

    head: Any
    body: Parts


def wire_frame(head: Any, name: str, messages: Sequence[Any]) -> bytes:
    """Return the serialized frame `head` with `messages` of a `SendQueue` in its field `name`. Copies large bodies."""
    if LargeBody not in map(type, messages):
        getattr(head, name).extend(messages)
        return bytes(head.SerializeToString())
    number, parts = head.DESCRIPTOR.fields_by_name[name].number, [head.SerializeToString()]
    for message in messages:
        if isinstance(message, LargeBody):
            body = wire_field(message.head.BODY_FIELD_NUMBER, message.body)
            parts += wire_field(number, [message.head.SerializeToString(), *body])
        else:
            parts += wire_field(number, [message.SerializeToString()])
    return b"".join(parts)


def split(body: Body) -> Iterator[tuple[Body, bool]]:
    """Yield `(chunk, more)` pairs that make up `body`; one pair if it is small."""
    if (isinstance(body, bytes) and len(body) <= CHUNK) or size_of(body) <= CHUNK:
        yield body, False
        return
    chunk: Parts = []
    room = CHUNK
    for part in parts_of(body):
        view = memoryview(part)
        while len(view) > room:
            yield [*chunk, view[:room]], True
            chunk, view, room = [], view[room:], CHUNK
        chunk.append(view)
        room -= len(view)
    yield chunk, False


class BufferedBytes:
    """Bytes of unfinished bodies that a service holds for all its streams."""

    size = 0


class Reassembler:
    """Joins the chunks of a body, by its id. `held` counts the bytes that it holds, until `close`."""

    def __init__(self, held: BufferedBytes | None = None):
        self._held = held or BufferedBytes()
        self._id, self._body = 0, bytearray()  # of the unfinished body

    def add(self, id_: int, chunk: bytes, more: bool) -> bytes | None:
        """Return the whole body once its last chunk is in. Raises InvalidMessage for a second one, or one beyond a limit."""
        if not more and id_ != self._id:
            return chunk
        if self._body and id_ != self._id:
            raise errors.InvalidMessage("more than one unfinished message")
        self._id = id_
        self._body += chunk
        self._held.size += len(chunk)
        if len(self._body) > LARGEST:
            raise errors.InvalidMessage(f"a message of more than {LARGEST} bytes")
        if self._held.size > HELD_IN_ALL:
            raise errors.InvalidMessage(f"unfinished messages of more than {HELD_IN_ALL} bytes, over all streams")
        if more:
            return None
        whole = bytes(self._body)
        self.forget(id_)
        return whole

    def forget(self, id_: int) -> None:
        if id_ == self._id:
            self.close()

    def close(self) -> None:
        """Drop the unfinished body: the stream has ended, or the call was withdrawn."""
        self._held.size -= len(self._body)
        self._id, self._body = 0, bytearray()


def _fitting(messages: list[Any]) -> list[Any]:
    """Return the first messages, as many as a frame takes. Small messages do not fill it."""
    if LargeBody not in map(type, messages):
        return messages
    before = accumulate((size_of(each.body) if isinstance(each, LargeBody) else 0 for each in messages), initial=0)
    return [message for message, size in zip(messages, before, strict=False) if size < FRAME]


class SendQueue:
    """Messages for the next frame. Data waits up to `FRAME_WINDOW` for more data; urgent messages leave at once."""

    def __init__(self) -> None:
        self._messages: list[Any] = []
        self._something = asyncio.Event()
        self._urgent = asyncio.Event()
        self._closed = False

    def put(self, message: Any, body: Body = b"", urgent: bool = False) -> None:
        """Queue `message`, a Call or Reply without its `body`."""
        if isinstance(body, bytes) and len(body) <= SMALL:
            message.body = body
            self._messages.append(message)
        else:
            self._messages.append(LargeBody(message, parts_of(body)))
        self._something.set()
        if urgent or len(self._messages) >= MAX_BATCH:
            self._urgent.set()

    def close(self) -> None:
        """Close the queue: `frame` gives the messages that are here, and then none."""
        self._closed = True
        self._something.set()
        self._urgent.set()

    async def frame(self) -> list[Any]:
        """Return the messages of the next frame, at least one, large bodies as `LargeBody`. Empty once closed."""
        await self._something.wait()
        if not self._urgent.is_set():
            loop = asyncio.get_running_loop()
            timer = loop.call_later(timeouts.FRAME_WINDOW, self._urgent.set)
            await self._urgent.wait()
            timer.cancel()
        messages = _fitting(self._messages[:MAX_BATCH])
        self._messages = self._messages[len(messages) :]
        if not self._messages and not self._closed:
            self._something.clear()
            self._urgent.clear()
        return messages


# ---- Wire errors

# Errors that arrive unchanged, but not Unreachable and Unanswered: a caller's caller would take them for its own peer's.
UNCHANGED = (
    *(errors.UserError, errors.StorageFull, errors.ConfigError, errors.InvalidMessage, errors.Cancelled, errors.BlobLost),
    *(errors.Forbidden, errors.ServiceFault, errors.DeadlineExceeded, errors.InvariantViolated),
)


def error_to_wire(error: BaseException) -> common_pb2.Error:
    """Turn an exception into a message. An exception that is not Sluice's becomes a ServiceFault at the other end."""
    kind = next((kind for kind in type(error).__mro__ if kind in UNCHANGED), type(error))
    out = common_pb2.Error(kind=kind.__name__, message=text(str(error)))
    if isinstance(error, errors.ServiceFault):
        out.service, out.phase, out.message = error.service, error.phase, text(error.reason)
        out.deadline = error.deadline or 0.0
    if isinstance(error, errors.StorageFull):
        out.message = text(error.path)
    return out


def text(text: str) -> str:
    """Return a string that protobuf takes: a file name, for example, need not be UTF-8."""
    return text.encode(errors="replace").decode()


def error_from_wire(error: common_pb2.Error, service: str, phase: str) -> Exception:
    """Return the exception that `error_to_wire` was given. `service` and `phase` say where, if the message does not."""
    kind = getattr(errors, error.kind, None)
    if kind is errors.ConfigError:
        return errors.ConfigError(error.message.splitlines())
    if kind in (errors.ServiceFault, errors.DeadlineExceeded, errors.BlobLost):
        return kind(error.service, error.phase, error.message, error.deadline or None)
    if kind in UNCHANGED:
        return kind(error.message)
    return errors.ServiceFault(service, phase, f"{error.kind}: {error.message}")


PACKAGE = "sluice.v1"
_M = TypeVar("_M", bound=Message)
_PLAIN = (bytes, list[bytes])  # types that a message holds unchanged


@dataclass(frozen=True)
class MethodSide:
    """One direction of a method: its message, and the `kind` of its value, with the same fields. Otherwise the message has one
    field, `whole`: the value's msgpack, or the value itself (`plain`: bytes, or a list of bytes)."""

    message: type[Message]
    kind: Any
    whole: str = ""
    plain: bool = False

    def pack(self, value: Any) -> Body:
        """Return the serialized message. Large payloads are not copied."""
        if self.kind is type(None):
            return b""
        if not self.whole:
            large: Parts = []
            _write(message := self.message(), value, large)
            return [message.SerializeToString(), *large] if large else message.SerializeToString()
        body = value if self.plain else types.encode_body(value)
        if isinstance(body, bytes) or self.plain:
            return self.message(**{self.whole: body}).SerializeToString()
        return _field(self.message, self.whole, body)

    def serialize(self, value: Any) -> bytes:
        return b"".join(parts_of(self.pack(value)))

    def parse(self, data: bytes) -> Any:
        """Return the value of a serialized message. Raises InvalidMessage."""
        message = _parsed(self.message, data)
        if not self.whole:
            return None if self.kind is type(None) else _read(message, self.kind)
        held = getattr(message, self.whole)
        return self.kind(held) if self.plain else types.decode(self.kind, held)


def _parsed(message: type[_M], data: bytes) -> _M:
    try:
        return message.FromString(data)
    except DecodeError as error:
        raise errors.InvalidMessage(f"not a {message.DESCRIPTOR.full_name}: {error}") from error


class Ranks(enum.Enum):
    """The ranks of a group that get a command. All of them answer; the first rank answers for the group."""

    FIRST = "the first"
    ALL = "all"
    EACH = "all, whose lists of answers are joined"
    OTHERS = "all but the first"
    SHARES = "all, the data-parallel leaders with a share of its groups"


@dataclass(frozen=True)
class Method:
    """One method, and what its callers must know. `deadline`: the configuration's key of the seconds until its answer, or their
    name in `timeouts`; "" if the callers say. `command`: the Struct that asks for it. `share`: maps a command and the number of
    leaders to each leader's indices into `groups`. `gathered`: the Struct of a single request; a command takes many. `key`: the
    fields that identify a call. A call with a key outlives its stream, is not done twice, and has its answer kept until the
    caller acknowledges it. Groups of evaluations and probes, whose ids are negative, have no key: they are generated again.
    `callers`: who may call it, by kind or by role (`keys.kinds_of`). `speaker`: the fields that name the only caller who may
    send it. `streamed`: the answer is any number of replies."""

    service: str
    name: str
    command: type | None
    request: MethodSide
    reply: MethodSide
    deadline: str = ""
    priority: Priority = Priority.DATA
    ranks: Ranks = Ranks.FIRST
    share: Callable[[Any, int], list[list[int]]] | None = None
    gathered: type | None = None
    key: tuple[str, ...] = ()
    callers: tuple[str, ...] = (keys.COORDINATOR,)
    speaker: tuple[str, ...] = ()
    streamed: bool = False

    @property
    def path(self) -> str:
        return f"/{PACKAGE}.{self.service}/{self.name}"

    @property
    def handler(self) -> str:
        """The name of the servicer's method."""
        return snake(self.name)

    def key_of(self, command: Any) -> str:
        if not self.key or getattr(command, "group_id", 0) < 0:
            return ""
        return "/".join((self.name, *(str(getattr(command, field)) for field in self.key)))

    def speaker_of(self, command: Any) -> str:
        """Return the only caller who may send it, "" if all callers may. A gateway may generate only groups of its own."""
        if isinstance(command, types.GroupRequest) and command.group_id >= types.GATEWAY_GROUPS:
            return keys.COORDINATOR
        named = [getattr(command, field) for field in self.speaker]
        return (keys.node_agent if keys.NODE_AGENT in self.callers else keys.process)(*named) if named else ""

    def seconds(self, config: Config) -> float:
        """Return the seconds until the answer is due. A weight sync is posted before its step has ended, and may wait behind
        another weight sync. Its deadline is generous: the deadlines of its phases end first, and name the late process."""
        if self.deadline == WEIGHT_SYNC:
            return 2 * (config.deadlines.train + config.weight_sync.transfer_timeout)
        section, _, key = self.deadline.rpartition(".")
        if not section:
            return float(getattr(timeouts, key))
        seconds: float = getattr(getattr(config, section), key)
        if self.command is types.GroupRequest and config.training.partial_rollouts:  # other roles compute in between
            seconds += config.training.staleness * (seconds + config.deadlines.score + config.deadlines.train)
        if self.command is types.RunEpisodesRequest:
            seconds += timeouts.EPISODE_END  # the gateway ends its episodes at the deadline
        return seconds


def _field(message: type[Message], name: str, body: Body) -> Parts:
    return wire_field(message.DESCRIPTOR.fields_by_name[name].number, parts_of(body))


def _write(message: Any, value: msgspec.Struct, large: Parts | None = None) -> None:
    """Write `value` into `message`. `large`: takes the bytes that follow the serialized message."""
    for name in value.__struct_fields__:
        item, target = getattr(value, name), getattr(message, name)
        if isinstance(item, msgspec.Struct):
            target.SetInParent()
            _write(target, item)
        elif isinstance(target, bytes) and not isinstance(item, bytes):
            body = types.encode_body(item)
            if large is None or isinstance(body, bytes):
                setattr(message, name, b"".join(parts_of(body)))
            else:
                large += _field(type(message), name, body)
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
def _fields(type_: type[msgspec.Struct]) -> tuple[tuple[str, Any, bool], ...]:
    found = msgspec.structs.fields(type_)
    return tuple((field.name, field.type, type(None) in typing.get_args(field.type)) for field in found)


def _read(item: Any, type_: Any) -> Any:
    if isinstance(item, Message):
        type_ = next((one for one in typing.get_args(type_) if one is not type(None)), type_)
        there = ((name, kind) for name, kind, optional in _fields(type_) if not optional or item.HasField(name))
        return type_(**{name: _read(getattr(item, name), kind) for name, kind in there})
    if isinstance(item, bytes) and type_ is not bytes:
        return types.decode(type_, item)
    origin = typing.get_origin(type_)
    if origin in (list, tuple):
        return origin(_read(one, typing.get_args(type_)[0]) for one in item)
    return dict(item) if origin is dict else item


def _side(descriptor: Descriptor, kind: Any) -> MethodSide:
    message, fields = message_factory.GetMessageClass(descriptor), list(descriptor.fields_by_name)
    if kind in (None, type(None)):
        return MethodSide(message, type(None))
    if set(getattr(kind, "__struct_fields__", (None,))) == set(fields):
        return MethodSide(message, kind)
    (whole,) = fields
    return MethodSide(message, kind, whole, plain=kind in _PLAIN)


_SERVICES = {
    service.name: service
    for module in pkgutil.iter_modules(generated.__path__, f"{generated.__name__}.")
    for service in importlib.import_module(module.name).DESCRIPTOR.services_by_name.values()
}


def service_of(role: str, config: Config) -> str:
    """Return the service of `role`: called like it; Reward for roles that score; ReferenceGroup for a reference's group."""
    if role == "reference" and config.services.reference.engine == "megatron":
        return "ReferenceGroup"
    return "Reward" if role in types.SCORERS else "".join(map(str.capitalize, role.split("_")))


def _method(service: str, name: str, request: Any, reply: Any, **more: Any) -> Method:
    """Return a method whose request does not give the type of its reply, and whose callers set their deadlines."""
    declared = _SERVICES[service].methods_by_name[name]
    return Method(service, name, request, _side(declared.input_type, request), _side(declared.output_type, reply), **more)


def _command(service: str, command: type, deadline: str, *, name: str = "", **more: Any) -> Method:
    name = name or command.__name__.removeprefix("Compute").removesuffix("Request")
    ranks = {"ranks": Ranks.SHARES} if "share" in more else {}
    return _method(service, name, command, types.answer_of(command), deadline=deadline, **ranks, **more)


def _by_tokens(command: commands.Accumulate, leaders: int) -> list[list[int]]:
    """Balance the groups of each mini-batch by themselves: all ranks take part in every update."""
    tokens, mini_batches = [group.tokens for group in command.groups], [group.mini_batch for group in command.groups]
    return balance_each(tokens, mini_batches, leaders)


def _by_values(command: commands.ComputeValues, leaders: int) -> list[list[int]]:
    return balance([request.tokens for request in command.groups], leaders)


def _by_bytes(command: commands.ComputeLogprobs, leaders: int) -> list[list[int]]:
    """Balance by bytes, which are about proportional to tokens."""
    return balance([len(request.payload) for request in command.groups], leaders)


WEIGHT_SYNC = "weight_sync"
_START, _TRAIN, _SCORE, _SAVE = "deadlines.start", "deadlines.train", "deadlines.score", "deadlines.save"
_JOIN, _COMMIT, _ABORT = "weight_sync.join_timeout", "weight_sync.commit_timeout", "SYNC_ABORT"
_CONTROL: dict[str, Any] = {"priority": Priority.CONTROL}
_ALL: dict[str, Any] = {"ranks": Ranks.ALL}
_OF_GROUP = ("group_id", "attempt")
_OBSERVERS = (keys.COORDINATOR, keys.NODE_AGENT, keys.OPERATOR)
_AGENTS, _GATEWAYS, _GENERATE = (keys.NODE_AGENT,), (keys.GATEWAY,), (keys.COORDINATOR, keys.GATEWAY)


_ROWS = (
    _method("Process", "Status", None, status.Status, callers=_OBSERVERS, **_CONTROL),
    _method("Process", "Stop", status.Stop, None, **_CONTROL),
    _method("Process", "Profile", status.Profile, status.Profiled, callers=(keys.OPERATOR,), **_CONTROL),
    _method("Coordinator", "Register", status.Registration, None, callers=(keys.PROCESS,), speaker=("name", "incarnation")),
    _method("Coordinator", "Processes", None, status.Topology, callers=_OBSERVERS),
    _method("Coordinator", "Watch", None, status.Progress, callers=_OBSERVERS, streamed=True),
    _method("Coordinator", "Join", nodes.NodeRegistration, nodes.Assignment, callers=_AGENTS, speaker=("name",), streamed=True),
    _method("Coordinator", "ReportPaths", nodes.NodePaths, None, callers=_AGENTS, speaker=("node",)),
    _method("Coordinator", "ReportDeath", nodes.Death, None, callers=_AGENTS, speaker=("node",)),
    _method("Coordinator", "Scale", nodes.Scale, nodes.Scaled, callers=(keys.OPERATOR,)),
    _command("Blobs", blobs.PutBlob, "BLOB_CALL", callers=("rollout", keys.GATEWAY, keys.NODE_AGENT)),
    _command("Blobs", blobs.ReadBlob, "BLOB_CALL", callers=("trainer", "reference")),
    _method("RemoteReward", "Score", RemoteScoreRequest, RemoteScoreReply, callers=()),  # served by a process of the user's
    _command("Gateway", types.RunEpisodesRequest, "deadlines.episode", key=_OF_GROUP),
    _command("Gateway", commands.UpdateEndpoints, _JOIN, **_CONTROL),
    _command("Gateway", commands.FinishGroup, _JOIN, **_CONTROL),
    _method("Environment", "Describe", None, EnvironmentDescription, callers=_GATEWAYS),
    _method("Environment", "Run", EpisodeRequest, EpisodeEvent, callers=_GATEWAYS, streamed=True),
    _method("Environment", "Cancel", CancelRequest, None, callers=_GATEWAYS),
    _command("Rollout", types.GroupRequest, "deadlines.generate", name="Generate", key=_OF_GROUP, callers=_GENERATE),
    _command("Rollout", commands.InitWeightGroup, _JOIN, **_CONTROL),
    _command("Rollout", commands.ResendWeights, WEIGHT_SYNC, **_CONTROL),
    _command("Rollout", commands.JoinWeights, _JOIN, **_CONTROL, **_ALL),
    _command("Rollout", commands.ReceiveWeights, WEIGHT_SYNC, **_CONTROL, **_ALL),
    _command("Rollout", commands.CommitWeights, _COMMIT, **_CONTROL, **_ALL),
    _command("Rollout", commands.AbortWeights, _ABORT, **_CONTROL, **_ALL),
    _command("Rollout", commands.SetLevel, _COMMIT, **_CONTROL),  # may take as long as a commit
    _command("Reward", types.ScoreRequest, _SCORE, key=_OF_GROUP),
    _command("Reference", types.LogprobRequest, _SCORE, name="Logprobs", key=_OF_GROUP),
    _command("Reference", commands.Onload, _SCORE),
    _command("Reference", commands.Offload, _SCORE),
    _command("ReferenceGroup", commands.ComputeLogprobs, _SCORE, share=_by_bytes, gathered=types.LogprobRequest),
    _command("ReferenceGroup", commands.Onload, _SCORE, **_ALL),
    _command("ReferenceGroup", commands.Offload, _SCORE, **_ALL),
    _command("Trainer", commands.InitWeightGroup, _JOIN, **_CONTROL),
    _command("Trainer", commands.JoinWeights, WEIGHT_SYNC, **_CONTROL, ranks=Ranks.OTHERS),
    _command("Trainer", commands.SendWeights, WEIGHT_SYNC, **_ALL),
    _command("Trainer", commands.ResendWeights, WEIGHT_SYNC, **_CONTROL, **_ALL),
    _command("Trainer", commands.AbortWeights, _ABORT, **_CONTROL, **_ALL),
    _command("Trainer", commands.Export, _SAVE, **_ALL),
    _command("Critic", commands.ComputeValues, _TRAIN, share=_by_values, gathered=types.ValueRequest),
    *(
        row
        for service in ("Trainer", "Critic")
        for row in (
            _command(service, commands.Restore, _START, **_ALL),
            _command(service, commands.Recall, _START, **_ALL),
            _command(service, commands.BeginStep, _TRAIN, **_ALL),
            _command(service, commands.Accumulate, _TRAIN, share=_by_tokens),
            _command(service, commands.Apply, _TRAIN, **_ALL, key=("step",)),
            _command(service, commands.Keep, _TRAIN, **_ALL),
            _command(service, commands.Save, _SAVE, ranks=Ranks.EACH),
            _command(service, commands.Onload, _TRAIN, **_ALL),
            _command(service, commands.Offload, _TRAIN, **_ALL),
        )
    ),
)
METHODS: dict[tuple[str, str], Method] = {(method.service, method.name): method for method in _ROWS}
_BY_COMMAND = {(method.service, kind): method for method in _ROWS for kind in (method.command, method.gathered) if kind}


def method_of(service: str, command: Any) -> Method:
    """Return the method that `command` asks for. Raises InvalidMessage if the service has no such command."""
    try:
        return _BY_COMMAND[service, type(command)]
    except KeyError:
        raise errors.InvalidMessage(f"{service} takes no {type(command).__name__}") from None


_F = TypeVar("_F", common_pb2.CallFrame, common_pb2.ReplyFrame)


def frame_of(kind: type[_F], data: bytes) -> _F:
    """Parse a frame. Raises InvalidMessage if it is malformed, or of another schema version."""
    frame = _parsed(kind, data)
    if frame.schema != SCHEMA_VERSION:
        raise errors.InvalidMessage(f"message schema {frame.schema} is not supported; this process speaks {SCHEMA_VERSION}")
    return frame
