"""Groups that are killed in the middle of a run, whole or one rank of theirs: they are started again as one, and it goes on."""

from __future__ import annotations

import importlib.util
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from runtime.ledger_reader import GroupRow, LedgerReader
from runtime.pipeline.states import Phase
from runtime.trackers import read_jsonl
from tests.system.runs import Live, check_gone, eventually, one_line, started, steps, summary

pytestmark = pytest.mark.timeout(400)

STEPS, EVERY = 24, 4
SHORT = (f"training.steps={STEPS}", f"checkpoint.every={EVERY}")
BACKOFF = tuple(f"services.{role}.restarts.backoff=0.1" for role in ("trainer", "critic", "reference"))
PPO = ("algorithm.preset=ppo", "critic.optimizer.learning_rate=1e-4")
BACK = 150.0  # seconds until a group has loaded again, on a busy machine
LIVING = ("rollout-0", "rollout-1", "reward-0")
no_megatron = importlib.util.find_spec("megatron") is None


def ready(run: Live) -> dict[str, int]:
    """The pids of who is to live on, once there are checkpoints."""
    run.reaches(EVERY + 2)
    return {name: run.member(name).pid for name in LIVING}


def newest(run: Live) -> float:
    return steps(run.folder)[-1]["time"]


def ends_well(run: Live) -> list[dict[str, Any]]:
    """With every step in the books, and no group in two or lost. Returns the points as they were written."""
    assert run.wait(BACK) == 0, run.output + run.errors
    check_gone(run.folder)
    assert [point["step"] for point in read_jsonl(run.folder / "metrics.jsonl")] == list(range(1, STEPS + 1))
    result = summary(run.folder)
    assert (result["steps"], result["stop_reason"]) == (STEPS, "all steps done")
    assert result["staleness_max"] <= 2
    with LedgerReader(run.folder / "ledger") as ledger:
        assert ledger.check_final(4)["retired"] == 4 * STEPS
        assert set(ledger.dropped()) <= {"run ended"}
        check_ages(list(ledger.groups(states=[Phase.RETIRED])))
    return steps(run.folder)


def check_ages(groups: list[GroupRow]) -> None:
    assert Counter(group.step for group in groups) == dict.fromkeys(range(STEPS), 4)
    for group in groups:
        assert group.oldest is not None and group.newest is not None and group.step is not None
        assert group.oldest.incarnation == group.newest.incarnation
        assert group.step - group.oldest.step <= 2


@pytest.mark.parametrize(
    ("role", "rank", "settings"),
    [
        ("trainer", 0, ()),
        ("trainer", 1, ("services.trainer.processes=2",)),
        ("critic", 0, PPO),
    ],
)
def test_a_group_under_training_goes_on_from_the_newest_checkpoint(
    config: Path, tmp_path: Path, role: str, rank: int, settings: tuple[str, ...]
) -> None:
    with started(config, *SHORT, *BACKOFF, *settings, folder=tmp_path / "run") as run:
        living = ready(run)
        killed = time.time()
        run.member(f"{role}-0", rank).kill()
        run.says(f"{role}-0: run: ", BACK)
        run.says("recovering", BACK)
        eventually(lambda: newest(run) > killed + 1.0, BACK, "another step")
        assert {name: run.member(name).pid for name in LIVING} == living
        told = [point["step"] for point in ends_well(run)]
        back = next(at for at in range(1, len(told)) if told[at] <= told[at - 1])
        assert told[back] % EVERY == 1  # the step after a checkpoint
        assert told[back] > 1
        assert told[:back] + told[back:] == [*range(1, told[back - 1] + 1), *range(told[back], STEPS + 1)]
        assert sorted(path.name for path in (run.folder / "logs").glob(f"{role}-0*")) == [f"{role}-0.1.log", f"{role}-0.log"]


def test_out_of_attempts_the_run_ends_and_says_so_first(config: Path, tmp_path: Path) -> None:
    settings = ("training.steps=100000", "checkpoint.every=4", *BACKOFF, "services.trainer.restarts.attempts=1")
    with started(config, *settings, folder=tmp_path / "run") as run:
        ready(run)
        for _ in range(2):
            killed = time.time()
            run.member("trainer-0").kill()
            eventually(lambda: run.process.poll() is not None or newest(run) > killed + 1.0, BACK, "another step")  # noqa: B023
        assert run.wait(BACK) == 1, run.output + run.errors
        check_gone(run.folder)
        line = "error: trainer-0: run: was killed by SIGKILL; services.trainer.restarts allows no further start"
        assert one_line(run.errors) == line
        assert (run.folder / "checkpoints").is_dir()


def test_a_mistake_of_the_users_is_not_tried_again(config: Path, tiny: Path, tmp_path: Path) -> None:
    weights = tiny / "model" / "model.safetensors"
    with started(config, *SHORT, *BACKOFF, folder=tmp_path / "run") as run:
        ready(run)
        aside = weights.rename(tmp_path / weights.name)
        try:
            run.member("trainer-0").kill()
            assert run.wait(BACK) == 2, run.output + run.errors
        finally:
            aside.rename(weights)
        check_gone(run.folder)
        assert str(tiny / "model") in one_line(run.errors)


@pytest.mark.skipif(no_megatron, reason="needs megatron-core")
def test_a_reference_of_two_ranks_comes_back_whole(config: Path, tmp_path: Path) -> None:
    """It holds nothing: no step is made again."""
    settings = (
        "services.reference.engine=megatron",
        "services.reference.processes=2",
        "services.reference.parallel.pipeline=2",
    )
    with started(config, *SHORT, *BACKOFF, *settings, folder=tmp_path / "run") as run:
        living = ready(run)
        trainer = run.member("trainer-0").pid
        run.member("reference-0", rank=1).kill()
        run.says("reference-0: run: ", BACK)
        run.reaches(STEPS - 2, BACK)
        assert {name: run.member(name).pid for name in LIVING} == living
        assert run.member("trainer-0").pid == trainer
        assert [point["step"] for point in ends_well(run)] == list(range(1, STEPS + 1))
