"""`sluice eval`: what it starts, what it leaves, how it ends when it cannot go on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runtime.evaluation import generations
from runtime.evaluation import results as evaluation
from tests.system.runs import START, Live, belonging, check_gone, eventually, one_line, sluice, started, trained

pytestmark = pytest.mark.timeout(240)

RUN = 120.0
TOLD = 90.0  # seconds until an evaluation whose process was killed has ended
LONG = ("evaluation.samples=2000", "evaluation.temperature=1", "evaluation.problems=0")  # nobody waits for its end
WITHOUT_TRAINING = ("data.train=''", "sampling.group_size=1", "services.trainer.processes=3")


def evaluated(config: Path, *overrides: str, folder: Path) -> Live:
    with started(config, *overrides, folder=folder, command="eval") as run:
        assert run.wait(RUN) == 0, run.output + run.errors
        check_gone(folder)
    return run


def refused(config: Path, folder: Path, *overrides: str) -> str:
    ended = sluice("eval", str(config), f"run.dir={folder}", *overrides)
    assert ended.returncode == 2, ended.stdout + ended.stderr
    check_gone(folder)
    return one_line(ended.stderr).removeprefix("error: ")


def test_several_sets_are_evaluated_without_anything_of_training(config: Path, tiny: Path, tmp_path: Path) -> None:
    sets = json.dumps(
        [{"name": "easy", "path": str(tiny / "train.jsonl"), "problems": 5, "samples": 6, "k": [1, 3], "temperature": 1}]
    )
    folder = tmp_path / "run"
    run = evaluated(config, *WITHOUT_TRAINING, f"evaluation.sets={sets}", folder=folder)
    assert sorted(path.stem for path in (folder / "eval" / "logs").iterdir()) == [
        "coordinator",
        "reward-0",
        "rollout-0",
        "rollout-1",
    ]
    (result,) = evaluation.read(folder / "eval")
    held_out, other = result.sets
    assert (held_out.problems, held_out.samples, set(held_out.pass_at)) == (16, 1, {1})
    assert (other.problems, other.samples, other.scored, set(other.pass_at), set(other.maj_at)) == (5, 6, 30, {1, 3}, {3})
    assert result.accuracy == pytest.approx((held_out.pass_at[1] + other.pass_at[1]) / 2)
    assert result.model == str(tiny / "model")
    replies = list(generations.read(evaluation.folder_for(folder / "eval", 0) / "easy.jsonl"))
    assert [each.sample for each in replies] == 5 * list(range(6))
    assert {each.versions for each in replies} == {("0.0", "0.0")}
    for words in ("held_out", "easy", "pass@3", "maj@3", str(evaluation.folder_for(folder / "eval", 0))):
        assert words in run.output
    shown = sluice("samples", str(folder / "eval"), "--eval", "--jsonl", "--limit", "0").stdout.splitlines()
    assert len(shown) == 16 + 30
    (point,) = (json.loads(line) for line in (folder / "eval" / "metrics.jsonl").read_text().splitlines())
    assert point["eval/easy/pass@3"] == other.pass_at[3]

    assert "run.overwrite" in refused(config, folder)
    evaluated(config, "run.overwrite=true", folder=folder)
    (again,) = evaluation.read(folder / "eval")
    assert [each.name for each in again.sets] == ["held_out"]
    assert again.sets[0].pass_at == held_out.pass_at
    assert not (evaluation.folder_for(folder / "eval", 0) / "easy.jsonl").exists()


def test_a_checkpoint_and_an_export_are_models_and_the_run_beside_is_left_alone(config: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    trained(config, "training.steps=2", "evaluation.after=true", folder=folder, timeout=RUN)
    (after,) = evaluation.read(folder)
    for model in (folder / "model", folder / "checkpoints" / "step-00000002" / "model"):
        evaluated(config, f"model.path={model}", "run.overwrite=true", folder=folder)
        (result,) = evaluation.read(folder / "eval")
        assert (result.accuracy, result.sets[0].lengths) == (after.accuracy, after.sets[0].lengths)
    assert evaluation.read(folder) == [after]
    assert (folder / "ledger" / "ledger.sqlite").exists()


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (("data.eval=''",), ["data.eval: missing", "evaluation.sets"]),
        (("evaluation.k=[1,8]", "evaluation.samples=4", "evaluation.temperature=1"), ["evaluation.k", "8", "4 samples"]),
        (("evaluation.k=[2]", "evaluation.samples=4"), ["evaluation.temperature", "above 0"]),
        (("data.eval=/nowhere/e.jsonl",), ["data.eval", "/nowhere/e.jsonl"]),
        (("model.path=/nowhere/model",), ["model.path", "/nowhere/model"]),
        (("rewards.rules=[]",), ["rewards.rules", "empty"]),
        (("evaluation.sets=[{name: a}]",), ["evaluation.sets.0.path", "missing"]),
    ],
)
def test_a_mistake_is_one_line(config: Path, tmp_path: Path, overrides: tuple[str, ...], parts: list[str]) -> None:
    line = refused(config, tmp_path / "run", *overrides)
    assert all(part in line for part in parts), line


def test_a_rollout_that_is_killed_is_replaced(config: Path, tmp_path: Path) -> None:
    with started(config, *LONG, folder=tmp_path / "run", command="eval") as run:
        run.says("evaluating")
        run.member("rollout-1").kill()
        run.says("rollout-1: run: was killed by SIGKILL; started again in 0.5 s")
        again = run.folder / "eval" / "logs" / "rollout-1.1.log"
        eventually(lambda: again.exists() and "serves on" in again.read_text(), START, "another in its place")
        run.interrupt()
        assert run.wait(TOLD) == 0, run.output + run.errors
        check_gone(run.folder)


@pytest.mark.parametrize("name", ["reward-0", "coordinator"])
def test_a_process_that_is_killed_is_named(config: Path, tmp_path: Path, name: str) -> None:
    never = ("services.reward.restarts.attempts=0", "services.coordinator.restarts.attempts=0")
    with started(config, *LONG, *never, folder=tmp_path / "run", command="eval") as run:
        run.says("evaluating")
        run.member(name).kill()
        assert run.wait(TOLD) == 1, run.output + run.errors
        check_gone(run.folder)
        line = one_line(run.errors)
        assert line.startswith(f"error: {name}: ")
        assert "SIGKILL" in line
        assert evaluation.read(run.folder / "eval") == []


def test_ctrl_c_stops_in_order_and_keeps_the_replies_so_far(config: Path, tmp_path: Path) -> None:
    with started(config, *LONG, folder=tmp_path / "run", command="eval") as run:
        run.says("/32")
        run.interrupt()
        assert run.wait(TOLD) == 0, run.output + run.errors
        check_gone(run.folder)
        assert "the replies so far are in" in run.output
        assert not run.errors
        assert list(generations.read(evaluation.folder_for(run.folder / "eval", 0) / "held_out.jsonl"))
        assert evaluation.read(run.folder / "eval") == []
        assert "Traceback" not in (run.folder / "eval" / "logs" / "coordinator.log").read_text()


def test_ctrl_c_twice_ends_at_once(config: Path, tmp_path: Path) -> None:
    with started(config, *LONG, folder=tmp_path / "run", command="eval") as run:
        run.says("evaluating")
        run.interrupt()
        run.interrupt()
        assert run.wait(TOLD) in (0, 130)
        check_gone(run.folder)
        assert not belonging(run.folder)
