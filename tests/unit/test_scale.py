"""The coordinator's work for a sample, counted in calls of its functions: as much with 40 rollouts as with 5."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from benchmarks import scale, scale_trial
from runtime.errors import UserError
from runtime.simulation.simulate import Simulation
from services.rpc.client import ContractDeadlines

STEPS = 3


def calls(replicas: int, folder: Path) -> float:
    """Of the coordinator's functions, for each sample."""
    found = 0

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal found
        name = frame.f_code.co_filename
        found += event == "call" and name.startswith(scale_trial.RUNTIME) and not name.startswith(scale_trial.MODELS)

    config = scale_trial.configured(replicas, STEPS, str(folder / str(replicas)))
    simulation = Simulation(config, scale_trial.costs(replicas), ContractDeadlines(config))
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        simulation.run()
    finally:
        sys.setprofile(before)
    return found / (STEPS * scale_trial.GROUPS * scale_trial.SIZE * replicas)


def test_a_sample_takes_as_much_work_with_forty_rollouts_as_with_five(tmp_path: Path) -> None:
    assert calls(40, tmp_path) <= 1.1 * calls(5, tmp_path)


def test_figures_are_told_apart_from_the_models(tmp_path: Path) -> None:
    found = scale_trial.measure(2, 20)
    assert found.samples == 18 * 16
    assert 0 < found.coordinator_seconds < found.seconds


def test_data_without_replies_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--data: .* holds no data/qwen_math_cot_100/math_cot_100.jsonl"):
        scale._reply_lengths(tmp_path / scale.REPLIES)
