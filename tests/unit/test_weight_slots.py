"""Which buckets share a buffer: whoever gathers is never made to wait for what cannot leave yet."""

from __future__ import annotations

import random

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from runtime.weights.plan import Bucket, BucketEntry, Manifest, TensorSpec, plan_buckets, plan_slots, predecessors


@st.composite
def shuffled(draw: st.DrawFn) -> tuple[tuple[Bucket, ...], int]:
    """Buckets of tensors that are not gathered in the order in which they lie there."""
    sizes = draw(st.lists(st.integers(1, 400), min_size=1, max_size=40))
    bucket_bytes = draw(st.integers(1, 500))
    order = list(range(len(sizes)))
    if draw(st.booleans()):
        random.Random(draw(st.integers())).shuffle(order)
    specs = tuple(TensorSpec(f"t{tensor}", "uint8", (sizes[tensor],)) for tensor in order)
    buckets = plan_buckets(Manifest(specs, bucket_bytes))
    return tuple(
        Bucket(tuple(BucketEntry(order[each.tensor], each.offset, each.nbytes) for each in bucket.entries), bucket.data_bytes)
        for bucket in buckets
    ), bucket_bytes


@given(shuffled(), st.integers(1, 5))
def test_what_a_bucket_waits_for_can_leave_before_it_is_begun(plan: tuple[tuple[Bucket, ...], int], spare: int) -> None:
    buckets, bucket_bytes = plan
    before = predecessors(plan_slots(buckets, bucket_bytes, spare))
    for bucket, awaited in zip(buckets, before, strict=True):
        if awaited is not None:
            first = min(entry.tensor for entry in bucket.entries)
            ahead = [entry.tensor for other in buckets[: awaited + 1] for entry in other.entries]
            assert max(ahead) < first


@given(shuffled(), st.integers(1, 5), st.integers(1, 3))
def test_senders_that_gather_in_step_wait_for_what_can_leave_alone(
    plan: tuple[tuple[Bucket, ...], int], spare: int, senders: int
) -> None:
    """Whatever another of them has to send before, too."""
    buckets, bucket_bytes = plan
    shared = tuple(msgspec.structs.replace(bucket, root=index % senders) for index, bucket in enumerate(buckets))
    for root in range(senders):
        own = [index for index, bucket in enumerate(shared) if bucket.root == root]
        before = predecessors(plan_slots(shared, bucket_bytes, spare, root))
        assert len(before) == len(own)
        for index, awaited in zip(own, before, strict=True):
            if awaited is not None:
                first = min(entry.tensor for entry in shared[index].entries)
                ahead = [entry.tensor for other in shared[: own[awaited] + 1] for entry in other.entries]
                assert max(ahead) < first


@given(shuffled(), st.integers(1, 5))
def test_a_slot_is_of_small_buckets_or_of_large_ones(plan: tuple[tuple[Bucket, ...], int], spare: int) -> None:
    buckets, bucket_bytes = plan
    slots = plan_slots(buckets, bucket_bytes, spare)
    large = [bucket.data_bytes > bucket_bytes for bucket in buckets]
    assert set(slots) == set(range(len(set(slots))))
    assert all(len({large[index] for index, own in enumerate(slots) if own == slot}) == 1 for slot in slots)
    assert len({slot for slot, one in zip(slots, large, strict=True) if not one}) >= min(spare, large.count(False))


def test_tensors_that_are_gathered_in_the_buckets_order_need_the_spare_slots_and_one_for_the_large() -> None:
    sizes = [*[64] * 20, 5000, *[64] * 20, 7000, 9000]
    buckets = plan_buckets(Manifest(tuple(TensorSpec(f"t{i}", "uint8", (size,)) for i, size in enumerate(sizes)), 64))
    slots = plan_slots(buckets, 64, 3)
    assert len(set(slots)) == 4
    assert len({slots[index] for index, size in enumerate(sizes) if size > 64}) == 1
    assert slots[:4] == (0, 1, 2, 0)
    assert predecessors(slots)[:4] == (None, None, None, 0)


def test_a_bucket_that_is_filled_during_all_of_the_gathering_keeps_its_slot() -> None:
    """Vectors lie behind all matrices, and are gathered between them."""
    matrices = [Bucket((BucketEntry(tensor, 0, 64),), 64) for tensor in range(0, 20, 2)]
    vectors = Bucket(tuple(BucketEntry(tensor, tensor, 1) for tensor in range(1, 20, 2)), 64)
    slots = plan_slots((*matrices, vectors), 64, 3)
    assert len(set(slots)) == 4
    assert slots.count(slots[-1]) == 1
