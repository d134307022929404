"""The picture of a run, drawn by its own process."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runtime import run_files


def draw(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-m", "runtime.telemetry.figures", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_draws_runs_long_and_short_whatever_they_logged(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: make install")
    from runtime.telemetry.figures import plot_run

    step = {"grpo/score/mean": 0.5, "staleness/mean": 0.7, "staleness/max": 2, "timing/all": 1.0, "timing/update": 0.6}
    other = {f"timing/phase_{index}": 0.1 for index in range(9)}
    logged: dict[str, list[dict[str, Any]]] = {
        "long": [
            {"step": 0, "eval/accuracy": 0.4},
            *({"step": n, **step, **other, "eval/accuracy": n / 50} for n in range(1, 50)),
        ],
        "one": [{"step": 1, **step}],
        "evaluation-only": [{"step": 0, "eval/accuracy": 0.4}],
        "nulls": [{"step": n, **dict.fromkeys(step), "timing/all": 1.0} for n in range(3)],
    }
    for name, points in logged.items():
        (tmp_path / run_files.METRICS).write_text("".join(json.dumps(point) + "\n" for point in points))
        plot_run(tmp_path / run_files.METRICS, tmp_path / f"{name}.png")
        data = (tmp_path / f"{name}.png").read_bytes()
        assert data.startswith(b"\x89PNG") and struct.unpack(">II", data[16:24]) == (1440, 900)
    assert {path.suffix for path in tmp_path.iterdir()} == {".png", ".jsonl"}


def test_smoothing_is_the_mean_of_the_last_ten() -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: make install")
    import numpy as np

    from runtime.telemetry.figures import _smoothed

    values = np.arange(25.0) ** 2
    expected = [values[max(0, index - 9) : index + 1].mean() for index in range(25)]
    np.testing.assert_allclose(_smoothed(values), expected, rtol=1e-12)


def test_as_a_job_of_its_own(tmp_path: Path) -> None:
    missing = draw(tmp_path)
    assert missing.returncode == 2 and missing.stderr.strip() == f"{tmp_path / run_files.METRICS}: no such file or directory"
    (tmp_path / run_files.METRICS).write_text('{"step":1,"grpo/score/mean":0.5}\n')
    done = draw(tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "metrics.png").stat().st_size > 10_000
