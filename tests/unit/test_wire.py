"""Between protobuf and Sluice's own types: every method both ways, errors, and how bodies become frames."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import pytest
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime import codec, commands, errors, status
from runtime.actor import MailboxStats, Priority
from runtime.types import (
    GeneratedGroup,
    GroupRequest,
    LogprobRequest,
    Logprobs,
    PolicyVersion,
    SamplingParams,
    ScoreRequest,
    Scores,
    StepResult,
    TrainGroup,
)
from runtime.weights.plan import GroupAddress, Manifest, TensorSpec
from services import stream, wire
from services.rpc import common_pb2, coordinator_pb2, reference_pb2, reward_pb2, rollout_pb2, trainer_pb2, weights_pb2

VERSION = PolicyVersion(3, 1 << 20)
ADDRESS = GroupAddress(epoch=4, host="10.0.0.7", port=65535, rank=2, world_size=9, backend="gloo", timeout=12.5)
MANIFEST = Manifest(
    (
        TensorSpec("model.embed.weight", "bfloat16", (151936, 4096)),
        TensorSpec("part", "float32", (3,), (7,)),
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
    )
    for group_id, reference in ((1, None), (1 << 40, codec.encode(Logprobs(group_id=1, values=np.ones(2, np.float32)))))
]
STATUS = status.Status(
    role="rollout",
    name="rollout-1",
    state="ready",
    detail="füllt",
    version=VERSION,
    mailbox=MailboxStats(
        depth=1,
        capacity=2,
        handled=3,
        failed=4,
        refused=5,
        expired=6,
        cancelled=7,
        late=8,
        wait_seconds=0.25,
        service_seconds=0.5,
    ),
    rates={"tokens": 1e4, "empty": 0.0},
    gauges={"running": -3.0},
    pid=4_000_000,
    address="127.0.0.1:1",
    uptime_seconds=1.5,
)
REGISTRATION = status.Registration(
    role="trainer", name="trainer-3", rank=3, address="[::1]:5", pid=9, host="node", seconds={"load": 2.5}
)

MESSAGES: dict[tuple[str, str], tuple[Any, Any]] = {
    ("Process", "Status"): (None, STATUS),
    ("Process", "Stop"): (status.Stop(drain_seconds=2.5), None),
    ("Coordinator", "Register"): (REGISTRATION, None),
    ("Coordinator", "Processes"): (None, status.Topology(processes=[REGISTRATION, REGISTRATION])),
    ("Coordinator", "Watch"): (
        None,
        status.Progress(phase="training", step=4, steps=300, detail="x"),
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
    ("Rollout", "Cancel"): (commands.Cancel([1, -1, 1 << 50]), None),
    ("Rollout", "JoinWeights"): (commands.JoinWeights(ADDRESS, MANIFEST), None),
    ("Rollout", "ReceiveWeights"): (commands.ReceiveWeights(VERSION, 6), None),
    ("Rollout", "CommitWeights"): (commands.CommitWeights(VERSION, 6), commands.WeightsCommitted(0.0125)),
    ("Rollout", "AbortWeights"): (commands.AbortWeights(VERSION, 6), None),
    ("Reward", "Score"): (
        ScoreRequest(group_id=5, label="#### 7 €", payload=b"\xff", source="gsm8k"),
        Scores(
            group_id=5,
            rewards=np.array([1, np.nan], np.float32),
            valid=np.array([1, 0], np.uint8),
            rules={"gsm8k": np.array([1, np.nan], np.float32)},
            errors={"timeout": 1},
        ),
    ),
    ("Reference", "Logprobs"): (LogprobRequest(group_id=5, payload=b"\xff\x00", temperature=0.75), b"\x00\xffraw"),
    ("Trainer", "HostWeights"): (commands.HostWeights(4, 9), commands.WeightsHosted(ADDRESS, MANIFEST)),
    ("Trainer", "SendWeights"): (commands.SendWeights(VERSION, 6), commands.WeightsSent(1 << 40, 0.25)),
    ("Trainer", "AbortWeights"): (commands.AbortWeights(VERSION, 6), None),
    ("Trainer", "BeginStep"): (commands.BeginStep(7), None),
    ("Trainer", "Accumulate"): (commands.Accumulate(7, 2, GROUPS), None),
    ("Trainer", "Apply"): (commands.Apply(7), StepResult(step=7, metrics={"grad_norm": 0.5}, seconds=1.25)),
    ("Trainer", "Save"): (commands.Save("runs/a/checkpoint", b"\x00position"), None),
    ("Trainer", "Export"): (commands.Export("runs/a/export"), None),
}
SIDES = [
    pytest.param(side, value, id=f"{service}.{name}-{direction}")
    for (service, name), values in MESSAGES.items()
    for direction, side, value in zip(
        ("request", "reply"), (wire.METHODS[service, name].request, wire.METHODS[service, name].reply), values, strict=True
    )
]


def same(one: Any, other: Any) -> bool:
    """Equal in type and value; arrays bit for bit. A map has no order."""
    return type(one) is type(other) and msgspec.msgpack.decode(codec.encode(one)) == msgspec.msgpack.decode(codec.encode(other))


# ------------------------------------------------------------------------------------------------------- the methods


def test_every_method_has_an_example() -> None:
    assert MESSAGES.keys() == wire.METHODS.keys()


@pytest.mark.parametrize(("side", "value"), SIDES)
def test_a_message_arrives_as_it_was_sent(side: wire.Side, value: Any) -> None:
    assert same(side.parse(side.pack(value).SerializeToString()), value)


@pytest.mark.parametrize(
    ("key", "request_", "reply"),
    [
        (("Trainer", "Accumulate"), commands.Accumulate(0, 0, []), None),
        (("Trainer", "HostWeights"), commands.HostWeights(0, 0), commands.WeightsHosted(ADDRESS, Manifest((), 0))),
        (("Rollout", "Cancel"), commands.Cancel([]), None),
        (("Coordinator", "Processes"), None, status.Topology()),
        (("Coordinator", "Watch"), None, status.Progress()),
        (("Process", "Status"), None, status.Status(role="", name="")),
        (("Rollout", "ReceiveWeights"), commands.ReceiveWeights(PolicyVersion(), 0), None),
        (("Reference", "Logprobs"), LogprobRequest(group_id=0, payload=b""), b""),
    ],
)
def test_what_is_empty_or_zero_arrives_too(key: tuple[str, str], request_: Any, reply: Any) -> None:
    for side, value in ((wire.METHODS[key].request, request_), (wire.METHODS[key].reply, reply)):
        assert same(side.parse(side.pack(value).SerializeToString()), value)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.builds(
            TensorSpec,
            st.text(max_size=8),
            st.sampled_from(["float32", "bfloat16"]),
            st.lists(st.integers(0, (1 << 64) - 1), max_size=4).map(tuple),
            st.lists(st.integers(0, (1 << 64) - 1), max_size=4).map(tuple),
        ),
        max_size=5,
    ),
    st.integers(0, (1 << 64) - 1),
)
def test_any_manifest_arrives(tensors: list[TensorSpec], bucket_bytes: int) -> None:
    side, command = (
        wire.METHODS["Rollout", "JoinWeights"].request,
        commands.JoinWeights(ADDRESS, Manifest(tuple(tensors), bucket_bytes)),
    )
    assert side.parse(side.pack(command).SerializeToString()) == command


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
def test_protobuf_and_struct_have_the_same_fields(side: wire.Side, value: Any) -> None:
    assert matches(side.message, value)


def test_the_protocol_files_declare_exactly_these_methods() -> None:
    declared = {}
    for module in (common_pb2, coordinator_pb2, reference_pb2, reward_pb2, rollout_pb2, trainer_pb2, weights_pb2):
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                if method.name == "Session":
                    frames = common_pb2.CallFrame.DESCRIPTOR, common_pb2.ReplyFrame.DESCRIPTOR
                    assert (method.input_type, method.output_type) == frames
                    assert method.client_streaming and method.server_streaming
                    continue
                assert method.server_streaming == (method.name == "Watch")
                assert not method.client_streaming
                declared[service.name, method.name] = (
                    f"/{service.full_name}/{method.name}",
                    method.input_type,
                    method.output_type,
                )
    assert declared == {
        key: (method.path, method.request.message.DESCRIPTOR, method.reply.message.DESCRIPTOR)
        for key, method in wire.METHODS.items()
    }


def test_what_steers_a_role_goes_before_its_data() -> None:
    control = {name for (_, name), method in wire.METHODS.items() if method.priority is Priority.CONTROL}
    assert control == {"Status", "Stop", "Cancel", "JoinWeights", "ReceiveWeights", "CommitWeights", "AbortWeights"}


# -------------------------------------------------------------------------------------------------- damaged messages


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
    ],
)
def test_what_does_not_decode_is_an_invalid_message(key: tuple[str, str], data: bytes) -> None:
    with pytest.raises(errors.InvalidMessage):
        wire.METHODS[key].request.parse(data)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(sorted(wire.METHODS)), st.binary(max_size=24))
def test_no_bytes_do_worse_than_InvalidMessage(key: tuple[str, str], data: bytes) -> None:
    with suppress(errors.InvalidMessage):
        wire.METHODS[key].request.parse(data)


def test_another_schema_is_refused() -> None:
    wire.check_schema(1)
    for schema in (0, 2):
        with pytest.raises(errors.InvalidMessage, match=f"schema {schema} is not supported; this process speaks 1"):
            wire.check_schema(schema)


# ------------------------------------------------------------------------------------------------------------ errors


def over_the_wire(error: BaseException) -> Exception:
    message = common_pb2.Error.FromString(wire.error_to_wire(error).SerializeToString())
    return wire.error_from_wire(message, "rollout-0", "Generate")


@pytest.mark.parametrize(
    "error",
    [
        errors.UserError("data.train: no such file"),
        errors.InvalidMessage("schema 2"),
        errors.Cancelled("group 5 was cancelled"),
        errors.InvariantViolated("trained twice"),
        errors.ServiceFault("reward-1", "score", "a worker died"),
        errors.ServiceFault("reward-1", "score", "a worker died", 2.5),
        errors.DeadlineExceeded("trainer-0", "mailbox", "was not reached in time", 30.0),
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


def test_an_overload_keeps_its_delay() -> None:
    arrived = over_the_wire(errors.Overloaded("reward-0: mailbox is full", 0.375))
    assert isinstance(arrived, errors.Overloaded)
    assert (str(arrived), arrived.retry_after) == ("reward-0: mailbox is full", 0.375)


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
    arrived = wire.error_from_wire(common_pb2.Error(kind=kind, message="m"), "reward-0", "Score")
    assert type(arrived) is errors.ServiceFault
    assert (arrived.service, arrived.phase) == ("reward-0", "Score")


def test_an_error_that_is_not_utf8_arrives() -> None:
    for error in (ValueError("no file \udcff"), errors.ServiceFault("a", "b", "no file \udcff")):
        assert "no file ?" in str(over_the_wire(error))


# ------------------------------------------------------------------------------------------------- bodies and frames


@pytest.mark.parametrize(("size", "chunks"), [(0, 1), (1, 1), (stream.CHUNK, 1), (stream.CHUNK + 1, 2), (3 * stream.CHUNK, 3)])
def test_a_body_is_cut_up_and_joined(size: int, chunks: int) -> None:
    body = np.random.default_rng(0).bytes(size)
    pieces = list(stream.split(body))
    assert [more for _, more in pieces] == [True] * (chunks - 1) + [False]
    assert all(len(chunk) <= stream.CHUNK for chunk, _ in pieces)
    joiner = stream.Joiner()
    joined = [joiner.add(1, chunk, more) for chunk, more in pieces]
    assert joined[:-1] == [None] * (chunks - 1)
    assert joined[-1] == body


def test_bodies_of_several_calls_may_interleave() -> None:
    joiner = stream.Joiner()
    assert joiner.add(1, b"a", True) is None
    assert joiner.add(2, b"x", True) is None
    assert joiner.add(3, b"whole", False) == b"whole"
    assert joiner.add(2, b"y", False) == b"xy"
    assert joiner.add(1, b"b", False) == b"ab"
    assert joiner.add(1, b"again", False) == b"again"


def test_a_forgotten_body_leaves_nothing() -> None:
    joiner = stream.Joiner()
    joiner.add(1, b"a", True)
    joiner.forget(1)
    joiner.forget(2)
    assert joiner.add(1, b"b", False) == b"b"


def test_a_body_beyond_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "LARGEST", 10)
    joiner = stream.Joiner()
    joiner.add(1, bytes(6), True)
    joiner.add(2, bytes(6), True)
    with pytest.raises(errors.InvalidMessage, match="more than 10 bytes"):
        joiner.add(1, bytes(6), True)
    assert joiner.add(2, bytes(4), False) == bytes(10)


def run(test: Coroutine[Any, Any, None]) -> None:
    async def within() -> None:
        await asyncio.wait_for(test, 10)

    asyncio.run(within())


def call(id_: int, size: int = 0) -> common_pb2.Call:
    return common_pb2.Call(id=id_, body=bytes(size))


def ids(calls: list[Any]) -> list[int]:
    return [call.id for call in calls]


def test_data_waits_for_company(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "WINDOW", 0.05)

    async def test() -> None:
        loop, outbox = asyncio.get_running_loop(), stream.Outbox()
        before = loop.time()
        outbox.put(call(1))
        loop.call_later(0.01, outbox.put, call(2))
        assert ids(await outbox.frame()) == [1, 2]
        assert loop.time() - before >= 0.04
        outbox.put(call(3))
        before = loop.time()
        assert ids(await outbox.frame()) == [3]
        assert loop.time() - before >= 0.04

    run(test())


def test_an_urgent_message_leaves_at_once_with_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "WINDOW", 60.0)

    async def test() -> None:
        outbox = stream.Outbox()
        outbox.put(call(1))
        frame = asyncio.create_task(outbox.frame())
        await asyncio.sleep(0)
        outbox.put(call(2), urgent=True)
        assert ids(await frame) == [1, 2]
        outbox.put(call(3))  # the urgency is over
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(outbox.frame(), 0.02)

    run(test())


def test_a_full_frame_leaves_and_the_rest_follows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        outbox = stream.Outbox()
        for number in range(5):
            outbox.put(call(number, stream.CHUNK))
        assert ids(await outbox.frame()) == [0, 1, 2, 3]
        monkeypatch.setattr(stream, "WINDOW", 60.0)
        assert ids(await outbox.frame()) == [4]

    run(test())


def test_a_closed_outbox_gives_what_it_has_and_then_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "WINDOW", 60.0)

    async def test() -> None:
        outbox = stream.Outbox()
        outbox.put(call(1))
        outbox.close()
        assert ids(await outbox.frame()) == [1]
        assert await outbox.frame() == []
        assert await outbox.frame() == []
        waiting = stream.Outbox()
        frame = asyncio.create_task(waiting.frame())
        await asyncio.sleep(0)
        waiting.close()
        assert await frame == []

    run(test())
