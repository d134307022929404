"""Between protobuf and Sluice's own types: each method both ways, damaged messages, and errors."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from enum import Enum
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime import commands, errors, status, types
from runtime.cluster import nodes
from runtime.commands import Priority
from runtime.environments.messages import EpisodeEvent, EpisodeRequest
from runtime.rewards.remote import RemoteResult, RemoteScoreReply, RemoteScoreRequest
from runtime.types import SCHEMA_VERSION, GeneratedGroup, LogprobRequest, PolicyVersion, ScoreRequest, TrainGroup, ValueRequest
from runtime.weights.plan import GroupAddress, Manifest, Sharding
from services.rpc import contract
from services.rpc.generated import (
    blobs_pb2,
    common_pb2,
    coordinator_pb2,
    critic_pb2,
    environment_pb2,
    gateway_pb2,
    reference_pb2,
    remote_reward_pb2,
    reward_pb2,
    rollout_pb2,
    trainer_pb2,
    weights_pb2,
)

# ---- Between protobuf and Sluice's own types: every method both ways, and messages that are damaged

MODULES = (
    *(blobs_pb2, common_pb2, coordinator_pb2, critic_pb2, environment_pb2, gateway_pb2, reference_pb2),
    *(remote_reward_pb2, reward_pb2, rollout_pb2, trainer_pb2, weights_pb2),
)

VERSION = PolicyVersion(3, 1 << 20)
# What a field narrower than Sluice's own would not take, by its name.
LARGE = {"group_id": -(1 << 40), "seed": (1 << 63) - 1, "step": 1 << 20, "bytes": 1 << 40, "bucket_bytes": 1 << 36}
LARGE |= {"port": 65535, "tokens": 1 << 31, "pid": 4_000_000}


def example(kind: Any, numbers: Iterator[int], name: str = "", default: Any = None) -> Any:
    """A value of this type: no field has its default, and no two have the same number or text."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin is Literal:
        return next(one for one in inside if one != default)
    if origin in (Union, UnionType):
        return example(next(one for one in inside if one is not type(None)), numbers, name, default)
    if origin is list or (origin is tuple and inside[-1] is ...):
        return origin(example(inside[0], numbers, name) for _ in range(2))
    if origin is tuple:
        return tuple(example(one, numbers, name) for one in inside)
    if origin is dict:
        return {example(str, numbers): example(inside[1], numbers) for _ in range(2)}
    number = next(numbers)
    plain = {
        int: LARGE.get(name, number),
        float: number + 0.5,
        str: f"é{number}",
        bytes: b"\xff\0%d" % number,
        bool: default is not True,
    }
    plain |= {Any: {"é": [number, None]}, type(None): None, np.ndarray: np.array([number, np.nan], np.float32)}
    if kind in plain:
        return plain[kind]
    if issubclass(kind, Enum):
        return list(kind)[-1]
    hints, fields = get_type_hints(kind), inspect.signature(kind).parameters
    return kind(**{name: example(hints[name], numbers, name, field.default) for name, field in fields.items()})


SIDES = [
    pytest.param(side, example(side.kind, itertools.count(1)), id=f"{service}.{name}-{direction}")
    for (service, name), method in contract.METHODS.items()
    for direction, side in (("request", method.request), ("reply", method.reply))
]
RUN, ADDRESS = (example(kind, itertools.count(1)) for kind in (EpisodeRequest, GroupAddress))


def trained(payload: bytes) -> TrainGroup:
    return TrainGroup(group_id=1, tokens=9, payload=payload, rewards=np.ones(1, np.float32), valid=np.ones(1, np.uint8))


def same(one: Any, other: Any) -> bool:
    """Equal in type and value; arrays bit for bit. A map has no order."""
    return type(one) is type(other) and msgspec.msgpack.decode(types.encode(one)) == msgspec.msgpack.decode(types.encode(other))


@pytest.mark.parametrize(("side", "value"), SIDES)
def test_a_message_arrives_as_it_was_sent(side: contract.MethodSide, value: Any) -> None:
    assert same(side.parse(side.serialize(value)), value)


@pytest.mark.parametrize(
    ("key", "request_", "reply"),
    [
        (("Trainer", "Accumulate"), commands.Accumulate(0, []), None),
        (("Critic", "Accumulate"), commands.Accumulate(0, [trained(b"")]), None),
        (("Trainer", "Save"), commands.Save("", b"", ()), []),
        (("RemoteReward", "Score"), RemoteScoreRequest([]), RemoteScoreReply([RemoteResult(value=0.0), RemoteResult()])),
        (
            ("Trainer", "InitWeightGroup"),
            commands.InitWeightGroup(0, (), ()),
            commands.WeightGroupReady(ADDRESS, Manifest((), 0, Sharding(cuts=()))),
        ),
        (("Critic", "Values"), commands.ComputeValues([]), []),
        (("Coordinator", "Processes"), None, status.Topology()),
        (("Coordinator", "Watch"), None, status.Progress()),
        (
            ("Coordinator", "Join"),
            nodes.NodeRegistration(name="", address=""),
            nodes.Assignment(config="", launches=[nodes.Launch(role="", name="")]),
        ),
        (("Process", "Status"), None, status.Status(role="", name="")),
        (("Environment", "Run"), RUN, EpisodeEvent()),
        (("Rollout", "ReceiveWeights"), commands.ReceiveWeights(PolicyVersion(), 0), commands.WeightsReceived()),
        (("Reference", "Logprobs"), LogprobRequest(group_id=0, payload=b""), b""),
    ],
)
def test_what_is_empty_or_zero_arrives_too(key: tuple[str, str], request_: Any, reply: Any) -> None:
    for side, value in ((contract.METHODS[key].request, request_), (contract.METHODS[key].reply, reply)):
        assert same(side.parse(side.serialize(value)), value)


def payloads(value: Any) -> list[bytes]:
    return [one.payload for one in [value, *getattr(value, "groups", [])] if hasattr(one, "payload")]


BULK = [
    (("Rollout", "Generate"), "reply", lambda payload: generated(payload)),
    (("Reward", "Score"), "request", lambda payload: ScoreRequest(group_id=1, label="", payload=payload)),
    (("Reference", "Logprobs"), "request", lambda payload: LogprobRequest(group_id=1, payload=payload)),
    (
        ("ReferenceGroup", "Logprobs"),
        "request",
        lambda payload: commands.ComputeLogprobs([LogprobRequest(group_id=1, payload=payload)]),
    ),
    (
        ("Critic", "Values"),
        "request",
        lambda payload: commands.ComputeValues([ValueRequest(group_id=1, tokens=9, payload=payload)]),
    ),
    (("Trainer", "Accumulate"), "request", lambda payload: commands.Accumulate(1, [trained(payload)])),
]


def generated(payload: bytes) -> GeneratedGroup:
    return GeneratedGroup(
        group_id=1, prompt_tokens=1, response_tokens=[1], truncated=0, oldest=VERSION, newest=VERSION, payload=payload
    )


@pytest.mark.parametrize(("key", "direction", "value"), BULK)
def test_a_payload_is_copied_once_into_its_frame(key: tuple[str, str], direction: str, value: Any) -> None:
    payload = np.random.default_rng(0).bytes(1 << 19)
    side = getattr(contract.METHODS[key], direction)
    tracemalloc.start()
    try:
        body = side.pack(value(payload))
        packed = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        messages = [contract.LargeBody(common_pb2.Reply(id=1), chunk) for chunk, _ in contract.split(body)]
        frame = contract.wire_frame(common_pb2.ReplyFrame(), "replies", messages)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert any(part is payload for part in body)  # no copy on the way to the frame
    assert packed < len(payload) / 16
    assert peak < 17 / 16 * len(payload)
    arrived = side.parse(common_pb2.ReplyFrame.FromString(frame).replies[0].body)
    assert any(one == payload for one in payloads(arrived))


def test_the_protocol_files_declare_exactly_these_methods() -> None:
    declared = {}
    for module in MODULES:
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                if method.name == "Session":
                    frames = common_pb2.CallFrame.DESCRIPTOR, common_pb2.ReplyFrame.DESCRIPTOR
                    assert (method.input_type, method.output_type) == frames
                    assert method.client_streaming and method.server_streaming
                    continue
                assert method.server_streaming == (method.name in ("Watch", "Join", "Run"))
                assert not method.client_streaming
                declared[service.name, method.name] = (
                    f"/{service.full_name}/{method.name}",
                    method.input_type,
                    method.output_type,
                )
    assert declared == {
        key: (method.path, method.request.message.DESCRIPTOR, method.reply.message.DESCRIPTOR)
        for key, method in contract.METHODS.items()
    }


def test_what_steers_a_role_goes_before_its_data() -> None:
    control = {name for (_, name), method in contract.METHODS.items() if method.priority is Priority.CONTROL}
    assert control == {
        *("Status", "Stop", "Profile", "InitWeightGroup", "SetLevel", "UpdateEndpoints", "FinishGroup"),
        *("JoinWeights", "ReceiveWeights", "ResendWeights", "CommitWeights", "AbortWeights"),
    }


@pytest.mark.parametrize(
    ("key", "data"),
    [
        (("Process", "Stop"), b"\xff"),
        (("Rollout", "Generate"), b"\x0a\x05abc"),  # shorter than it says
        (("Coordinator", "Register"), b"\x0a\x01\xff"),  # not UTF-8
        (("Rollout", "Generate"), rollout_pb2.GenerateRequest(group=b"\xc1").SerializeToString()),
        (("Rollout", "Generate"), b""),
        (("Reward", "Score"), reward_pb2.ScoreRequest(group=types.encode({"group_id": "7"})).SerializeToString()),
        (("Trainer", "Accumulate"), trainer_pb2.AccumulateRequest(groups=types.encode([5])).SerializeToString()),
        (("Trainer", "Accumulate"), trainer_pb2.AccumulateRequest(step=1).SerializeToString()),
        (("Critic", "Values"), critic_pb2.ValuesRequest(groups=types.encode([5])).SerializeToString()),
    ],
)
def test_what_does_not_decode_is_an_invalid_message(key: tuple[str, str], data: bytes) -> None:
    with pytest.raises(errors.InvalidMessage):
        contract.METHODS[key].request.parse(data)


@given(st.sampled_from(sorted(contract.METHODS)), st.binary(max_size=24))
def test_no_bytes_do_worse_than_InvalidMessage(key: tuple[str, str], data: bytes) -> None:
    with suppress(errors.InvalidMessage):
        contract.METHODS[key].request.parse(data)


def frame(schema: int) -> bytes:
    return common_pb2.CallFrame(schema=schema, term=3).SerializeToString()


def test_another_schema_is_refused() -> None:
    assert contract.frame_of(common_pb2.CallFrame, frame(SCHEMA_VERSION)).term == 3
    for schema in (0, SCHEMA_VERSION - 1, SCHEMA_VERSION + 1):
        with pytest.raises(
            errors.InvalidMessage, match=f"schema {schema} is not supported; this process speaks {SCHEMA_VERSION}"
        ):
            contract.frame_of(common_pb2.CallFrame, frame(schema))


@given(st.binary(max_size=24))
def test_no_bytes_as_a_frame_do_worse_than_InvalidMessage(data: bytes) -> None:
    for kind in (common_pb2.CallFrame, common_pb2.ReplyFrame):
        with pytest.raises(errors.InvalidMessage):  # bytes so few are of our schema by chance alone
            contract.frame_of(kind, b"\xff" + data)


# ---- An error arrives at the other end as what it was, or as the nearest that the other end knows


def over_the_wire(error: BaseException) -> Exception:
    message = common_pb2.Error.FromString(contract.error_to_wire(error).SerializeToString())
    return contract.error_from_wire(message, "rollout-0", "Generate")


@pytest.mark.parametrize(
    ("found", "told"), [(errors.Unreachable, errors.ServiceFault), (errors.Unanswered, errors.DeadlineExceeded)]
)
def test_what_a_caller_finds_out_about_its_peer_is_not_taken_for_its_own_fault(
    found: type[errors.ServiceFault], told: type[errors.ServiceFault]
) -> None:
    error = found("rollout-1", "transfer", "is gone", 2.0)
    arrived = over_the_wire(error)
    assert type(arrived) is told
    assert vars(arrived) == vars(error)


class Hung(errors.DeadlineExceeded):
    """An error that only one side knows."""


def test_an_error_that_the_other_end_does_not_know_arrives_as_the_nearest_and_one_that_is_not_utf8() -> None:
    arrived = over_the_wire(Hung("trainer-0", "step", "rank 3 is silent", 30.0))
    assert type(arrived) is errors.DeadlineExceeded
    assert str(arrived) == "trainer-0: step: rank 3 is silent (deadline 30 s)"
    for error in (ValueError("no file \udcff"), errors.ServiceFault("a", "b", "no file \udcff")):
        assert "no file ?" in str(over_the_wire(error))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("bad shape"), "rollout-0: Generate: ValueError: bad shape"),
        (KeyError("x"), "rollout-0: Generate: KeyError: 'x'"),
        (asyncio.CancelledError(), "rollout-0: Generate: CancelledError: "),
        (errors.SluiceError("plain"), "rollout-0: Generate: SluiceError: plain"),
    ],
)
def test_any_other_error_is_a_fault_of_the_service(error: BaseException, message: str) -> None:
    arrived = over_the_wire(error)
    assert type(arrived) is errors.ServiceFault
    assert str(arrived) == message


@pytest.mark.parametrize("kind", ["", "Sequence", "annotations", "SluiceError", "__name__", "Exception"])
def test_an_unknown_kind_is_a_fault_of_the_service(kind: str) -> None:
    arrived = contract.error_from_wire(common_pb2.Error(kind=kind, message="m"), "reward-0", "Score")
    assert type(arrived) is errors.ServiceFault
    assert (arrived.service, arrived.phase) == ("reward-0", "Score")
