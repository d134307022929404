"""Both ends of a transfer without a process or a socket: sender, the receiver's account of its time, and deltas."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.commands import WeightsSent
from runtime.config import Config, Run
from runtime.errors import DeadlineExceeded, InvariantViolated, ServiceFault
from runtime.types import PolicyVersion
from runtime.weights import receiver
from runtime.weights.delta import ENTRY_BYTES, HEADER, DeltaLink, Positions, Words, decode, entries
from runtime.weights.group import TAG, BucketReceipt, BucketTags, Link, Shard, Target, Transfer, arena, new_key, populate
from runtime.weights.plan import ITEM_BYTES, GroupAddress, Manifest, TensorSpec, plan_buckets
from runtime.weights.receiver import _Share
from runtime.weights.sender import SendBuffers, WeightGroup

COUNT = 24
MANIFEST = Manifest(tuple(TensorSpec(f"t{index}", "float32", (3, 5)) for index in range(COUNT)), 128)  # two to a bucket
VERSION = PolicyVersion(0, 1)
DEADLINE = 60.0


class Memory(WeightGroup):
    """Keeps what is sent. `gone[i]` is set once bucket i is on its way, and it is taken only if `may_take`. After the buckets,
    their tags are sent. The group is its own link."""

    await_announcement = receive = None  # are the receivers'
    sent_bytes = 0  # type: ignore[assignment]

    def __init__(self, sender: SendBuffers) -> None:
        address = GroupAddress(epoch=1, host="", port=0, rank=0, world_size=2, backend="gloo", timeout=1.0, key=new_key())
        super().__init__(address, "trainer", dist.HashStore(), "")
        self.gone = [threading.Event() for _ in range(sender.count + 1)]
        self.may_take = threading.Event()
        self.may_take.set()
        self.sent: list[torch.Tensor] = []

    def announce(self, version: PolicyVersion) -> None:
        """Nobody waits for it."""

    def way(self, sender: int, taker: int) -> Any:
        return self

    def describe(self, tag: bytes, changed: Positions | None) -> None:
        assert TAG.unpack(tag)

    def send(self, index: int, buffer: torch.Tensor) -> Transfer:
        if self.aborted:
            raise RuntimeError("the group was aborted")
        assert index == len(self.sent)
        self.sent.append(buffer.clone())
        self.sent_bytes += buffer.nbytes
        self.gone[index].set()
        return partial(self._take, buffer, self.sent[-1])

    def _take(self, buffer: torch.Tensor, sent: torch.Tensor, give_up: float) -> None:
        taken = self.may_take.wait(give_up - time.monotonic())
        if self.aborted or not taken:
            raise RuntimeError("the receiver is lost")
        assert torch.equal(buffer, sent)

    def abort(self) -> None:
        self.aborted = True
        self.may_take.set()


def tensor(index: int, version: int = 1) -> torch.Tensor:
    return torch.full((3, 5), float(100 * version + index))


def shards(version: int = 1) -> list[Shard]:
    return [Shard(index, (), tensor(index, version)) for index in range(COUNT)]


def assert_sent(group: Memory, sender: SendBuffers, version: int = 1) -> None:
    assert len(group.sent) == sender.count + 1
    tags = group.sent[-1].view(-1, TAG.size)
    for index, bucket in sender.own:
        buffer, tag = group.sent[index], tags[index].numpy().tobytes()
        assert tag == group.tags.tag(index, group.tags.digest(buffer), PolicyVersion.unpack(TAG.unpack(tag)[1]))
        for piece in bucket.pieces:
            found = buffer[piece.offset : piece.offset + piece.nbytes].view(torch.float32).view(3, 5)
            assert torch.equal(found, tensor(piece.tensor, version))


@pytest.fixture
def sender() -> SendBuffers:
    return SendBuffers(MANIFEST)


def sent(group: Memory, sender: SendBuffers, given: Iterable[Shard], deadline: float = DEADLINE) -> Future[WeightsSent]:
    """They are sent while they are gathered."""
    sender.begin(VERSION, DEADLINE)
    sending = sender.send(group, VERSION, deadline)
    sender.fill(given)
    return sending


def cut_off(group: Memory, sender: SendBuffers, given: Iterable[Shard], deadline: float) -> Future[WeightsSent]:
    """Do as `sent` does, with a gathering that fails after `given`."""
    sender.begin(VERSION, DEADLINE)
    sending = sender.send(group, VERSION, deadline)
    with pytest.raises(InvariantViolated, match="are in no shard"):
        sender.fill(given)
    return sending


def test_a_bucket_leaves_before_the_next_one_is_gathered(sender: SendBuffers) -> None:
    group = Memory(sender)

    def slowly() -> Iterator[Shard]:
        for index, one in enumerate(shards()):
            if index and index % 2 == 0:
                assert group.gone[index // 2 - 1].wait(DEADLINE)
            yield one

    assert sent(group, sender, slowly()).result(DEADLINE).bytes == sum(bucket.nbytes + TAG.size for _, bucket in sender.own)
    assert_sent(group, sender)


def test_a_bucket_with_a_buffer_of_its_own_leaves_before_those_before_it_are_taken(sender: SendBuffers) -> None:
    group = Memory(sender)
    group.may_take.clear()

    def slowly() -> Iterator[Shard]:
        for index, one in enumerate(shards()):
            if index in (2, 4):
                assert group.gone[index // 2 - 1].wait(DEADLINE)
            yield one
        group.may_take.set()

    sent(group, sender, slowly()).result(DEADLINE)
    assert_sent(group, sender)


def test_a_bucket_waits_for_all_its_tensors_in_whatever_order_they_come(sender: SendBuffers) -> None:
    """The second tensor of the first bucket comes last, and the others from the last to the first."""
    group, (first, last, *others) = Memory(sender), shards()

    def last_of_all() -> Iterator[Shard]:
        for shard in (first, *reversed(others), last):
            assert not group.sent
            yield shard

    sent(group, sender, last_of_all()).result(DEADLINE)
    assert_sent(group, sender)


def test_a_part_that_no_shard_has_is_named_and_the_buckets_hold_no_version(sender: SendBuffers) -> None:
    sender.begin(VERSION, DEADLINE)
    with pytest.raises(InvariantViolated, match="sender 0: 1 of the pieces that it sends are in no shard"):
        sender.fill(shards()[1:])
    assert sender.await_held(VERSION, 0.0) is None


def test_a_lost_receiver_ends_the_transfer_and_everything_is_gathered_all_the_same(sender: SendBuffers) -> None:
    group = Memory(sender)
    group.may_take.clear()
    given = []

    def counted() -> Iterator[Shard]:
        for index, one in enumerate(shards()):
            if index == 4:
                group.abort()
            given.append(index)
            yield one

    sending = sent(group, sender, counted())
    with pytest.raises(
        ServiceFault, match=r"trainer: transfer: bucket 0 of 12 \(t0 and 1 more\) of version 0\.1 was not taken"
    ):
        sending.result(DEADLINE)
    assert given == list(range(COUNT))

    again = Memory(sender)
    sent(again, sender, shards(2)).result(DEADLINE)
    assert_sent(again, sender, 2)


def test_a_gathering_that_ends_early_is_given_up_at_once(sender: SendBuffers) -> None:
    group = Memory(sender)
    sending = cut_off(group, sender, shards()[:5], 10 * DEADLINE)
    assert group.gone[1].wait(DEADLINE)
    sender.abort()
    with pytest.raises(ServiceFault, match=r"bucket [012] of 12 \(.*\) of version 0\.1 was not taken"):
        sending.result(DEADLINE)
    sender.begin(VERSION, DEADLINE)


def test_a_bucket_that_is_not_gathered_in_time_ends_the_transfer(sender: SendBuffers) -> None:
    group = Memory(sender)
    sending = cut_off(group, sender, shards()[:1], 0.1)
    with pytest.raises(
        DeadlineExceeded, match=r"bucket 0 of 12 \(.*\) of version 0\.1 was not taken: it was not gathered in time"
    ):
        sending.result(DEADLINE)
    assert group.aborted


def test_a_byte_that_changes_between_two_sends_is_found_before_it_is_sent(sender: SendBuffers) -> None:
    sender.begin(VERSION, DEADLINE)
    sender.fill(shards())
    for _ in range(2):
        group = Memory(sender)
        sender.send(group, VERSION, DEADLINE).result(DEADLINE)
        assert_sent(group, sender)
    sender.buffers[3][1] ^= 1
    group = Memory(sender)
    with pytest.raises(
        ServiceFault, match=r"trainer: snapshot: bucket 3 of 12 \(t6 and 1 more\) has changed in memory since it was gathered"
    ):
        sender.send(group, VERSION, DEADLINE).result(DEADLINE)
    assert group.aborted and len(group.sent) == 3 and sender.await_held(VERSION, 0.0) is None
    sender.begin(PolicyVersion(0, 2), DEADLINE)
    sender.fill(shards(2))
    again = Memory(sender)
    sender.send(again, PolicyVersion(0, 2), DEADLINE).result(DEADLINE)
    assert_sent(again, sender, 2)
    assert sender.await_held(VERSION, 0.0) == PolicyVersion(0, 2)


def test_what_is_gathered_is_taken_without_its_graph(sender: SendBuffers) -> None:
    sender.fill(shard._replace(block=shard.block.requires_grad_()) for shard in shards())
    assert not any(view.requires_grad for each in sender._pieces.values() for _, _, view in each)


# ------------------------------------------------------------------------------------------------ the receiver's time
NINE = Manifest(tuple(TensorSpec(f"tensor.{index}", "float32", (16,)) for index in range(9)), 64)


def _share() -> _Share:
    own = list(enumerate(plan_buckets(NINE)))
    return _Share(NINE, own, torch.zeros(9 * 64, dtype=torch.uint8), range(9), [])


class Clock:
    """Time passes only when a transfer is waited for."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class Arriving:
    """A bucket that is there after `seconds` of waiting."""

    def __init__(self, clock: Clock, seconds: float, taken: BucketReceipt):
        self._clock, self._seconds, self._taken = clock, seconds, taken

    def __call__(self, give_up: float) -> BucketReceipt:
        self._clock.now += self._seconds
        return self._taken


class Arrivals:
    """Every bucket takes 2 s to copy and 1 s to hash, and is there after `seconds` of waiting. Then come the tags, at once."""

    name, aborted, scatters, worker = "rollout-0", False, True, 0

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.tags = BucketTags(bytes(32))
        self.count = len(plan_buckets(NINE))
        self._clock, self._seconds = clock, seconds
        self._sent = b""

    def way(self, sender: int, taker: int) -> Any:
        return self

    def receive(self, index: int, target: Target) -> Arriving:
        assert target.run is not None
        if index >= self.count:
            target.run.copy_(torch.frombuffer(bytearray(self._sent), dtype=torch.uint8))
            return Arriving(self._clock, 0.0, BucketReceipt(0, 0.0, 0.0))
        digest = self.tags.digest(target.run)
        self._sent += self.tags.tag(index, digest, VERSION)
        return Arriving(self._clock, self._seconds, BucketReceipt(digest, 2.0, 1.0))

    def settle(self, give_up: float) -> None:
        """Passes nothing on."""


@pytest.mark.parametrize(("seconds", "expected"), [(5.0, (2.0, 2.0, 1.0)), (3.0, (0.0, 2.0, 1.0)), (0.75, (0.0, 0.5, 0.25))])
def test_a_receptions_time_is_divided_whole(
    monkeypatch: pytest.MonkeyPatch, seconds: float, expected: tuple[float, ...]
) -> None:
    """A bucket that was copied while another was waited for takes no time of its own."""
    clock = Clock()
    monkeypatch.setattr(receiver, "time", clock)
    group: Any = Arrivals(clock, seconds)
    took, _ = _share().take(group, VERSION, 1e6, 1e9)
    spent = (took.wait_seconds, took.copy_seconds, took.hash_seconds)
    assert spent == pytest.approx([group.count * each for each in expected])
    assert clock.now - 100.0 == pytest.approx(sum(spent))


def test_memory_that_is_populated_keeps_its_bytes() -> None:
    first, second = arena([5000, 70])
    first.fill_(7)
    populate(second)
    assert first.eq(7).all()
    assert not second.any()


# ------------------------------------------------------------------------------------------------ deltas
class Wire(Link):
    """What one end sends, the other receives: the bytes, in order."""

    def __init__(self, bytes_on_it: deque[torch.Tensor]):
        self.on_it = bytes_on_it

    def send(self, index: int, buffer: torch.Tensor) -> Transfer:
        self.sent_bytes += buffer.nbytes
        self.on_it.append(buffer.clone())
        return done

    def receive(self, index: int, target: Target) -> Transfer:
        assert target.run is not None
        target.run.copy_(self.on_it.popleft())
        return done

    def abort(self) -> None:
        self.on_it.clear()


def done(give_up: float) -> None:
    assert give_up > time.monotonic()


TAGS = BucketTags(bytes(32))


class Pair:
    """Sender and receiver of one manifest, and the bytes that went from one to the other."""

    def __init__(self, specs: tuple[TensorSpec, ...], bucket_bytes: int = 1 << 20, full_every: int = 50):
        manifest = Manifest(specs, bucket_bytes)
        self.buffers = SendBuffers(manifest, takes_changes=True)
        self.tensors = [torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in specs]
        self.received = [torch.zeros_like(buffer) for buffer in self.buffers.buffers]
        wire: deque[torch.Tensor] = deque()
        self.sender, self.receiver = DeltaLink(Wire(wire), full_every), DeltaLink(Wire(wire), full_every)

    @property
    def whole(self) -> int:
        return sum(bucket.nbytes + HEADER.size for _, bucket in self.buffers.own)

    def gather(self, step: int) -> None:
        """Gather a version."""
        self.buffers.begin(PolicyVersion(0, step), 1.0)
        self.buffers.fill(Shard(index, (), tensor) for index, tensor in enumerate(self.tensors))

    def send(self, index: int, step: int) -> None:
        buffer, words = self.buffers.buffers[index], self.buffers._words[index]
        self.sender.describe(
            TAGS.tag(index, TAGS.digest(buffer), PolicyVersion(0, step)),
            None if words is None else np.sort(np.concatenate(words)),
        )
        self.sender.send(index, buffer)(time.monotonic() + 1.0)

    def receive(self, index: int) -> None:
        self.receiver.receive(index, Target.of(self.received[index]))(time.monotonic() + 1.0)

    def publish(self, step: int, taken: bool = True) -> int:
        """One version, which has to arrive as it is; the bytes that it took. Not `taken`: it does not reach the receiver."""
        before = self.sender.sent_bytes
        self.gather(step)
        for index, buffer in enumerate(self.buffers.buffers):
            self.send(index, step)
            if taken:
                self.receive(index)
                assert torch.equal(self.received[index], buffer)
            else:
                self.sender.abort()
        return self.sender.sent_bytes - before


def of(dtype: str, *shape: int) -> TensorSpec:
    return TensorSpec(f"{dtype}.{'x'.join(map(str, shape))}", dtype, shape)


def delta(old: Words, new: Words) -> Words | None:
    return entries(np.flatnonzero(old != new), new)


@given(data=st.data(), size=st.integers(1, 3000))
def test_a_delta_turns_the_old_words_into_the_new(data: st.DataObject, size: int) -> None:
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    old = generator.integers(0, 1 << 16, size, dtype=np.uint16)
    new = old.copy()
    at = data.draw(
        st.lists(st.one_of(st.integers(0, size - 1), st.sampled_from([0, size - 1, min(255, size - 1)])), max_size=40)
    )
    new[at] ^= generator.integers(0, 1 << 16, len(at), dtype=np.uint16)
    payload = delta(old, new)
    changed = int(np.count_nonzero(old != new))
    if payload is None:
        assert ENTRY_BYTES * (changed + size // 256) >= new.nbytes
    else:
        assert len(payload) < new.nbytes
        assert ENTRY_BYTES * changed <= len(payload) <= ENTRY_BYTES * (changed + size // 256)
        found = decode(old, payload)
        assert np.array_equal(old, new) and len(found) == len(payload) // ENTRY_BYTES


@pytest.mark.parametrize("gap", [0, 1, 254, 255, 256, 257, 511, 512, 513, 100_000])
def test_gaps_of_every_width(gap: int) -> None:
    old = np.zeros(gap + 1 + 700_000, dtype=np.uint16)
    new = old.copy()
    new[gap] = 7
    payload = delta(old, new)
    assert payload is not None and len(payload) == ENTRY_BYTES * (1 + gap // 256)
    decode(old, payload)
    assert np.array_equal(old, new)


def test_what_fills_a_gap_counts_for_the_size_too() -> None:
    old = np.zeros(2000, dtype=np.uint16)
    new = old.copy()
    new[667:] = 1
    assert delta(old, new) is None  # 1333 changes of 3 bytes are less than 4000, with 2 fillers more
    new[667] = 0
    assert delta(old, new) is None
    new[667:671] = 0
    assert delta(old, new) is not None


@settings(max_examples=6)
@given(seed=st.integers(0, 2**32), full_every=st.sampled_from([1, 7, 1000]))
def test_many_versions_of_all_dtypes_arrive_bit_for_bit(seed: int, full_every: int) -> None:
    pair = Pair(tuple(of(dtype, 61, 9) for dtype in ITEM_BYTES), bucket_bytes=4096, full_every=full_every)
    assert pair.buffers.count > 3
    generator = np.random.default_rng(seed)
    special = torch.tensor([0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x7F81], dtype=torch.int32).to(torch.int16)
    for step in range(40):
        for tensor in pair.tensors:
            if tensor.dtype == torch.bool:
                tensor[step] = ~tensor[step]
                continue
            words = tensor.view(-1).view(torch.uint8)[: tensor.nbytes // 2 * 2].view(torch.int16)
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


def test_what_a_delta_would_make_larger_is_whole_and_the_same_version_again_needs_no_payload() -> None:
    pair = Pair((of("bfloat16", 1000),))
    pair.publish(0)
    assert pair.publish(0) == HEADER.size * pair.buffers.count
    pair.tensors[0][:700] += 1  # at 3 bytes each more than 2000
    assert pair.publish(1) == pair.whole
    pair.tensors[0][:600] += 1
    assert pair.publish(2) < pair.whole


def test_a_delta_is_refused_by_who_has_another_version() -> None:
    pair = Pair((of("bfloat16", 1000),))
    pair.publish(0)
    pair.publish(1, taken=False)
    match = r"^the delta of bucket 0 starts from version 0\.1 \(checksum \w+\), and this member has version 0\.0 \("
    with pytest.raises(RuntimeError, match=match):
        pair.publish(2)


def test_windows_are_loaded_one_after_the_other() -> None:
    """A window may arrive while the engine still loads the one before, or waits for samples under way."""

    class Engine:
        adopts = None

        def __init__(self) -> None:
            self.loading, self.loaded = False, list[tuple[int, bool, bool]]()

        async def load(self, tensors: dict[str, int], first: bool, last: bool) -> None:
            assert not self.loading
            self.loading = True
            for _ in range(tensors["turns"]):
                await asyncio.sleep(0)
            self.loading = False
            self.loaded.append((tensors["turns"], first, last))

    async def drain() -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    async def scenario() -> None:
        engine: Any = Engine()
        taken = receiver.WeightReceiver(engine, Config(run=Run(name="test")), "rollout-0", drain=drain)
        loop, turns = asyncio.get_running_loop(), [9, 5, 1]
        futures = [taken._load(loop, {"turns": each}, each == 9, each == 1) for each in turns]  # type: ignore[dict-item]
        await asyncio.gather(*map(asyncio.wrap_future, futures))
        assert engine.loaded == [(9, True, False), (5, False, False), (1, False, True)]

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE))


def test_a_delta_with_a_wrong_word_does_not_give_the_bucket_of_its_tag() -> None:
    pair = Pair((of("bfloat16", 1000),))
    pair.publish(0)
    pair.tensors[0][5] = 5
    pair.gather(1)
    pair.send(0, 1)
    pair.receiver._inner.on_it[1][0] ^= 1
    pair.receive(0)
    assert TAGS.digest(pair.received[0]) != TAGS.digest(pair.buffers.buffers[0])


def test_only_what_was_whole_before_is_compared() -> None:
    """After a gathering that failed, nobody knows which words the receivers lack."""
    pair = Pair((of("bfloat16", 1000), of("float32", 10)))
    pair.publish(0)
    pair.buffers.begin(PolicyVersion(0, 1), 1.0)
    pair.tensors[0][3] = 1
    with pytest.raises(InvariantViolated):
        pair.buffers.fill([Shard(0, (), pair.tensors[0])])
    assert pair.publish(2) == pair.whole


@pytest.mark.parametrize("payload", [[1, 0, 200], [1, 0, 5, 0], [1]])
def test_a_payload_of_other_words_is_refused(payload: list[int]) -> None:
    with pytest.raises(RuntimeError, match=rf"a delta of {len(payload)} bytes does not fit 100 words"):
        decode(np.zeros(100, dtype=np.uint16), np.array(payload, dtype=np.uint8))
