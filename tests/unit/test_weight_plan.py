"""How a manifest is laid out in buckets and spread over senders, and which transport `weight_sync.transport` stands for."""

from __future__ import annotations

import itertools
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import InvalidMessage, UserError
from runtime.weights.plan import (
    ALIGNMENT,
    ITEM_BYTES,
    TRAILER,
    Bucket,
    GroupAddress,
    Manifest,
    TensorSpec,
    plan_buckets,
    resolve_transport,
    roots,
)

tensors = st.lists(
    st.tuples(st.sampled_from(sorted(ITEM_BYTES)), st.lists(st.integers(0, 40), max_size=3).map(tuple)), max_size=30
).map(lambda rows: tuple(TensorSpec(f"t{index}", dtype, shape) for index, (dtype, shape) in enumerate(rows)))


@given(tensors, st.integers(1, 5000))
def test_every_tensor_lies_once_aligned_and_apart(specs: tuple[TensorSpec, ...], bucket_bytes: int) -> None:
    buckets = plan_buckets(Manifest(specs, bucket_bytes))
    order = [entry.tensor for bucket in buckets for entry in bucket.entries]
    matrices, others = ([i for i, spec in enumerate(specs) if (len(spec.shape) >= 2) is want] for want in (True, False))
    assert order == matrices + others
    for bucket in buckets:
        end = 0
        for entry in bucket.entries:
            spec = specs[entry.tensor]
            assert entry.nbytes == ITEM_BYTES[spec.dtype] * math.prod(spec.shape)
            assert entry.offset % ALIGNMENT == 0
            assert 0 <= entry.offset - end < ALIGNMENT
            end = entry.offset + entry.nbytes
        assert 0 <= bucket.data_bytes - end < ALIGNMENT
        assert bucket.data_bytes % ALIGNMENT == 0
        assert bucket.total_bytes == bucket.data_bytes + TRAILER.size


@given(tensors, st.integers(1, 5000))
def test_only_a_lone_tensor_exceeds_the_bucket(specs: tuple[TensorSpec, ...], bucket_bytes: int) -> None:
    buckets = plan_buckets(Manifest(specs, bucket_bytes))
    for bucket in buckets:
        last = bucket.entries[-1]
        assert len(bucket.entries) == 1 or last.offset + last.nbytes <= bucket_bytes
    for bucket, following in itertools.pairwise(buckets):
        assert bucket.data_bytes + following.entries[0].nbytes > bucket_bytes


@pytest.mark.parametrize(
    ("sizes", "tensors", "total"),
    [
        ((10, 300, 10, 20), [[0], [1], [2, 3]], [64, 320, 128]),  # a large tensor has a bucket of its own
        ((64, 64, 64), [[0, 1], [2]], [128, 64]),  # a bucket may be exactly full
    ],
)
def test_tensors_are_laid_out_in_order(sizes: tuple[int, ...], tensors: list[list[int]], total: list[int]) -> None:
    specs = tuple(TensorSpec(f"t{index}", "uint8", (size,)) for index, size in enumerate(sizes))
    buckets = plan_buckets(Manifest(specs, 128))
    assert [[entry.tensor for entry in bucket.entries] for bucket in buckets] == tensors
    assert [bucket.total_bytes for bucket in buckets] == [size + 16 for size in total]


@pytest.mark.parametrize(
    ("specs", "bucket_bytes", "senders", "fault"),
    [
        ((TensorSpec("w", "complex64", (1,)),), 64, 2, "tensor w: dtype 'complex64'"),
        ((TensorSpec("w", "int8", (1,)), TensorSpec("w", "int8", (1,))), 64, 2, "w occurs twice"),
        ((), 0, 2, "bucket_bytes is 0"),
        ((), 64, 0, "senders is 0"),
        ((TensorSpec("w", "int8", (1,), held_by=(0, 2)),), 64, 2, r"w is held by \(0, 2\), of 2 senders"),
    ],
)
def test_a_bad_manifest_is_refused(specs: tuple[TensorSpec, ...], bucket_bytes: int, senders: int, fault: str) -> None:
    with pytest.raises(InvalidMessage, match=fault):
        plan_buckets(Manifest(specs, bucket_bytes, senders))


def test_messages_call_a_member_by_its_rank_and_name() -> None:
    names = ("trainer-0", "rollout-1")
    address = GroupAddress(
        epoch=1, host="h", port=1, rank=0, world_size=3, backend="gloo", timeout=1.0, key=b"0123", names=names
    )
    assert [address.label(rank) for rank in range(3)] == ["rank 0 (trainer-0)", "rank 1 (rollout-1)", "rank 2"]
    assert repr(address) == "GroupAddress(rank 0 (trainer-0) of epoch 1 at h:1)"  # without the key


def test_each_bucket_goes_to_whoever_has_least() -> None:
    sizes = (64, 64, 64, 64, 64, 192, 64, 64)
    specs = tuple(TensorSpec(f"t{index}", "uint8", (size,)) for index, size in enumerate(sizes))
    assert roots(Manifest(specs, 64, senders=2)) == [0, 1, 0, 1, 0, 1, 0, 0]


def test_what_few_hold_is_given_out_first() -> None:
    held = (("shared-0", ()), ("shared-1", (0, 1, 2)), ("own", (1,)))
    manifest = Manifest(tuple(TensorSpec(name, "uint8", (64,), by) for name, by in held), 64, senders=3)
    assert roots(manifest) == [0, 2, 1]
    order = [manifest.tensors[bucket.entries[0].tensor].name for bucket in plan_buckets(manifest)]
    assert order == ["own", "shared-0", "shared-1"]


@st.composite
def spread(draw: st.DrawFn) -> Manifest:
    """Tensors of pipeline stages, each of which some replicas hold, in any order."""
    stages, replicas = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    specs = draw(tensors)
    held = [tuple(range(draw(st.integers(0, stages - 1)), stages * replicas, stages)) for _ in specs]
    found = (TensorSpec(spec.name, spec.dtype, spec.shape, held_by=by) for spec, by in zip(specs, held, strict=True))
    return Manifest(tuple(found), draw(st.integers(1, 5000)), stages * replicas)


def held_by(manifest: Manifest, bucket: Bucket) -> set[tuple[int, ...]]:
    return {manifest.tensors[entry.tensor].held_by for entry in bucket.entries}


@given(spread())
def test_every_tensor_moves_once_from_one_of_its_holders(manifest: Manifest) -> None:
    buckets = plan_buckets(manifest)
    assert sorted(entry.tensor for bucket in buckets for entry in bucket.entries) == list(range(len(manifest.tensors)))
    for bucket in buckets:
        (holders,) = held_by(manifest, bucket)
        assert bucket.root in holders
    assert roots(manifest) == [
        next(bucket.root for bucket in buckets if any(entry.tensor == index for entry in bucket.entries))
        for index in range(len(manifest.tensors))
    ]


@given(spread())
def test_senders_that_hold_the_same_differ_by_a_bucket_at_most(manifest: Manifest) -> None:
    buckets = plan_buckets(manifest)
    for holders in {spec.held_by for spec in manifest.tensors}:
        own = [bucket for bucket in buckets if held_by(manifest, bucket) == {holders}]
        loads = [sum(bucket.data_bytes for bucket in own if bucket.root == holder) for holder in holders]
        assert max(loads) - min(loads) <= max(bucket.data_bytes for bucket in own)


@given(spread())
def test_the_plan_is_that_of_the_stages_alone_and_all_come_forward_at_one_pace(manifest: Manifest) -> None:
    buckets = plan_buckets(manifest)
    assert buckets == plan_buckets(msgspec.json.decode(msgspec.json.encode(manifest), type=Manifest))
    for holders in {spec.held_by for spec in manifest.tensors}:
        own = [bucket for bucket in buckets if held_by(manifest, bucket) == {holders}]
        alone = Manifest(
            tuple(spec for spec in manifest.tensors if spec.held_by == holders), manifest.bucket_bytes, manifest.senders
        )
        assert [bucket.data_bytes for bucket in own] == [bucket.data_bytes for bucket in plan_buckets(alone)]
    totals = dict.fromkeys({spec.held_by for spec in manifest.tensors}, 0)
    for bucket in buckets:
        totals[held_by(manifest, bucket).pop()] += bucket.data_bytes
    done, share = dict.fromkeys(totals, 0), 0.0
    for bucket in buckets:
        (holders,) = held_by(manifest, bucket)
        assert done[holders] / max(1, totals[holders]) >= share
        share = done[holders] / max(1, totals[holders])
        done[holders] += bucket.data_bytes


HERE = {"trainer-0": "a", "rollout-0": "a", "rollout-1": "a"}
APART = HERE | {"rollout-1": "b"}
UNKNOWN = dict.fromkeys(HERE, "")


@pytest.mark.parametrize(
    ("transport", "backend", "machines", "chosen"),
    [
        ("auto", "auto", HERE, "shared_memory"),
        ("auto", "auto", APART, "collective"),
        ("auto", "auto", UNKNOWN, "collective"),
        ("auto", "nccl", HERE, "collective"),
        ("auto", "gloo", HERE, "collective"),
        ("collective", "auto", HERE, "collective"),
        ("shared_memory", "nccl", HERE, "shared_memory"),
    ],
)
def test_auto_follows_the_members(transport: str, backend: str, machines: dict[str, str], chosen: str) -> None:
    assert resolve_transport(transport, backend, machines) == chosen


@pytest.mark.parametrize(("machines", "named"), [(APART, "rollout-1"), (UNKNOWN, "trainer-0, rollout-0, rollout-1")])
def test_shared_memory_across_machines_names_who_is_apart(machines: dict[str, str], named: str) -> None:
    with pytest.raises(UserError, match=f"weight_sync.transport: shared_memory needs .*, but {named} may") as caught:
        resolve_transport("shared_memory", "auto", machines)
    assert "\n" not in str(caught.value)
