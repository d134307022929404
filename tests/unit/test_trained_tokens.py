"""What is kept of trained tokens: the first of each step, by group, row and place, in two parts of a bounded size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from runtime import run_files
from runtime.telemetry import trained_tokens
from runtime.telemetry.trained_tokens import TrainedTokenLog, TrainedTokens


def some(step: int, count: int = 3) -> TrainedTokens:
    numbers = np.arange(count)
    return TrainedTokens(step, numbers, numbers + 1, numbers + 2, np.float32(numbers) - step, np.float32(numbers))


def test_what_was_kept_of_a_step_is_read(tmp_path: Path) -> None:
    for rank in range(2):
        log = TrainedTokenLog(tmp_path, f"trainer-{rank}")
        for step in range(5):
            log.append(some(step))
    found = list(trained_tokens.read(tmp_path, 3))
    assert len(found) == 2
    for each in found:
        assert (each.step, each.group.tolist(), each.row.tolist(), each.position.tolist()) == (
            3,
            [0, 1, 2],
            [1, 2, 3],
            [2, 3, 4],
        )
        assert each.logprob.tolist() == [-3, -2, -1]
    assert list(trained_tokens.read(tmp_path, 9)) == []
    assert list(trained_tokens.read(tmp_path / "none", 0)) == []


def test_the_newest_steps_are_kept_in_a_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trained_tokens, "MOST_BYTES", 4096)
    log = TrainedTokenLog(tmp_path, "trainer-0")
    for step in range(100):
        log.append(some(step))
        assert sum(path.stat().st_size for path in (tmp_path / run_files.TRAINED).iterdir()) <= 4096 + 16
    kept = [step for step in range(100) if list(trained_tokens.read(tmp_path, step))]
    assert kept == list(range(kept[0], 100))
    assert 0 < kept[0] < 99


def test_a_step_that_is_torn_by_a_kill_is_left_out(tmp_path: Path) -> None:
    log = TrainedTokenLog(tmp_path, "trainer-0")
    log.append(some(0))
    log.append(some(1))
    (path,) = (tmp_path / run_files.TRAINED).iterdir()
    path.write_bytes(path.read_bytes()[:-5])
    assert len(list(trained_tokens.read(tmp_path, 0))) == 1
    assert list(trained_tokens.read(tmp_path, 1)) == []
    again = TrainedTokenLog(tmp_path, "trainer-0")  # of the process that goes on
    again.append(some(1))
    again.append(some(2))
    assert [len(list(trained_tokens.read(tmp_path, step))) for step in range(3)] == [1, 1, 1]


def test_a_folder_that_cannot_be_written_costs_what_is_kept_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / run_files.TRAINED).write_text("")
    log = TrainedTokenLog(tmp_path, "trainer-0")
    log.append(some(0))
    log.append(some(1))
    assert caplog.text.count("no more log-probabilities of trained tokens are kept") == 1
