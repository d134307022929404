"""Weight publication, by each transport: one sender here, two receivers in processes of their own."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.errors import DeadlineExceeded
from runtime.types import PolicyVersion
from runtime.weights.authentication import BucketTags
from runtime.weights.sender import WeightSender
from tests.loopback.weight_cases import IN_A_STORE, MANIFEST, PATIENCE, WAYS, gather, settles, threads_and_files
from tests.loopback.weight_members import Member, connect, leave, post


@pytest.fixture(scope="module")
def members() -> Iterator[list[Member]]:
    torch.set_num_threads(1)
    started = [Member(f"rollout-{index}") for index in range(2)]
    try:
        yield started
    finally:
        for one in started:
            one.end()


@pytest.mark.parametrize("transport", WAYS)
def test_two_processes_receive_every_version_whole(members: list[Member], transport: str, tmp_path: Path) -> None:
    group = connect(members, 1, transport=transport, folder=str(tmp_path))
    sender = WeightSender(MANIFEST)
    assert len(sender.buckets) > 3
    for version in range(4):
        post(members, version, PATIENCE)
        gather(sender, version)
        result = sender.send(group, PolicyVersion(0, version), PATIENCE).result(PATIENCE)
        whole = sum(bucket.total_bytes for bucket in sender.buckets)
        assert result.nbytes == whole if transport in ("collective", "shared_memory") else 0 < result.nbytes < 1.1 * whole
        assert [one.hear() for one in members] == [("staged", version, True)] * 2
    leave(members, group)


@pytest.mark.parametrize("transport", WAYS)
def test_a_corrupted_bucket_is_caught_and_named(
    members: list[Member], transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = connect(members, 2, transport=transport, folder=str(tmp_path))
    sender = WeightSender(MANIFEST)
    stamp = BucketTags.stamp

    def stamp_then_flip(tags: BucketTags, index: int, bucket: Any, buffer: torch.Tensor, version: PolicyVersion) -> int:
        digest = stamp(tags, index, bucket, buffer, version)
        if bucket is sender.buckets[2]:
            buffer[5] ^= 1
        return digest

    with monkeypatch.context() as patch:
        patch.setattr(BucketTags, "stamp", stamp_then_flip)
        post(members, 1, PATIENCE)
        gather(sender, 1)
        sender.send(group, PolicyVersion(0, 1), PATIENCE).result(PATIENCE)
    for one in members:
        kind, phase, text = one.hear()
        assert (kind, phase) == ("fault", "verify")
        assert one.name in text and f"bucket 2 of {len(sender.buckets)}: the checksum" in text
        assert "bucket 1 of" not in text
    post(members, 2, PATIENCE)  # the group is whole
    gather(sender, 2)
    sender.send(group, PolicyVersion(0, 2), PATIENCE).result(PATIENCE)
    assert [one.hear() for one in members] == [("staged", 2, True)] * 2
    leave(members, group)


@pytest.mark.parametrize("transport", IN_A_STORE)
def test_a_stopped_receiver_ends_everyone_in_time_and_leaves_nothing(members: list[Member], transport: str) -> None:
    def counts() -> list[int]:
        for one in members:
            one.tell("counts")
        return [*threads_and_files(), *members[0].hear()[1], *members[1].hear()[1]]

    sender = WeightSender(MANIFEST)
    leave(members, connect(members, 2, transport=transport))  # the first group of a process opens what the next ones use
    before = counts()
    group = connect(members, 3, transport=transport)
    post(members, 1, 2 * PATIENCE)
    stopped, innocent = members
    os.kill(stopped.process.pid, signal.SIGSTOP)
    try:
        gather(sender, 1)
        with pytest.raises(DeadlineExceeded, match=r"trainer: transfer: bucket 0 of \d+ of version 0\.1 was not taken"):
            sender.send(group, PolicyVersion(0, 1), 0.5).result(PATIENCE)
        kind, phase, text = innocent.hear()  # long before its own deadline
        assert (kind, phase) == ("fault", "transfer"), text
    finally:
        os.kill(stopped.process.pid, signal.SIGCONT)
    assert stopped.hear()[0] == "fault"
    del group
    for one in members:
        one.tell("leave")
        assert one.hear()[0] == "left"
    assert settles(counts, before)

    group = connect(members, 4, transport=transport)  # a new epoch goes on with the same buffers
    post(members, 5, PATIENCE)
    gather(sender, 5)
    sender.send(group, PolicyVersion(0, 5), PATIENCE).result(PATIENCE)
    assert [one.hear() for one in members] == [("staged", 5, True)] * 2
    leave(members, group)
