"""A PPO run whose groups are killed one after the other, whole or one rank of theirs: each is started again as one, and the run
goes on where it was."""

from __future__ import annotations

import importlib.util
import random
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from runtime.ledger.reader import GroupRow, LedgerReader
from runtime.ledger.states import Phase
from runtime.telemetry.record import read_jsonl
from tests.system.runs import LONG, SOON, Live, check_gone, started, steps, summary
from tests.system.test_takeover import OFTEN, kill_coordinator, others

pytestmark = pytest.mark.timeout(600)

EVERY = 4
PPO = ("algorithm.preset=ppo", "critic.learning_rate=1e-4")
SETTINGS = (f"checkpoint.every={EVERY}", "checkpoint.keep=100", f"evaluation.every={EVERY}")
REFERENCE = ("engine=megatron", "processes=2", "parallel.pipeline=2")
BACK = 150.0  # seconds until a group has loaded again, on a busy machine
LIVING = ("rollout-0", "rollout-1", "reward-0")


def registrations(run: Live) -> Counter[str]:
    """How many processes of each name there were."""
    log = (run.folder / "logs" / "coordinator.log").read_text()
    return Counter(re.findall(r"INFO (\S+) registered: ", log))


def made_again(run: Live) -> list[int]:
    """The steps of the checkpoints that the run went back to, but for those that were its last step."""
    told = [point["step"] for point in steps(run.folder)]
    back = [after - 1 for before, after in pairwise(told) if after <= before]
    assert all(after == before + 1 or after <= before for before, after in pairwise(told)), told
    return back


def check_ages(rows: list[GroupRow], last: int) -> None:
    assert Counter(row.step for row in rows) == dict.fromkeys(range(last), 4)
    for row in rows:
        assert row.oldest is not None and row.newest is not None and row.step is not None
        assert row.oldest.incarnation == row.newest.incarnation
        assert row.step - row.oldest.step <= 2


def test_groups_come_back_whole_and_no_step_is_lost(config: Path, tmp_path: Path) -> None:
    two = importlib.util.find_spec("megatron") is not None
    settings = [f"services.reference.{each}" for each in (REFERENCE if two else ())]
    with started(config, *LONG, *PPO, *SETTINGS, *settings, *OFTEN, folder=tmp_path / "run", modules=SOON) as run:
        run.reaches(EVERY + 2, BACK)
        run.member("reference-0", rank=int(two)).kill()  # it holds nothing: no step is made again
        run.says("reference-0: run: ", BACK)
        run.reaches(run.steps() + 4, BACK)
        assert made_again(run) == []
        for kills, role in enumerate(("critic", "trainer"), 1):
            run.member(f"{role}-0").kill()
            run.says(f"{role}-0: run: ", BACK)
            run.comes(lambda kills=kills: registrations(run)["trainer-0"] == kills + 1, BACK, "both again")
            done = len(steps(run.folder))
            run.comes(lambda done=done: len(steps(run.folder)) >= done + 4, BACK, "more steps")
            assert made_again(run) == []
        assert "recovering" in run.output
        both = {"reference-0": 2, "reference-1": 2} if two else {"reference-0": 2}
        again = {**dict.fromkeys(LIVING, 1), **both, "trainer-0": 3, "critic-0": 3}
        assert {name: registrations(run)[name] for name in again} == again
        before, chance = others(run), random.Random(3)
        for _ in range(2):
            kill_coordinator(run, chance.uniform(0.0, 0.4))
        assert others(run) == before
        run.interrupt()
        assert run.wait(BACK) == 0, run.output + run.errors
        check_gone(run.folder)
    last = max(point["step"] for point in steps(run.folder))
    assert [point["step"] for point in read_jsonl(run.folder / "metrics.jsonl")] == list(range(1, last + 1))
    result = summary(run.folder)
    assert (result["steps"], result["stop_reason"]) == (last, "interrupted")
    assert result["staleness_max"] <= 2
    with LedgerReader(run.folder / "ledger") as ledger:
        assert ledger.check_final(4)["retired"] == 4 * last
        assert set(ledger.dropped()) <= {"run ended"}
        check_ages(list(ledger.groups(states=[Phase.RETIRED])), last)
