"""What `sluice bench engine` measures of drafts: the embedded engine with and without them, on replies that resemble each other
and on others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from functools import cache
from itertools import count
from typing import TYPE_CHECKING

from runtime.config import Config

if TYPE_CHECKING:
    from runtime.rollout.torch.engine import TorchRolloutEngine
    from runtime.types import GroupRequest

TEMPERATURES = {"alike": 0.05, "unlike": 1.0}
DRAFT_WAYS = tuple(f"{replies}{end}" for replies in TEMPERATURES for end in ("", ", no drafts"))
SLOTS = 8  # so few that a step's fixed cost is most of it
PROMPTS = 4  # one after the other, again and again


class DraftsTrial:
    """One engine for each of `DRAFT_WAYS`, built when first used."""

    def __init__(self, config: Config):
        self._config = config

    def tokens(self, way: str, seconds: float) -> tuple[int, float]:
        """Tokens out of decode steps, all slots in use, and the seconds that they took: `seconds`, and one step at least."""
        engine, requests = self._built(way)
        before, begun = engine.stats().decode_tokens, time.perf_counter()

        def over() -> bool:
            return time.perf_counter() - begun >= seconds and engine.stats().decode_tokens > before

        async def run() -> None:
            while not over():
                while engine.stats().waiting < SLOTS:
                    engine.submit([next(requests)])
                await engine.advance(over)

        asyncio.run(run())
        return engine.stats().decode_tokens - before, time.perf_counter() - begun

    @cache  # noqa: B019 - a trial lives as long as its process
    def _built(self, way: str) -> tuple[TorchRolloutEngine, Iterator[GroupRequest]]:
        import torch

        from runtime.rollout.torch.engine import TorchRolloutEngine

        config = self._config
        engine = TorchRolloutEngine(
            config.model.path,
            device=torch.device("cpu"),
            dtype=torch.float32,
            slots=SLOTS,
            max_model_len=config.data.max_prompt_tokens + config.sampling.max_new_tokens,
            drafts="," not in way,
        )
        return engine, self._requests(TEMPERATURES[way.partition(",")[0]])

    def _requests(self, temperature: float) -> Iterator[GroupRequest]:
        from runtime.data.prepared import training_prompts
        from runtime.data.tokenizer import Tokenizer
        from runtime.types import GroupRequest, SamplingParams

        config, tokenizer = self._config, Tokenizer(self._config.model.path)
        prompts = training_prompts(config.data, tokenizer).tokens[:PROMPTS]
        sampling = SamplingParams(
            max_new_tokens=config.sampling.max_new_tokens, temperature=temperature, stop_token_ids=tokenizer.eos_ids
        )
        for number in count():
            yield GroupRequest(
                group_id=number,
                prompt=prompts[number % PROMPTS],
                n=config.sampling.group_size,
                seed=number,
                sampling=sampling,
            )
