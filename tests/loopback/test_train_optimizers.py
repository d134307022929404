"""Two ranks over real gloo update as one rank does, with optimizers beside AdamW, and read each other's checkpoints."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from runtime.trainer.fsdp import optimizers, sharding
from runtime.trainer.step import ModelTrainer, policy_trainer
from tests.loopback.ranks import run_two
from tests.unit.training_cases import make_config, make_groups, make_policy
from tests.unit.training_steps import run_step

pytestmark = pytest.mark.numeric

HAS_TORCHAO = importlib.util.find_spec("torchao") is not None
NEEDS_TORCHAO = pytest.mark.skipif(not HAS_TORCHAO, reason="torchao is missing: pip install 'sluice-rl[torchao]'")
NAMES = ["muon", *(["adamw_8bit"] if HAS_TORCHAO else [])]
CASES = [
    "muon",
    pytest.param("adamw_8bit", marks=NEEDS_TORCHAO),
]
STEPS = 3
# Each rank's rows of a matrix are whole blocks of 8 bits, as they are of models of any use.
LARGE = {"hidden_size": 128, "intermediate_size": 128, "num_key_value_heads": 4, "initializer_range": 0.02}


def make_engine(folder: Path, name: str, rank: int = 0, world_size: int = 1) -> ModelTrainer:
    options = {"name": name, "learning_rate": 1e-2, "eps": 1e-2, "weight_decay": 0.1}
    return policy_trainer(
        make_config(str(folder / "policy"), optimizer=options), rank=rank, world_size=world_size, device="cpu"
    )


def update(engine: ModelTrainer, step: int) -> None:
    """One update by gradients that every number of ranks has bit for bit, each rank its rows of them."""
    generator = torch.Generator().manual_seed(step)
    for parameter in engine.backend.parameters.values():  # type: ignore[attr-defined]
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = torch.zeros_like(parameter)
        sharding.local(parameter.grad).copy_(gradient[sharding.rows(parameter)])
    engine.backend.update(1.0, 1e-2)
    engine.backend.clear_gradients()
    engine.step += 1


def whole(engine: ModelTrainer, rank: int = 0) -> torch.Tensor:
    parts = [tensor.flatten().float() for tensor in engine.backend.gather()]
    return torch.cat(parts) if rank == 0 else torch.empty(0)


def two_ranks(rank: int, folder: Path) -> None:
    tensors, metrics = {}, {}
    for name in NAMES:
        engine = make_engine(folder, name, rank, 2)
        for step in range(STEPS):
            update(engine, step)
        tensors[f"{name}-updated"] = whole(engine, rank)
        engine.save(str(folder / f"{name}-by-two"))
        engine.load(str(folder / f"{name}-by-one"))
        tensors[f"{name}-loaded"] = whole(engine, rank)
        update(engine, STEPS)
        tensors[f"{name}-resumed"] = whole(engine, rank)
        trained = make_engine(folder, name, rank, 2)
        groups = make_groups(0)
        metrics[name] = run_step(trained, groups[:1] if rank == 0 else groups[1:]).metrics["actor/grad_norm"]
        held = {optimizers.kept(trained.backend.optimizer, each) for each in trained.backend.parameters.values()}  # type: ignore[attr-defined]
        assert (("momentum_buffer",) in held) == (name == "muon")
    if rank == 0:
        torch.save(tensors, folder / "tensors.pt")
        (folder / "metrics.json").write_text(json.dumps(metrics))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("optimizers")
    (folder / "policy").mkdir()
    make_policy(folder / "policy", tied=False, **LARGE)
    for name in NAMES:
        for by in ("one", "two"):
            (folder / f"{name}-by-{by}").mkdir()
        updated(folder, name, STEPS).save(str(folder / f"{name}-by-one"))
    run_two(two_ranks, folder)
    return folder


def updated(folder: Path, name: str, steps: int) -> ModelTrainer:
    engine = make_engine(folder, name)
    for step in range(steps):
        update(engine, step)
    return engine


@pytest.fixture(scope="module")
def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "tensors.pt", weights_only=True)


@pytest.mark.parametrize("name", CASES)
def test_updates_are_those_of_one_rank_bit_for_bit(folder: Path, tensors: dict[str, torch.Tensor], name: str):
    assert torch.equal(tensors[f"{name}-updated"], whole(updated(folder, name, STEPS)))


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_go_on_from_a_checkpoint_of_one(folder: Path, tensors: dict[str, torch.Tensor], name: str):
    assert torch.equal(tensors[f"{name}-loaded"], whole(updated(folder, name, STEPS)))
    assert torch.equal(tensors[f"{name}-resumed"], whole(updated(folder, name, STEPS + 1)))


@pytest.mark.parametrize("name", CASES)
def test_one_rank_goes_on_from_a_checkpoint_of_two(folder: Path, tensors: dict[str, torch.Tensor], name: str):
    engine = make_engine(folder, name)
    engine.load(str(folder / f"{name}-by-two"))
    assert engine.step == STEPS
    assert torch.equal(whole(engine), tensors[f"{name}-updated"])
    update(engine, STEPS)
    assert torch.equal(whole(engine), tensors[f"{name}-resumed"])


@pytest.mark.parametrize("name", CASES)
def test_a_step_of_two_ranks_has_the_gradient_of_one(folder: Path, name: str):
    expected = run_step(make_engine(folder, name), make_groups(0)).metrics["actor/grad_norm"]
    assert json.loads((folder / "metrics.json").read_text())[name] == pytest.approx(expected, rel=1e-4)
