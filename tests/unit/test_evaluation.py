"""Evaluations: sets of a configuration, figures against numbers worked out by hand, replies, files and table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec import structs
from msgspec.structs import replace
from rich.console import Console

from runtime.config import Config, Data, RowFormat, Rule, Source, Warmup
from runtime.config.checks import semantic_faults
from runtime.coordinator.evaluation import Transcript
from runtime.data.handlers import Problem
from runtime.data.prepared import row_format_of
from runtime.data.tokenizer import Tokenizer
from runtime.errors import ServiceFault, UserError
from runtime.evaluation import results as evaluation
from runtime.evaluation.results import (
    HELD_OUT,
    EvaluatedProblem,
    EvaluationData,
    EvaluationResult,
    Generation,
    SetResult,
    evaluation_sets,
    load_held_out,
    render,
    set_faults,
)
from runtime.models.tiny_model import write_tokenizer
from runtime.types import GroupPayload, PolicyVersion, Sample, Scores


def settings(samples: int = 4, k: tuple[int, ...] = (1, 2, 4)) -> EvaluationData:
    rows = {"name": "sums", "path": "sums.jsonl", "key": "data.eval", "row_format": RowFormat(), "problems": 0}
    return EvaluationData(**rows, samples=samples, k=k, temperature=1.0, max_new_tokens=8)  # type: ignore[arg-type]


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
    skipped = evaluation.set_result(settings(3, (1, 2)), "gsm8k", [evaluated("-?+", "311")])
    assert skipped.maj_at == {2: 0.0}  # of the answers 3 and 1, the first
    nothing = evaluation.set_result(settings(2, (1, 2)), "gsm8k", [evaluated("??", "..")])
    assert (nothing.pass_at, nothing.maj_at, nothing.standard_error) == ({1: 0.0}, {}, None)
    assert nothing.notes == ["no reply has a verdict"]
    unanswered = evaluation.set_result(settings(), "mine", [evaluated("++--")])
    assert (unanswered.maj_at, unanswered.notes) == ({}, ["no maj@k: the rule mine names no answers"])
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


# -------------------------------------------------------------------------------------------------- the sets of a configuration
def make(*sets: dict[str, Any], **sections: Any) -> Config:
    evaluation = {**sections.pop("evaluation", {}), "sets": list(sets)}
    return msgspec.convert({"run": {"name": "a"}, "evaluation": evaluation, **sections}, Config)


def faults(*sets: dict[str, Any], **sections: Any) -> list[str]:
    return list(set_faults(make(*sets, **sections)))


def test_data_eval_is_the_simple_way() -> None:
    config = make(data={"eval": "e.jsonl", "handler": "gsm8k"}, evaluation={"samples": 8, "k": [8, 4], "temperature": 0.7})
    (found,) = evaluation_sets(config)
    assert (found.name, found.path, found.key) == (HELD_OUT, "e.jsonl", "data.eval")
    assert (found.samples, found.k, found.temperature, found.max_new_tokens) == (8, (1, 4, 8), 0.7, 512)
    assert found.row_format == row_format_of(Source(path=""), config.data)
    assert evaluation_sets(make()) == []


def test_a_set_takes_over_what_it_leaves_out() -> None:
    rows = {"handler": "gsm8k", "columns": {"prompt": "q", "label": "l"}, "system_prompt": ""}
    config = make(
        {"name": "plain", "path": "p"},
        {"name": "own", "path": "o", "problems": 0, "samples": 2, "k": [2], "temperature": 0, "max_new_tokens": 16, **rows},
        data={"eval": "e", "system_prompt": "s", "columns": {"prompt": "x"}},
        evaluation={"problems": 7, "samples": 4, "temperature": 1.0, "max_new_tokens": 64},
    )
    held_out, plain, own = evaluation_sets(config)
    assert [each.key for each in (held_out, plain, own)] == ["data.eval", "evaluation.sets.0.path", "evaluation.sets.1.path"]
    assert (plain.problems, plain.samples, plain.k, plain.temperature, plain.max_new_tokens) == (7, 4, (1,), 1.0, 64)
    assert plain.row_format == held_out.row_format == row_format_of(Source(path=""), config.data)
    assert (own.problems, own.samples, own.k, own.temperature, own.max_new_tokens) == (0, 2, (1, 2), 0.0, 16)
    assert {key: getattr(own.row_format, key) for key in rows} == rows


SAMPLED = {"samples": 4, "temperature": 1.0}


@pytest.mark.parametrize(
    ("sets", "sections", "fault"),
    [
        ([{"name": "a/b"}], {}, "evaluation.sets.0.name: 'a/b' is not letters"),
        ([{"name": ".."}], {}, "evaluation.sets.0.name: '..' is not letters"),
        ([{"k": [1, 8]}], {}, "evaluation.sets.0.k: 8 is more than the 4 samples to a problem (evaluation.sets.0.samples)"),
        ([{"samples": 2, "k": [4]}], {}, "evaluation.sets.0.k: 4 is more than the 2 samples"),
        (
            [{"k": [4], "temperature": 0}],
            {},
            "evaluation.sets.0.temperature: 0 makes all samples of a problem alike; k 4 needs",
        ),
        ([{"max_new_tokens": 100}], {}, "evaluation.sets.0.max_new_tokens: 100 is more than evaluation.max_new_tokens, 64"),
        ([{}, {}], {}, "evaluation.sets.1.name: 'a' names two sets"),
        (
            [{"name": HELD_OUT}],
            {"data": {"eval": "e"}},
            f"evaluation.sets.0.name: '{HELD_OUT}' names two sets; {HELD_OUT} is the set of data.eval",
        ),
        ([], {"data": {"eval": "e"}}, "evaluation.k: 8 is more than the 4 samples to a problem (evaluation.samples)"),
        ([], {"warmup": {}}, "evaluation.k: 8 is more than the 4 samples to a problem (evaluation.samples)"),
        ([], {}, ""),  # nothing is evaluated
    ],
)
def test_a_set_that_cannot_be(sets: list[dict[str, Any]], sections: dict[str, Any], fault: str) -> None:
    whole = [{"name": "a", "path": "p", "k": [1], **each} for each in sets]
    found = faults(*whole, evaluation={**SAMPLED, "max_new_tokens": 64, **({} if sets else {"k": [8]})}, **sections)
    assert len(found) == bool(fault)
    assert "".join(found).startswith(fault)


def test_the_files_and_handlers_of_sets_are_checked(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    config = make(
        {"name": "a", "path": "/no/a.jsonl", "handler": "other"},
        {"name": "b", "path": str(tmp_path / "empty.jsonl")},
        rewards={"rules": [{"name": "gsm8k"}]},
    )
    found = semantic_faults(config, {"data.handler": ["plain"]}, 1 << 40, trains=False)
    assert [line for line in found if line.startswith("evaluation.sets")] == [
        "evaluation.sets.0.handler: 'other' is not one of plain, nor FILE.py:NAME",
        "evaluation.sets.0.path: '/no/a.jsonl' is not a file",
        f"evaluation.sets.1.path: '{tmp_path / 'empty.jsonl'}' is empty",
    ]


def test_an_evaluation_alone_needs_a_set_and_nothing_of_training() -> None:
    config = make(
        training={"mini_batch_size": 3},
        critic={"path": "/no/critic"},
        data={"train": "/no/train.jsonl", "max_prompt_tokens": 24},
        model={"reference": "/no/reference"},
        sampling={"group_size": 1, "max_new_tokens": 24},
        rewards={"rules": [{"name": "gsm8k"}]},
    )
    found = semantic_faults(config, {}, 1 << 40, trains=False)
    assert [line.partition(":")[0] for line in found] == ["data.eval", "model.path"]
    assert "evaluation.sets" in found[0]
    warmed_up = replace(config, warmup=Warmup())  # which names no data where there is some to train on
    assert [line.partition(":")[0] for line in semantic_faults(warmed_up, {}, 1 << 40, trains=False)] == ["data.eval"]
    assert semantic_faults(replace(warmed_up, data=Data(max_prompt_tokens=24)), {}, 1 << 40, trains=False) == []


def test_the_first_problems_of_each_file_are_read(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    rows = [{"question": f"{i}+1=", "answer": str(i + 1)} for i in range(5)]
    (tmp_path / "e.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = str(tmp_path / "e.jsonl")
    config = make({"name": "all", "path": path, "problems": 0}, data={"eval": path}, evaluation={"problems": 2})
    held_out, all_of_it = load_held_out(config, Tokenizer(str(tmp_path)))
    assert [problem.label for problem in held_out.prompts.problems] == ["1", "2"]
    assert len(held_out.prompts.tokens) == 2
    assert [problem.label for problem in all_of_it.prompts.problems] == ["1", "2", "3", "4", "5"]
    with pytest.raises(UserError, match=r"evaluation\.sets\.0\.columns\.label: .* has no column 'none'"):
        load_held_out(make({"name": "a", "path": path, "columns": {"label": "none"}}), Tokenizer(str(tmp_path)))


# ---------------------------------------------------------------------------------------------------------------------- replies
PROBLEM = Problem("f/eval:7", [{"role": "user", "content": "?"}], "42", "f/eval")


class Letters:
    """A tokenizer whose ids are characters."""

    def decode(self, ids: np.ndarray, skip_special: bool = True) -> str:
        return "".join(map(chr, ids))

    def decode_batch(self, batch: Any, skip_special: bool = True) -> list[str]:
        assert not skip_special
        return [self.decode(ids) for ids in batch]


def sample(text: str, versions: tuple[int, int] = (2, 3)) -> Sample:
    size = len(text)
    steps = np.linspace(*versions, size).round().astype(np.int64)
    return Sample(
        tokens=np.array([ord(letter) for letter in text], np.int32),
        loss_mask=(np.arange(size) < size - 1).astype(np.uint8),
        logprobs=np.where(np.arange(size) < size - 1, np.float32(-0.5), np.float32(0)),
        versions=steps,
        finish_reason="length",
    )


def scored_part(*texts: str, values: list[float], valid: list[int], answers: list[str | None]) -> tuple[GroupPayload, Scores]:
    payload = GroupPayload.of(-1, np.array([ord("?")], np.int32), [sample(text) for text in texts])
    rules = {"mine": np.array(values, np.float32)}
    rewards = np.nan_to_num(rules["mine"] * 2)
    return payload, Scores(group_id=-1, rewards=rewards, valid=np.array(valid, np.uint8), rules=rules, answers=answers)


def test_a_reply_is_told_whole() -> None:
    parts = [
        scored_part("four", "five", values=[0.5, np.nan], valid=[1, 0], answers=["4", None]),
        scored_part("six", values=[0.25], valid=[1], answers=[]),
    ]
    found = evaluation.replies_to("set", PROBLEM, parts, Rule(name="rules/own.py:mine", correct=0.5), Letters())
    first, second, third = found
    asked = {"set": "set", "problem": "f/eval:7", "sample": 0, "prompt": "?", "label": "42"}
    judged = {"reply": "four", "answer": "4", "correct": True, "reward": 1.0, "rules": {"mine": 0.5}}
    versions = (str(PolicyVersion(0, 2)), str(PolicyVersion(0, 3)))
    assert first == Generation(**asked, **judged, tokens=4, finish="length", versions=versions, logprob=-0.5)  # type: ignore[arg-type]
    assert (second.correct, second.reward, second.rules, second.answer, second.sample) == (None, None, {"mine": None}, None, 1)
    assert (third.correct, third.reward, third.answer, third.sample) == (False, 0.5, None, 2)


def test_of_an_episode_the_last_branch_is_told_and_what_the_others_say() -> None:
    rows = [sample("ask"), sample("four"), structs.replace(sample("fi"), finish_reason="stop"), sample("")]
    payload = GroupPayload.of(-1, np.array([ord("?")], np.int32), rows, [2, 1, 1])
    values = np.array([1.0, 0.0, 0.5], np.float32)
    scores = Scores(group_id=-1, rewards=values, valid=np.ones(3, np.uint8), rules={"environment": values})
    found = evaluation.replies_to("set", PROBLEM, [(payload, scores)], Rule(name="environment"), Letters())
    assert [(each.reply, each.correct, each.tokens, each.finish) for each in found] == [
        ("four", True, 4, "length"),
        ("fi", False, 2, "stop"),
        ("", False, 0, "length"),  # nobody called the model
    ]
    assert (found[2].logprob, found[2].versions) == (None, ("", ""))
    assert [each.earlier for each in found] == [["ask"], [], []]


def lines(problem: int) -> list[Generation]:
    (first,) = evaluation.replies_to(
        "set", PROBLEM, [scored_part("reply", values=[1.0], valid=[1], answers=["1"])], Rule(name="mine"), Letters()
    )
    return [msgspec.structs.replace(first, problem=str(problem), sample=index) for index in range(2)]


def kept(path: Path) -> list[tuple[str, int]]:
    return [(each.problem, each.sample) for each in evaluation.read_replies(path)]


def test_lines_stand_in_the_order_of_the_problems(tmp_path: Path) -> None:
    transcript = Transcript(tmp_path / "a.jsonl")
    transcript.add(1, lines(1))
    assert kept(tmp_path / "a.jsonl") == []
    transcript.add(0, lines(0))
    assert kept(tmp_path / "a.jsonl") == [("0", 0), ("0", 1), ("1", 0), ("1", 1)]  # before it is closed
    transcript.add(4, lines(4))
    transcript.add(3, lines(3))
    transcript.close()
    assert [problem for problem, sample in kept(tmp_path / "a.jsonl") if sample == 0] == ["0", "1", "3", "4"]


def test_a_line_that_is_still_being_written_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    transcript = Transcript(path)
    transcript.add(0, lines(0))
    transcript.close()
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:30])
    assert kept(path) == [("0", 0), ("0", 1)]
    path.write_bytes(whole + b"{}\n")
    with pytest.raises(UserError, match="not the replies of an evaluation"):
        kept(path)
    with pytest.raises(UserError, match="no such file"):
        kept(tmp_path / "none")
    with pytest.raises(ServiceFault, match=r"coordinator: write: .*a\.jsonl"):
        Transcript(tmp_path / "none" / "a.jsonl")
