"""A reception's account of its time, over a group without a sender."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from runtime.types import PolicyVersion
from runtime.weights import receiver
from runtime.weights.authentication import BucketTags
from runtime.weights.group import Taken, allocate, arena, populate
from runtime.weights.plan import Manifest, TensorSpec, plan_buckets
from runtime.weights.receiver import Reception

VERSION = PolicyVersion(0, 1)
MANIFEST = Manifest(tuple(TensorSpec(f"tensor.{index}", "float32", (16,)) for index in range(9)), 64)


class Clock:
    """Time passes only when a transfer is waited for."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class Arriving:
    """A bucket that is there after `seconds` of waiting."""

    def __init__(self, clock: Clock, seconds: float, taken: Taken):
        self._clock, self._seconds, self._taken = clock, seconds, taken

    def wait(self, timeout: float) -> Taken:
        self._clock.now += self._seconds
        return self._taken


class Group:
    """Every bucket is stamped, takes 2 s to copy and 1 s to hash, and is there after `seconds` of waiting."""

    name, aborted = "rollout-0", False

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.tags = BucketTags(bytes(32))
        self.buckets = plan_buckets(MANIFEST)
        self._clock, self._seconds = clock, seconds

    def receive(self, index: int, buffer: torch.Tensor, root: int) -> Arriving:
        digest = self.tags.stamp(index, self.buckets[index], buffer, VERSION)
        return Arriving(self._clock, self._seconds, Taken(digest, 2.0, 1.0))


@pytest.mark.parametrize(("seconds", "expected"), [(5.0, (2.0, 2.0, 1.0)), (3.0, (0.0, 2.0, 1.0)), (0.75, (0.0, 0.5, 0.25))])
def test_the_time_of_a_reception_is_divided_without_a_rest(
    monkeypatch: pytest.MonkeyPatch, seconds: float, expected: tuple[float, ...]
) -> None:
    """A bucket that was copied while another was waited for takes no time of its own."""
    clock = Clock()
    monkeypatch.setattr(receiver, "time", clock)
    group: Any = Group(clock, seconds)
    buffers = allocate(group.buckets, pin=False)
    reception = Reception(group, group.buckets, VERSION, 1e6)
    reception.take(buffers.__getitem__)
    spent = (reception.waiting, reception.copying, reception.hashing)
    assert spent == pytest.approx([len(buffers) * each for each in expected])
    assert clock.now - 100.0 == pytest.approx(sum(spent))


def test_memory_that_is_populated_keeps_its_bytes() -> None:
    first, second = arena([5000, 70])
    first.fill_(7)
    populate(second)
    assert first.eq(7).all()
    assert not second.any()
