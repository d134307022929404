"""`sluice accept` on this machine: the checks that it makes of devices, made of simulated NPUs, which are the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.loopback.weight_cases import SIMULATED_NPU
from tests.system.runs import one_line, sluice

TOTAL = 400.0  # seconds, on a busy machine


@pytest.mark.long
@pytest.mark.timeout(TOTAL + 20)
def test_every_check_passes_and_leaves_its_figures(config: Path, tmp_path: Path) -> None:
    """SIMULATION: a stand-in for torch_npu over the CPU and gloo. It shows that Sluice's code for NPUs runs, and no more; what
    the checks do besides is what they do on a CPU."""
    out = tmp_path / "accept"
    arguments = ("--device", "npu", "--out", str(out), "--config", str(config), "--steps", "2")
    done = sluice("accept", *arguments, timeout=TOTAL, modules=SIMULATED_NPU)
    report = json.loads((out / "report.json").read_text())
    assert done.returncode == 0, report
    outcomes = {outcome["check"]: outcome for outcome in report["outcomes"]}
    assert {check: outcome["result"] for check, outcome in outcomes.items()} == dict.fromkeys(
        ("platform", "weight_sync", "rollout", "trainer", "quickstart"), "passed"
    )
    found = {check: outcome["figures"] for check, outcome in outcomes.items()}
    assert found["platform"]["name"] == "simulated"
    assert found["weight_sync"]["backend"] == "hccl"
    assert found["weight_sync"]["MB_per_second"] > 0
    assert 3.0 <= found["weight_sync"]["abort_seconds"] < 60.0
    assert found["rollout"]["logprob_difference"] < 1e-4
    assert found["quickstart"]["steps"] == 2
    assert report["versions"]["torch"]
    assert "Passed." in (out / "report.md").read_text()
    assert not (out / "model").exists()
    again = sluice("accept", *arguments)
    assert (again.returncode, one_line(again.stderr)) == (2, f"error: --out: {out} is not empty")


def test_a_device_that_is_not_there_is_a_failed_check_and_a_report(tmp_path: Path, config: Path) -> None:
    out = tmp_path / "accept"
    done = sluice("accept", "--device", "npu", "--out", str(out), "--config", str(config))
    assert done.returncode == 1
    first, *rest = json.loads((out / "report.json").read_text())["outcomes"]
    assert (first["check"], first["result"]) == ("platform", "failed")
    assert "torch_npu cannot be imported" in first["detail"]
    assert [outcome["result"] for outcome in rest] == ["left out"] * 4
