"""The sender over a group in memory: a bucket leaves once it is whole, and its buffer is not touched until it is taken."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from runtime.errors import DeadlineExceeded, ServiceFault
from runtime.types import PolicyVersion
from runtime.weights import sender as sender_module
from runtime.weights.authentication import new_key
from runtime.weights.group import WeightGroup
from runtime.weights.plan import Bucket, BucketEntry, GroupAddress, Manifest, TensorSpec, plan_buckets
from runtime.weights.sender import WeightSender

COUNT = 24
MANIFEST = Manifest(tuple(TensorSpec(f"t{index}", "float32", (3, 5)) for index in range(COUNT)), 128)  # two to a bucket
VERSION = PolicyVersion(0, 1)
DEADLINE = 60.0


class Memory(WeightGroup):
    """Keeps what is sent. `gone[i]` is set once bucket i is on its way, and it is taken only if `may_take`."""

    def __init__(self, buckets: tuple[Bucket, ...]) -> None:
        address = GroupAddress(epoch=1, host="", port=0, rank=0, world_size=2, backend="gloo", timeout=1.0, key=new_key())
        super().__init__(address, "trainer")
        self.buckets = buckets
        self.gone = [threading.Event() for _ in buckets]
        self.may_take = threading.Event()
        self.may_take.set()
        self.sent: list[torch.Tensor] = []

    def announce(self, version: PolicyVersion) -> None:
        """Nobody waits for it."""

    def await_announcement(self, version: PolicyVersion) -> None:
        raise AssertionError("it is rank 0's")

    def send(self, index: int, buffer: torch.Tensor) -> Taking:
        if self.aborted:
            raise RuntimeError("the group was aborted")
        assert index == len(self.sent)
        self.sent.append(buffer.clone())
        self.sent_bytes += buffer.nbytes
        self.gone[index].set()
        return Taking(self, buffer, self.sent[-1])

    def receive(self, index: int, buffer: torch.Tensor, root: int) -> Taking:
        raise AssertionError("it is rank 0's")

    def abort(self) -> None:
        self.aborted = True
        self.may_take.set()


class Taking:
    def __init__(self, group: Memory, buffer: torch.Tensor, sent: torch.Tensor):
        self._group, self._buffer, self._sent = group, buffer, sent

    def wait(self, timeout: float) -> None:
        taken = self._group.may_take.wait(timeout)
        if self._group.aborted or not taken:
            raise RuntimeError("the receiver is lost")
        assert torch.equal(self._buffer, self._sent)


def tensor(index: int, version: int = 1) -> torch.Tensor:
    return torch.full((3, 5), float(100 * version + index))


def tensors(version: int = 1) -> list[torch.Tensor]:
    return [tensor(index, version) for index in range(COUNT)]


def assert_sent(group: Memory, sender: WeightSender, version: int = 1) -> None:
    assert len(group.sent) == len(sender.buckets)
    for index, (bucket, buffer) in enumerate(zip(sender.buckets, group.sent, strict=True)):
        assert group.tags.verify(index, bucket, buffer)
        for entry in bucket.entries:
            found = buffer[entry.offset : entry.offset + entry.nbytes].view(torch.float32).view(3, 5)
            assert torch.equal(found, tensor(entry.tensor, version))


@pytest.fixture
def sender() -> WeightSender:
    return WeightSender(MANIFEST)


def test_a_bucket_leaves_before_the_next_one_is_gathered(sender: WeightSender) -> None:
    group = Memory(sender.buckets)

    def slowly() -> Iterator[torch.Tensor]:
        for index, one in enumerate(tensors()):
            if index and index % 2 == 0:
                assert group.gone[index // 2 - 1].wait(DEADLINE)
            yield one

    sender.begin(DEADLINE)
    sending = sender.send(group, VERSION, DEADLINE)
    sender.fill(slowly())
    assert sending.result(DEADLINE).nbytes == sum(bucket.total_bytes for bucket in sender.buckets)
    assert_sent(group, sender)


def test_a_bucket_with_a_buffer_of_its_own_leaves_before_those_before_it_are_taken() -> None:
    sender = WeightSender(MANIFEST)
    group = Memory(sender.buckets)
    group.may_take.clear()

    def slowly() -> Iterator[torch.Tensor]:
        for index, one in enumerate(tensors()):
            if index in (2, 4):
                assert group.gone[index // 2 - 1].wait(DEADLINE)
            yield one
        group.may_take.set()

    sender.begin(DEADLINE)
    sending = sender.send(group, VERSION, DEADLINE)
    sender.fill(slowly())
    sending.result(DEADLINE)
    assert_sent(group, sender)


def test_a_bucket_waits_for_all_its_tensors_in_whatever_order_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first tensors lie in the last bucket."""

    def reversed_plan(manifest: Manifest) -> tuple[Bucket, ...]:
        def turned(entry: BucketEntry) -> BucketEntry:
            return BucketEntry(COUNT - 1 - entry.tensor, entry.offset, entry.nbytes)

        return tuple(Bucket(tuple(map(turned, each.entries)), each.data_bytes) for each in plan_buckets(manifest))

    with monkeypatch.context() as patch:
        patch.setattr(sender_module, "plan_buckets", reversed_plan)
        sender = WeightSender(MANIFEST)
        group = Memory(sender.buckets)

        def last_of_all() -> Iterator[torch.Tensor]:
            for index, one in enumerate(tensors()):
                assert not group.sent or index == COUNT - 1
                yield one

        sender.begin(DEADLINE)
        sending = sender.send(group, VERSION, DEADLINE)
        sender.fill(last_of_all())
        sending.result(DEADLINE)
        assert_sent(group, sender)


def test_a_lost_receiver_ends_the_transfer_and_everything_is_gathered_all_the_same(sender: WeightSender) -> None:
    group = Memory(sender.buckets)
    group.may_take.clear()
    given = []

    def counted() -> Iterator[torch.Tensor]:
        for index, one in enumerate(tensors()):
            if index == 4:
                group.abort()
            given.append(index)
            yield one

    sender.begin(DEADLINE)
    sending = sender.send(group, VERSION, DEADLINE)
    sender.fill(counted())
    with pytest.raises(ServiceFault, match=r"trainer: transfer: bucket 0 of 12 of version 0\.1 was not taken"):
        sending.result(DEADLINE)
    assert given == list(range(COUNT))

    sender.begin(DEADLINE)
    again = Memory(sender.buckets)
    sending = sender.send(again, VERSION, DEADLINE)
    sender.fill(tensors(2))
    sending.result(DEADLINE)
    assert_sent(again, sender, 2)


def test_a_gathering_that_ends_early_is_given_up_at_once(sender: WeightSender) -> None:
    group = Memory(sender.buckets)
    sender.begin(DEADLINE)
    sending = sender.send(group, VERSION, 10 * DEADLINE)
    sender.fill(tensors()[:5])
    assert group.gone[1].wait(DEADLINE)
    sender.abort()
    with pytest.raises(ServiceFault, match=r"bucket [012] of 12 of version 0\.1 was not taken"):
        sending.result(DEADLINE)
    sender.begin(DEADLINE)


def test_a_bucket_that_is_not_gathered_in_time_ends_the_transfer(sender: WeightSender) -> None:
    group = Memory(sender.buckets)
    sender.begin(DEADLINE)
    sending = sender.send(group, VERSION, 0.1)
    sender.fill(tensors()[:1])
    with pytest.raises(DeadlineExceeded, match=r"bucket 0 of 12 of version 0\.1 was not taken: it was not gathered in time"):
        sending.result(DEADLINE)
    assert group.aborted


def test_a_version_can_be_sent_twice() -> None:
    sender = WeightSender(MANIFEST)
    sender.begin(DEADLINE)
    sender.fill(tensors())
    for _ in range(2):
        group = Memory(sender.buckets)
        sender.send(group, VERSION, DEADLINE).result(DEADLINE)
        assert_sent(group, sender)


def test_a_byte_that_changes_between_two_sends_is_found_before_it_is_sent() -> None:
    sender = WeightSender(MANIFEST)
    sender.begin(DEADLINE)
    sender.fill(tensors())
    sender.send(Memory(sender.buckets), VERSION, DEADLINE).result(DEADLINE)
    sender._buffers[3][1] ^= 1
    group = Memory(sender.buckets)
    with pytest.raises(ServiceFault, match=r"trainer: snapshot: bucket 3 of 12 has changed in memory since it was gathered"):
        sender.send(group, VERSION, DEADLINE).result(DEADLINE)
    assert group.aborted and len(group.sent) == 3 and not sender.intact
    sender.begin(DEADLINE)
    sender.fill(tensors(2))
    again = Memory(sender.buckets)
    sender.send(again, PolicyVersion(0, 2), DEADLINE).result(DEADLINE)
    assert_sent(again, sender, 2)
    assert sender.intact


def test_what_is_gathered_is_taken_without_its_graph() -> None:
    sender = WeightSender(MANIFEST)
    sender.fill(tensor.requires_grad_() for tensor in tensors())
    assert not any(view.requires_grad for view in sender._views)
