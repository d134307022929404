"""Experts on megatron-core: replay and balance are engine torch's, in layouts that spread layers, tokens and experts."""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from runtime import types
from runtime.config import Config, Model, Moe, Parallel, Run, Trainer, Warmup
from runtime.models import tiny_model
from runtime.rollout.torch.engine import TorchRolloutEngine
from runtime.trainer.step import policy_trainer
from runtime.types import GroupRequest, SamplingParams, TrainGroup
from tests.closeness import assert_close, forward_terms
from tests.loopback.megatron_equality import assert_equal, assert_experts
from tests.loopback.megatron_member import SAVED, STEPS, Layout, train
from tests.loopback.ranks import run_ranks
from tests.unit.rollout_cases import drain
from tests.unit.tiny_models import save_model
from tests.unit.training_cases import make_config
from tests.unit.training_steps import run_step

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.ranks,
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None, reason="needs megatron-core: pip install 'sluice-rl[megatron]'"
    ),
]

ROUTING = Moe(router_replay="routing")
LOSSES = Moe(router_replay="routing", aux_loss=0.1, z_loss=0.01)
ALL = Moe(router_replay="routing", aux_loss=0.1, z_loss=0.01, bias_update=0.01)
CASES = {
    "experts": ("qwen3_moe", Layout(1, processes=2, expert=2, moe=ROUTING)),
    "tensor, sequence and experts, recomputed": ("deepseek_v3", Layout(2, sequence=True, processes=4, expert=2, moe=ALL)),
    "pipeline": ("glm4_moe", Layout(1, 2, processes=2, layers_per_stage=(1, 2), moe=ALL)),
    "context": ("mixtral", Layout(1, processes=2, context=2, moe=LOSSES)),
    "pipeline and experts, recomputed": ("qwen3_moe_tied", Layout(1, 2, processes=4, expert=2, moe=LOSSES, recompute=True)),
}


def policy(folder: Path, family: str) -> Path:
    save_model(folder / "policy", family)
    (folder / "policy" / "tokenizer.json").write_text('{"version": "1.0"}')
    return folder


@pytest.mark.parametrize("case", CASES)
def test_replay_and_balance_are_engine_torchs(tmp_path: Path, case: str) -> None:
    """Tokens take experts at random, in each micro-batch others. With two stages, two micro-batches are in flight when a layer
    is computed again, which then takes the experts of its own."""
    family, layout = CASES[case]
    policy(tmp_path, family)
    expected = train(tmp_path, Layout(0, moe=layout.moe))
    found = train(tmp_path, layout)
    assert_experts(found, expected)
    assert_equal(found, expected)
    assert found["metrics"][0]["moe/routing_differs"] > 0.5
    if case == "pipeline":  # what corrects scores comes back from a checkpoint
        assert_equal(train(tmp_path, Layout(1, moe=layout.moe), resumed=layout.name), found, last=STEPS - SAVED)


def test_adapters_are_trained_with_the_experts_of_the_rollout(tmp_path: Path) -> None:
    """New adapters add nothing: the first numbers are those of engine torch without them, and the metrics tell of replay."""
    policy(tmp_path, "qwen3_moe")
    spread = train(tmp_path, Layout(1, processes=2, expert=2, lora="all", moe=LOSSES))
    plain = train(tmp_path, Layout(1, lora="all", moe=ROUTING))
    shutil.rmtree(tmp_path / f"export-{Layout(1, lora='all').name}")
    alone = train(tmp_path, Layout(1, lora="all", moe=LOSSES))
    assert_equal(spread, alone, lora=True)
    expected = train(tmp_path, Layout(0, moe=LOSSES))
    assert_close(spread["numbers"][0], expected["numbers"][0], terms=forward_terms(tokens=46))
    for name in ("moe/routing_differs", "moe/aux_loss", "moe/z_loss", "moe/load_max"):
        assert spread["metrics"][0][name] == pytest.approx(expected["metrics"][0][name], rel=1e-5)
    norms = [found["metrics"][0]["actor/grad_norm"] for found in (plain, alone)]
    assert norms[0] != pytest.approx(norms[1], rel=1e-3)  # the losses reach adapters through the frozen routers


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_moe"])
def test_in_bfloat16_no_token_is_far_from_the_rollout(tmp_path: Path, family: str) -> None:
    """Where it takes the rollout's experts."""
    config = Config(run=Run(name="far"), model=Model(path=f"tiny:{family}"), warmup=Warmup(cache=str(tmp_path)))
    path = tiny_model.made(config).model.path
    (tmp_path / "groups").write_bytes(types.encode(asyncio.run(sampled(path))))
    run_ranks(far_member, tmp_path, 2, path)
    off, routing = np.load(tmp_path / "far.npy")
    assert off > routing == 0


async def sampled(path: str) -> list[TrainGroup]:
    """Groups of the rollout in bfloat16."""
    prompts = np.random.default_rng(0).integers(0, 256, (8, 32)).astype(np.int32)
    sampling = SamplingParams(max_new_tokens=128, experts_from=0)
    dtype = torch.bfloat16
    engine = TorchRolloutEngine(path, device=torch.device("cpu"), dtype=dtype, slots=16, max_model_len=160, replays=True)
    engine.submit([GroupRequest(group_id=at, prompt=each, n=4, seed=at, sampling=sampling) for at, each in enumerate(prompts)])
    groups = [group async for group in drain(engine)]
    await engine.close()
    ones: dict[str, Any] = {"tokens": 0, "rewards": np.ones(4, np.float32), "valid": np.ones(4, np.uint8)}
    return [TrainGroup(group_id=each.group_id, payload=each.payload, **ones) for each in groups]


def far_member(rank: int, folder: Path, path: str) -> None:
    # torch's attention in bfloat16 packs for AVX-512 also where ATEN_CPU_CAPABILITY forbids it: "only supported when avx512".
    torch.backends.cuda.enable_flash_sdp(False)
    groups, found = types.decode(list[TrainGroup], (folder / "groups").read_bytes()), []
    for moe in (Moe(), ROUTING):
        settings = Trainer(processes=2, engine="megatron", parallel=Parallel(expert=2))
        config = replace(make_config(path, dtype="bfloat16", trainer=settings), moe=moe)
        engine = policy_trainer(config, rank=rank, world_size=2, device=torch.device("cpu"))
        found.append(run_step(engine, groups[rank::2]).metrics["mismatch/over_0.1"])
    if rank == 0:
        np.save(folder / "far.npy", found)
