"""Transport `shared_memory` where processes die, stop, lie, or are strangers; what all transports share is tested elsewhere."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist

from runtime.errors import ServiceFault
from runtime.types import PolicyVersion
from runtime.weights import shared_memory
from runtime.weights.authentication import AuthenticatedStore, BucketTags
from runtime.weights.group import Link, arena, file_of, memory_file
from runtime.weights.plan import TRAILER, Bucket, GroupAddress
from runtime.weights.receiver import WeightReceiver
from runtime.weights.rendezvous import host, join
from runtime.weights.sender import WeightSender, in_thread
from tests.loopback.ranks import Helper
from tests.loopback.weight_cases import MANIFEST, PATIENCE, gather, mappings, settles, threads_and_files
from tests.system.runs import shared_files

LABELS = ("trainer", "rollout-0", "rollout-1")
KEY = bytes(32)


def meeting(world_size: int = 2, timeout: float = PATIENCE) -> list[Future[Link]]:
    """The members of a group, that meet in a store of this process."""
    torch.set_num_threads(1)
    store = AuthenticatedStore(dist.HashStore(), KEY)
    address = GroupAddress(
        epoch=1,
        host="",
        port=1,
        rank=0,
        world_size=world_size,
        backend="gloo",
        timeout=timeout,
        key=KEY,
        transport="shared_memory",
    )
    return [
        in_thread(
            "connect",
            lambda rank=rank: shared_memory.connect(
                store, msgspec.structs.replace(address, rank=rank), LABELS[:world_size], LABELS[rank], ""
            ),
        )
        for rank in range(world_size)
    ]


def links(world_size: int = 2, timeout: float = PATIENCE) -> list[Link]:
    return [member.result(PATIENCE) for member in meeting(world_size, timeout)]


@pytest.fixture
def pair() -> Iterator[list[Link]]:
    made = links()
    try:
        yield made
    finally:
        for link in made:
            link.abort()


# ------------------------------------------------------------------------------------------------ what moves


@pytest.mark.parametrize("shared", [True, False], ids=["files", "a rollout's own memory"])
def test_buckets_of_any_size_arrive(pair: list[Link], shared: bool) -> None:
    sizes, before = (1, 63, (1 << 20) - 1, 1 << 20, (3 << 20) + 5), mappings()
    for seed in range(2):  # a sender's buckets may be made anew while the group stays
        sources = arena(sizes) if shared else [torch.empty(size, dtype=torch.uint8) for size in sizes]
        for buffer in sources:
            buffer.copy_(torch.randint(0, 256, buffer.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8))
        sent = [pair[0].send(index, buffer) for index, buffer in enumerate(sources)]
        for index, buffer in enumerate(sources):
            arrived = torch.zeros_like(buffer)
            pair[1].receive(index, arrived).wait(PATIENCE)
            assert torch.equal(arrived, buffer)
        for transfer in sent:
            transfer.wait(PATIENCE)
        del sources, buffer
    assert not shared or len(mappings() - before) == 1  # the receiver's, of the last file


def test_another_bucket_than_the_one_awaited_is_refused(pair: list[Link]) -> None:
    pair[0].send(3, memory_file(64))
    with pytest.raises(RuntimeError, match="trainer sent bucket 3, 64 bytes at 0, for bucket 0, 32 bytes"):
        pair[1].receive(0, torch.zeros(32, dtype=torch.uint8)).wait(PATIENCE)


def test_nothing_is_read_beyond_the_memory_file(pair: list[Link], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "file_of", lambda buffer: (file_of(buffer)[0], 1 << 20))
    pair[0].send(0, memory_file(64))
    with pytest.raises(RuntimeError, match="trainer sent bucket 0, 64 bytes at 1048576, "):
        pair[1].receive(0, torch.zeros(64, dtype=torch.uint8)).wait(PATIENCE)


def test_the_checksum_is_of_what_the_receiver_has(pair: list[Link], monkeypatch: pytest.MonkeyPatch) -> None:
    copyto = np.copyto

    def faulty(target: Any, source: Any) -> None:
        copyto(target, source)
        target[-1] ^= 1

    bucket = memory_file((3 << 20) + 5)
    bucket.copy_(torch.arange(bucket.numel()) % 251)
    arrived = torch.zeros_like(bucket)
    pair[0].send(0, bucket)
    assert pair[1].receive(0, arrived).wait(PATIENCE).digest == digest_of(bucket)
    with monkeypatch.context() as patch:
        patch.setattr(np, "copyto", faulty)
        pair[0].send(1, bucket)
        digest = pair[1].receive(1, arrived).wait(PATIENCE).digest
    assert not torch.equal(arrived, bucket)
    assert digest == digest_of(arrived)


def digest_of(buffer: torch.Tensor) -> int:
    return BucketTags(KEY).digest(Bucket((), buffer.numel() - TRAILER.size), buffer)


class Held:
    """Holds every copy of `nbytes` until it is let go."""

    def __init__(self, patch: pytest.MonkeyPatch, nbytes: int):
        self.begun, self.go = threading.Event(), threading.Event()
        copy_and_hash = shared_memory.copy_and_hash

        def hold(source: Any, target: Any, hasher: Any, check: Any) -> Any:
            if len(target) == nbytes:
                self.begun.set()
                assert self.go.wait(PATIENCE)
            return copy_and_hash(source, target, hasher, check)

        patch.setattr(shared_memory, "copy_and_hash", hold)


def test_a_bucket_counts_as_taken_after_those_before_it(pair: list[Link], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "LANES", 2)
    held = Held(monkeypatch, 64)
    sources = arena((64, 128))
    sent = [pair[0].send(index, buffer) for index, buffer in enumerate(sources)]
    copies = [pair[1].receive(index, torch.empty_like(buffer)) for index, buffer in enumerate(sources)]
    second = copies[1].copied.result(PATIENCE).digest  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="waited in vain for rollout-0"):
        sent[0].wait(0.1)
    held.go.set()
    copies[0].wait(PATIENCE)
    sent[0].wait(PATIENCE)
    assert copies[1].wait(PATIENCE).digest == second
    sent[1].wait(PATIENCE)


def test_an_aborted_group_writes_into_no_buffer_any_more(pair: list[Link], monkeypatch: pytest.MonkeyPatch) -> None:
    held, (buffer,) = Held(monkeypatch, 64), arena((64,))
    buffer.fill_(1)
    arrived = torch.zeros_like(buffer)
    pair[0].send(0, buffer)
    copy = pair[1].receive(0, arrived)
    assert held.begun.wait(PATIENCE)
    ended = in_thread("abort", pair[1].abort)
    with pytest.raises(RuntimeError, match=r"the group was aborted|waited in vain"):
        copy.wait(0.1)
    assert not ended.done()
    held.go.set()
    ended.result(PATIENCE)
    assert not arrived.any()
    with pytest.raises(RuntimeError, match="the group was aborted"):
        pair[1].receive(1, arrived)


def test_a_bucket_is_waited_for_longer_than_the_rendezvous_may_take() -> None:
    trainer, rollout = links(timeout=1.0)
    try:
        copy = in_thread("wait", lambda: rollout.receive(0, torch.empty(64, dtype=torch.uint8)).wait(PATIENCE))
        assert not threading.Event().wait(1.1)
        trainer.send(0, memory_file(64))
        assert copy.result(PATIENCE) is not None
    finally:
        trainer.abort()
        rollout.abort()


# ------------------------------------------------------------------------------------------------ processes that fail


def test_who_ends_is_named_whoever_is_waited_for() -> None:
    trainer, *others = links(3)
    buffer = memory_file(64)
    transfer = trainer.send(0, buffer)
    others[0].receive(0, torch.zeros_like(buffer)).wait(PATIENCE)
    others[0].abort()
    with pytest.raises(RuntimeError, match="rollout-0 is gone"):
        transfer.wait(PATIENCE)
    trainer.abort()
    with pytest.raises(RuntimeError, match="trainer is gone"):
        others[1].receive(0, torch.zeros_like(buffer)).wait(PATIENCE)
    others[1].abort()


def send_one_bucket(connection: Any) -> None:
    """The sender: it says where it is to be met, and that its second bucket is under way, at which it stays."""
    pending = host(1, 2, "127.0.0.1", "gloo", PATIENCE, "trainer", "shared_memory", names=("trainer", "rollout-0"))
    connection.send(pending.address)
    group, sender, stamp = pending.connect(), WeightSender(MANIFEST), BucketTags.stamp

    def stamp_one(tags: BucketTags, index: int, bucket: Bucket, *rest: Any) -> int:
        if bucket is sender.buckets[1]:
            connection.send("under way")
            connection.recv()
        return stamp(tags, index, bucket, *rest)

    BucketTags.stamp = stamp_one
    gather(sender, 1)
    sender.send(group, PolicyVersion(0, 1), 600.0).result()


def test_a_sender_that_is_killed_is_noticed_at_once_and_leaves_nothing() -> None:
    files, mapped = shared_files(), mappings()
    trainer = Helper(send_one_bucket)
    try:
        group = join(msgspec.structs.replace(trainer.hear(), rank=1), "rollout-0")
        reception = WeightReceiver(MANIFEST).receive(group, PolicyVersion(0, 1), 10 * PATIENCE)
        assert trainer.hear() == "under way"
        assert settles(lambda: [-len(mappings() - mapped)], [-1])  # the first bucket has come
    finally:
        trainer.end()
    with pytest.raises(
        ServiceFault, match=r"transfer: bucket 1 of \d+ of version 0\.1 did not arrive: rank 0 \(trainer\) is gone"
    ):
        reception.result(PATIENCE)
    del group, reception
    assert settles(lambda: [len(mappings() - mapped)], [0])
    assert settles(lambda: [len(shared_files() - files)], [0])  # what other workers make there they take away


def test_many_aborts_leave_no_thread_no_file_and_no_mapping() -> None:
    buffer = memory_file(8 << 20)

    def one_epoch(posted: bool) -> None:
        trainer, *others = links(3)
        waits = [other.receive(0, torch.empty_like(buffer)).wait for other in others]
        waits += [trainer.send(0, buffer).wait] if posted else []
        blocked = [in_thread("blocked", lambda wait=wait: wait(60.0)) for wait in waits]
        for link in (trainer, *others):
            link.abort()
        for each in blocked:
            try:
                each.result(PATIENCE)
            except RuntimeError as error:
                assert "aborted" in str(error) or "is gone" in str(error)

    one_epoch(True)
    before, mapped = threads_and_files(), mappings()
    for index in range(50):
        one_epoch(bool(index % 2))
    assert settles(lambda: [*threads_and_files(), len(mappings() - mapped)], [*before, 0])


# ------------------------------------------------------------------------------------------------ strangers


def test_another_users_process_is_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    own = os.geteuid()
    monkeypatch.setattr(shared_memory, "user_of", lambda peer: own + 1)
    trainer, rollout = meeting(timeout=0.5)
    with pytest.raises(ServiceFault, match=rf"rollout-0: rendezvous: trainer is of user {own + 1}, this process of {own}"):
        rollout.result(PATIENCE)
    with pytest.raises(ServiceFault, match="trainer: rendezvous: rollout-0 did not join"):
        trainer.result(PATIENCE)


def test_the_sender_lets_in_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.local()
    user_of = shared_memory.user_of

    def stranger_to_the_sender(peer: socket.socket) -> int:
        first, asked.once = not getattr(asked, "once", False), True
        return user_of(peer) + (peer.getsockname() != "" and first)

    monkeypatch.setattr(shared_memory, "user_of", stranger_to_the_sender)
    trainer, rollout = meeting()
    with pytest.raises(ServiceFault, match="trainer: rendezvous: rollout-0 did not connect"):
        trainer.result(PATIENCE)
    rollout.result(PATIENCE).abort()


@pytest.mark.skipif(os.geteuid() != 0, reason="takes another user's process")
def test_the_kernel_tells_a_process_of_another_user() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        name = f"sluice-test-{secrets.token_hex(8)}"
        listener.bind(f"\0{name}")
        listener.listen(1)
        code = f"import os, socket; os.setuid(65534); s = socket.socket(1, 5); s.connect(chr(0) + '{name}'); s.recv(1)"
        child = subprocess.Popen([sys.executable, "-S", "-c", code])
        listener.settimeout(PATIENCE)
        try:
            with listener.accept()[0] as peer:
                assert shared_memory.user_of(peer) == 65534
        finally:
            child.kill()
            child.wait()
