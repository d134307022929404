"""Two ranks over real gloo tune a model as one does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.loopback.ranks import run_two
from tests.unit.sft_cases import make_sft, make_sums, points, resumed, tuned
from tests.unit.training_steps import assert_updated

pytestmark = [pytest.mark.numeric, pytest.mark.ranks]

SMOOTH: dict[str, Any] = {"learning_rate": 1e-3, "optimizer": {"eps": 1e-2, "max_grad_norm": 0.5}}


def two_ranks(rank: int, folder: Path) -> None:
    """A go that is stopped, and one that goes on from what it saved; with odd numbers of conversations for two."""
    config = make_sft(folder, "two", processes=2, batch_size=7, **SMOOTH)

    def at_the_fourth(made: object) -> None:
        made.stopped = rank == 1 and made._trainer.step == 3  # type: ignore[attr-defined]

    tuned(config, rank, 2, at_the_fourth)
    tuned(resumed(config, 4), rank, 2)


def test_two_ranks_tune_as_one(tmp_path: Path) -> None:
    make_sums(tmp_path)
    config = make_sft(tmp_path, "one", batch_size=7, **SMOOTH)
    tuned(config)
    run_two(two_ranks, tmp_path)
    two, one = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("two", "one"))
    assert_updated(two, one, config.optimizer_of("sft"), steps=11)
    for ours, theirs in zip(points(make_sft(tmp_path, "two")), points(config), strict=True):
        assert ours["step"] == theirs["step"]
        assert ours["sft/loss"] == pytest.approx(theirs["sft/loss"], rel=1e-3)
        assert ours["sft/tokens"] == theirs["sft/tokens"]
