"""A run on the loopback of IPv6, where there is one. test_cluster.py has nodes that have no address of IPv4 at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime import run_files
from runtime.process import keys
from runtime.process.network import is_own
from services.health_check import check
from tests.system.runs import LONG, all_gone, check_gone, eventually, everyone, one_line, sluice, started, table

pytestmark = pytest.mark.timeout(600)

IP = "::1" if is_own("::1") else "127.0.0.1"
START = 180.0  # seconds until several processes train, on what may be two busy cores


def test_a_run_on_the_loopback_of_ipv6(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks of the trainer, whose store is on loopback; the run is looked at by its folder and by its address, and is
    scaled up and down. It ends with its coordinator, in whose place no other may come."""
    once = "services.coordinator.restarts=0"
    overrides = (once, f"network.interface={IP}", "services.trainer.processes=2", "weight_sync.transport=collective")
    with started(config, *LONG, *overrides, folder=tmp_path / "run") as run:
        run.reaches(2, START)
        address = (run.folder / "coordinator.address").read_text().strip()
        assert address.startswith(f"[{IP}]:" if ":" in IP else f"{IP}:")
        assert sluice("scale", "rollout=3", str(run.folder)).stdout == "started: rollout-2\n"

        def serves() -> bool:
            row = table(sluice("status", str(run.folder)).stdout).get("rollout-2", [""] * 3)
            return row[1] == "ready" and int(row[2].partition(".")[2]) > 0  # it has weights of a step, and groups to make

        eventually(serves, START, "rollout-2 serves")
        assert sluice("scale", "rollout=1", str(run.folder)).stdout == "stopped: rollout-1, rollout-2\n"
        run.reaches(run.steps() + 3, START)
        monkeypatch.setenv(keys.SECRET, (run.folder / run_files.SECRET).read_text().strip())
        assert sluice("status", address).returncode == 0
        assert check(address, own=keys.of_user(address)) == (True, "serving")
        family = everyone(run)
        run.member("coordinator").kill()
        assert run.wait(START) == 1, run.output + run.errors
        all_gone(family)
        check_gone(run.folder)
        line = one_line(run.errors)
        assert line.startswith("error: coordinator: ") and "SIGKILL" in line
        assert "Traceback" not in run.output
