"""Steps of the training engine and the weights that they leave, for its tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from msgspec.structs import replace

from runtime.engines.train_torch import TorchTrainEngine
from runtime.types import StepResult, TrainGroup
from tests.unit.training_cases import make_groups

LOSS_TERMS = {"kl_coefficient": 0.1, "entropy_coefficient": 0.01}


def run_step(engine: TorchTrainEngine, *batches: list[TrainGroup], probes: Sequence[bytes] = ()) -> StepResult:
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


def weights(engine: TorchTrainEngine) -> dict[str, torch.Tensor]:
    """As they are published."""
    tensors = zip(engine.tensor_specs(), engine.gather(), strict=True)
    return {spec.name: tensor.to(getattr(torch, spec.dtype), copy=True) for spec, tensor in tensors}


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], tolerance: float = 0.0) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        torch.testing.assert_close(
            tensor, right[name], rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )
