"""`sluice play`: which task it has played, and what it shows of it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from rich.console import Console

from launcher import cli
from launcher.commands import play
from launcher.node.local_node import LocalNode
from launcher.view import View
from runtime.config import Config
from runtime.config.loading import load
from runtime.data.handlers import load_problems
from runtime.errors import UserError
from runtime.evaluation.generations import Generation


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Of two sources with three tasks and two, whose rows differ in their form."""
    first = tmp_path / "first.jsonl"
    first.write_text("".join(json.dumps({"question": f"{n}?", "answer": n}) + "\n" for n in range(3)))
    second = tmp_path / "second.jsonl"
    second.write_text("".join(json.dumps({"who": "maze", "size": n}) + "\n" for n in (3, 4)))
    train = f"[{{path: {first}}}, {{path: {second}, handler: task, environment_key: who}}]"
    return load({"run": {"name": "a", "dir": str(tmp_path / "run")}}, [f"data.train={train}", "sampling.temperature=0.5"])


def playing(config: Config, task: int) -> Config:
    made = play._OneTask(config, View(Console(file=io.StringIO())), LocalNode.of(config))
    made.task = task
    return made.chosen(config)


@pytest.mark.parametrize(("task", "told"), [(0, {"question": "0?", "answer": 0}), (4, {"who": "maze", "size": 4})])
def test_tasks_are_counted_over_all_sources(config: Config, task: int, told: dict[str, Any]) -> None:
    chosen = playing(config, task)
    assert [json.loads(line) for line in Path(chosen.data.eval).read_text().splitlines()] == [told]
    assert chosen.data.train == "" and chosen.evaluation.temperature == 0.5
    (problem,) = load_problems(chosen.data.eval, chosen.data, "data.eval").problems
    assert problem.environment == told.get("who", "")


@pytest.mark.parametrize(("task", "why"), [(5, "--task: 5, but there are only 5 tasks"), (-1, "--task: -1 is below 0")])
def test_a_task_that_is_not_there_is_refused(config: Config, task: int, why: str) -> None:
    with pytest.raises(UserError, match=why):
        playing(config, task)


def test_the_conversation_is_shown_with_what_it_earned() -> None:
    played = Generation(
        set="eval",
        problem="a:1",
        sample=0,
        prompt="<|user|>2?",
        reply="2",
        label="2",
        answer="2",
        reward=0.5,
        rules={"gsm8k": 1.0, "format": None},
        correct=True,
        tokens=1,
        finish="stop",
        versions=("0", "0"),
        logprob=None,
    )
    assert play.shown(played) == "<|user|>2?2\n\na:1: reward 0.5 (gsm8k 1), stop"
    branches = structs.replace(
        played, earlier=["<|user|>1?1"], prompt="", reply="<|user|>2?2", outcome="max_turns", logprob=-1.0
    )
    assert play.shown(branches) == "<|user|>1?1\n\n<|user|>2?2\n\na:1: reward 0.5 (gsm8k 1), max_turns"
    silent = structs.replace(played, prompt="\0", reply="", rules={}, reward=None, outcome="left out: it broke")
    assert play.shown(silent) == "(the model gave no reply)\n\na:1: no reward, left out: it broke"


@pytest.mark.parametrize(
    ("arguments", "overrides", "task"),
    [
        (["play", "a.yaml", "--task", "3", "b.c=1", "d=2"], ["b.c=1", "d=2"], 3),
        (["play", "a.yaml", "b.c=1", "--task", "3", "d=2"], ["b.c=1", "d=2"], 3),
        (["play", "--task", "3", "a.yaml"], [], 3),
        (["play", "a.yaml", "d=2"], ["d=2"], 0),
    ],
)
def test_overrides_may_stand_before_and_behind_options(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], overrides: list[str], task: int
) -> None:
    seen = []
    monkeypatch.setitem(cli._COMMANDS, "play", lambda options: seen.append(options) or 0)
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert not ended.value.code
    assert (seen[0].overrides, seen[0].task, seen[0].config) == (overrides, task, Path("a.yaml"))


@pytest.mark.parametrize("rest", [["--task", "1", "word"], ["--unknown", "a=b"], ["--task", "one"]])
def test_what_is_no_override_is_still_a_mistake(rest: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["play", "a.yaml", "b=1", *rest])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("error: ")
