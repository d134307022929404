"""What the tests of the embedded rollout engine share: requests, and an engine run until it has no work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from runtime import types
from runtime.rollout.torch.engine import TorchRolloutEngine
from runtime.types import GeneratedGroup, GroupPayload, GroupRequest, PolicyVersion, Sample, SamplingParams

Make = Callable[..., TorchRolloutEngine]


@contextmanager
def engines(folder: Path, **usual: Any) -> Iterator[Make]:
    """Yields what makes engines of the folder's model, or of another one's; they are closed at the end."""
    made: list[TorchRolloutEngine] = []

    def make(slots: int = 4, path: Path = folder, **options: Any) -> TorchRolloutEngine:
        chosen = {"device": torch.device("cpu"), "dtype": torch.float32, "max_model_len": 64, **usual, **options}
        made.append(TorchRolloutEngine(str(path), slots=slots, **chosen))
        return made[-1]

    yield make
    for engine in made:
        asyncio.run(engine.close())


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


async def begin(engine: TorchRolloutEngine, requests: list[GroupRequest], steps: int) -> list[GeneratedGroup]:
    """Submit them and take so many steps, in which some may end."""
    engine.submit(requests)
    checks = iter([False] * steps + [True])
    return await engine.advance(lambda: next(checks))


def run(engine: TorchRolloutEngine, *requests: GroupRequest) -> dict[int, list[Sample]]:
    async def collect() -> dict[int, list[Sample]]:
        engine.submit(requests)
        return {group.group_id: samples(group) async for group in drain(engine)}

    return asyncio.run(collect())


def tokens_of(samples: list[Sample]) -> list[list[int]]:
    return [sample.tokens.tolist() for sample in samples]


def samples(group: GeneratedGroup) -> list[Sample]:
    return types.decode(GroupPayload, group.payload).samples


def from_scratch(model: Any, prompt: np.ndarray, sample: Sample, temperature: float = 1.0) -> np.ndarray:
    """The log-probability of each token given all before it, by one forward pass over the whole text."""
    text = torch.tensor([[*prompt.tolist(), *sample.tokens.tolist()]])
    with torch.no_grad():
        logp = torch.log_softmax(model(text).logits[0, len(prompt) - 1 : -1].double() / temperature, -1)
    return logp.gather(1, text[0, len(prompt) :, None])[:, 0].numpy()
