"""Deltas of weights: bit for bit what was sent, small where little changed, never applied to other weights than their own."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.types import PolicyVersion
from runtime.weights.authentication import BucketTags
from runtime.weights.delta import ENTRY_BYTES, HEADER, DeltaLink, decode, encode
from runtime.weights.group import Link, allocate, tensors_of
from runtime.weights.plan import ITEM_BYTES, Manifest, TensorSpec, plan_buckets


class Wire(Link):
    """What one end sends, the other receives: the bytes, in order."""

    def __init__(self, bytes_on_it: deque[torch.Tensor]):
        self.on_it = bytes_on_it

    def send(self, index: int, buffer: torch.Tensor) -> Done:
        self.sent_bytes += buffer.nbytes
        self.on_it.append(buffer.clone())
        return Done()

    def receive(self, index: int, buffer: torch.Tensor) -> Done:
        buffer.copy_(self.on_it.popleft())
        return Done()

    def abort(self) -> None:
        self.on_it.clear()


class Done:
    def wait(self, timeout: float) -> None:
        assert timeout > 0


TAGS = BucketTags(bytes(32))


class Pair:
    """Sender and receiver of one manifest, and the bytes that went from one to the other."""

    def __init__(self, specs: tuple[TensorSpec, ...], bucket_bytes: int = 1 << 20, full_every: int = 50):
        manifest = Manifest(specs, bucket_bytes)
        self.buckets = plan_buckets(manifest)
        self.sent, self.received = allocate(self.buckets, False), allocate(self.buckets, False)
        self.tensors = list(tensors_of(manifest, self.buckets, self.sent).values())
        wire: deque[torch.Tensor] = deque()
        self.sender, self.receiver = DeltaLink(Wire(wire), full_every), DeltaLink(Wire(wire), full_every)

    @property
    def whole(self) -> int:
        return sum(bucket.total_bytes + HEADER.size for bucket in self.buckets)

    def publish(self, step: int, taken: bool = True) -> int:
        """One version, which has to arrive as it is; the bytes that it took. Not `taken`: it does not reach the receiver."""
        before = self.sender.sent_bytes
        for index, (bucket, buffer) in enumerate(zip(self.buckets, self.sent, strict=True)):
            TAGS.stamp(index, bucket, buffer, PolicyVersion(0, step))
            self.sender.send(index, buffer).wait(1.0)
            if taken:
                self.receiver.receive(index, self.received[index]).wait(1.0)
                assert torch.equal(self.received[index], buffer)
            else:
                self.sender.abort()
        return self.sender.sent_bytes - before


def of(dtype: str, *shape: int) -> TensorSpec:
    return TensorSpec(f"{dtype}.{'x'.join(map(str, shape))}", dtype, shape)


@given(data=st.data(), size=st.integers(1, 3000))
def test_a_delta_turns_the_old_words_into_the_new(data: st.DataObject, size: int) -> None:
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    old = generator.integers(0, 1 << 16, size, dtype=np.uint16)
    new = old.copy()
    at = data.draw(
        st.lists(st.one_of(st.integers(0, size - 1), st.sampled_from([0, size - 1, min(255, size - 1)])), max_size=40)
    )
    new[at] ^= generator.integers(0, 1 << 16, len(at), dtype=np.uint16)
    payload = encode(old, new)
    changed = int(np.count_nonzero(old != new))
    if payload is None:
        assert ENTRY_BYTES * (changed + size // 256) >= new.nbytes
    else:
        assert len(payload) < new.nbytes
        assert ENTRY_BYTES * changed <= len(payload) <= ENTRY_BYTES * (changed + size // 256)
        decode(old, payload)
        assert np.array_equal(old, new)


@pytest.mark.parametrize("gap", [0, 1, 254, 255, 256, 257, 511, 512, 513, 100_000])
def test_gaps_of_every_width(gap: int) -> None:
    old = np.zeros(gap + 1 + 700_000, dtype=np.uint16)
    new = old.copy()
    new[gap] = 7
    payload = encode(old, new)
    assert payload is not None and len(payload) == ENTRY_BYTES * (1 + gap // 256)
    decode(old, payload)
    assert np.array_equal(old, new)


def test_what_fills_a_gap_counts_for_the_size_too() -> None:
    old = np.zeros(2000, dtype=np.uint16)
    new = old.copy()
    new[667:] = 1
    assert encode(old, new) is None  # 1333 changes of 3 bytes are less than 4000, with 2 fillers more
    new[667] = 0
    assert encode(old, new) is None
    new[667:671] = 0
    assert encode(old, new) is not None


@settings(max_examples=10)
@given(seed=st.integers(0, 2**32), full_every=st.sampled_from([1, 7, 1000]))
def test_a_hundred_versions_of_all_dtypes_arrive_bit_for_bit(seed: int, full_every: int) -> None:
    pair = Pair(tuple(of(dtype, 61, 9) for dtype in ITEM_BYTES), bucket_bytes=4096, full_every=full_every)
    assert len(pair.buckets) > 3
    generator = np.random.default_rng(seed)
    special = torch.tensor([0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x7F81], dtype=torch.int32).to(torch.int16)
    for step in range(100):
        for bucket, buffer in zip(pair.buckets, pair.sent, strict=True):
            words = buffer[: bucket.data_bytes].view(torch.int16)
            count = int(generator.integers(0, len(words) if step % 10 == 0 else 20))
            at = torch.from_numpy(generator.integers(0, len(words), count))
            words[at] += 1
            words[at[:3]] = special[torch.from_numpy(generator.integers(0, len(special), len(at[:3])))]
        pair.publish(step)


def test_the_first_version_of_an_epoch_and_every_so_many_are_whole() -> None:
    pair = Pair((of("bfloat16", 1000, 10),), full_every=3)
    took = []
    for step in range(7):
        pair.tensors[0][step] += 1
        took.append(pair.publish(step))
    assert [bytes_ == pair.whole for bytes_ in took] == [True, False, False, True, False, False, True]
    assert max(took[1:3]) < pair.whole / 50


def test_what_a_delta_would_make_larger_is_whole() -> None:
    pair = Pair((of("bfloat16", 1000),))
    pair.publish(0)
    pair.tensors[0][:700] += 1  # at 3 bytes each more than 2000
    assert pair.publish(1) == pair.whole
    pair.tensors[0][:600] += 1
    assert pair.publish(2) < pair.whole


def test_the_same_version_again_needs_no_payload() -> None:
    pair = Pair((of("float32", 300),))
    pair.publish(0)
    assert pair.publish(0) == HEADER.size * len(pair.buckets)


def test_a_delta_is_refused_by_who_has_another_version() -> None:
    pair = Pair((of("bfloat16", 1000),))
    pair.publish(0)
    pair.publish(1, taken=False)
    match = r"^the delta of bucket 0 starts from version 0\.1 \(checksum \w+\), and this member has version 0\.0 \("
    with pytest.raises(RuntimeError, match=match):
        pair.publish(2)


def test_a_delta_that_does_not_lead_to_its_version_is_refused() -> None:
    pair = Pair((of("bfloat16", 1000),))
    pair.publish(0)
    pair.tensors[0][5] = 5
    TAGS.stamp(0, pair.buckets[0], pair.sent[0], PolicyVersion(0, 1))
    pair.sender.send(0, pair.sent[0])
    wire = pair.receiver._inner.on_it  # type: ignore[attr-defined]
    wire[1][8] ^= 1  # after the change and three fillers the entries are those of the trailer
    with pytest.raises(RuntimeError, match=r"^the delta of bucket 0 leads to version 0\.1 \(.* instead of version 0\.1 \("):
        pair.receiver.receive(0, pair.received[0]).wait(1.0)


@pytest.mark.parametrize("payload", [[1, 0, 200], [1, 0, 5, 0], [1]])
def test_a_payload_of_other_words_is_refused(payload: list[int]) -> None:
    with pytest.raises(RuntimeError, match=rf"a delta of {len(payload)} bytes does not fit 100 words"):
        decode(np.zeros(100, dtype=np.uint16), np.array(payload, dtype=np.uint8))


def test_steps_of_adam_at_a_small_rate_change_few_words() -> None:
    """A master in float32, as trainers keep it, published in bfloat16."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(128, 512), torch.nn.GELU(), torch.nn.Linear(512, 128))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, betas=(0.9, 0.95))
    pair = Pair(tuple(of("bfloat16", *parameter.shape) for parameter in model.parameters()))
    took = []
    for step in range(12):
        loss = (model(torch.randn(64, 128)) - torch.randn(64, 128)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for tensor, parameter in zip(pair.tensors, model.parameters(), strict=True):
            tensor.copy_(parameter.detach())
        took.append(pair.publish(step))
    assert all(0 < bytes_ <= 0.1 * pair.whole for bytes_ in took[1:])
