"""Two ranks over real gloo do what one rank does: several updates a step, PPO, and a loss that is not finite."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from runtime import config
from runtime.config import Config
from runtime.errors import ServiceFault
from runtime.trainer.step import ModelTrainer, critic_trainer, policy_trainer
from runtime.types import TrainGroup, ValueRequest
from tests.closeness import STEP, assert_close
from tests.loopback.ranks import run_two
from tests.unit.training_cases import make_config, make_groups, make_policy
from tests.unit.training_steps import assert_metrics

pytestmark = pytest.mark.numeric

STEPS, UPDATES = 2, 4  # updates of each step: two epochs of two mini-batches
PPO = {"advantage": "gae", "gamma": 0.9, "gae_lambda": 0.8, "kl": "k1", "kl_placement": "reward", "kl_coefficient": 0.1}
SMOOTH = {"eps": 1e-2, "max_grad_norm": 0.5}
CASES: dict[str, tuple[Callable[..., ModelTrainer], dict[str, Any]]] = {
    "policy": (policy_trainer, {"algorithm": {"kl_coefficient": 0.1}}),
    "ppo": (policy_trainer, {"algorithm": PPO}),
    "interpolated": (policy_trainer, {"algorithm": {"proximal": "interpolated"}}),
    "critic": (critic_trainer, {"algorithm": PPO}),
}


def settings(folder: Path, sections: dict[str, Any], **training: Any) -> Config:
    training = {"groups_per_step": 4, "epochs": 2, "mini_batch_size": 2, "max_tokens_per_microbatch": 24} | training
    made = make_config(str(folder / "policy"), optimizer=SMOOTH, training=training, **sections)
    critic = config.Critic(value_clip=0.1, optimizer=config.CriticOptimizer(learning_rate=1e-2, eps=1e-2))
    return replace(made, critic=critic, run=replace(made.run, dir=str(folder)))


def batch(step: int) -> list[TrainGroup]:
    """Mini-batch 0 lies with both ranks, mini-batch 1 with one alone."""
    groups = make_groups(step, (4, 3, 5, 2), step=step)
    for place, group in enumerate(groups):
        group.mini_batch = place // 2
    return groups


def train(engine: ModelTrainer, share: slice | list[int]) -> list[dict[str, float]]:
    results = []
    for step in range(STEPS):
        groups = batch(step)
        engine.begin_step(step)
        engine.accumulate([groups[i] for i in share] if isinstance(share, list) else groups)
        metrics = engine.apply().metrics
        metrics.pop("padding_waste", None)
        results.append(metrics)
    return results


def requests() -> list[ValueRequest]:
    return [ValueRequest(group_id=g.group_id, tokens=g.tokens, payload=g.payload) for g in batch(5)]


def poisoned() -> list[TrainGroup]:
    groups = batch(0)
    groups[1].rewards = np.full_like(groups[1].rewards, math.nan)
    return groups


def two_ranks(rank: int, folder: Path) -> None:
    results: dict[str, Any] = {}
    for name, (make, sections) in CASES.items():
        engine = make(settings(folder, sections), rank=rank, world_size=2)
        results[name] = train(engine, [0] if rank == 0 else [1, 2, 3])
    values = engine.values(requests()[:1] if rank == 0 else [])
    engine = policy_trainer(settings(folder, {}, epochs=1, mini_batch_size=0), rank=rank, world_size=2)
    engine.begin_step(0)
    engine.accumulate(poisoned()[rank : rank + 1])
    try:
        engine.apply()
    except ServiceFault as fault:
        results["fault"] = str(fault)
    if rank == 0:
        results["values"] = values[0].values.tolist()
    (folder / f"results-{rank}.json").write_text(json.dumps(results))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "policy").mkdir()
    make_policy(folder / "policy")
    run_two(two_ranks, folder)
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results-0.json").read_text())


@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_one_rank(folder: Path, results: dict[str, Any], name: str):
    make, sections = CASES[name]
    engine = make(settings(folder, sections))  # type: ignore[call-arg]
    for step, (got, expected) in enumerate(zip(results[name], train(engine, slice(None)), strict=True)):
        assert_metrics(got, expected, steps=UPDATES * (step + 1))


def test_values_are_those_of_one_rank(folder: Path, results: dict[str, Any]):
    engine = critic_trainer(settings(folder, CASES["critic"][1]))
    train(engine, slice(None))
    expected = engine.values(requests())[0].values
    assert np.abs(expected).max() > 0.01
    assert_close(results["values"], expected, terms=UPDATES * STEPS * STEP)


def test_every_rank_names_the_samples_of_the_rank_whose_loss_is_not_finite(folder: Path, results: dict[str, Any]):
    other = json.loads((folder / "results-1.json").read_text())["fault"]
    assert results["fault"] == other
    assert "micro-batch of samples 1:" in other
    written = json.loads((folder / "nonfinite" / "trainer-step-00000000.json").read_text())
    assert {group for micro_batch in written["micro_batches"] for group, _ in micro_batch} == {1}
