"""The part of an engine on its second node, as a process of its own: it stages the weights in each file that standard input
names, and ends with standard input. `python -m tests.vllm.follower MODEL SPREAD PORT PORT`, SPREAD as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from runtime.config import RolloutParallel
from runtime.rollout.vllm.arguments import UnitPlace
from runtime.rollout.vllm.engine import VLLMFollower
from runtime.types import PolicyVersion
from tests.vllm import cpu_parts
from tests.vllm.rig import CONTEXT, SLOTS

HOST = "127.0.0.1"


def main(model: str, spread: str, *ports: str) -> None:
    workers, ranks = map(int, ports)
    parallel = RolloutParallel(**json.loads(spread))
    if parallel.expert > 1:
        cpu_parts.put_in(pytest.MonkeyPatch())
    follower = VLLMFollower(
        model,
        name="rollout-0n1",
        device=torch.device("cpu"),
        dtype=torch.float32,
        slots=SLOTS,
        max_model_len=CONTEXT,
        swap_timeout=60.0,
        parallel=parallel,
        place=UnitPlace(1, HOST, HOST, (workers, ranks)),
    )
    print("started", flush=True)
    for version, line in enumerate(sys.stdin, 1):
        asyncio.run(follower.stage(load_file(Path(line.strip()))))
        asyncio.run(follower.swap(PolicyVersion(0, version)))
        print("staged", flush=True)
    asyncio.run(follower.close())


if __name__ == "__main__":
    main(*sys.argv[1:])
