"""The figures of an evaluation against numbers worked out by hand; its files; its table."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from runtime.config import RowFormat
from runtime.errors import UserError
from runtime.evaluation import results as evaluation
from runtime.evaluation.results import EvaluatedProblem, EvaluationResult, SetResult
from runtime.evaluation.sets import EvaluationData
from runtime.evaluation.table import render
from runtime.types import PolicyVersion


def settings(samples: int = 4, k: tuple[int, ...] = (1, 2, 4)) -> EvaluationData:
    return EvaluationData(
        name="sums",
        path="sums.jsonl",
        key="data.eval",
        row_format=RowFormat(),
        problems=0,
        samples=samples,
        k=k,
        temperature=1.0,
        max_new_tokens=8,
    )


def evaluated(verdicts: str, answers: str = "", tokens: int = 10, truncated: int = 0) -> EvaluatedProblem:
    """A letter a sample: + right, - wrong, ? failed; and its answer, . for none."""
    return EvaluatedProblem(
        correct=[{"+": True, "-": False, "?": None}[verdict] for verdict in verdicts],
        answers=[None if answer == "." else answer for answer in answers],
        tokens=[tokens + index for index in range(len(verdicts))],
        truncated=truncated,
        errors={"timeout": verdicts.count("?")} if "?" in verdicts else {},
        oldest=PolicyVersion(0, 3),
        newest=PolicyVersion(0, 4),
    )


def test_figures_of_whole_problems() -> None:
    found = evaluation.set_result(
        settings(),
        "gsm8k",
        [
            evaluated("++--", "1123", 10, truncated=1),
            evaluated("----", "2222", 20),
            evaluated("++++", "7777", 30),
            evaluated("+---", "9.88", 0),
        ],
    )
    assert (found.problems, found.samples, found.scored, found.errors, found.left_out, found.notes) == (4, 4, 16, {}, {}, [])
    # pass@2 of 2 right of 4: 1 - C(2,2)/C(4,2) = 5/6; of 1 of 4: 1 - C(3,2)/C(4,2) = 1/2
    assert found.pass_at == pytest.approx({1: (0.5 + 0 + 1 + 0.25) / 4, 2: (5 / 6 + 0 + 1 + 0.5) / 4, 4: 3 / 4})
    assert found.maj_at == {2: 3 / 4, 4: 2 / 4}  # the last: 9 leads after two samples, 8 after four
    assert found.standard_error == pytest.approx(np.std([0.5, 0, 1, 0.25], ddof=1) / 2)
    tokens = [10, 11, 12, 13, 20, 21, 22, 23, 30, 31, 32, 33, 0, 1, 2, 3]
    lengths = found.lengths
    assert (lengths.mean, lengths.median, lengths.max, lengths.truncated) == (np.mean(tokens), 16.5, 33, 1 / 16)
    assert lengths.p95 == pytest.approx(32.25)  # 14.25 of the way through the 16 in order


def test_a_reply_without_a_verdict_is_counted_and_in_no_share() -> None:
    found = evaluation.set_result(
        settings(), "gsm8k", [evaluated("++??", "1122"), evaluated("-+-+", "2323"), evaluated("????", "....")]
    )
    assert found.pass_at == pytest.approx({1: (1 + 0.5) / 2, 2: (1 + 5 / 6) / 2, 4: 1.0})
    assert found.maj_at == {2: 0.5, 4: 0.0}  # a tie of 2 and 3 goes to 2, which was there first
    assert (found.scored, found.errors, found.left_out) == (6, {"timeout": 6}, {1: 1, 2: 1, 4: 2})
    assert found.standard_error == pytest.approx(np.std([1, 0.5], ddof=1) / np.sqrt(2))


def test_votes_skip_replies_without_a_verdict() -> None:
    found = evaluation.set_result(settings(3, (1, 2)), "gsm8k", [evaluated("-?+", "311")])
    assert found.maj_at == {2: 0.0}  # of the answers 3 and 1, the first


def test_nothing_could_be_judged() -> None:
    found = evaluation.set_result(settings(2, (1, 2)), "gsm8k", [evaluated("??", "..")])
    assert (found.pass_at, found.maj_at, found.standard_error) == ({1: 0.0}, {}, None)
    assert found.notes == ["no reply has a verdict"]


def test_a_rule_without_answers_has_no_majority_and_it_is_said() -> None:
    found = evaluation.set_result(settings(), "mine", [evaluated("++--")])
    assert found.maj_at == {}
    assert found.notes == ["no maj@k: the rule mine names no answers"]
    assert evaluation.set_result(settings(1, (1,)), "mine", [evaluated("+")]).notes == []


def result(step: int, *sets: SetResult) -> EvaluationResult:
    versions = {"oldest": PolicyVersion(0, step), "newest": PolicyVersion(0, step + 1)}
    accuracy = sum(each.pass_at[1] for each in sets) / len(sets)
    return EvaluationResult(model="m", step=step, accuracy=accuracy, seconds=1.5, sets=list(sets), **versions)


def some(name: str, verdicts: str) -> SetResult:
    found = evaluation.set_result(settings(), "gsm8k", [evaluated(verdicts, "1122"), evaluated("++++", "5555")])
    found.name = name
    return found


def test_metrics_of_several_sets() -> None:
    found = evaluation.metrics(result(3, some("sums", "++--"), some("more", "++??")))
    assert found["eval/accuracy"] == pytest.approx((0.75 + 1.0) / 2)
    assert (found["eval/samples"], found["eval/errors"]) == (14.0, 2.0)
    assert (found["eval/version_oldest"], found["eval/version_newest"]) == (3.0, 4.0)
    assert (found["eval/sums/pass@1"], found["eval/sums/pass@4"], found["eval/sums/maj@4"]) == (0.75, 1.0, 1.0)
    assert (found["eval/more/errors"], found["eval/more/length/mean"]) == (2.0, 11.5)
    assert all(isinstance(value, float) for value in found.values())


def test_results_come_back_from_their_files(tmp_path: Path) -> None:
    written = [result(step, some("sums", "++--")) for step in (0, 20)]
    for each in written:
        folder = evaluation.folder_for(tmp_path, each.step)
        folder.mkdir(parents=True)
        each.write(folder)
    cut_short = evaluation.folder_for(tmp_path, 40)
    cut_short.mkdir()
    assert evaluation.read(tmp_path) == written
    assert [step for step, _ in evaluation.folders(tmp_path)] == [0, 20, 40]
    raw = json.loads((tmp_path / "evaluations" / "step-00000020" / "results.json").read_text())
    assert raw["sets"][0]["pass@k"] == {"1": 0.75, "2": pytest.approx(11 / 12), "4": 1.0}
    (cut_short / "results.json").write_text("{}")
    with pytest.raises(UserError, match=r"step-00000040/results\.json: not the results"):
        evaluation.read(tmp_path)
    assert evaluation.read(tmp_path / "none") == []
    evaluation.forget_after(tmp_path, 0)
    assert evaluation.read(tmp_path) == written[:1]


def test_the_table_has_every_figure_and_what_there_is_to_say() -> None:
    console = Console(width=80, record=True)
    console.print(render([result(0, some("sums", "++--")), result(20, some("sums", "++??"), some("more", "----"))]))
    text = console.export_text()
    rows = {line.split("│")[2].strip(): line for line in reversed(text.splitlines()) if line.startswith("│")}
    assert [cell.strip() for cell in rows["pass@1"].split("│")[1:5]] == ["", "pass@1", "75.0% ± 25.0", "100.0% ± 0.0"]
    assert "11.5, 12" in rows["tokens: mean, median"]
    assert "sums, step 20: errors: 2 timeout" in text
    assert "sums, step 20: too few verdicts for @4: 1 of 2 problems" in text
    (first,) = (line for line in text.splitlines() if "│ more" in line)
    assert [cell.strip() for cell in first.split("│")[1:5]] == ["more", "problems × samples", "–", "2 × 4"]
