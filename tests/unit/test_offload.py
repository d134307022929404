"""Storages on the host and back, and what vLLM is told as its engine sleeps and wakes on an accelerator."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch

from runtime.commands import Level, Offload, Onload
from runtime.errors import InvariantViolated
from runtime.models.offload import HostOffload
from runtime.process import platform
from runtime.rollout.engine import EngineStats
from runtime.rollout.vllm.engine import VLLMRolloutEngine
from runtime.scoring.scorer_torch import OffloadableScorer
from runtime.types import Logprobs, PolicyVersion


@pytest.mark.parametrize("keep", [True, False])
def test_a_storage_is_gone_and_comes_back_under_all_of_its_views(keep: bool) -> None:
    buffer = torch.arange(8.0)
    left, right, single = buffer[:3], buffer[3:].view(5, 1), torch.tensor([-0.0, torch.nan], dtype=torch.bfloat16)
    before = [tensor.clone().view(torch.uint8) for tensor in (buffer, single)]
    host = HostOffload([left, right, single, torch.empty(0)], keep=keep)
    for _ in range(2):
        host.offload()
        assert [tensor.untyped_storage().nbytes() for tensor in (buffer, left, right, single)] == [0] * 4
        host.onload()
        for tensor, bits in zip((buffer, single), before, strict=True):
            assert torch.equal(tensor.view(torch.uint8), bits if keep else torch.zeros_like(bits))
    left += 1.0
    host.offload()
    host.onload()
    assert left[0] == (1.0 if keep else 0.0)


def test_what_never_changes_is_copied_once() -> None:
    frozen = torch.arange(4.0)
    host = HostOffload([frozen], frozen=True)
    host.offload()
    host.onload()
    frozen += 1.0
    host.offload()
    host.onload()
    assert torch.equal(frozen, torch.arange(4.0))


class Scorer:
    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.weights: Iterable[torch.Tensor] = [torch.arange(4.0)]
        self.asked = 0

    def logprobs(self, requests: object) -> list[Logprobs]:
        self.asked += 1
        assert sum(map(torch.sum, self.weights)) == 6.0
        return []


def test_a_reference_that_is_away_comes_back_for_a_question(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[torch.device] = []
    monkeypatch.setattr(platform, "release", released.append)
    scorer = Scorer("cuda")
    lent = OffloadableScorer(scorer, away=True)
    there = []
    for order in (Offload(), None, Onload(), None, Offload(), Offload(), Onload(), Onload()):
        lent.logprobs([]) if order is None else lent.handle(order)
        there.append(sum(tensor.untyped_storage().nbytes() for tensor in scorer.weights))
    assert there == [0, 16, 16, 16, 0, 0, 16, 16]
    assert (scorer.asked, released) == (2, [scorer.device] * 2)


def test_a_reference_on_cpus_stays() -> None:
    scorer = Scorer("cpu")
    lent = OffloadableScorer(scorer, away=True)
    assert scorer.logprobs([]) == lent.logprobs([]) == []


class Core:
    """Notes what it is told."""

    dead = False

    def __init__(self) -> None:
        self.told: list[Any] = []

    async def abort(self, request_ids: Sequence[str]) -> None:
        self.told.append("abort")

    async def pause(self, forget: bool) -> None:
        self.told.append("pause")

    async def resume(self) -> None:
        self.told.append("resume")

    async def outstanding(self) -> list[Any]:
        return []

    async def load(self, locations: Sequence[Any]) -> list[str]:
        self.told.append("load")
        return []

    async def sleep(self) -> None:
        self.told.append("sleep")

    async def wake(self, tags: Sequence[str]) -> None:
        self.told.append(tuple(tags))


@pytest.mark.parametrize("sleeps", [True, False])
def test_weights_come_back_first_and_vllm_goes_on_with_the_cache(sleeps: bool) -> None:
    engine = object.__new__(VLLMRolloutEngine)
    engine._core = core = Core()
    engine._sleeps, engine._level, engine._swap_timeout = sleeps, Level.AWAKE, 5.0
    engine._running, engine._withdrawn, engine.torn = {}, [], False
    engine._waiting, engine.version = deque(), PolicyVersion()
    engine._name, engine._stats = "rollout-0", EngineStats()

    async def go() -> None:
        await engine.sleep()
        with pytest.raises(InvariantViolated, match="asleep"):
            await engine.swap(PolicyVersion(0, 1))
        await engine.wake(cache=False)
        engine._staged = ([], [])
        await engine.swap(PolicyVersion(0, 1))
        await engine.wake()
        await engine.sleep()
        await engine.wake()

    asyncio.run(go())
    on_device = ["sleep", ("weights",), "load", ("kv_cache",), "sleep", ("weights", "kv_cache")]
    assert core.told == (on_device if sleeps else ["pause", "load", "resume", "pause", "resume"])
