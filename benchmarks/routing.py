"""`python -m benchmarks.routing`: how far rollout and trainer are apart on tiny models with experts, with replay and without.

Replies that the embedded rollout samples are computed by the trainer of the same weights, on this machine's CPUs.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from rich.console import Console

from runtime.config import Config, Model, Moe, Run, Warmup
from runtime.models import tiny_model
from runtime.rollout.torch.engine import TorchRolloutEngine
from runtime.telemetry.shown import LiteralTable
from runtime.trainer.step import policy_trainer
from runtime.types import GeneratedGroup, GroupRequest, SamplingParams, TrainGroup

FAMILIES = ("qwen3_moe", "mixtral", "glm4_moe", "deepseek_v3")
DTYPES: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")
GROUPS, REPLIES, PROMPT, REPLY = 16, 4, 32, 128
COLUMNS = {"mean |Δ|": "abs_logprob", "99 %": "abs_logprob_p99", "largest": "max", "k3": "k3", "over 0.1": "over_0.1"}


def sampled(config: Config, dtype: torch.dtype) -> list[TrainGroup]:
    """Groups that the embedded rollout samples, of prompts at random."""
    rng, device = np.random.default_rng(0), torch.device("cpu")
    engine = TorchRolloutEngine(
        config.model.path, device=device, dtype=dtype, slots=32, max_model_len=PROMPT + REPLY, replays=True
    )
    sampling = SamplingParams(max_new_tokens=REPLY, experts_from=0)
    requests = [
        GroupRequest(group_id=at, prompt=rng.integers(0, 256, PROMPT).astype(np.int32), n=REPLIES, seed=at, sampling=sampling)
        for at in range(GROUPS)
    ]

    async def generate() -> list[GeneratedGroup]:
        done: list[GeneratedGroup] = []
        engine.submit(requests)
        while engine.has_work:
            done += await engine.advance(lambda: False)
        await engine.close()
        return done

    return [
        TrainGroup(
            group_id=group.group_id,
            tokens=sum(group.response_tokens) + REPLIES * PROMPT,
            payload=group.payload,
            rewards=rng.normal(size=REPLIES).astype(np.float32),
            valid=np.ones(REPLIES, np.uint8),
        )
        for group in asyncio.run(generate())
    ]


def measured(folder: Path) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    for family, dtype in product(FAMILIES, DTYPES):
        model = Model(path=f"tiny:{family}", dtype=dtype)
        config = tiny_model.made(Config(run=Run(name="routing"), model=model, warmup=Warmup(cache=str(folder))))
        groups = sampled(config, getattr(torch, dtype))
        for replay in ("off", "routing"):
            trainer = policy_trainer(msgspec.structs.replace(config, moe=Moe(router_replay=replay)))
            trainer.begin_step(0)
            trainer.accumulate(groups)
            yield family, dtype, replay, trainer.apply().metrics


def main() -> None:
    table = LiteralTable()
    for name in ("family", "dtype", "moe.router_replay", *COLUMNS, "routing differs"):
        table.add_column(name, justify="right")
    with tempfile.TemporaryDirectory() as folder:
        for family, dtype, replay, found in measured(Path(folder)):
            figures = [f"{found[f'mismatch/{column}']:.2g}" for column in COLUMNS.values()]
            differs = f"{found['moe/routing_differs']:.2%}" if replay == "routing" else ""
            table.add_row(family, dtype, replay, *figures, differs)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
