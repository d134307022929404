"""What the tests of the embedded rollout engine share: requests, and an engine run until it has no work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import torch

from runtime import codec
from runtime.rollout.torch.engine import TorchRolloutEngine
from runtime.types import GeneratedGroup, GroupPayload, GroupRequest, PolicyVersion, Sample, SamplingParams


async def update(
    engine: TorchRolloutEngine, tensors: dict[str, torch.Tensor], version: PolicyVersion, recompute: bool = False
) -> None:
    await engine.stage(tensors)
    await engine.swap(version, recompute)


def request(group_id: int, n: int = 3, prompt: tuple[int, ...] = (5, 9, 2), limit: int = 12, **sampling: Any) -> GroupRequest:
    return GroupRequest(
        group_id=group_id,
        prompt=np.array(prompt, np.int32),
        n=n,
        seed=100 + group_id,
        sampling=SamplingParams(max_new_tokens=limit, **sampling),
    )


def never() -> bool:
    return False


async def drain(engine: TorchRolloutEngine) -> AsyncIterator[GeneratedGroup]:
    while engine.has_work:
        for group in await engine.advance(never):
            yield group


def run(engine: TorchRolloutEngine, *requests: GroupRequest) -> dict[int, list[Sample]]:
    async def collect() -> dict[int, list[Sample]]:
        engine.submit(requests)
        return {group.group_id: samples(group) async for group in drain(engine)}

    return asyncio.run(collect())


def tokens_of(samples: list[Sample]) -> list[list[int]]:
    return [sample.tokens.tolist() for sample in samples]


def samples(group: GeneratedGroup) -> list[Sample]:
    return codec.decode(GroupPayload, group.payload).samples


def from_scratch(model: Any, prompt: np.ndarray, sample: Sample, temperature: float = 1.0) -> np.ndarray:
    """The log-probability of each token given all before it, by one forward pass over the whole text."""
    text = torch.tensor([[*prompt.tolist(), *sample.tokens.tolist()]])
    with torch.no_grad():
        logp = torch.log_softmax(model(text).logits[0, len(prompt) - 1 : -1].double() / temperature, -1)
    return logp.gather(1, text[0, len(prompt) :, None])[:, 0].numpy()
