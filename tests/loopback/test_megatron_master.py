"""Training in bfloat16 loses no update: the float32 master weights take each, and the model is their rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.config import Trainer
from runtime.trainer.step import policy_trainer
from tests.closeness import FLOAT32, gamma
from tests.loopback.ranks import run_ranks
from tests.unit.training_cases import make_config, make_policy

pytestmark = pytest.mark.numeric

pytest.importorskip("megatron.core", reason="needs megatron-core: pip install 'sluice-rl[megatron]'")

RATE, UPDATES = 1e-6, 60
BETAS, EPS = (0.9, 0.95), 1e-8
ROUNDING = UPDATES * FLOAT32  # relative: each update rounds a weight once
UPDATE = UPDATES * RATE * 2 * gamma(UPDATES)  # what all updates add up to is as exact as the two moments, sums of so many terms


def test_the_master_weights_follow_the_arithmetic(tmp_path: Path) -> None:
    make_policy(tmp_path / "policy")
    run_ranks(member, tmp_path, 1)


def member(rank: int, folder: Path) -> None:
    optimizer = {"learning_rate": RATE, "weight_decay": 0.0, "betas": BETAS, "eps": EPS}
    settings = Trainer(engine="megatron")
    config = make_config(str(folder / "policy"), dtype="bfloat16", trainer=settings, optimizer=optimizer)
    device = torch.device("cpu")
    engine: Any = policy_trainer(config, rank=rank, world_size=1, device=device)
    parameters = dict(engine.backend.model.named_parameters())
    assert {parameter.dtype for parameter in parameters.values()} == {torch.bfloat16}
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    expected = {name: Adam(start) for name, start in before.items()}
    torch.manual_seed(1)
    for _ in range(UPDATES):
        engine.backend.clear_gradients()
        for name, parameter in parameters.items():
            # Of one sign, so that what is lost at each update adds up to what is easily seen.
            parameter.main_grad.copy_(torch.rand(parameter.shape))
            expected[name].step(parameter.main_grad.double())
        engine.backend.optimizer.finish()
        engine.backend.optimizer.step(1.0, RATE)
    for name, parameter in parameters.items():
        master = engine.backend.optimizer.gather(parameter)["master"]
        moved = (expected[name].weights - before[name].double()).abs()
        assert moved.min() > 0.5 * RATE * UPDATES
        torch.testing.assert_close(master.double(), expected[name].weights, rtol=ROUNDING, atol=UPDATE, msg=name)
        assert torch.equal(parameter, master.bfloat16())
        large = parameter.abs() > 0.5  # rounded, these are where they began
        assert torch.equal(parameter[large], before[name][large])


class Adam:
    """Adam (Kingma and Ba, 2015, algorithm 1) in float64."""

    def __init__(self, start: torch.Tensor):
        self.weights = start.double()
        self._first, self._second = torch.zeros_like(self.weights), torch.zeros_like(self.weights)
        self._count = 0

    def step(self, gradient: torch.Tensor) -> None:
        self._count += 1
        self._first = BETAS[0] * self._first + (1 - BETAS[0]) * gradient
        self._second = BETAS[1] * self._second + (1 - BETAS[1]) * gradient.square()
        first = self._first / (1 - BETAS[0] ** self._count)
        second = self._second / (1 - BETAS[1] ** self._count)
        self.weights = self.weights - RATE * first / (second.sqrt() + EPS)
