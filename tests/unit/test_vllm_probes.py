"""What vLLM is asked with all slots taken, by an engine whose core only notes it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from runtime.rollout.vllm import engine as rollout_vllm
from runtime.rollout.vllm.engine import VLLMRolloutEngine
from tests.unit.rollout_cases import request
from tests.unit.training_cases import make_policy

SLOTS = 2


class Core:
    dead = False
    vocabulary = 61

    def __init__(self, own: dict[str, Any], arguments: dict[str, Any]) -> None:
        self.own = own
        self.asked: list[int] = []  # the prompts' first tokens

    async def add(self, request_id: str, prompt: list[int], sampling: dict[str, Any], salt: str) -> None:
        self.asked.append(prompt[0])


def test_a_probe_goes_before_all_that_wait_into_a_sequence_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_vllm, "Core", Core)
    for name in ("prepare_environment", "check_version"):
        monkeypatch.setattr(rollout_vllm, name, lambda *_: None)
    path, cpu = make_policy(tmp_path), torch.device("cpu")
    engine = VLLMRolloutEngine(
        path, name="rollout-0", device=cpu, dtype=torch.float32, slots=SLOTS, max_model_len=64, swap_timeout=1.0
    )
    core: Any = engine._core
    assert core.own["max_num_seqs"] == SLOTS + 1
    engine.submit([request(1, n=3, prompt=(1,)), request(2, n=2, prompt=(2,))])
    asyncio.run(engine._feed())
    assert core.asked == [1, 1]
    probes = [request(group_id, n=1, prompt=(9 + group_id,)) for group_id in (-1, -2)]
    probes = [replace(probe, purpose="probe") for probe in probes]
    engine.submit(probes[:1])
    asyncio.run(engine._feed())
    engine.submit(probes[1:])  # there is one such sequence
    asyncio.run(engine._feed())
    assert core.asked == [1, 1, 8]
