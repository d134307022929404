from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import InvalidMessage
from runtime.weights.plan import ALIGNMENT, ITEM_BYTES, TRAILER, Manifest, TensorSpec, plan_buckets

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


def test_a_large_tensor_has_a_bucket_of_its_own() -> None:
    sizes = (10, 300, 10, 20)
    specs = tuple(TensorSpec(f"t{size}-{index}", "uint8", (size,)) for index, size in enumerate(sizes))
    buckets = plan_buckets(Manifest(specs, 128))
    assert [[entry.tensor for entry in bucket.entries] for bucket in buckets] == [[0], [1], [2, 3]]
    assert [bucket.total_bytes for bucket in buckets] == [64 + 16, 320 + 16, 128 + 16]


@pytest.mark.parametrize(
    ("specs", "bucket_bytes", "fault"),
    [
        ((TensorSpec("w", "complex64", (1,)),), 64, "tensor w: dtype 'complex64'"),
        ((TensorSpec("w", "int8", (1,)), TensorSpec("w", "int8", (1,))), 64, "w occurs twice"),
        ((), 0, "bucket_bytes is 0"),
    ],
)
def test_a_bad_manifest_is_refused(specs: tuple[TensorSpec, ...], bucket_bytes: int, fault: str) -> None:
    with pytest.raises(InvalidMessage, match=fault):
        plan_buckets(Manifest(specs, bucket_bytes))
