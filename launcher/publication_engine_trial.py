"""One process of the pauses in `sluice bench publication`: `python -m launcher.publication_engine_trial FOLDER RANK WORLD`.

As `launcher.publication_trial`, but rank 0 has a model's own weights, and the others generate with that model meanwhile.
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

from launcher.publication_trial import Sender, Trial, run
from launcher.rollout_trial import FLEET, requests
from runtime.actor import Priority
from runtime.config import Config
from runtime.weights.plan import TensorSpec
from services.rollout import RolloutService


class EngineTrial(Trial):
    _feeding: tuple[asyncio.Task[None], ...] = ()

    async def open_model(self, config: Any) -> None:
        """The trainer's place with the weights of `model.path`, or a rollout's with its engine."""
        settings = msgspec.convert(config, Config)
        if self._rank:
            await self._serve(RolloutService(settings, FLEET, 0))
            return
        tensors = load_file(Path(settings.model.path) / "model.safetensors")
        dtype = settings.publication.dtype
        specs = [TensorSpec(name, dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
        await self._serve(Sender(settings, specs))
        torch._foreach_copy_(self._sender.views(), list(tensors.values()))

    async def generate(self, groups: int) -> None:
        """So many groups at once, one after the other, until `close`."""
        source = requests(self._service.config)

        async def feed() -> None:
            for request in source:
                await self._actor.send(request, priority=Priority.DATA)

        self._feeding = tuple(asyncio.create_task(feed()) for _ in range(groups))

    async def counters(self) -> dict[str, float]:
        """Tokens so far; CPU seconds of the engine with its event loop, and of the other threads; the clock."""
        own = {threading.main_thread(), *(one for one in threading.enumerate() if one.name.startswith("rollout-engine"))}
        engine = sum(time.clock_gettime(time.pthread_getcpuclockid(thread.ident)) for thread in own if thread.ident)
        tokens = self._service.gauges()["tokens_total"]
        return {"tokens": tokens, "engine": engine, "others": time.process_time() - engine, "now": time.monotonic()}

    async def close(self) -> None:
        for task in self._feeding:
            task.cancel()
        await asyncio.gather(*self._feeding, return_exceptions=True)
        await super().close()


if __name__ == "__main__":
    run(EngineTrial)
