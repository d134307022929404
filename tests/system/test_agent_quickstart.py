"""The agent's job as it is shipped: a stranger's program plays it, with the package `openai` and a URL."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.runs import ROOT, steps, summary, trained

pytestmark = pytest.mark.timeout(900)

PYTHON = ROOT / ".venv-agents" / "bin" / "python"
TOTAL = 800.0  # seconds, the warm-up on a busy machine included


@pytest.mark.skipif(not PYTHON.exists(), reason=f"{PYTHON} is not there: make install-agents makes it")
def test_it_learns_to_ask_its_tool(warmups: Path, tmp_path: Path) -> None:
    overrides = [f"warmup.cache={warmups}", "warmup.max_seconds=500"]
    run = trained(ROOT / "configs" / "agent_quickstart.yaml", *overrides, folder=tmp_path / "run", timeout=TOTAL)
    result, points = summary(run.folder), steps(run.folder)
    assert result["accuracy_before"] <= 0.6 and result["accuracy_after"] >= 0.9
    assert points[-1]["episode/turns"] > points[0]["episode/turns"] and points[-1]["episode/turns"] >= 1.8
    assert all(point["episode/environment_tokens"] > 0 for point in points)
    assert {point["gateway/forks"] for point in points if "gateway/forks" in point} == {0}  # a short step may have none yet
