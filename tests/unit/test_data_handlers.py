"""Files of problems: what each handler reads, what is dropped, and how a mistake is reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runtime import config
from runtime.data.handlers import load_problems
from runtime.errors import UserError


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_plain_reads_lines_and_arrays_alike(tmp_path: Path) -> None:
    rows = [{"question": "1+1?", "answer": "2"}, {"question": "half?", "answer": 0.5}, {"question": "AMC?", "answer": 142.0}]
    lines = load_problems(write(tmp_path / "train.jsonl", rows), config.Data())
    (tmp_path / "train.json").write_text(json.dumps(rows, indent=2))
    array = load_problems(str(tmp_path / "train.json"), config.Data())
    assert lines.problems == array.problems
    assert [problem.label for problem in lines.problems] == ["2", "0.5", "142"]
    assert lines.problems[0].messages == [{"role": "user", "content": "1+1?"}]
    assert [problem.id for problem in lines.problems] == [f"{tmp_path.name}/train:{i}" for i in (1, 2, 3)]


def test_columns_and_system_prompt_come_from_the_configuration(tmp_path: Path) -> None:
    data = config.Data(prompt_key="problem", label_key="solution", system_prompt="Be brief.")
    (problem,) = load_problems(write(tmp_path / "a.jsonl", [{"problem": "p", "solution": "s"}]), data).problems
    assert problem.messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "p"}]
    assert problem.label == "s"


def test_gsm8k_takes_the_number_after_the_last_mark(tmp_path: Path) -> None:
    rows = [
        {"question": "a", "answer": "She has 2*3=<<2*3=6>>6.\n#### 6"},
        {"question": "b", "answer": "#### 3\nno, <<#### 4>>\n#### 1,234"},
        {"question": "c", "answer": "no mark"},
    ]
    found = load_problems(write(tmp_path / "a.jsonl", rows), config.Data(handler="gsm8k"))
    assert [problem.label for problem in found.problems] == ["6", "1234"]
    assert found.dropped == {"label without ####": 1}


def test_unusable_rows_are_counted_by_reason(tmp_path: Path) -> None:
    rows = [
        {"question": "ok", "answer": 0},
        {"question": "q", "answer": None},
        {"question": "q", "answer": None},
        {"question": "q", "answer": " "},
        {"question": "q", "answer": ["1", "2"]},
        {"question": "q", "answer": True},
        {"question": "", "answer": "1"},
        {"question": ["x"], "answer": "1"},
    ]
    found = load_problems(write(tmp_path / "a.jsonl", rows), config.Data())
    assert [problem.label for problem in found.problems] == ["0"]
    assert found.rows == 8
    assert found.dropped == {
        "null label": 2,
        "empty label": 1,
        "label that is neither text nor a number": 2,
        "empty prompt": 1,
        "prompt that is not text": 1,
    }
    assert found.report().startswith("8 rows, 1 problems (dropped: 2 null label, ")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"question": "a", "answer": "1"}\n\n{"question": \n', "data.eval: {path}:3: not a line of JSON"),
        ('{"question": "a", "answer": "1"}\n["a"]\n', "data.eval: {path}:2: a row is a JSON object, not list"),
        ('[{"question": "a", "answer": "1"}', "data.eval: {path}: not a JSON array"),
        ('{"question": "a", "answer": "\xff"}\n', "data.eval: {path}:1: not a line of JSON"),
        ("\n\n", "data.eval: {path} has no rows"),
        ("[]", "data.eval: {path} has no rows"),
        ('{"question": "a"}\n', "data.label_key: {path}:1 has no column 'answer' (its columns: question)"),
        ('{"question": "a", "answer": null}\n', "data.eval: {path}: no row is left of 1 rows, 0 problems (dropped: 1 null"),
    ],
)
def test_a_mistake_is_one_line_that_names_key_and_place(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError) as error:
        load_problems(str(path), config.Data(), "data.eval")
    assert str(error.value).startswith(message.format(path=path))
    assert "\n" not in str(error.value)


def test_missing_file_and_unknown_handler(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^data\.train: .*absent\.jsonl is not a file$"):
        load_problems(str(tmp_path / "absent.jsonl"), config.Data())
    with pytest.raises(UserError, match=r"data\.handler.*gsm8k"):
        load_problems(str(tmp_path / "absent.jsonl"), config.Data(handler="gsm8"))
