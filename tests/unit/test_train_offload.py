"""The embedded training engine gives its device up between steps, and nothing of what it learns changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.config import Trainer
from runtime.trainer.step import ModelTrainer, policy_trainer
from tests.unit.training_cases import make_config, make_groups, make_policy
from tests.unit.training_steps import assert_same, run_step, weights


def owned(engine: ModelTrainer) -> ModelTrainer:
    """As if it were on an accelerator: in memory of its own, which can be given back."""
    for parameter in engine.backend.model.parameters():
        parameter.data = parameter.data.clone()
    engine.backend.offloaded = ("optimizer", "grad", "param")
    return engine


@pytest.mark.parametrize("lent", [("optimizer",), ("optimizer", "grad", "param")])
def test_steps_are_the_same_bit_for_bit(tmp_path: Path, lent: tuple[str, ...]) -> None:
    make_policy(tmp_path)
    config = make_config(str(tmp_path))
    plain, engine = policy_trainer(config), owned(policy_trainer(config))
    engine.backend.offloaded = lent
    for step in range(3):
        groups = make_groups(step, step=step)
        expected = run_step(plain, groups)
        engine.offload()
        is_away = next(engine.backend.model.parameters()).untyped_storage().nbytes() == 0
        assert is_away == ("param" in lent)
        if step:
            assert all(state["exp_avg"].untyped_storage().nbytes() == 0 for state in engine.backend.optimizer.state.values())
        engine.onload()
        assert run_step(engine, groups).metrics["actor/grad_norm"] == expected.metrics["actor/grad_norm"]
        assert_same(weights(engine), weights(plain))


def test_on_a_cpu_nothing_is_taken_to_the_host(tmp_path: Path) -> None:
    make_policy(tmp_path)
    engine = policy_trainer(make_config(str(tmp_path), trainer=Trainer(offload_train_param=True)))
    engine.offload()
    assert next(engine.backend.model.parameters()).untyped_storage().nbytes() > 0
    engine.onload()
