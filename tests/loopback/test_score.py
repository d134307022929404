"""`sluice score` and `sluice bench rewards` on small files: order, fields, bad lines, summaries, and what they refuse."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import command, programs
from benchmarks.rewards import CASES, GSM8K, MODEL, RewardsBenchSettings, Scored, measure, render
from benchmarks.rewards_trial import OURS, PLAIN
from launcher.commands import score as score_module
from launcher.commands.score import score
from runtime.errors import UserError
from tests.sandboxes import needs_bwrap

ROOT = Path(__file__).parents[2]
COUNTER = itertools.count()
RULES = """
import time
from runtime.rewards.rules import rule

@rule("NAME")
def own(text, label, context):
    if text == "slow":
        time.sleep(0.2)
    if text == "hang":
        time.sleep(600)
    if text == "raise":
        raise LookupError(text)
    return len(text) / 4
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    """A verifier of one's own, under a name of its own: a process registers a name once."""
    name = f"test_score_{next(COUNTER)}"
    (tmp_path / "own.py").write_text(RULES.replace("NAME", name))
    return f"{tmp_path}/own.py:{name}"


def write(folder: Path, *lines: dict[str, Any] | bytes) -> Path:
    path = folder / "replies.jsonl"
    path.write_bytes(b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines))
    return path


def case(id: object, prediction: object, truth: object = "5", **more: Any) -> dict[str, Any]:
    return {"id": id, "prediction": prediction, "truth": truth, **more}


def scored(path: Path, verifier: str | None, workers: int = 1, timeout: float | None = None) -> list[dict[str, Any]]:
    output = path.with_name("scores.jsonl")
    score(path, verifier, workers, timeout, output)
    return [json.loads(line) for line in output.read_text().splitlines()]


def test_each_line_gets_a_score(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(
        tmp_path,
        case("a", "so \\boxed{10/2}", kind="math", expected=True),
        case(2, "so \\boxed{\\sqrt{24}+1}", kind="math", expected=False),
        case([3], "5", kind="other", expected=True),
        case(None, "#### 5"),
    )
    lines = scored(path, "math")
    assert set(lines[0]) == {"id", "score", "equal", "error", "seconds"}
    assert [line["id"] for line in lines] == ["a", 2, [3], None]
    assert [(line["score"], line["equal"]) for line in lines] == [(1.0, True), (0.0, False), (0.0, False), (1.0, True)]
    assert all(line["error"] is None and line["seconds"] > 0 for line in lines)
    summary = capsys.readouterr().err
    assert "4 cases in" in summary
    assert "errors: none" in summary
    assert "agreement with `expected`: 66.67% (math 2/2, other 0/1)" in summary


def test_order_is_kept_and_errors_have_no_score(own: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = ["slow", "hang", "x", "raise", "xxxx", *(str(number) for number in range(300))]
    path = write(tmp_path, *(case(index, text, expected=True) for index, text in enumerate(texts)))
    lines = scored(path, own, workers=2, timeout=1.0)
    assert [line["id"] for line in lines] == list(range(len(texts)))
    assert [line["score"] for line in lines[:5]] == [1.0, None, 0.25, None, 1.0]
    assert [line["equal"] for line in lines[:5]] == [True, None, False, None, True]
    assert [line["error"] for line in lines[:5]] == [None, "timeout", None, "exception:LookupError", None]
    assert lines[1]["seconds"] >= 1.0
    summary = capsys.readouterr().err
    assert "errors: exception:LookupError 1; timeout 1" in summary
    assert "(no kind 2/305)" in summary


def test_without_a_verifier_each_line_names_its_own(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        case(1, "#### 5", kind="gsm8k"),
        case(2, "\\frac{10}{2}", kind="expr"),
        case(3, "<think>a</think>b", "think_prefix", kind="format"),
        case(4, "#### 5", kind="no_such"),
        case(5, "#### 5"),
    )
    with pytest.raises(UserError) as error:
        scored(path, None)
    faults = str(error.value).splitlines()
    assert [fault.partition(";")[0] for fault in faults] == [
        f"{path}: line 4: its kind 'no_such' names no verifier",
        f"{path}: line 5: its kind '' names no verifier",
    ]
    lines = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert [line["equal"] for line in lines] == [True, True, True, None, None]


def test_a_line_that_cannot_be_judged_costs_itself_alone(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        case(1, "#### 5"),
        b"{ not json\n",
        b"[1, 2]\n",
        b"\n",
        {"id": 5, "truth": "5"},
        case(6, None),
        case(7, True),
        b'{"id": 8, "prediction": "\xff\xfe #### 5", "truth": 5}\n',
        b'{"id": 9, "prediction": "\\ud800 #### 5", "truth": 5.0}\n',
        b"[" * 100_000 + b"\n",
        b'{"id": 11, "prediction": "#### 5", "truth": "5"}',
    )
    with pytest.raises(UserError) as error:
        scored(path, "gsm8k")
    lines = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert [(line["id"], line["equal"]) for line in lines] == [
        *((1, True), (None, None), (None, None), (5, None), (6, None), (7, None)),
        *((8, True), (9, True), (None, None), (11, True)),
    ]
    faults = str(error.value).splitlines()
    assert [fault.split(":")[1].strip() for fault in faults] == [f"line {number}" for number in (2, 3, 5, 6, 7, 10)]
    assert "no 'prediction'; needed are 'prediction' and 'truth'" in faults[2]
    assert "'prediction' is NoneType, not text" in faults[3]


def test_a_rule_finds_what_a_line_has_besides(tmp_path: Path) -> None:
    name = f"test_score_{next(COUNTER)}"
    (tmp_path / "more.py").write_text(
        f"from sluice import rule\n@rule({name!r})\ndef more(text, label, context): return context.extra['level']\n"
    )
    path = write(tmp_path, case(1, "x", extra={"level": 3}), case(2, "x", extra={"level": 4}), case(3, "x", extra=[3]))
    with pytest.raises(UserError, match="line 3: 'extra' is list, not an object"):
        scored(path, f"{tmp_path}/more.py:{name}")
    lines = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert [line["score"] for line in lines] == [3.0, 4.0, None]


def test_what_waits_for_an_earlier_case_is_bounded(own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score_module, "WINDOW", 8)
    read = []
    cases = score_module._cases

    def counted(*arguments: Any) -> Any:
        for each in cases(*arguments):
            read.append(each.number)
            yield each

    written = []
    write_one = score_module._write

    async def noted(window: Any, *arguments: Any) -> None:
        await write_one(window, *arguments)
        written.append(len(read))

    monkeypatch.setattr(score_module, "_cases", counted)
    monkeypatch.setattr(score_module, "_write", noted)
    path = write(tmp_path, *(case(index, "slow" if index == 0 else str(index)) for index in range(50)))
    assert len(scored(path, own, timeout=60.0)) == 50
    assert all(seen - done <= 8 for done, seen in enumerate(written))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"verifier": "maths"}, r"--verifier: unknown name 'maths'; did you mean 'math'\? allowed: acc,"),
        ({"verifier": "absent.py:rule"}, r"--verifier: .*absent.py is not a file"),
        *(({"path": "absent.jsonl"}, "absent.jsonl: No such file or directory"), ({"path": "."}, "Is a directory")),
        ({"output": "absent/scores.jsonl"}, "scores.jsonl: No such file or directory"),
        ({"output": "replies.jsonl"}, "--output: .* is the file that is scored"),
        *(
            ({"workers": 0}, "--workers: 0; must be at least 1"),
            ({"timeout": 0.0}, "--timeout: 0.0; must be more than 0 seconds"),
        ),
    ],
)
def test_what_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = write(tmp_path, case(1, "#### 5"))
    options = {"path": path.name, "verifier": "gsm8k", "workers": 1, "timeout": None, "output": "scores.jsonl"} | changes
    with pytest.raises(UserError, match=message):
        score(tmp_path / options.pop("path"), output=tmp_path / options.pop("output"), **options)


def test_the_command_prints_json_lines_and_exits_by_the_faults(tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "launcher.cli", "score", *arguments],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    good = run(str(write(tmp_path, case(1, "#### 5"), case(2, "#### 6"))), "--verifier", "gsm8k", "--workers", "2")
    assert good.returncode == 0, good.stderr
    assert [json.loads(line)["equal"] for line in good.stdout.splitlines()] == [True, False]
    bad = run(str(write(tmp_path, case(1, "#### 5"), b"nonsense\n")), "--verifier", "gsm8k")
    assert bad.returncode == 2
    assert len(bad.stdout.splitlines()) == 2
    assert bad.stderr.splitlines()[-1].startswith(f"error: {tmp_path}/replies.jsonl: line 2: not JSON")


# ------------------------------------------------------------------------------------------------ sluice bench rewards


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
    report = asyncio.run(measure(tmp_path, RewardsBenchSettings(verifiers=(), programs=0)))
    assert (report.cases, report.replies, report.scored) == (0, 3, [])
    report.scored.append(Scored("gsm8k", 1, 0.1, 0.2, 0.3, 1.0))
    assert len(render(report)) == 1


def test_programs_are_judged_beside_the_bare_start_of_a_sandbox() -> None:
    needs_bwrap()
    report = asyncio.run(programs.measure(1, (1,), 1))
    assert report is not None
    assert [judging.workers for judging in report.judged] == [1]
    assert report.judged[0].programs_per_second > 0 and report.late > 0
    assert set(report.starts) == set(programs.STARTS)
    assert programs.render(report).row_count == 3


def test_programs_are_left_out_without_a_sandbox(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    said: list[str] = []
    assert asyncio.run(programs.measure(2, (1,), 1, said.append)) is None
    assert said[0].startswith("programs are left out: rewards.sandbox.runtime: 'bwrap' is not installed")


def test_what_the_bench_refuses(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--data: neither .*verifier_open.jsonl nor .*solutions.jsonl is there"):
        command.run("rewards", command.Options(data=tmp_path))
    with pytest.raises(UserError, match="--data: bench rewards needs a folder"):
        command.run("rewards", command.Options())
    with pytest.raises(UserError, match="--data: only bench rewards and bench scale take a folder"):
        command.run("train", command.Options(data=tmp_path))
