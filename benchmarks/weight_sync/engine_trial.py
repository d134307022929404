"""One process of the pauses in `sluice bench weight_sync`.

`python -m benchmarks.weight_sync.engine_trial FOLDER RANK WORLD` is as `trial` beside it, but rank 0 has a model's own
weights, and the others generate with that model meanwhile.
"""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file

from benchmarks.rollout_trial import FLEET, requests
from benchmarks.weight_sync.trial import Sender, WeightSyncTrial, run
from runtime.config import Config
from runtime.weights.group import indexed
from runtime.weights.plan import TensorSpec
from services.rollout import RolloutService
from services.rpc import contract


class WeightSyncEngineTrial(WeightSyncTrial):
    _feeding: tuple[asyncio.Task[None], ...] = ()

    async def open_model(self, config: Any) -> None:
        """The trainer's place with the weights of `model.path`, or a rollout's with its engine."""
        settings = msgspec.convert(config, Config)
        if self._rank:
            await self._serve(RolloutService(settings, FLEET, 0))
            return
        dtype, tensors = settings.weight_sync.dtype, weights(settings.model.path)
        specs = [TensorSpec(name, dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
        await self._serve(Sender(settings, specs))
        given = list(tensors.values())
        for part in self._sender._engine.shards():
            part.block.copy_(indexed(given[part.tensor], part.span))

    async def generate(self, groups: int) -> None:
        """So many groups at once, one after the other, until `close`."""
        source = requests(self._service.config)

        async def feed() -> None:
            for request in source:
                await self._service.handler(contract.METHODS["Rollout", "Generate"])(request)

        self._feeding = tuple(asyncio.create_task(feed()) for _ in range(groups))

    async def counters(self) -> dict[str, float]:
        """Tokens so far; CPU seconds of the engine's thread, of the event loop, and of the other threads; the clock."""
        engine = sum(_cpu(thread) for thread in threading.enumerate() if thread.name.startswith("rollout-engine"))
        loop = _cpu(threading.main_thread())
        tokens = self._service.gauges()["tokens_total"]
        others = time.process_time() - engine - loop
        return {"tokens": tokens, "engine": engine, "loop": loop, "others": others, "now": time.monotonic()}

    async def close(self) -> None:
        for task in self._feeding:
            task.cancel()
        await asyncio.gather(*self._feeding, return_exceptions=True)
        await super().close()


def weights(model: str) -> dict[str, torch.Tensor]:
    """A model folder's, in the order in which a trainer publishes them. A file has query and key apart, which a rollout would
    have to copy together."""
    from transformers import AutoConfig, AutoModelForCausalLM

    stored = load_file(Path(model) / "model.safetensors")
    with torch.device("meta"):
        policy = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    return {name: stored[name] for name, _ in policy.named_parameters()}


def _cpu(thread: threading.Thread) -> float:
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


if __name__ == "__main__":
    run(WeightSyncEngineTrial)
