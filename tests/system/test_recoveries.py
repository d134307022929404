"""Groups that are killed in the middle of a run, whole or one rank of theirs: they are started again as one, and it goes on."""

from __future__ import annotations

import importlib.util
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from runtime.ledger.reader import GroupRow, LedgerReader
from runtime.ledger.states import Phase
from runtime.telemetry.report.record import read_jsonl
from tests.system.runs import Live, check_gone, eventually, one_line, started, steps, summary, trained, write_config
from tests.system.test_spmd import SMOOTH, VARIETY, assert_compared

pytestmark = pytest.mark.timeout(400)

STEPS, EVERY = 24, 4
SHORT = (f"training.steps={STEPS}", f"checkpoint.every={EVERY}", "deadlines.stop=60")
BACKOFF = tuple(f"services.{role}.restarts.backoff=0.1" for role in ("trainer", "critic", "reference"))
PPO = ("algorithm.preset=ppo", "critic.optimizer.learning_rate=1e-4")
BACK = 150.0  # seconds until a group has loaded again, on a busy machine
LIVING = ("rollout-0", "rollout-1", "reward-0")
no_megatron = importlib.util.find_spec("megatron") is None


def ready(run: Live) -> None:
    """Waits until there is a checkpoint, and steps after it."""
    run.reaches(EVERY + 2, BACK)


def newest(run: Live) -> float:
    return steps(run.folder)[-1]["time"]


def registrations(run: Live) -> Counter[str]:
    """How many processes of each name there were."""
    log = (run.folder / "logs" / "coordinator.log").read_text()
    return Counter(re.findall(r"INFO (\S+) registered: ", log))


def ends_well(run: Live) -> list[dict[str, Any]]:
    """With every step in the books, and no group in two or lost. Returns the points as they were written."""
    assert run.wait(BACK) == 0, run.output + run.errors
    check_gone(run.folder)
    last = max(point["step"] for point in steps(run.folder))
    assert [point["step"] for point in read_jsonl(run.folder / "metrics.jsonl")] == list(range(1, last + 1))
    result = summary(run.folder)
    assert (result["steps"], result["stop_reason"]) == (last, "all steps done")
    assert result["staleness_max"] <= 2
    with LedgerReader(run.folder / "ledger") as ledger:
        assert ledger.check_final(4)["retired"] == 4 * last
        assert set(ledger.dropped()) <= {"run ended"}
        check_ages(list(ledger.groups(states=[Phase.RETIRED])), last)
    for name in LIVING:
        assert registrations(run)[name] == 1
    return steps(run.folder)


def goes_back(points: list[dict[str, Any]]) -> int | None:
    """The step of the checkpoint that the run went back to, once; None where that was the last step, so that none was made
    again."""
    told = [point["step"] for point in points]
    at = next((at for at in range(1, len(told)) if told[at] <= told[at - 1]), None)
    if at is None:
        assert told == [*range(1, told[-1] + 1)]
        return None
    assert told[:at] + told[at:] == [*range(1, told[at - 1] + 1), *range(told[at], told[-1] + 1)]
    return told[at] - 1


def check_ages(groups: list[GroupRow], last: int) -> None:
    assert Counter(group.step for group in groups) == dict.fromkeys(range(last), 4)
    for group in groups:
        assert group.oldest is not None and group.newest is not None and group.step is not None
        assert group.oldest.incarnation == group.newest.incarnation
        assert group.step - group.oldest.step <= 2


@pytest.mark.parametrize(("role", "settings"), [("trainer", ()), ("critic", PPO)])
def test_a_group_under_training_goes_on_from_the_newest_checkpoint(
    config: Path, tmp_path: Path, role: str, settings: tuple[str, ...]
) -> None:
    with started(config, *SHORT, *BACKOFF, *settings, folder=tmp_path / "run") as run:
        ready(run)
        run.member(f"{role}-0").kill()
        run.says(f"{role}-0: run: ", BACK)
        run.says("recovering", BACK)
        back = goes_back(ends_well(run))
        assert back is None or (back % EVERY == 0 and back > 0)
        both = ("trainer-0", "critic-0") if role == "critic" else ("trainer-0",)
        assert {name: registrations(run)[name] for name in both} == dict.fromkeys(both, 2)
        assert (run.folder / "logs" / f"{role}-0.1.log").exists()


def test_what_is_made_again_after_the_loss_of_a_rank_is_what_would_have_been(tiny: Path, tmp_path: Path) -> None:
    """On-policy, what is generated depends on weights and seeds alone: both ranks' weights, moments and all are restored."""
    rule = tmp_path / "variety.py"
    rule.write_text(VARIETY)
    config = write_config(
        tmp_path / "config.yaml",
        tiny,
        rewards={"rules": [{"name": f"{rule}:variety"}]},
        algorithm={"kl_coefficient": 0.1},
        training={"steps": 12, "staleness": 0, "optimizer": SMOOTH},
        checkpoint={"every": EVERY},
        services={"trainer": {"processes": 2}},
        publication={"senders": "all"},
        deadlines={"stop": 60.0},
    )
    whole = trained(config, folder=tmp_path / "whole", timeout=BACK)
    with started(config, *BACKOFF, folder=tmp_path / "run") as run:
        ready(run)
        run.member("trainer-0", rank=1).kill()
        assert goes_back(ends_well(run)) in (4, 8, None)
    expected, found = (read_jsonl(one.folder / "metrics.jsonl") for one in (whole, run))
    for wanted, point in zip(expected, found, strict=True):
        assert_compared(point, wanted)
    assert expected[-1]["actor/kl_loss"] > 1e-5  # the weights have moved


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
        assert one_line(run.errors).startswith(line)
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


@pytest.mark.skipif(no_megatron, reason="needs megatron-core: make install-dev")
def test_a_reference_of_two_ranks_comes_back_whole(config: Path, tmp_path: Path) -> None:
    """It holds nothing: no step is made again."""
    settings = (
        "services.reference.engine=megatron",
        "services.reference.processes=2",
        "services.reference.parallel.pipeline=2",
    )
    with started(config, *SHORT, *BACKOFF, *settings, folder=tmp_path / "run") as run:
        ready(run)
        run.member("reference-0", rank=1).kill()
        run.says("reference-0: run: ", BACK)
        assert [point["step"] for point in ends_well(run)] == list(range(1, STEPS + 1))
        assert {name: registrations(run)[name] for name in ("trainer-0", "reference-0", "reference-1")} == {
            "trainer-0": 1,
            "reference-0": 2,
            "reference-1": 2,
        }
