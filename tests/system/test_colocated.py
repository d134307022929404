"""A run whose rollouts, reference and critic take turns with the trainer on its devices, undisturbed and under faults."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from runtime.ledger.reader import LedgerReader
from tests.system.runs import SOON, START, check_gone, eventually, started, steps, summary
from tests.system.test_takeover import OFTEN, kill_coordinator

pytestmark = pytest.mark.timeout(300)

QUIET, STEPS = 10, 80
SETTINGS = (
    *(f"services.{role}.colocate=trainer" for role in ("rollout", "reference", "critic")),
    *("algorithm.preset=ppo", "critic={}"),
    *("services.trainer.offload=[optimizer]", "services.critic.offload=[optimizer]"),
    *("training.staleness=2", "training.partial_rollouts=true", f"training.steps={STEPS}"),
    *("services.rollout.max_num_seqs=6", "sampling.max_new_tokens=64"),  # a turn ends while half of a group is being generated
    *("evaluation.every=2", "checkpoint.every=2", "checkpoint.keep=2"),
)


def test_they_take_turns_and_who_is_killed_comes_back_in_its_turn(config: Path, tmp_path: Path) -> None:
    chance = random.Random(3)
    with started(config, *SETTINGS, *OFTEN, folder=tmp_path / "run", modules=SOON) as run:
        run.reaches(QUIET)
        run.member("rollout-0").kill()
        eventually(lambda: steps(run.folder)[-1]["rollout/serving"] == 1, START, "a step without it")
        eventually(lambda: steps(run.folder)[-1]["rollout/serving"] == 2, START, "its successor in training")
        for kill in (run.member("trainer-0").kill, lambda: kill_coordinator(run, chance.uniform(0.0, 0.4))):
            kill()
            before = len(steps(run.folder))
            eventually(lambda before=before: len(steps(run.folder)) > before + 1, START, "steps after the loss")
        assert run.wait(START) == 0, run.output + run.errors
        check_gone(run.folder)
    points = steps(run.folder)
    assert sorted({point["step"] for point in points}) == list(range(1, STEPS + 1))
    assert sum(point["rollout/lost"] for point in points) == 1
    assert 0 < max(point["staleness/max"] for point in points) <= 2
    assert all(point["mismatch/max"] < 1e-4 for point in points if "mismatch/max" in point)  # each version arrived whole
    assert summary(run.folder)["groups"]["retired"] == 4 * STEPS
    quiet = points[:QUIET]
    timed = {"timing/onload", "timing/offload", "timing/ref_onload", "timing/ref_offload", "timing/critic_offload"}
    assert timed <= {name for point in quiet for name in point}
    assert all("critic/vf_loss" in point for point in quiet)
    assert sum("timing/weight_sync" in point for point in quiet) >= QUIET // 3 - 1  # once a turn
    kept = sorted(path.name for path in (run.folder / "checkpoints").iterdir() if path.name.startswith("step-"))
    assert kept[-2:] == [f"step-{STEPS - 2:08d}", f"step-{STEPS:08d}"]  # and the best one
    with LedgerReader(run.folder / "ledger") as ledger:
        assert ledger.check_final(4)["retired"] == 4 * STEPS
        versions = {(group.oldest, group.newest) for group in ledger.groups()}
    assert any(oldest != newest for oldest, newest in versions), "no reply was cut by the end of a turn"
