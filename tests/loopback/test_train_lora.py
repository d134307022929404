"""Two ranks over real gloo train adapters as one rank does."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from runtime.config import Config
from runtime.models import hf_policy
from runtime.trainer.step import ModelTrainer, policy_trainer
from runtime.types import TrainGroup
from tests.closeness import BFLOAT16, assert_close
from tests.loopback.ranks import run_two
from tests.loopback.test_train_fsdp import run_step
from tests.unit.lora_cases import LORA, assert_merged, lora_config
from tests.unit.training_cases import make_groups, make_policy
from tests.unit.training_steps import assert_metrics, rolled_out

pytestmark = pytest.mark.numeric

STEPS = 3
# Two results of some 32 operations, each rounded to bfloat16 once: √n·u, as in tests/closeness.py.
ROUNDED = 2 * math.sqrt(32) * BFLOAT16
SECTIONS = {
    "algorithm": {"kl_coefficient": 0.1, "entropy_coefficient": 0.01},
    "optimizer": {"max_grad_norm": 0.5},
    "training": {"max_tokens_per_microbatch": 24},  # so that ranks have unequal numbers of micro-batches
}


def config_of(folder: Path) -> Config:
    return lora_config(str(folder / "policy"), mode="adapter_off", **SECTIONS)


def half_config(folder: Path) -> Config:
    """Passes in bfloat16 over weights in float32, of which some have a gradient."""
    return lora_config(str(folder / "half"), mode="adapter_off", dtype="bfloat16", **SECTIONS)


def step_groups(step: int) -> list[TrainGroup]:
    return [replace(group, reference=None) for group in make_groups(step, step=step)]


def flat_weights(engine: ModelTrainer, rank: int) -> torch.Tensor:
    """What a rollout makes of what is published, in the order of the model's parameters."""
    names = [spec.name for spec in engine.backend.tensor_specs()]
    gathered = [tensor.clone() for tensor in engine.backend.gather()]
    if rank:
        return torch.empty(0)
    whole = rolled_out(engine, dict(zip(names, gathered, strict=True)))
    like = hf_policy.load_policy(engine._config.model.path)
    return torch.cat([whole[name].flatten() for name, _ in like.named_parameters()])


def two_ranks(rank: int, folder: Path) -> None:
    """What each of the two processes runs; rank 0 writes its results to `folder`."""
    engine = policy_trainer(config_of(folder), rank=rank, world_size=2, device="cpu")
    results = []
    for step in range(STEPS):
        groups = step_groups(step)
        calls = [groups[:1], groups[2:]] if rank == 0 else [groups[1:2], []]
        results.append(run_step(engine, calls).metrics)
    engine.save(str(folder / "saved-by-two"))
    weights = flat_weights(engine, rank)
    engine.backend.export(folder / "export")
    engine.load(str(folder / "saved-by-one"))
    loaded = flat_weights(engine, rank)
    resumed = run_step(engine, [step_groups(STEPS)] if rank == 0 else [[]]).metrics

    half = policy_trainer(half_config(folder), rank=rank, world_size=2, device="cpu")
    halves = [run_step(half, [step_groups(step)[rank::2]]).metrics for step in range(STEPS)]
    if rank == 0:
        torch.save({"weights": weights, "loaded": loaded}, folder / "tensors.pt")
        (folder / "results.json").write_text(json.dumps({"steps": results, "resumed": resumed, "half": halves}))


def one_rank(folder: Path, steps: int = STEPS) -> ModelTrainer:
    engine = policy_trainer(config_of(folder))
    for step in range(steps):
        run_step(engine, [step_groups(step)])
    return engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two ranks have run, beside a checkpoint of one rank that they loaded."""
    folder = tmp_path_factory.mktemp("lora")
    for name in ("policy", "saved-by-one", "saved-by-two", "export"):
        (folder / name).mkdir()
    policy = make_policy(folder / "policy")
    hf_policy.load_policy(policy).to(torch.bfloat16).save_pretrained(folder / "half")
    one_rank(folder).save(str(folder / "saved-by-one"))
    run_two(two_ranks, folder)
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text())


@pytest.fixture(scope="module")
def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "tensors.pt", weights_only=True)


def test_steps_are_those_of_one_rank(folder: Path, results: dict, tensors: dict[str, torch.Tensor]):
    engine = one_rank(folder, 0)
    for step in range(STEPS):
        expected = run_step(engine, [step_groups(step)]).metrics
        assert_metrics(results["steps"][step], expected, steps=step + 1)
    assert expected["actor/kl"] > 1e-4  # so the reference is not the policy
    assert_merged({"weights": tensors["weights"]}, {"weights": flat_weights(engine, 0)}, engine._config, STEPS)


def test_a_checkpoint_of_one_rank_is_loaded_by_two(folder: Path, results: dict, tensors: dict[str, torch.Tensor]):
    engine = one_rank(folder)
    assert torch.equal(tensors["loaded"], flat_weights(engine, 0))
    assert_metrics(results["resumed"], run_step(engine, [step_groups(STEPS)]).metrics)


def test_a_checkpoint_of_two_ranks_is_loaded_by_one(folder: Path, tensors: dict[str, torch.Tensor]):
    engine = one_rank(folder, 0)
    engine.load(str(folder / "saved-by-two"))
    assert engine.step == STEPS
    assert torch.equal(flat_weights(engine, 0), tensors["weights"])


def test_what_two_ranks_export_is_whole(folder: Path, tensors: dict[str, torch.Tensor]):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    exported = AutoModelForCausalLM.from_pretrained(folder / "export")
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder / "policy"), folder / "export" / "adapter")
    for model in (exported, adapted.merge_and_unload()):
        flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        assert_close(flat, tensors["weights"], terms=LORA.rank + 2)  # their product, its scale, the sum


def test_passes_in_bfloat16(folder: Path, results: dict):
    engine = policy_trainer(half_config(folder))
    for step in range(STEPS):
        expected = run_step(engine, [step_groups(step)]).metrics
        for name in ("actor/entropy", "actor/pg_loss", "actor/grad_norm"):
            assert results["half"][step][name] == pytest.approx(expected[name], rel=ROUNDED, abs=ROUNDED)
