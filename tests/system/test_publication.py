"""Whole runs whose weights travel, or are taken in, by another way than the default."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import safe_open

from tests.system.runs import steps, trained

pytestmark = pytest.mark.timeout(400)


@pytest.mark.parametrize("processes", [1, 2])
def test_deltas_are_a_small_part_of_the_weights(config: Path, tmp_path: Path, processes: int) -> None:
    way = (f"services.trainer.processes={processes}", "weight_sync.encoding=delta", "weight_sync.dtype=bfloat16")
    run = trained(
        config, "training.steps=6", "training.optimizer.learning_rate=1e-6", *way, folder=tmp_path / "run", timeout=150.0
    )
    with safe_open(run.folder / "model" / "model.safetensors", framework="pt") as file:
        whole = sum(2 * file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118
    took = {point["step"]: point["weight_sync/bytes"] for point in steps(run.folder) if "weight_sync/bytes" in point}
    assert all(bytes_ < whole / 2 for bytes_ in took.values())
