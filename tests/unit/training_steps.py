"""Steps of the training engine and the weights that they leave, for its tests."""

from __future__ import annotations

import torch

from runtime.engines.train_torch import TorchTrainEngine
from runtime.types import StepResult, TrainGroup

LOSS_TERMS = {"kl_coefficient": 0.1, "entropy_coefficient": 0.01}


def run_step(engine: TorchTrainEngine, *batches: list[TrainGroup]) -> StepResult:
    engine.begin_step(engine.step)
    for batch in batches:
        engine.accumulate(batch)
    return engine.apply()


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
