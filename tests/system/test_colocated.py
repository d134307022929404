"""Whole runs whose rollouts take turns with the trainer, and whose critic lies on its devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.ledger.reader import LedgerReader
from tests.system.runs import START, eventually, started, steps, summary, trained

pytestmark = pytest.mark.timeout(240)

TURNS = ("services.rollout.colocate=trainer",)


@pytest.mark.parametrize("staleness", [0, 1])
def test_rollouts_and_trainer_take_turns(config: Path, tmp_path: Path, staleness: int) -> None:
    asked = (f"training.staleness={staleness}", "evaluation.every=2", "evaluation.after=true")
    reference = "services.reference.colocate=trainer"
    run = trained(config, *TURNS, *asked, reference, folder=tmp_path / "run", timeout=180)
    assert summary(run.folder)["groups"] == {"retired": 16, "dropped": 0}
    points = steps(run.folder)
    assert {point["staleness/max"] for point in points} == set(map(float, range(staleness + 1)))
    timed = {"timing/onload", "timing/ref_onload", "timing/ref_offload"}
    assert all(timed <= point.keys() for point in points[:: 1 + staleness])
    assert all("timing/weight_sync" in point for point in points[staleness :: 1 + staleness])
    assert all(point["mismatch/max"] < 1e-4 for point in points[:: 1 + staleness])  # each version arrived whole


def test_replies_that_are_not_done_go_on_in_the_next_turn(config: Path, tmp_path: Path) -> None:
    asked = ("training.staleness=2", "training.partial_rollouts=true", "training.steps=12")
    run = trained(config, *TURNS, *asked, folder=tmp_path / "run", timeout=180)
    assert summary(run.folder)["groups"]["dropped"] == 0
    points = steps(run.folder)
    assert len(points) == 12
    assert 0 < max(point["staleness/max"] for point in points) <= 2
    assert all(point["mismatch/max"] < 1e-4 for point in points if "mismatch/max" in point)
    with LedgerReader(run.folder / "ledger") as ledger:
        versions = {(group.oldest, group.newest) for group in ledger.groups()}
    assert any(oldest != newest for oldest, newest in versions), "no reply was cut by the end of a turn"


def test_a_rollout_that_is_killed_comes_back_in_its_turn(config: Path, tmp_path: Path) -> None:
    with started(config, *TURNS, "training.staleness=1", "training.steps=100000", folder=tmp_path / "run") as run:
        run.reaches(3)
        run.member("rollout-0").kill()
        eventually(lambda: steps(run.folder)[-1]["rollout/serving"] == 1, START, "a step without it")
        run.reaches(run.steps() + 3)
        eventually(lambda: steps(run.folder)[-1]["rollout/serving"] == 2, START, "its successor in training")
        run.reaches(run.steps() + 3)
        assert sum(point["rollout/lost"] for point in steps(run.folder)) == 1
        assert max(point["staleness/max"] for point in steps(run.folder)) == 1.0


@pytest.mark.parametrize("settings", [(), ("algorithm.preset=ppo", "critic={}", "services.critic.colocate=trainer")])
def test_a_trainer_that_is_killed_comes_back_while_the_rollouts_sleep(
    config: Path, tmp_path: Path, settings: tuple[str, ...]
) -> None:
    often = ("training.staleness=1", "training.steps=24", "checkpoint.every=2")
    with started(config, *TURNS, *settings, *often, folder=tmp_path / "run") as run:
        for step in (3, 9, 15):
            run.reaches(step)
            run.member("trainer-0").kill()
            before = run.steps()
            eventually(lambda before=before: run.steps() > before + 1, START, "steps after the loss")
        assert run.wait(START) == 0, run.output + run.errors
    found = steps(run.folder)
    assert sorted({point["step"] for point in found}) == list(range(1, 25))
    assert max(point["staleness/max"] for point in found) == 1.0
    assert all(point["mismatch/max"] < 1e-4 for point in found if "mismatch/max" in point)


PPO = ("algorithm.preset=ppo", "critic={}", "services.critic.colocate=trainer")
AWAY = ("services.trainer.offload_train_optimizer=true", "services.critic.offload_train_optimizer=true")


@pytest.mark.parametrize("turns", [(), (*TURNS, "training.staleness=1")])
def test_trainer_and_critic_alternate_on_the_same_devices(config: Path, tmp_path: Path, turns: tuple[str, ...]) -> None:
    run = trained(config, *PPO, *AWAY, *turns, "checkpoint.every=2", folder=tmp_path / "run", timeout=180)
    points = steps(run.folder)
    assert len(points) == 4
    assert all({"critic/vf_loss", "timing/critic_offload", "timing/offload"} <= point.keys() for point in points)
    assert sorted(path.name for path in (run.folder / "checkpoints").iterdir()) == ["step-00000002", "step-00000004"]
