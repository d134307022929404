"""Optimizers of engine torch beside AdamW: Muon's step against plain arithmetic, and what is kept of them."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from runtime.config import Optimizer
from runtime.errors import UserError
from runtime.models import hf_policy
from runtime.trainer.fsdp import optimizers
from runtime.trainer.step import policy_trainer
from tests.closeness import BFLOAT16, assert_close
from tests.unit.training_cases import make_config, make_groups, make_policy
from tests.unit.training_steps import assert_same, run_step, weights

pytestmark = pytest.mark.numeric

# Matrices of 64 x 64 are large enough for moments of 8 bits.
LARGE = {"hidden_size": 64, "intermediate_size": 64, "num_key_value_heads": 4, "initializer_range": 0.02}
HAS_TORCHAO = importlib.util.find_spec("torchao") is not None
NEEDS_TORCHAO = pytest.mark.skipif(not HAS_TORCHAO, reason="torchao is missing: pip install 'sluice-rl[torchao]'")
OTHERS = [
    "muon",
    pytest.param("adamw_8bit", marks=NEEDS_TORCHAO),
]


def plain_orthogonalised(matrix: np.ndarray) -> np.ndarray:
    """By the singular values, which the iteration moves one by one: `s ← a s + b s³ + c s⁵`."""
    u, s, v = np.linalg.svd(matrix, full_matrices=False)
    s = s / math.sqrt((matrix**2).sum())
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return (u * s) @ v


def plain_muon(weight: np.ndarray, gradients: list[np.ndarray], *, rate: float, decay: float, momentum: float) -> np.ndarray:
    kept = np.zeros_like(weight)
    for gradient in gradients:
        kept = momentum * kept + (1 - momentum) * gradient
        update = plain_orthogonalised((1 - momentum) * gradient + momentum * kept)
        weight = weight - rate * decay * weight - rate * 0.2 * math.sqrt(max(weight.shape)) * update
    return weight


def muon(parameters: list[torch.nn.Parameter], compute: torch.dtype, **options: float) -> optimizers.Muon:
    groups = [{"params": parameters, "weight_decay": options.pop("weight_decay")}]
    momentum = options.pop("momentum")
    return optimizers.Muon(groups, frozenset(parameters), momentum, compute, **options, betas=(0.9, 0.99), eps=1e-8)


@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4), (1, 5)])
def test_a_step_of_muon_is_that_of_plain_arithmetic(shape: tuple[int, int]):
    rng = np.random.default_rng(sum(shape))
    weight, gradients = rng.normal(size=shape), [rng.normal(size=shape) for _ in range(4)]
    parameter = torch.nn.Parameter(torch.from_numpy(weight.copy()))
    optimizer = muon([parameter], torch.float64, lr=0.03, weight_decay=0.1, momentum=0.9)
    for gradient in gradients:
        parameter.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
    expected = plain_muon(weight, gradients, rate=0.03, decay=0.1, momentum=0.9)
    np.testing.assert_allclose(parameter.detach().numpy(), expected, rtol=1e-10, atol=1e-12)
    assert optimizer.state[parameter]["step"] == 4


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon is missing: pip install 'torch>=2.9'")
def test_in_bfloat16_it_is_torchs_own():
    torch.manual_seed(0)
    ours, theirs = (torch.nn.Parameter(torch.linspace(-1, 1, 48).view(6, 8).clone()) for _ in range(2))
    optimizer = muon([ours], torch.bfloat16, lr=0.03, weight_decay=0.1, momentum=0.95)
    other = torch.optim.Muon([theirs], lr=0.03, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        ours.grad = torch.randn(6, 8)
        theirs.grad = ours.grad.clone()
        optimizer.step()
        other.step()
    assert_close(ours, theirs, terms=1, unit=BFLOAT16 / 16)
    assert not torch.equal(ours, torch.linspace(-1, 1, 48).view(6, 8))


def test_a_gradient_of_0_moves_nothing():
    parameter = torch.nn.Parameter(torch.ones(2, 3))
    optimizer = muon([parameter], torch.float32, lr=0.1, weight_decay=0.0, momentum=0.9)
    parameter.grad = torch.zeros(2, 3)
    optimizer.step()
    assert torch.equal(parameter, torch.ones(2, 3))


@pytest.mark.parametrize("tied", [True, False])
def test_matrices_of_layers_are_muons_and_all_else_adamws(tmp_path: Path, tied: bool):
    model = hf_policy.load_policy(make_policy(tmp_path, tied=tied))
    parameters = dict(model.named_parameters())
    options = Optimizer(name="muon", learning_rate=1e-2, weight_decay=0.1, momentum=0.8)
    optimizer = optimizers.make_optimizer(options, model, parameters, torch.float64, "training.optimizer")
    before = {name: parameter.detach().double().numpy() for name, parameter in parameters.items()}
    rng = np.random.default_rng(1)
    gradients = {name: [rng.normal(size=array.shape) for _ in range(2)] for name, array in before.items()}
    for index in range(2):
        for name, parameter in parameters.items():
            parameter.grad = torch.from_numpy(gradients[name][index]).float()
        optimizer.step()
    for name, parameter in parameters.items():
        if ".layers." in name and parameter.ndim == 2:
            expected = plain_muon(before[name], gradients[name], rate=1e-2, decay=0.1, momentum=0.8)
        else:
            alone = torch.nn.Parameter(torch.from_numpy(before[name].copy()))
            adamw = torch.optim.AdamW([alone], lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1 * (alone.ndim > 1))
            for gradient in gradients[name]:
                alone.grad = torch.from_numpy(gradient)
                adamw.step()
            expected = alone.detach().numpy()
        assert_close(parameter, expected, terms=200, what=name)
    assert sum(optimizers.kept(optimizer, parameter) == ("momentum_buffer",) for parameter in parameters.values()) == 14


@pytest.mark.parametrize("name", OTHERS)
class TestTraining:
    options = {"learning_rate": 1e-2, "weight_decay": 0.01}  # noqa: RUF012

    def test_it_learns_otherwise_than_adamw(self, tmp_path: Path, name: str):
        path = make_policy(tmp_path, **LARGE)
        other, plain = (policy_trainer(make_config(path, optimizer=self.options | {"name": one})) for one in (name, "adamw"))
        rates = []
        for seed in range(2):
            rates.append(run_step(other, make_groups(seed)).metrics["actor/lr"])
            run_step(plain, make_groups(seed))
        assert rates == [1e-2] * 2
        moved = {key: not torch.equal(tensor, weights(plain)[key]) for key, tensor in weights(other).items()}
        assert any(moved.values())

    def test_a_checkpoint_goes_on(self, tmp_path: Path, name: str):
        (tmp_path / "policy").mkdir()
        (tmp_path / "save").mkdir()
        schedule = {"schedule": "cosine", "warmup_steps": 2}
        config = make_config(
            make_policy(tmp_path / "policy", **LARGE), optimizer=self.options | schedule | {"name": name}, training={"steps": 9}
        )
        first, second = policy_trainer(config), policy_trainer(config)
        for seed in range(3):
            run_step(first, make_groups(seed))
        first.save(str(tmp_path / "save"))
        run_step(second, make_groups(40))  # a history that the checkpoint must erase
        second.load(str(tmp_path / "save"))
        for seed in range(3, 6):
            assert run_step(first, make_groups(seed)).metrics == run_step(second, make_groups(seed)).metrics
        assert_same(weights(first), weights(second))

    def test_lent_devices_change_nothing(self, tmp_path: Path, name: str):
        config = make_config(make_policy(tmp_path, **LARGE), optimizer=self.options | {"name": name})
        plain, lent = policy_trainer(config), policy_trainer(config)
        lent.backend.offloaded = ("optimizer",)  # type: ignore[attr-defined]
        for step in range(3):
            run_step(plain, make_groups(step, step=step))
            lent.offload()
            if step:
                states = lent.backend.optimizer.state.values()  # type: ignore[attr-defined]
                kept = [value for state in states for key, value in state.items() if key != "step"]
                assert all(not part.untyped_storage().nbytes() for value in kept for part in optimizers.storages(value))
            lent.onload()
            run_step(lent, make_groups(step, step=step))
        assert_same(weights(lent), weights(plain))


def test_a_checkpoint_of_the_other_kind_is_refused(tmp_path: Path):
    for name in ("policy", "adamw", "muon"):
        (tmp_path / name).mkdir()
    path = make_policy(tmp_path / "policy")
    engines = {name: policy_trainer(make_config(path, optimizer={"name": name})) for name in ("adamw", "muon")}
    for name, engine in engines.items():
        run_step(engine, make_groups(0))
        engine.save(str(tmp_path / name))
    for own, saved in (("adamw", "muon"), ("muon", "adamw")):
        before = weights(engines[own])
        with pytest.raises(UserError, match=rf"^training\.optimizer\.name: checkpoint .* is of {saved}, which {own} cannot go"):
            engines[own].load(str(tmp_path / saved))
        assert_same(weights(engines[own]), before)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torchao.optim.subclass_8bit", None)
    with pytest.raises(
        UserError, match=r"^training\.optimizer\.name: adamw_8bit needs a package: pip install 'sluice-rl\[torchao\]'$"
    ):
        policy_trainer(make_config(make_policy(tmp_path), optimizer={"name": "adamw_8bit"}))


@NEEDS_TORCHAO
@pytest.mark.parametrize("name", optimizers.MOMENTS)
def test_moments_of_8_bits_are_restored_bit_for_bit(name: str):
    """In some of 4,000 blocks the quotient that gives the scale is rounded up, in some down."""
    torch.manual_seed(0)
    values = torch.randn(4000, 256) * torch.rand(4000, 1)
    values[5] = 0
    parameter = torch.nn.Parameter(values)
    group = {"params": [parameter], "weight_decay": 0.0}
    eight = optimizers.AdamW8bit([group], optimizers._eight_bits(""), lr=1e-3, betas=(0.9, 0.99), eps=1e-8)
    held = eight.zeros(parameter, name)
    held.copy_(values if name == "exp_avg" else values.square())
    expected = optimizers.numbers(held)
    optimizers.restore(eight, parameter, 1, lambda _: expected)
    assert torch.equal(optimizers.numbers(eight.state[parameter][name]), expected)


@NEEDS_TORCHAO
def test_moments_of_8_bits_are_small_and_read_by_adamw(tmp_path: Path):
    for name in ("policy", "save"):
        (tmp_path / name).mkdir()
    path = make_policy(tmp_path / "policy", **LARGE)
    small, plain = (policy_trainer(make_config(path, optimizer={"name": name})) for name in ("adamw_8bit", "adamw"))
    for engine in (small, plain):
        run_step(engine, make_groups(0))
    states = small.backend.optimizer.state.values()  # type: ignore[attr-defined]
    held = [optimizers.storages(state["exp_avg"]) for state in states]
    quantised = [parts for parts in held if len(parts) == 2]
    assert len(quantised) == 14
    assert all(codes.dtype == torch.uint8 and scale.numel() * 256 == codes.numel() for codes, scale in quantised)
    small.save(str(tmp_path / "save"))
    plain.load(str(tmp_path / "save"))
    for parameter, state in plain.backend.optimizer.state.items():  # type: ignore[attr-defined]
        assert state["exp_avg"].dtype == torch.float32
        assert state["exp_avg"].shape == parameter.shape
