"""`sluice bench rewards` on a handful of cases: both ways judge them, and what is not there is left out or refused."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from benchmarks import command, programs
from benchmarks.rewards import CASES, GSM8K, MODEL, RewardsBenchSettings, measure, render
from benchmarks.rewards_trial import OURS, PLAIN
from runtime.errors import UserError
from tests.sandboxes import needs_bwrap


def write_cases(folder: Path) -> None:
    (folder / CASES).parent.mkdir(parents=True)
    cases = [
        ("gsm8k", "#### 5", "5", True),
        ("boxed", "\\boxed{4}, no: \\boxed{\\frac{10}{2}}", "5", True),  # of which plain math-verify makes a set
        ("expr", "\\sqrt{8}", "2\\sqrt{2}", True),
        ("expr", "7", "8", False),
        ("format", "<think>a</think>", "think_prefix", True),  # not compared
    ]
    names = ("kind", "prediction", "truth", "expected")
    lines = [json.dumps({"id": str(index), **dict(zip(names, case, strict=True))}) for index, case in enumerate(cases)]
    (folder / CASES).write_text("\n".join(lines) + "\n")


def write_replies(folder: Path) -> None:
    (folder / GSM8K).parent.mkdir(parents=True)
    rows = [
        {"ground_truth": "2 + 3 = 5\nA: 5", MODEL: {"is_correct": right, "solution": f"It is {answer}.\nA: {answer}"}}
        for answer, right in (("5", True), ("1,005", False), ("$5.00", True))
    ]
    (folder / GSM8K).write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_both_ways_judge_the_same_cases_and_the_pool_the_replies(tmp_path: Path) -> None:
    write_cases(tmp_path)
    write_replies(tmp_path)
    report = asyncio.run(measure(tmp_path, RewardsBenchSettings(verifiers=("gsm8k",), workers=(1,), rounds=1, programs=0)))
    assert report.cases == 4
    assert report.sides[OURS].agreement == 1.0
    assert report.sides[PLAIN].agreement == 0.75
    assert report.ratio == report.sides[OURS].cases_per_second / report.sides[PLAIN].cases_per_second
    assert report.replies == 3
    assert [(scored.verifier, scored.workers, scored.agreement) for scored in report.scored] == [("gsm8k", 1, 1.0)]
    assert report.scored[0].screened_seconds > 0
    assert report.scored[0].pooled_seconds > 0
    assert len(render(report)) == 2


def test_what_is_not_there_is_left_out(tmp_path: Path) -> None:
    write_replies(tmp_path)
    report = asyncio.run(measure(tmp_path, RewardsBenchSettings(verifiers=("gsm8k",), workers=(1,), rounds=1, programs=0)))
    assert (report.cases, report.replies) == (0, 3)
    assert len(render(report)) == 1


def test_programs_are_judged_beside_the_bare_start_of_a_sandbox() -> None:
    needs_bwrap()
    report = asyncio.run(programs.measure(2, (1,), 1))
    assert report is not None
    assert [judging.workers for judging in report.judged] == [1]
    assert report.judged[0].programs_per_second > 0
    assert set(report.starts) == set(programs.STARTS)
    assert report.late > 0
    assert programs.render(report).row_count == 3


def test_programs_are_left_out_without_a_sandbox(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    said: list[str] = []
    assert asyncio.run(programs.measure(2, (1,), 1, said.append)) is None
    assert said[0].startswith("programs are left out: rewards.sandbox.runtime: 'bwrap' is not installed")


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--data: neither .*verifier_open.jsonl nor .*solutions.jsonl is there"):
        command.run("rewards", command.Options(data=tmp_path))
    with pytest.raises(UserError, match="--data: bench rewards needs a folder"):
        command.run("rewards", command.Options())
    with pytest.raises(UserError, match="--data: only bench rewards and bench scale take a folder"):
        command.run("train", command.Options(data=tmp_path))
