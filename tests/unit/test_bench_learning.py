"""`sluice bench learning`: what it asks of both sides, when the goal counts as reached, and the plain loop's part."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from rich.console import Console

from benchmarks import learning, learning_trial
from benchmarks.inputs import bench_config
from benchmarks.learning import (
    PLAIN,
    SLUICE,
    LearningPoint,
    LearningSettings,
    LearningTrial,
    overrides,
    points,
    render,
    report,
)
from benchmarks.plain_loop import PlainLoop
from benchmarks.staleness.runs import CONFIG
from runtime.config import Config, loading


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    torch.set_num_threads(1)
    return bench_config(tmp_path_factory.mktemp("bench") / "inputs")


def test_a_run_is_the_quickstart_that_stops_at_the_goal(tmp_path: Path) -> None:
    folder = tmp_path / "a: [b] #c"
    config = loading.load(CONFIG, overrides("seed3", 3, LearningSettings(), folder))
    quickstart = loading.load(CONFIG, ())
    assert (config.run.seed, config.run.dir, config.run.overwrite) == (3, str(folder / "seed3"), True)
    assert config.warmup is not None
    assert (config.warmup.seed, config.warmup.cache) == (3, str(folder))
    assert (config.evaluation.every, config.evaluation.before, config.evaluation.after) == (10, True, False)
    assert (config.stop.accuracy, config.training.steps) == (0.9, 300)
    for section in ("algorithm", "sampling", "rewards", "services", "checkpoint", "publication"):
        assert getattr(config, section) == getattr(quickstart, section)
    assert config.training.optimizer == quickstart.training.optimizer


def test_a_runs_clock_starts_after_the_evaluation_before_training() -> None:
    rows = [
        {"step": 0, "time": 100.0, "eval/accuracy": 0.5},
        {"step": 9, "time": 103.0},
        {"step": 10, "time": 104.5, "eval/accuracy": 0.9},
    ]
    assert points(rows) == [LearningPoint(0, 0.0, 0.5), LearningPoint(10, 4.5, 0.9)]


def test_the_first_evaluation_at_the_goal_counts() -> None:
    course = [
        LearningPoint(0, 0.0, 0.5),
        LearningPoint(10, 4.0, 0.89),
        LearningPoint(20, 8.0, 0.9),
        LearningPoint(30, 12.0, 0.95),
    ]
    assert (LearningTrial.of(1, course, 0.9).step, LearningTrial.of(1, course, 0.9).seconds) == (20, 8.0)
    assert (LearningTrial.of(1, course, 0.96).step, LearningTrial.of(1, course, 0.96).seconds) == (None, None)


def _trials(seconds: list[float | None]) -> list[LearningTrial]:
    return [LearningTrial(seed, [], None if took is None else 10 * seed, took) for seed, took in enumerate(seconds, 1)]


def test_the_report_has_medians_and_ratios() -> None:
    one, two = PLAIN.values()
    trials = {SLUICE: _trials([10.0, 30.0, 14.0]), one: _trials([20.0, 20.0, 28.0]), two: _trials([40.0, 60.0, 28.0])}
    made = report(LearningSettings(seeds=3), trials)
    assert made.seconds == {SLUICE: 14.0, one: 20.0, two: 40.0}
    assert made.ratios == {one: [0.5, 1.5, 0.5], two: [0.25, 0.5, 0.5]}
    assert made.ratio == pytest.approx(0.7)
    text = _shown(made)
    assert "medians, sluice train / faster plain loop: 0.70 (aim: at most 1.1)" in text
    assert "10.0, 30.0, 14.0" in text


def test_a_seed_that_never_got_there_leaves_no_median() -> None:
    one, two = PLAIN.values()
    made = report(
        LearningSettings(seeds=2), {SLUICE: _trials([10.0, None]), one: _trials([20.0, 20.0]), two: _trials([None, 40.0])}
    )
    assert made.seconds == {SLUICE: None, one: 20.0, two: None}
    assert made.ratios == {one: [0.5, None], two: [None, None]}
    assert made.ratio is None
    assert "faster plain loop: – (aim" in _shown(made)


def _shown(made: learning.LearningReport) -> str:
    console = Console(record=True, width=200, file=io.StringIO())
    for table in render(made):
        console.print(table)
    return console.export_text()


# ---------------------------------------------------------------------------------------------- the plain loop


def test_the_plain_loop_scores_as_the_rules_do(config: Config) -> None:
    loop = PlainLoop(config)
    replies = [loop._tokenizer._tokenizer.encode(text).ids for text in ("1 6 #### 61", "1 6 #### 51", "61")]
    assert loop._score(replies, ["61"]) == pytest.approx([1.1, 0.1, 0.0])


def test_the_plain_loops_accuracy_is_of_greedy_replies(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = PlainLoop(config)
    prompts = [[65, 66, 67], [72, 73]]
    replies = loop.generate(prompts, greedy=True).tokens
    assert replies == loop.generate(prompts, greedy=True).tokens
    assert len(replies) == 2
    answers = ["7", None]
    monkeypatch.setattr(loop, "_answers", lambda found: answers if found == replies else pytest.fail("other replies"))
    assert loop.accuracy(prompts, ["7", "8"]) == 0.5


def test_the_plain_loop_ramps_its_learning_rate(config: Config) -> None:
    optimizer = replace(config.training.optimizer, learning_rate=1e-3, warmup_steps=2)
    loop = PlainLoop(replace(config, training=replace(config.training, optimizer=optimizer)))
    rates = []
    for _ in range(3):
        rates.append(loop._optimizer.param_groups[0]["lr"])
        loop.step()
    assert rates == pytest.approx([0.5e-3, 1e-3, 1e-3])


def test_the_plain_loop_learns_until_the_goal(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    found = iter([0.2, 0.5, 0.92, 1.0])
    steps: list[int] = []
    monkeypatch.setattr(PlainLoop, "accuracy", lambda self, prompts, labels: next(found))
    monkeypatch.setattr(PlainLoop, "step", lambda self: steps.append(1))
    held_out = replace(config, data=replace(config.data, eval=config.data.train))
    course = learning_trial.learn(held_out, goal=0.9, every=2, steps=20)
    assert [(step, accuracy) for step, _, accuracy in course] == [(0, 0.2), (2, 0.5), (4, 0.92)]
    assert course[0][1] == 0.0 < course[1][1] < course[2][1]
    assert len(steps) == 4
