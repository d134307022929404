"""Replicas that are killed in the middle of a run: it goes on, and another process comes in their place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtime.ledger.reader import LedgerReader
from runtime.ledger.states import Phase
from tests.system.runs import LONG, Live, check_gone, eventually, sluice, started, steps

pytestmark = pytest.mark.timeout(400)

BACK = 120.0  # seconds until another process has come in a dead one's place, on a busy machine


def newest(run: Live) -> dict[str, Any]:
    return steps(run.folder)[-1]


def sees(run: Live, holds: Callable[[dict[str, Any]], bool], what: str) -> None:
    """Waits until the newest step is such."""

    def check() -> bool:
        assert run.process.poll() is None, f"ended with {run.process.returncode}:\n{run.output}{run.errors}"
        return holds(newest(run))

    eventually(check, BACK, what)


def ends_well(run: Live) -> None:
    """On Ctrl-C, with every step in the books, and every group in one of them at most."""
    run.interrupt()
    assert run.wait(BACK) == 0, run.output + run.errors
    check_gone(run.folder)
    done = [point["step"] for point in steps(run.folder)]
    assert done == list(range(1, len(done) + 1))
    with LedgerReader(run.folder / "ledger") as ledger:
        groups = list(ledger.groups(states=()))
        assert {group.phase for group in groups} <= {Phase.RETIRED, Phase.DROPPED}
        assert set(ledger.dropped()) <= {"run ended"}
        assert Counter(group.step for group in groups if group.phase == Phase.RETIRED) == dict.fromkeys(range(len(done)), 4)
        for group in groups:
            if group.phase == Phase.RETIRED:
                assert group.oldest is not None
                assert group.step is not None
                assert 0 <= group.step - group.oldest.step <= 2


def test_replicas_that_are_killed_are_replaced_while_the_run_goes_on(config: Path, tmp_path: Path) -> None:
    with started(config, *LONG, folder=tmp_path / "run") as run:
        run.reaches(2)
        trainer = run.member("trainer-0").pid
        run.member("rollout-1").kill()
        sees(run, lambda point: point["weight_sync/epoch"] >= 2, "an epoch without the dead rollout")
        sees(run, lambda point: point["rollout/serving"] == 2 and point["weight_sync/epoch"] >= 3, "the rollout's return")
        assert sum(point["rollout/lost"] for point in steps(run.folder)) == 1

        status = sluice("status", str(run.folder)).stdout
        assert "rollout-0, rollout-1" in status
        row = next(line for line in status.splitlines() if "rollout-1" in line and "│" in line)
        assert [cell.strip() for cell in row.strip("│ \n").split("│")][-3] == "1"  # restarts

        run.member("reward-0").kill()
        run.member("reference-0").kill()
        run.says("reward-0: run: ", BACK)  # and why, as the launcher or the coordinator saw it first
        run.says("reference-0: run: ", BACK)
        run.reaches(run.steps() + 5, BACK)  # which need both

        for name in ("rollout-0", "rollout-1"):  # there is no rollout left
            run.member(name).kill()
        sees(run, lambda point: sum(one["rollout/lost"] for one in steps(run.folder)) == 3, "both losses in the books")
        sees(run, lambda point: point["rollout/serving"] == 2, "the return of both")
        assert run.member("trainer-0").pid == trainer
        ends_well(run)
