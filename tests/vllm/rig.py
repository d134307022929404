"""An engine with the Hugging Face model whose weights it should have."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from runtime import types
from runtime.rollout.vllm.engine import VLLMRolloutEngine
from runtime.types import GroupPayload, GroupRequest, PolicyVersion, Sample, SamplingParams

T = TypeVar("T")

CONTEXT = 384
SLOTS = 16
SWAP_SECONDS = 60.0
TOLERANCE = 1e-4  # of a log-probability, between vLLM and Hugging Face in float32
PROMPT = np.arange(5, 155, dtype=np.int32)  # longer than a block of the prefix cache (128 tokens on CPUs)


class Rig:
    """`models[v]` are the weights of version v; the engine is used on one event loop."""

    def __init__(self, path: Path, worker: str = "tests.vllm.faulty_worker.FaultyLoading", **options: Any):
        self.engine = VLLMRolloutEngine(
            str(path),
            name="rollout-0",
            device=torch.device("cpu"),
            dtype=torch.float32,
            slots=SLOTS,
            max_model_len=CONTEXT,
            swap_timeout=SWAP_SECONDS,
            worker=worker,
            **options,
        )
        self._loop = asyncio.new_event_loop()
        self._ids = 0
        self.models = {0: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()}
        self.newest = 0

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, work: Awaitable[T], timeout: float = 240.0) -> T:
        return self._loop.run_until_complete(asyncio.wait_for(work, timeout))

    def close(self) -> None:
        self.run(self.engine.close())
        self._loop.close()

    def request(
        self, n: int = 4, tokens: int = 24, prompt: np.ndarray = PROMPT, seed: int = 0, **sampling: Any
    ) -> GroupRequest:
        self._ids += 1
        chosen = SamplingParams(max_new_tokens=tokens, **{"temperature": 0.7, **sampling})
        return GroupRequest(group_id=self._ids, prompt=prompt, n=n, seed=seed or self._ids, sampling=chosen)

    async def finish(self, count: int) -> list[GroupPayload]:
        """The next `count` groups that end."""
        done: list[Any] = []
        while len(done) < count:
            assert self.engine.has_work
            done += await self.engine.advance(lambda: False)
        return [types.decode(GroupPayload, each.payload) for each in done]

    def generate(self, *requests: GroupRequest) -> list[list[Sample]]:
        """The samples of each request, in its order."""
        self.engine.submit(requests)
        found = {payload.group_id: payload.samples for payload in self.run(self.finish(len(requests)))}
        return [found[request.group_id] for request in requests]

    async def until_tokens(self, count: int, done: list[Sample] | None = None) -> None:
        """Generate until the engine has made `count` tokens more; without `done`, no sample may end meanwhile."""
        goal = self.engine.stats().decode_tokens + count
        while self.engine.stats().decode_tokens < goal:
            assert self.engine.has_work
            ended = await self.engine.advance(lambda: self.engine.stats().decode_tokens >= goal)
            assert done is not None or not ended
            for each in ended:
                done += types.decode(GroupPayload, each.payload).samples  # type: ignore[operator]

    def next_weights(self, scale: float = 0.05) -> dict[str, torch.Tensor]:
        """Weights of the version after the newest, quite unlike it."""
        model = copy.deepcopy(self.models[self.newest])
        generator = torch.Generator().manual_seed(self.newest)
        self.newest += 1
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
        self.models = {self.newest - 1: self.models[self.newest - 1], self.newest: model}
        tied = model.config.tie_word_embeddings
        return {name: tensor for name, tensor in model.state_dict().items() if not (tied and name == "lm_head.weight")}

    def publish_files(self, folder: Path, recompute: bool = False) -> dict[str, torch.Tensor]:
        """The next version by the names of a checkpoint's files: of experts, one tensor each, as the trainer has them."""
        self.next_weights()
        self.models[self.newest].save_pretrained(folder)
        tensors = load_file(folder / "model.safetensors")
        self.run(self.swap(tensors, PolicyVersion(0, self.newest), recompute))
        return tensors

    async def update(self, recompute: bool = False) -> None:
        await self.swap(self.next_weights(), PolicyVersion(0, self.newest), recompute)

    async def swap(self, tensors: dict[str, torch.Tensor], version: PolicyVersion, recompute: bool = False) -> None:
        await self.engine.stage(tensors)
        await self.engine.swap(version, recompute)

    @torch.no_grad()
    def logprobs(self, version: int, prompt: np.ndarray, sample: Sample) -> np.ndarray:
        """float32 [R]: what the model of `version` gives the sample's tokens."""
        return (
            self.distribution(version, prompt, sample, 0.7)
            .gather(1, torch.from_numpy(sample.tokens.astype(np.int64)).unsqueeze(1))[:, 0]
            .numpy()
        )

    @torch.no_grad()
    def distribution(self, version: int, prompt: np.ndarray, sample: Sample, temperature: float) -> torch.Tensor:
        """float32 [R, vocabulary]: log-probabilities before each of the sample's tokens."""
        ids = torch.from_numpy(np.concatenate((prompt, sample.tokens)).astype(np.int64))
        logits = self.models[version](ids.unsqueeze(0)).logits[0].float() / temperature
        return torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]

    def error(self, version: int, sample: Sample, where: Sequence[bool] | np.ndarray | None = None) -> float:
        """The largest difference from the model of `version`, over the tokens `where`."""
        difference = np.abs(self.logprobs(version, PROMPT, sample) - sample.logprobs)
        return float(difference[where if where is not None else slice(None)].max(initial=0.0))

    def begin(self, *requests: GroupRequest, tokens: int) -> None:
        """Submit them, and generate so many tokens."""
        self.engine.submit(requests)
        self.run(self.until_tokens(tokens))

    def finish_one(self) -> GroupPayload:
        (payload,) = self.run(self.finish(1))
        return payload

    def check_exact(self, samples: Sequence[Sample]) -> None:
        """Every token has the log-probability that the weights of its version give it."""
        for sample in samples:
            steps = sample.versions & 0xFFFFFFFF
            assert (np.diff(steps) >= 0).all()
            for version in set(steps.tolist()):
                assert self.error(version, sample, steps == version) < TOLERANCE


def interrupted_after(calls: int) -> Callable[[], bool]:
    """What `advance` asks: true from the call after `calls` on."""
    left = iter(range(calls))
    return lambda: next(left, None) is None
