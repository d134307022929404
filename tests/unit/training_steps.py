"""Steps of the training engine and the weights that they leave, for its tests."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from msgspec.structs import replace

from runtime.config import Optimizer
from runtime.models.adapters import merged
from runtime.models.hf_folder import WeightFiles
from runtime.rollout.engine import are_adapters
from runtime.trainer.backend import BINS_PER_OCTAVE
from runtime.trainer.step import ModelTrainer
from runtime.types import StepResult, TrainGroup
from tests.closeness import STEP, assert_close
from tests.unit.training_cases import make_groups

LOSS_TERMS = {"kl_coefficient": 0.1, "entropy_coefficient": 0.01}


def run_step(engine: ModelTrainer, *batches: list[TrainGroup], probes: Sequence[bytes] = ()) -> StepResult:
    engine.begin_step(engine.step)
    for batch in batches:
        engine.accumulate(batch)
    gaps = engine.compare(probes) if probes else []
    return replace(engine.apply(), probes=gaps)


def make_probes(seed: int) -> list[bytes]:
    """Encoded groups, with log-probabilities of nobody's."""
    return [group.payload for group in make_groups(seed, (2, 1, 1), longest=16)]


def comparable(result: StepResult) -> dict[str, float]:
    """What a step reports, but for what tells how it was packed."""
    return {name: value for name, value in result.metrics.items() if name != "padding_waste"}


def weights(engine: ModelTrainer) -> dict[str, torch.Tensor]:
    """As they are published; with adapters, what rollouts make of them."""
    found = published(engine)
    return rolled_out(engine, found) if are_adapters(found) else found


def published(engine: ModelTrainer) -> dict[str, torch.Tensor]:
    tensors = zip(engine.backend.tensor_specs(), engine.backend.gather(), strict=True)
    return {spec.name: tensor.to(getattr(torch, spec.dtype), copy=True) for spec, tensor in tensors}


def rolled_out(engine: ModelTrainer, adapters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a rollout makes of the model folder and `adapters`, in their dtype."""
    (dtype,) = {tensor.dtype for tensor in adapters.values()}
    return {name: tensor.to(dtype) for name, tensor in merged(WeightFiles(engine._config.model.path), adapters)}


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    """Bit for bit."""
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        torch.testing.assert_close(tensor, right[name], rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")


def assert_metrics(got: Mapping[str, float], expected: Mapping[str, float], *, steps: int = 1) -> None:
    """But for the rounding of so many steps, each of which begins with what the last one left. Of the share of tokens beyond a
    limit, a token that lies at the limit may be on either side. The 99th percentile is the edge of a bin, and a number at that
    edge may be in either bin."""
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        if name == "mismatch/over_0.1":
            assert abs(got[name] - value) <= 1.5 / expected["mismatch/tokens"], name
            continue
        if name.endswith("_p99") and got[name] != value:
            assert abs(math.log2(got[name] / value)) * BINS_PER_OCTAVE <= 1.01, name
            continue
        assert_close(got[name], value, terms=steps * STEP, scale=_summands(name, abs(value)), what=name)


def _summands(name: str, mean: float) -> float:
    """How large the numbers are that a metric is the mean of, where they cancel.

    Losses and advantages are about 1. k3 of a difference x of log-probabilities is about x² / 2, and its error x times theirs.
    """
    if name.endswith(("pg_loss", "ppo_kl", "advantages/mean")):
        return max(mean, 1.0)
    return max(mean, math.sqrt(2 * mean)) if name in ("actor/kl", "actor/kl_loss") else mean


def assert_updated(
    left: Mapping[str, torch.Tensor],
    right: Mapping[str, torch.Tensor],
    optimizer: Optimizer,
    *,
    steps: int = 1,
    norm: float | None = None,
) -> None:
    """Weights after so many steps of Adam are the same but for rounding.

    Adam moves a weight by rate · m / (√v + eps). Where a gradient is small against eps, an error δ in it moves the weight
    by rate · δ / eps more, and where it is large by less. δ is relative to `norm`, of all gradients: what they are clipped
    to, unless it is given. The weight is rounded too, once a step. With an eps near 0 the rounding of a gradient near 0
    decides the sign of its update, and no two orders of addition agree on that.
    """
    assert optimizer.eps >= 1e-3
    assert left.keys() == right.keys()
    moved = optimizer.learning_rate * (optimizer.max_grad_norm if norm is None else norm) / optimizer.eps
    for name, tensor in right.items():
        stored = float(tensor.abs().max()) / STEP
        assert_close(left[name], tensor, terms=STEP, scale=steps * (moved + stored), what=name)
