"""`sluice eval`: what it starts and what it leaves, and how it goes on and ends. test_quickstart.py has its figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runtime.evaluation import results as evaluation
from tests.system.runs import START, check_gone, eventually, refused, shown, started

pytestmark = pytest.mark.timeout(240)

RUN = 120.0
TOLD = 90.0  # seconds until an evaluation whose process was killed has ended
LONG = ("evaluation.samples=2000", "evaluation.temperature=1", "evaluation.problems=0")  # nobody waits for its end
WITHOUT_TRAINING = ("data.train=''", "sampling.group_size=1", "services.trainer.processes=3")


def test_several_sets_are_evaluated_without_anything_of_training_and_a_second_one_is_disturbed(
    config: Path, tiny: Path, tmp_path: Path
) -> None:
    sets = json.dumps(
        [{"name": "easy", "path": str(tiny / "train.jsonl"), "problems": 5, "samples": 6, "k": [1, 3], "temperature": 1}]
    )
    folder = tmp_path / "run"
    with started(config, *WITHOUT_TRAINING, f"evaluation.sets={sets}", folder=folder, command="eval") as run:
        assert run.wait(RUN) == 0, run.output + run.errors
        check_gone(folder)
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
    replies = list(evaluation.read_replies(evaluation.folder_for(folder / "eval", 0) / "easy.jsonl"))
    assert [each.sample for each in replies] == 5 * list(range(6))
    assert {each.versions for each in replies} == {("0.0", "0.0")}
    for words in ("held_out", "easy", "pass@3", "maj@3", str(evaluation.folder_for(folder / "eval", 0))):
        assert words in run.output
    assert len(shown(folder / "eval", "--eval", "--limit", "0")) == 16 + 30
    (point,) = (json.loads(line) for line in (folder / "eval" / "metrics.jsonl").read_text().splitlines())
    assert point["eval/easy/pass@3"] == other.pass_at[3]

    # Over what is there, once that is asked for: a rollout is lost, and Ctrl-C keeps the replies so far.
    assert "run.overwrite" in refused(config, folder, command="eval", whole=True)
    with started(config, *LONG, "run.overwrite=true", folder=folder, command="eval") as run:
        run.says("evaluating")
        run.member("rollout-1").kill()
        run.says("rollout-1: run: was killed by SIGKILL; started again in 0.5 s")
        again = folder / "eval" / "logs" / "rollout-1.1.log"
        eventually(lambda: again.exists() and "serves on" in again.read_text(), START, "another in its place")
        run.says("/32")
        run.interrupt()
        assert run.wait(TOLD) == 0, run.output + run.errors
        check_gone(folder)
    assert "the replies so far are in" in run.output
    assert not run.errors
    assert evaluation.read(folder / "eval") == []
    assert not (evaluation.folder_for(folder / "eval", 0) / "easy.jsonl").exists()
    assert list(evaluation.read_replies(evaluation.folder_for(folder / "eval", 0) / "held_out.jsonl"))
    assert "Traceback" not in (folder / "eval" / "logs" / "coordinator.log").read_text()


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
    line = refused(config, tmp_path / "run", *overrides, command="eval")
    assert all(part in line for part in parts), line
