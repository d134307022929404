"""Files of problems: what each handler reads, what is dropped, and how a mistake is reported."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from runtime import config
from runtime.data.handlers import HANDLERS, load_problems
from runtime.errors import UserError
from tests.real_data import ROOT


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


def test_a_prompt_alone_has_an_empty_label(tmp_path: Path) -> None:
    rows = [{"prompt": "Sing."}, {"prompt": [{"role": "user", "content": "Dance."}]}]
    found = load_problems(write(tmp_path / "a.jsonl", rows), config.Data(prompt_key="prompt", label_key=""))
    assert [(problem.messages[0]["content"], problem.label) for problem in found.problems] == [("Sing.", ""), ("Dance.", "")]


def test_columns_and_system_prompt_come_from_the_configuration(tmp_path: Path) -> None:
    data = config.Data(prompt_key="problem", label_key="solution", system_prompt="Be brief.")
    (problem,) = load_problems(write(tmp_path / "a.jsonl", [{"problem": "p", "solution": "s"}]), data).problems
    assert problem.messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "p"}]
    assert problem.label == "s"


def test_additional_columns_are_json_values(tmp_path: Path) -> None:
    rows = [{"question": "1+1?", "answer": 2, "level": 3, "tests": [{"in": "é", "out": None}], "other": 1}]
    path = write(tmp_path / "a.jsonl", rows)
    (problem,) = load_problems(path, config.Data(additional_keys=["level", "tests"])).problems
    assert problem.extra == {"level": 3, "tests": [{"in": "é", "out": None}]}
    assert load_problems(path, config.Data()).problems[0].extra == {}
    with pytest.raises(UserError, match=r"^data.additional_keys: .*a.jsonl:1 has no column 'year' \(its columns: "):
        load_problems(path, config.Data(additional_keys=["year"]))


def test_dates_of_parquet_are_text(tmp_path: Path) -> None:
    table = pa.table({"question": ["q"], "answer": ["1"], "day": [date(2026, 1, 2)], "half": [0.5]})
    pq.write_table(table, tmp_path / "a.parquet")
    (problem,) = load_problems(str(tmp_path / "a.parquet"), config.Data(additional_keys=["day", "half"])).problems
    assert problem.extra == {"day": "2026-01-02", "half": 0.5}


def test_gsm8k_takes_the_number_after_the_last_mark(tmp_path: Path) -> None:
    rows = [
        {"question": "a", "answer": "She has 2*3=<<2*3=6>>6.\n#### 6"},
        {"question": "b", "answer": "#### 3\nno, <<#### 4>>\n#### 1,234"},
        {"question": "c", "answer": "no mark"},
    ]
    found = load_problems(write(tmp_path / "a.jsonl", rows), config.Data(handler="gsm8k"))
    assert [problem.label for problem in found.problems] == ["6", "1234"]
    assert found.dropped == {"label without ####": 1}


BOXED = "So $\\boxed{1}$? No: $x = \\boxed{\\frac{a}{b}}$."


@pytest.mark.parametrize(
    ("layout", "row", "prompt", "label"),
    [
        ({"handler": "alpaca"}, {"instruction": "Add.", "input": "1, 2", "output": "3"}, "Add.\n1, 2", "3"),
        ({"handler": "alpaca"}, {"instruction": "Add 1 and 2.", "input": "", "output": 3}, "Add 1 and 2.", "3"),
        ({"handler": "alpaca"}, {"instruction": "Add 1 and 2.", "output": "3"}, "Add 1 and 2.", "3"),
        ({"handler": "alpaca", "query_key": ""}, {"instruction": "Add.", "input": "1, 2", "output": "3"}, "Add.", "3"),
        ({"handler": "r1"}, {"problem": "p", "answer": "\\frac{1}{2}"}, "p", "\\frac{1}{2}"),
        ({"handler": "r1"}, {"problem": "p", "answer": 142.0}, "p", "142"),
        ({"handler": "r1"}, {"problem": "p", "answer": ["9.6\n", "9.60"]}, "p", "9.6"),
        ({"handler": "r1", "query_key": "context"}, {"problem": "p", "context": "c", "answer": "1"}, "p\nc", "1"),
        ({"handler": "math"}, {"problem": "p", "solution": BOXED}, "p", "\\frac{a}{b}"),
        (
            {"handler": "math17k"},
            {"prompt": [{"role": "user", "content": "p"}], "reward_model": {"ground_truth": "34", "style": "rule"}},
            "p",
            "34",
        ),
        ({"handler": "math17k"}, {"prompt": "p", "reward_model": {"ground_truth": 34}}, "p", "34"),
    ],
)
def test_layouts(tmp_path: Path, layout: dict[str, str], row: dict[str, Any], prompt: str, label: str) -> None:
    (problem,) = load_problems(write(tmp_path / "a.jsonl", [row]), config.Data(**layout)).problems  # type: ignore[arg-type]
    assert (problem.messages, problem.label) == ([{"role": "user", "content": prompt}], label)
    assert problem.question == prompt


def test_a_row_may_bring_its_system_text_and_earlier_turns(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}, {"role": "user", "content": "3"}]
    rows = [
        {"q": "own", "s": "Think.", "a": "1"},
        {"q": "none", "s": None, "a": "1"},
        {"q": chat, "s": "", "a": "1"},
        {"q": [{"role": "system", "content": "S"}, *chat], "s": "Think.", "a": "1"},
    ]
    data = config.Data(prompt_key="q", label_key="a", system_key="s", system_prompt="Be brief.")
    found = load_problems(write(tmp_path / "a.jsonl", rows), data).problems
    assert [problem.messages[0]["content"] for problem in found] == ["Think.", "Be brief.", "Be brief.", "S"]
    assert found[2].messages[1:] == found[3].messages[1:] == chat
    assert found[2].question == "3"


@pytest.mark.parametrize(
    ("handler", "row", "reason"),
    [
        ("math", {"problem": "p", "solution": "It is 3."}, "label without \\boxed{}"),
        ("math", {"problem": "p", "solution": "\\boxed{ }"}, "empty label"),
        ("r1", {"problem": "p", "answer": []}, "empty label"),
        ("r1", {"problem": "p", "answer": [["1"]]}, "label that is neither text nor a number"),
        ("math17k", {"prompt": "p", "reward_model": "34"}, "label without ground_truth"),
        ("math17k", {"prompt": "p", "reward_model": None}, "null label"),
        ("math17k", {"prompt": "p", "reward_model": {}}, "null label"),
        ("math17k", {"prompt": [], "reward_model": {"ground_truth": "1"}}, "empty prompt"),
        (
            "math17k",
            {"prompt": [{"role": "tool", "content": "x"}], "reward_model": {"ground_truth": "1"}},
            "prompt that is not text",
        ),
        (
            "math17k",
            {"prompt": [{"role": "assistant", "content": "x"}], "reward_model": {"ground_truth": "1"}},
            "chat that does not end with the user",
        ),
    ],
)
def test_rows_that_a_layout_cannot_use(tmp_path: Path, handler: str, row: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError) as error:
        load_problems(write(tmp_path / "a.jsonl", [row]), config.Data(handler=handler))
    assert str(error.value).endswith(f"no row is left of 1 rows, 0 problems (dropped: 1 {reason})")


def test_a_column_that_was_named_must_be_there(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"instruction": "i", "output": "o"}])
    for key, role in (("query_key", "query"), ("system_key", "system")):
        with pytest.raises(UserError, match=rf"^data\.{role}_key: .*:1 has no column 'input' "):
            load_problems(path, config.Data(handler="alpaca", **{key: "input"}))  # type: ignore[arg-type]


@pytest.mark.parametrize(("value", "expected"), [(3, 3.0), (2.5, 2.5), ("Level 4", 4.0), ("1.25", 1.25)])
def test_difficulty_is_a_number_or_text_with_one(tmp_path: Path, value: Any, expected: float) -> None:
    path = write(tmp_path / "a.jsonl", [{"question": "q", "answer": "a", "level": value}])
    assert load_problems(path, config.Data(), difficulty_key="level").problems[0].difficulty == expected


def test_rows_of_unknown_difficulty_are_left_out_where_it_matters(tmp_path: Path) -> None:
    values = [0.0, None, "Level ?", True, -1, 2]
    rows = [{"question": "q", "answer": "a", "level": value} for value in values]
    path = write(tmp_path / "a.jsonl", rows)
    found = load_problems(path, config.Data(), difficulty_key="level")
    assert (len(found.problems), found.dropped) == (1, {"unknown difficulty": 5})
    assert len(load_problems(path, config.Data()).problems) == 6
    with pytest.raises(UserError, match=r"^data\.curriculum\.key: .*:1 has no column 'hard'"):
        load_problems(path, config.Data(), difficulty_key="hard")


def test_the_guide_s_own_handler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HANDLERS, "_entries", dict(HANDLERS._entries))  # what is registered here is gone afterwards
    guide = (ROOT / "docs" / "guides" / "data.md").read_text(encoding="utf-8")
    (tmp_path / "own.py").write_text(guide.partition("```python\n")[2].partition("```")[0])
    rows = [{"stem": "1+1?", "options": ["2", "3"], "key": "A"}, {"stem": "1+2?", "options": ["3"], "key": "A"}]
    found = load_problems(write(tmp_path / "a.jsonl", rows), config.Data(handler=f"{tmp_path / 'own.py'}:choice"))
    assert [(problem.question, problem.label) for problem in found.problems] == [("1+1?\n(A) 2\n(B) 3", "A")]
    assert found.dropped == {"fewer than two options": 1}


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
