"""Whole runs whose weights travel, or are taken in, by another way than the default."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import safe_open

from tests.system.runs import LONG, START, eventually, started, steps, trained
from tests.system.test_losses import ends_well, sees

pytestmark = pytest.mark.timeout(400)


def whole_versions(shared: Path) -> list[Path]:
    indices = shared.glob("epoch-0001/*-version-*/*.index.json")
    return [index for index in indices if index.with_name("model-00001-of-00001.safetensors").exists()]


def test_weights_by_way_of_a_folder_and_a_rollout_that_is_killed(config: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    way = ("publication.transport=files", f"publication.folder={shared}")
    with started(config, *LONG, *way, folder=tmp_path / "run") as run:
        run.reaches(2)
        eventually(lambda: whole_versions(shared), START, "a version with its index")  # only the newest two are kept
        run.member("rollout-1").kill()
        sees(run, lambda point: point["rollout/serving"] == 2 and point["publication/epoch"] >= 3, "the rollout's return")
        assert not list(shared.glob("epoch-0001*"))
        ends_well(run)
    assert not list(shared.iterdir())


@pytest.mark.parametrize("processes", [1, 2])
def test_deltas_are_a_small_part_of_the_weights(config: Path, tmp_path: Path, processes: int) -> None:
    way = (
        f"services.trainer.processes={processes}",
        "publication.encoding=delta",
        "publication.dtype=bfloat16",
    )
    run = trained(
        config, "training.steps=6", "training.optimizer.learning_rate=1e-6", *way, folder=tmp_path / "run", timeout=150.0
    )
    with safe_open(run.folder / "model" / "model.safetensors", framework="pt") as file:
        whole = sum(2 * file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118
    took = {point["step"]: point["publication/bytes"] for point in steps(run.folder) if "publication/bytes" in point}
    assert all(bytes_ < whole / 2 for bytes_ in took.values())
