"""`python -m benchmarks.routing`: how far rollout and trainer are apart on tiny models with experts, with replay and without;
and what the coordinator and the ledger get of a group, with the experts in its payload and as a blob.

Replies that the embedded rollout samples are computed by the trainer of the same weights, on this machine's CPUs. Blobs are put
to an agent in a process of its own, and read from there, over loopback.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from rich.console import Console

from benchmarks.process import end
from runtime import blobs, types
from runtime.blobs import BlobPart
from runtime.config import Config, Model, Moe, Run, Warmup
from runtime.models import tiny_model
from runtime.process import os_process
from runtime.rollout.torch.engine import TorchRolloutEngine
from runtime.telemetry.shown import LiteralTable
from runtime.trainer.step import policy_trainer
from runtime.types import (
    GeneratedGroup,
    GroupPayload,
    GroupRequest,
    PolicyVersion,
    RoutedExperts,
    Sample,
    SamplingParams,
    TrainGroup,
)
from services.blobs import BlobClient, BlobKeeper, BlobServer
from services.rpc import contract
from sluice import start

FAMILIES = ("qwen3_moe", "mixtral", "glm4_moe", "deepseek_v3")
DTYPES: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")
GROUPS, REPLIES, PROMPT, REPLY = 16, 4, 32, 128
EXPERTS = ((0, 0), (2, 2), (48, 8))  # layers with experts, and experts of a token in each
LONG = 512  # tokens of each reply of a group that is carried
ROUNDS = 20
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


def group_of(layers: int, per_token: int, seed: int) -> GeneratedGroup:
    """A group of REPLIES replies with experts at random; without, if `layers` is 0."""
    rng, version = np.random.default_rng(seed), PolicyVersion(0, 1)
    prompt = rng.integers(0, 256, PROMPT).astype(np.int32)
    shape = PROMPT + LONG - 1, layers, per_token
    taken = [RoutedExperts.of(rng.integers(0, 128, shape).astype(np.uint8)) if layers else None for _ in range(REPLIES)]
    replies = [
        Sample(
            tokens=rng.integers(0, 256, LONG).astype(np.int32),
            loss_mask=np.ones(LONG, np.uint8),
            logprobs=rng.normal(size=LONG).astype(np.float32),
            versions=np.full(LONG, version.pack(), np.int64),
            finish_reason="stop",
            experts=experts,
        )
        for experts in taken
    ]
    return GeneratedGroup(
        group_id=seed,
        prompt_tokens=PROMPT,
        response_tokens=[LONG] * REPLIES,
        truncated=0,
        oldest=version,
        newest=version,
        payload=types.encode(GroupPayload.of(seed, prompt, replies)),
    )


def bytes_a_token(group: GeneratedGroup) -> float:
    """The answer to the coordinator, for each sampled token."""
    return len(contract.METHODS["Rollout", "Generate"].reply.serialize(group)) / (REPLIES * LONG)


async def carried() -> list[tuple[str, ...]]:
    """For each of EXPERTS: bytes a token in the payload and with a blob; MB/s of putting a blob and of reading half its
    columns, as a rank of two stages does, medians of ROUNDS groups."""
    process = await asyncio.create_subprocess_exec(
        *start.command("benchmarks.routing", "--agent"), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    rows, client = list[tuple[str, ...]](), BlobClient("bench", None)
    os.environ |= {blobs.ADDRESS: (await process.stdout.readline()).decode().strip(), os_process.NODE: "a"}
    keeper = BlobKeeper(Config(run=Run(name="routing")), client)
    try:
        for layers, per_token in EXPERTS:
            puts, reads = list[float](), list[float]()
            for seed in range(ROUNDS):
                group = group_of(layers, per_token, seed)
                inline, began = bytes_a_token(group), time.perf_counter()
                group = await keeper.kept(group)
                put, taken = time.perf_counter(), types.decode(GroupPayload, group.payload).experts
                if taken is None or taken.blob is None:
                    continue
                half = taken.blob.width // 2
                await client.read(BlobPart(taken.blob, 0, half, np.arange(taken.blob.rows)))
                nbytes = taken.blob.rows * taken.blob.width / 1e6
                puts.append(nbytes / (put - began))
                reads.append(nbytes / 2 / (time.perf_counter() - put))
            rates = [f"{median(each):,.0f}" if each else "" for each in (puts, reads)]
            rows.append((f"{layers} x {per_token}", f"{inline:.2f}", f"{bytes_a_token(group):.2f}", *rates))
    finally:
        await client.close()
        await end(process)
    return rows


async def serve() -> None:
    """Hold blobs until standard input ends. Prints the address."""
    server = BlobServer("a", 4 << 30)
    print(await server.open(Config(run=Run(name="routing")), None), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.close()


def show_carried() -> None:
    table = LiteralTable("layers x experts", "bytes a token", "... as a blob", "put, MB/s", "read, MB/s")
    for row in asyncio.run(carried()):
        table.add_row(*row)
    Console(width=140).print(table)


def show_measured() -> None:
    table = LiteralTable("family", "dtype", "moe.router_replay", *COLUMNS, "routing differs")
    with tempfile.TemporaryDirectory() as folder:
        for family, dtype, replay, found in measured(Path(folder)):
            figures = [f"{found[f'mismatch/{column}']:.2g}" for column in COLUMNS.values()]
            differs = f"{found['moe/routing_differs']:.2%}" if replay == "routing" else ""
            table.add_row(family, dtype, replay, *figures, differs)
    Console(width=140).print(table)


if __name__ == "__main__":
    if "--agent" in sys.argv[1:]:
        os_process.die_with_parent()
        asyncio.run(serve())
    else:
        show_carried()
        show_measured()
