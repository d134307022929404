"""Between protobuf and Sluice's own types: each method both ways, damaged messages, and errors."""

from __future__ import annotations

import asyncio
import tracemalloc
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import pytest
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime import codec, commands, errors, status
from runtime.cluster import nodes
from runtime.commands import Priority
from runtime.environments.messages import CancelRequest, EnvironmentDescription, EpisodeEnd, EpisodeEvent, EpisodeRequest
from runtime.rewards.remote_messages import ChatMessage, RemoteItem, RemoteResult, RemoteScoreReply, RemoteScoreRequest
from runtime.types import (
    SCHEMA_VERSION,
    EpisodeTask,
    GeneratedGroup,
    GroupRequest,
    LogprobRequest,
    Logprobs,
    PlayRequest,
    PolicyVersion,
    SamplingParams,
    ScoreRequest,
    Scores,
    StepResult,
    TrainGroup,
    ValueRequest,
)
from runtime.weights.plan import GroupAddress, Manifest, TensorSpec
from services.rpc import contract, stream, wire_errors
from services.rpc.generated import (
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
    *(common_pb2, coordinator_pb2, critic_pb2, environment_pb2, gateway_pb2, reference_pb2),
    *(remote_reward_pb2, reward_pb2, rollout_pb2, trainer_pb2, weights_pb2),
)

VERSION = PolicyVersion(3, 1 << 20)


ADDRESS = GroupAddress(
    epoch=4,
    host="10.0.0.7",
    port=65535,
    rank=2,
    world_size=9,
    backend="gloo",
    timeout=12.5,
    names=("trainer-0", "trainer-2", "rollout-0"),
    senders=2,
    key=bytes(range(32)),
)


MANIFEST = Manifest(
    (
        TensorSpec("model.embed.weight", "bfloat16", (151936, 4096)),
        TensorSpec("part", "float32", (3,), (0, 1)),
        TensorSpec("s", "int8", ()),
    ),
    64 << 20,
)


GROUPS = [
    TrainGroup(
        group_id=group_id,
        tokens=123,
        payload=b"\x00\xff payload",
        rewards=np.array([0.5, -1], np.float32),
        valid=np.array([1, 0], np.uint8),
        reference=reference,
        values=reference,
        mini_batch=group_id % 2,
    )
    for group_id, reference in ((1, None), (1 << 40, codec.encode(Logprobs(group_id=1, values=np.ones(2, np.float32)))))
]


STATUS = status.Status(
    role="rollout",
    name="rollout-1",
    state="ready",
    detail="füllt",
    version=VERSION,
    calls=status.CallStats(open=1, answered=3, failed=4, withdrawn=7, seconds=0.25),
    rates={"tokens": 1e4, "empty": 0.0},
    gauges={"running": -3.0},
    pid=4_000_000,
    address="127.0.0.1:1",
    uptime_seconds=1.5,
)


REGISTRATION = status.Registration(
    role="trainer", name="trainer-3", rank=3, address="[::1]:5", pid=9, host="node", seconds={"load": 2.5}, machine="m"
)


MESSAGES: dict[tuple[str, str], tuple[Any, Any]] = {
    ("Process", "Status"): (None, STATUS),
    ("Process", "Stop"): (status.Stop(drain_seconds=2.5), None),
    ("Process", "Profile"): (
        status.Profile(step=3, steps=2, seconds=1.5, memory=True),
        status.Profiled(files=["runs/a/profiles/trainer-0.0.4.json.gz"]),
    ),
    ("Coordinator", "Register"): (REGISTRATION, None),
    ("Coordinator", "Processes"): (None, status.Topology(processes=[REGISTRATION, REGISTRATION])),
    ("Coordinator", "Watch"): (
        None,
        status.Progress(phase="training", step=4, steps=300, detail="x"),
    ),
    ("Coordinator", "Join"): (
        nodes.NodeRegistration(
            name="a", address="10.0.0.1", devices=8, machine="m", config="c", version="1", ports=[5, 6], pid=7
        ),
        nodes.Assignment(
            config="run: {name: a}",
            launches=[
                nodes.Launch(role="rollout", name="rollout-0", devices=[0, 1], incarnation=2),
                nodes.Launch(
                    role="trainer",
                    name="trainer-2",
                    ranks=[2, 3],
                    devices=[2, 3],
                    rendezvous=nodes.Rendezvous(host="10.0.0.1", port=5, key=bytes(range(32))),
                ),
            ],
        ),
    ),
    ("Coordinator", "ReportPaths"): (nodes.NodePaths(node="a", found={"model.path": "1f"}, parts=["trainer/a/run/0.4"]), None),
    ("Coordinator", "ReportDeath"): (
        nodes.Death(node="a", name="rollout-0", incarnation=3, reason="was killed", mistake=True),
        None,
    ),
    ("Coordinator", "Scale"): (
        nodes.Scale(role="rollout", replicas=3),
        nodes.Scaled(started=["rollout-2"], stopped=["rollout-3"], pending=["rollout-1"]),
    ),
    ("Rollout", "Generate"): (
        GroupRequest(
            group_id=-1,
            prompt=np.array([1, 2, 3], np.int32),
            n=8,
            seed=(1 << 63) - 1,
            sampling=SamplingParams(max_new_tokens=5, temperature=0.5, top_p=0.9, top_k=4, min_p=0.1, stop_token_ids=(7, 8)),
            purpose="eval",
        ),
        GeneratedGroup(
            group_id=5,
            prompt_tokens=3,
            response_tokens=[4, 0],
            truncated=1,
            oldest=PolicyVersion(),
            newest=VERSION,
            payload=b"\x00\x01",
        ),
    ),
    ("Gateway", "Play"): (
        PlayRequest(
            group_id=5,
            task=EpisodeTask(messages=[{"role": "user", "content": "é"}], label="7", source="s", extra={"k": [1, None]}),
            n=2,
            seed=2**63 - 1,
            attempt=3,
            first=4,
            sampling=SamplingParams(max_new_tokens=5),
            purpose="eval",
            version=VERSION,
        ),
        GeneratedGroup(
            group_id=5,
            prompt_tokens=0,
            response_tokens=[4, 1, 2],
            truncated=0,
            oldest=VERSION,
            newest=VERSION,
            rewards=[0.5, -1.0],
            payload=b"\x00\x01",
        ),
    ),
    ("Gateway", "UsePeers"): (
        commands.UsePeers(
            rollouts=(commands.PeerAddress("rollout-0", 3, "[::1]:65535", "a machine", 64, "gateway-0/1:00ff"),),
            environments=(commands.PeerAddress("environment-1", 0, "[::1]:1", "a machine", 1),),
            key="00ff",
        ),
        None,
    ),
    ("Gateway", "Hurry"): (commands.Hurry(1 << 40), None),
    ("Environment", "Describe"): (None, EnvironmentDescription(name="é", concurrency=64)),
    ("Environment", "Run"): (
        EpisodeRequest(
            id="f0a8",
            base_url="http://[::1]:1/episodes/f0a8",
            api_key="k",
            task='{"label": "é"}',
            seed=(1 << 63) - 1,
            purpose="evaluate",
            call_seconds=600.0,
            tool_seconds=0.5,
            setup_seconds=2.0,
            score_seconds=3.0,
            cleanup_seconds=4.0,
        ),
        EpisodeEvent(
            phase="run",
            reward=-0.5,
            turn=0,
            completion_id="call-1",
            branch="critic",
            log={"moves": 3.0},
            end=EpisodeEnd(
                reward=0.0,
                rewards={"call-1": 1.0},
                left_out=True,
                stop_reason="max_turns",
                failure="data",
                reason="é",
            ),
        ),
    ),
    ("Environment", "Cancel"): (CancelRequest("f0a8"), None),
    ("Rollout", "HostWeights"): (
        commands.HostWeights(4, 2, "collective", ("rollout-0", "rollout-1")),
        commands.WeightsHosted(ADDRESS, MANIFEST),
    ),
    ("Rollout", "ResendWeights"): (commands.ResendWeights(VERSION, 6), commands.WeightsSent(1 << 40, 0.25)),
    ("Rollout", "JoinWeights"): (commands.JoinWeights(ADDRESS, MANIFEST), None),
    ("Rollout", "ReceiveWeights"): (commands.ReceiveWeights(VERSION, 6), commands.WeightsReceived(0.5, 0.25, 0.125, 1.0)),
    ("Rollout", "CommitWeights"): (commands.CommitWeights(VERSION, 6), commands.WeightsCommitted(0.0125)),
    ("Rollout", "AbortWeights"): (commands.AbortWeights(VERSION, 6), None),
    ("Reward", "Score"): (
        ScoreRequest(
            group_id=5,
            label="#### 7 €",
            payload=b"\xff",
            source="gsm8k",
            messages=[{"role": "user", "content": "é"}],
            extra={"level": 3, "tests": [{"in": "é", "out": None}]},
        ),
        Scores(
            group_id=5,
            rewards=np.array([1, np.nan], np.float32),
            valid=np.array([1, 0], np.uint8),
            rules={"gsm8k": np.array([1, np.nan], np.float32)},
            errors={"timeout": 1},
        ),
    ),
    ("Reference", "Logprobs"): (LogprobRequest(group_id=5, payload=b"\xff\x00", temperature=0.75), b"\x00\xffraw"),
    ("ReferenceGroup", "Logprobs"): (
        commands.ComputeLogprobs([LogprobRequest(group_id=5, payload=b"\xff\x00", temperature=0.75)]),
        [b"\x00\xffraw", b""],
    ),
    ("Trainer", "HostWeights"): (
        commands.HostWeights(4, 2, "shared_memory", ("trainer-0", "rollout-0")),
        commands.WeightsHosted(ADDRESS, MANIFEST),
    ),
    ("Trainer", "SendWeights"): (commands.SendWeights(VERSION, 6), commands.WeightsSent(1 << 40, 0.25)),
    ("Trainer", "JoinWeights"): (commands.JoinWeights(ADDRESS, MANIFEST), None),
    ("Trainer", "ResendWeights"): (commands.ResendWeights(VERSION, 6), commands.WeightsSent(1 << 40, 0.25)),
    ("Trainer", "AbortWeights"): (commands.AbortWeights(VERSION, 6), None),
    ("RemoteReward", "Score"): (
        RemoteScoreRequest(
            [
                RemoteItem(
                    text="é",
                    label="5",
                    source="a/b",
                    tokens=1 << 31,
                    finish_reason="stop",
                    prompt=[ChatMessage("user", "2+3="), ChatMessage("assistant", "")],
                    extra='{"level": "é"}',
                )
            ]
        ),
        RemoteScoreReply([RemoteResult(value=0.0), RemoteResult(value=-1.5), RemoteResult(error="no idea"), RemoteResult()]),
    ),
    ("Trainer", "BeginStep"): (commands.BeginStep(7), None),
    ("Trainer", "Accumulate"): (commands.Accumulate(7, GROUPS), None),
    ("Trainer", "Apply"): (
        commands.Apply(7, (b"one", b"two")),
        StepResult(metrics={"actor/grad_norm": 0.5}, seconds=1.25, probes=[0.1, 0.2]),
    ),
    ("Trainer", "Restore"): (commands.Restore("runs/a/checkpoint", b"\x80", 2), None),
    ("Trainer", "Save"): (commands.Save("runs/a/checkpoint", b"\x80", (4, 8)), ["trainer/a"]),
    ("Trainer", "Export"): (commands.Export("runs/a/export"), None),
    ("Rollout", "Move"): (commands.Move(commands.Level.WEIGHTS.value), None),
    **{
        (service, name): (command, None)
        for service in ("Trainer", "Critic", "Reference", "ReferenceGroup")
        for name, command in (("Onload", commands.Onload()), ("Offload", commands.Offload()))
    },
    ("Critic", "BeginStep"): (commands.BeginStep(7), None),
    ("Critic", "Accumulate"): (commands.Accumulate(7, GROUPS), None),
    ("Critic", "Apply"): (commands.Apply(7), StepResult(metrics={"critic/value_loss": 0.5}, seconds=1.25)),
    ("Critic", "Restore"): (commands.Restore("runs/a/checkpoint"), None),
    ("Critic", "Save"): (commands.Save("runs/a/checkpoint/critic"), []),
    ("Critic", "Values"): (
        commands.ComputeValues([ValueRequest(group_id=1 << 40, tokens=9, payload=b"\x00\xff")]),
        [b"\x00\xffraw", b""],
    ),
}


SIDES = [
    pytest.param(side, value, id=f"{service}.{name}-{direction}")
    for (service, name), values in MESSAGES.items()
    for direction, side, value in zip(
        ("request", "reply"),
        (contract.METHODS[service, name].request, contract.METHODS[service, name].reply),
        values,
        strict=True,
    )
]


def same(one: Any, other: Any) -> bool:
    """Equal in type and value; arrays bit for bit. A map has no order."""
    return type(one) is type(other) and msgspec.msgpack.decode(codec.encode(one)) == msgspec.msgpack.decode(codec.encode(other))


# ---------------------------------------------------------------------------------------------------------- the methods


def test_every_method_has_an_example() -> None:
    assert MESSAGES.keys() == contract.METHODS.keys()


@pytest.mark.parametrize(("side", "value"), SIDES)
def test_a_message_arrives_as_it_was_sent(side: contract.MethodSide, value: Any) -> None:
    assert same(side.parse(side.serialize(value)), value)


@pytest.mark.parametrize(
    ("key", "request_", "reply"),
    [
        (("Trainer", "Accumulate"), commands.Accumulate(0, []), None),
        (("Trainer", "HostWeights"), commands.HostWeights(0, 0, ""), commands.WeightsHosted(ADDRESS, Manifest((), 0))),
        (("Critic", "Values"), commands.ComputeValues([]), []),
        (("Coordinator", "Processes"), None, status.Topology()),
        (("Coordinator", "Watch"), None, status.Progress()),
        (("Process", "Status"), None, status.Status(role="", name="")),
        (("Environment", "Run"), MESSAGES["Environment", "Run"][0], EpisodeEvent()),
        (("Rollout", "ReceiveWeights"), commands.ReceiveWeights(PolicyVersion(), 0), commands.WeightsReceived()),
        (("Reference", "Logprobs"), LogprobRequest(group_id=0, payload=b""), b""),
    ],
)
def test_what_is_empty_or_zero_arrives_too(key: tuple[str, str], request_: Any, reply: Any) -> None:
    for side, value in ((contract.METHODS[key].request, request_), (contract.METHODS[key].reply, reply)):
        assert same(side.parse(side.serialize(value)), value)


@settings(max_examples=40)
@given(
    st.lists(
        st.builds(
            TensorSpec,
            st.text(max_size=8),
            st.sampled_from(["float32", "bfloat16"]),
            st.lists(st.integers(0, (1 << 64) - 1), max_size=4).map(tuple),
            st.lists(st.integers(0, (1 << 32) - 1), max_size=4).map(tuple),
        ),
        max_size=5,
    ),
    st.integers(0, (1 << 64) - 1),
)
def test_any_manifest_arrives(tensors: list[TensorSpec], bucket_bytes: int) -> None:
    side, command = (
        contract.METHODS["Rollout", "JoinWeights"].request,
        commands.JoinWeights(ADDRESS, Manifest(tuple(tensors), bucket_bytes)),
    )
    assert side.parse(side.serialize(command)) == command


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
        group_id=1,
        prompt_tokens=1,
        response_tokens=[1],
        truncated=0,
        oldest=VERSION,
        newest=VERSION,
        payload=payload,
    )


def trained(payload: bytes) -> TrainGroup:
    return TrainGroup(group_id=1, tokens=9, payload=payload, rewards=np.ones(1, np.float32), valid=np.ones(1, np.uint8))


@pytest.mark.parametrize(("key", "direction", "value"), BULK)
def test_a_payload_is_copied_once_into_its_frame(key: tuple[str, str], direction: str, value: Any) -> None:
    payload = np.random.default_rng(0).bytes(1 << 19)
    side = getattr(contract.METHODS[key], direction)
    tracemalloc.start()
    try:
        body = side.pack(value(payload))
        packed = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        messages = [stream.Large(common_pb2.Reply(id=1), chunk) for chunk, _ in stream.split(body)]
        frame = stream.frame(common_pb2.ReplyFrame(), "replies", messages)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert any(part is payload for part in body)  # no copy on the way to the frame
    assert packed < len(payload) / 16
    assert peak < 17 / 16 * len(payload)
    arrived = side.parse(common_pb2.ReplyFrame.FromString(frame).replies[0].body)
    assert any(one == payload for one in payloads(arrived))


def matches(message: Any, value: Any) -> bool:
    """Whether a protobuf message and a Struct have the same fields, inner ones included; a bulk message has one, of bytes."""
    fields = {field.name: field for field in message.DESCRIPTOR.fields}
    if not isinstance(value, msgspec.Struct) or fields.keys() != set(value.__struct_fields__):
        return len(fields) == 1 and next(iter(fields.values())).type == FieldDescriptor.TYPE_BYTES
    inner = {name for name, field in fields.items() if field.message_type and not field.message_type.GetOptions().map_entry}
    for name in inner:
        part = getattr(value, name)
        for one in part if isinstance(part, (list, tuple)) else [part]:
            if {field.name for field in fields[name].message_type.fields} != set(one.__struct_fields__):
                return False
    return True


@pytest.mark.parametrize(("side", "value"), [case for case in SIDES if case.values[1] is not None])
def test_protobuf_and_struct_have_the_same_fields(side: contract.MethodSide, value: Any) -> None:
    assert matches(side.message, value)


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
        *("Status", "Stop", "Profile", "HostWeights", "Move", "UsePeers", "Hurry"),
        *("JoinWeights", "ReceiveWeights", "ResendWeights", "CommitWeights", "AbortWeights"),
    }


# ----------------------------------------------------------------------------------------------------- damaged messages


@pytest.mark.parametrize(
    ("key", "data"),
    [
        (("Process", "Stop"), b"\xff"),
        (("Rollout", "Generate"), b"\x0a\x05abc"),  # shorter than it says
        (("Coordinator", "Register"), b"\x0a\x01\xff"),  # not UTF-8
        (("Rollout", "Generate"), rollout_pb2.GenerateRequest(group=b"\xc1").SerializeToString()),
        (("Rollout", "Generate"), b""),
        (("Reward", "Score"), reward_pb2.ScoreRequest(group=codec.encode({"group_id": "7"})).SerializeToString()),
        (("Trainer", "Accumulate"), trainer_pb2.AccumulateRequest(groups=codec.encode([5])).SerializeToString()),
        (("Trainer", "Accumulate"), trainer_pb2.AccumulateRequest(step=1).SerializeToString()),
        (("Critic", "Values"), critic_pb2.ValuesRequest(groups=codec.encode([5])).SerializeToString()),
    ],
)
def test_what_does_not_decode_is_an_invalid_message(key: tuple[str, str], data: bytes) -> None:
    with pytest.raises(errors.InvalidMessage):
        contract.METHODS[key].request.parse(data)


@settings(max_examples=100)
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
    message = common_pb2.Error.FromString(wire_errors.error_to_wire(error).SerializeToString())
    return wire_errors.error_from_wire(message, "rollout-0", "Generate")


@pytest.mark.parametrize(
    "error",
    [
        errors.UserError("data.train: no such file"),
        errors.InvalidMessage("schema 2"),
        errors.Cancelled("group 5 was cancelled"),
        errors.InvariantViolated("trained twice"),
        errors.ServiceFault("reward-1", "score", "a worker died"),
        errors.ServiceFault("reward-1", "score", "a worker died", 2.5),
        errors.DeadlineExceeded("trainer-0", "Apply", "was not reached in time", 30.0),
    ],
)
def test_sluices_own_errors_arrive_as_they_were(error: errors.SluiceError) -> None:
    arrived = over_the_wire(error)
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert vars(arrived) == vars(error)


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


def test_faults_of_a_configuration_arrive_one_by_one() -> None:
    arrived = over_the_wire(errors.ConfigError(["run.name: is missing", "training.steps: must be >= 1"]))
    assert isinstance(arrived, errors.ConfigError)
    assert arrived.faults == ["run.name: is missing", "training.steps: must be >= 1"]


class Hung(errors.DeadlineExceeded):
    """An error that only one side knows."""


def test_an_error_that_the_other_end_does_not_know_arrives_as_the_nearest_that_it_does() -> None:
    arrived = over_the_wire(Hung("trainer-0", "step", "rank 3 is silent", 30.0))
    assert type(arrived) is errors.DeadlineExceeded
    assert str(arrived) == "trainer-0: step: rank 3 is silent (deadline 30 s)"


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
    arrived = wire_errors.error_from_wire(common_pb2.Error(kind=kind, message="m"), "reward-0", "Score")
    assert type(arrived) is errors.ServiceFault
    assert (arrived.service, arrived.phase) == ("reward-0", "Score")


def test_an_error_that_is_not_utf8_arrives() -> None:
    for error in (ValueError("no file \udcff"), errors.ServiceFault("a", "b", "no file \udcff")):
        assert "no file ?" in str(over_the_wire(error))
