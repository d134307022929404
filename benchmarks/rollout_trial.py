"""A rollout engine in a process of its own, measured when it is told to: `python -m benchmarks.rollout_trial CONFIG`.

Its first line says how long the engine took to start. Then it takes a JSON line an order, and answers with one:
{"what": "tokens", "sequences": N, "seconds": S}: the tokens generated, N sequences at once, and the time that it took;
{"what": "pauses", "sequences": N, "updates": U}: the seconds for which each of U updates held N running sequences up,
with "own": true, of vLLM alone, each beside one by its own pause and its own load of the model's files.
Between two orders the engine is empty.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from runtime.config import Config, loading
from runtime.errors import DeadlineExceeded
from runtime.process import os_process
from runtime.types import GroupRequest, PolicyVersion, SamplingParams
from services.rollout import make_engine

if TYPE_CHECKING:
    import torch

    from runtime.rollout.engine import RolloutEngine

FLEET = "rollout-0"
WARM = 0.2  # share of a measure that comes before it, so that the prefill of the first prompts is over
FIRST_TOKENS = 120.0  # seconds that a measure waits for them
GENERATED = 0.05  # seconds of generation between two swaps
TOKENS = 256  # ids that prompts are made of


class RolloutTrial:
    """Keeps an engine busy."""

    def __init__(self, config: Config, engine: RolloutEngine):
        self._engine = engine
        self._requests = requests(config)
        self._under_way: set[int] = set()
        self._weights = shared_weights(Path(config.model.path))

    async def tokens(self, sequences: int, seconds: float) -> dict[str, float]:
        await self._warm_up(sequences, seconds * WARM)
        before, begun = self._engine.stats().decode_tokens, time.perf_counter()
        await self._generate(sequences, seconds)
        done, spent = self._engine.stats().decode_tokens - before, time.perf_counter() - begun
        await self._clear()
        return {"count": done, "seconds": spent}

    async def pauses(self, sequences: int, updates: int, own: bool = False) -> dict[str, list[float]]:
        """With `own` each update is followed by one of vLLM's own."""

        async def swap() -> None:
            await self._engine.swap(PolicyVersion(0, self._engine.version.step + 1))

        ours, theirs = [], []
        for _ in range(updates):
            await self._engine.stage(self._weights)
            ours.append(await self._held(sequences, swap))
            if own:
                theirs.append(await self._held(sequences, self._reload))
        await self._clear()
        return {"pauses": ours, "own": theirs}

    async def _held(self, sequences: int, update: Callable[[], Awaitable[None]]) -> float:
        """Seconds of `update`, while so many sequences are running."""
        await self._generate(sequences, GENERATED)
        begun = time.perf_counter()
        await update()
        return time.perf_counter() - begun

    async def _reload(self) -> None:
        core = self._engine._core  # type: ignore[attr-defined]
        await core.pause(forget=False)
        await core._core.collective_rpc_async("reload_weights")
        await core.resume()

    async def _warm_up(self, sequences: int, seconds: float) -> None:
        """Until every sequence may have a token. Raises DeadlineExceeded."""
        before, begun = self._engine.stats().decode_tokens, time.perf_counter()
        while self._engine.stats().decode_tokens - before < sequences:
            if time.perf_counter() - begun > FIRST_TOKENS:
                raise DeadlineExceeded(FLEET, "bench", "generated nothing", FIRST_TOKENS)
            await self._generate(sequences, seconds)

    async def _generate(self, sequences: int, seconds: float) -> None:
        give_up = time.perf_counter() + seconds
        while time.perf_counter() < give_up:
            while (stats := self._engine.stats()).running + stats.waiting < sequences:
                request = next(self._requests)
                self._engine.submit([request])
                self._under_way.add(request.group_id)
            for group in await self._engine.advance(lambda: time.perf_counter() >= give_up):
                self._under_way.remove(group.group_id)

    async def _clear(self) -> None:
        """Withdraw everything: an engine in processes of its own would go on while another is measured."""
        self._engine.abort(list(self._under_way))
        self._under_way.clear()
        await self._engine.advance(lambda: True)


def requests(config: Config) -> Iterator[GroupRequest]:
    """Without end; replies end by length alone, between half of and the whole `sampling.max_new_tokens`."""
    rng, longest = np.random.default_rng(config.run.seed), config.sampling.max_new_tokens
    for number in count():
        yield GroupRequest(
            group_id=number,
            prompt=rng.integers(0, TOKENS, config.data.max_prompt_tokens).astype(np.int32),
            n=config.sampling.group_size,
            seed=number,
            sampling=SamplingParams(max_new_tokens=int(rng.integers(longest // 2, longest + 1))),
        )


def shared_weights(model: Path) -> dict[str, torch.Tensor]:
    """The model's own tensors, where a weight sync would have staged them: in memory that other processes can map."""
    from safetensors.torch import load_file

    from runtime.weights.group import memory_file

    staged = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        staged[name] = memory_file(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        staged[name].copy_(tensor)
    return staged


async def serve(config: Config, say: Callable[[Any], None]) -> None:
    """One event loop for all: an engine may belong to it."""
    begun = time.perf_counter()
    engine = await asyncio.to_thread(make_engine, config, FLEET)
    say({"count": 1, "seconds": time.perf_counter() - begun})
    trial = RolloutTrial(config, engine)
    try:
        while line := await asyncio.to_thread(sys.stdin.readline):
            order = json.loads(line)
            say(await getattr(trial, order.pop("what"))(**order))
    finally:
        await engine.close()


def main() -> None:
    os_process.die_with_parent()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an engine prints is no answer

    def say(answer: Any) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    asyncio.run(serve(loading.load(Path(sys.argv[1]), ()), say))
    os._exit(0)  # as the interpreter ends, vLLM's engine would close itself once more, and print a traceback


if __name__ == "__main__":
    main()
