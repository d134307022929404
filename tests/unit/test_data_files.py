"""Files and folders of problems: what each handler reads, what is dropped, how a mistake is reported, and what is held out."""

from __future__ import annotations

import gzip
import json
import logging
from collections.abc import Callable
from datetime import date
from decimal import Decimal
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from runtime import config
from runtime.coordinator.pools import request_for
from runtime.data import reading
from runtime.data.handlers import HANDLERS, Problem, ProblemSet, Rejected, label_text, load_problems
from runtime.data.prepare import keep_apart, overlap
from runtime.data.prepared import check_environments, row_format_of, tokenise
from runtime.data.reading import data_files, read_rows
from runtime.errors import UserError
from runtime.types import RunEpisodesRequest, SamplingParams
from tests.real_data import ROOT


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def loaded(tmp_path: Path, rows: list[Any], **data: Any) -> ProblemSet:
    return load_problems(write(tmp_path / "a.jsonl", rows), config.Data(**data))


def test_plain_reads_lines_and_arrays_alike(tmp_path: Path) -> None:
    rows = [{"question": "1+1?", "answer": "2"}, {"question": "half?", "answer": 0.5}, {"question": "AMC?", "answer": 142.0}]
    lines = load_problems(write(tmp_path / "train.jsonl", rows), config.Data())
    (tmp_path / "train.json").write_text(json.dumps(rows, indent=2))
    array = load_problems(str(tmp_path / "train.json"), config.Data())
    assert lines.problems == array.problems
    assert [problem.label for problem in lines.problems] == ["2", "0.5", "142"]
    assert lines.problems[0].messages == [{"role": "user", "content": "1+1?"}]
    assert [problem.id for problem in lines.problems] == [f"{tmp_path.name}/train:{i}" for i in (1, 2, 3)]


def test_columns_and_system_prompt_come_from_the_configuration_and_a_prompt_alone_has_an_empty_label(tmp_path: Path) -> None:
    rows = [{"prompt": "Sing."}, {"prompt": [{"role": "user", "content": "Dance."}]}]
    found = loaded(tmp_path, rows, columns={"prompt": "prompt", "label": ""}, system_prompt="Be brief.").problems
    assert [problem.messages for problem in found] == [
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}] for text in ("Sing.", "Dance.")
    ]
    assert [problem.label for problem in found] == ["", ""]
    (problem,) = loaded(
        tmp_path, [{"problem": "p", "solution": "s"}], columns={"prompt": "problem", "label": "solution"}
    ).problems
    assert (problem.question, problem.label) == ("p", "s")


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
    found = loaded(tmp_path, rows, handler="gsm8k")
    assert [problem.label for problem in found.problems] == ["6", "1234"]
    assert found.dropped == {"label without ####": 1}


TOOL, REPLY = ([{"role": role, "content": "x"}] for role in ("tool", "assistant"))
USER = [{"role": "user", "content": "p"}]


def test_a_file_names_its_own_columns_beside_those_of_the_others() -> None:
    data = config.Data(columns={"prompt": "q", "label": "a"})
    assert row_format_of(config.Source(path="x", columns={"label": "", "query": "c"}), data).columns == {
        "prompt": "q",
        "label": "",
        "query": "c",
    }


BOXED = "So $\\boxed{1}$? No: $x = \\boxed{\\frac{a}{b}}$."


@pytest.mark.parametrize(
    ("layout", "row", "prompt", "label"),
    [
        ({"handler": "alpaca"}, {"instruction": "Add.", "input": "1, 2", "output": "3"}, "Add.\n1, 2", "3"),
        ({"handler": "alpaca"}, {"instruction": "Add 1 and 2.", "input": "", "output": 3}, "Add 1 and 2.", "3"),
        ({"handler": "alpaca"}, {"instruction": "Add 1 and 2.", "output": "3"}, "Add 1 and 2.", "3"),
        ({"handler": "alpaca", "columns": {"query": ""}}, {"instruction": "Add.", "input": "1, 2", "output": "3"}, "Add.", "3"),
        ({"handler": "r1"}, {"problem": "p", "answer": "\\frac{1}{2}"}, "p", "\\frac{1}{2}"),
        ({"handler": "r1"}, {"problem": "p", "answer": 142.0}, "p", "142"),
        ({"handler": "r1"}, {"problem": "p", "answer": ["9.6\n", "9.60"]}, "p", "9.6"),
        ({"handler": "r1", "columns": {"query": "context"}}, {"problem": "p", "context": "c", "answer": "1"}, "p\nc", "1"),
        ({"handler": "math"}, {"problem": "p", "solution": BOXED}, "p", "\\frac{a}{b}"),
        ({"handler": "math17k"}, {"prompt": USER, "reward_model": {"ground_truth": "34", "style": "rule"}}, "p", "34"),
        ({"handler": "math17k"}, {"prompt": "p", "reward_model": {"ground_truth": 34}}, "p", "34"),
    ],
)
def test_layouts(tmp_path: Path, layout: dict[str, str], row: dict[str, Any], prompt: str, label: str) -> None:
    (problem,) = loaded(tmp_path, [row], **layout).problems
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
    data = {"columns": {"prompt": "q", "label": "a", "system": "s"}, "system_prompt": "Be brief."}
    found = loaded(tmp_path, rows, **data).problems
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
        ("math17k", {"prompt": TOOL, "reward_model": {"ground_truth": "1"}}, "prompt that is not text"),
        ("math17k", {"prompt": REPLY, "reward_model": {"ground_truth": "1"}}, "chat that does not end with the user"),
    ],
)
def test_rows_that_a_layout_cannot_use(tmp_path: Path, handler: str, row: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError) as error:
        loaded(tmp_path, [row], handler=handler)
    assert str(error.value).endswith(f"no row is left of 1 rows, 0 problems (dropped: 1 {reason})")


def test_a_column_that_was_named_must_be_there(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"instruction": "i", "output": "o"}])
    for role in ("query", "system"):
        with pytest.raises(UserError, match=rf"^data\.columns\.{role}: .*:1 has no column 'input' "):
            load_problems(path, config.Data(handler="alpaca", columns={role: "input"}))  # type: ignore[dict-item]


def test_difficulty_is_a_number_or_text_with_one_and_rows_without_are_left_out_where_it_matters(tmp_path: Path) -> None:
    values = [0.0, None, "Level ?", True, -1, 2, 3, 2.5, "Level 4", "1.25"]
    rows = [{"question": "q", "answer": "a", "level": value} for value in values]
    path = write(tmp_path / "a.jsonl", rows)
    found = load_problems(path, config.Data(), difficulty_key="level")
    assert [problem.difficulty for problem in found.problems] == [2.0, 3.0, 2.5, 4.0, 1.25]
    assert found.dropped == {"unknown difficulty": 5}
    assert len(load_problems(path, config.Data()).problems) == 10
    with pytest.raises(UserError, match=r"^data\.curriculum\.key: .*:1 has no column 'hard'"):
        load_problems(path, config.Data(), difficulty_key="hard")


def test_the_guide_s_own_handler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HANDLERS, "_entries", dict(HANDLERS._entries))  # what is registered here is gone afterwards
    guide = (ROOT / "docs" / "guides" / "data.md").read_text(encoding="utf-8")
    (tmp_path / "own.py").write_text(guide.partition("```python\n")[2].partition("```")[0])
    rows = [{"stem": "1+1?", "options": ["2", "3"], "key": "A"}, {"stem": "1+2?", "options": ["3"], "key": "A"}]
    found = loaded(tmp_path, rows, handler=f"{tmp_path / 'own.py'}:choice")
    assert [(problem.question, problem.label) for problem in found.problems] == [("1+1?\n(A) 2\n(B) 3", "A")]
    assert found.dropped == {"fewer than two options": 1}


def test_unusable_rows_are_counted_by_reason(tmp_path: Path) -> None:
    answers = [0, None, None, " ", ["1", "2"], True]
    answers += [[{"input": 1}, 2], {"inputs": ["1"]}, [{"input": "é"}]]
    rows = [{"question": "q", "answer": answer} for answer in answers]
    rows += [{"question": question, "answer": "1"} for question in ("", ["x"])]
    found = loaded(tmp_path, rows)
    assert [problem.label for problem in found.problems] == ["0", '{"inputs":["1"]}', '[{"input":"é"}]']
    assert found.rows == 11
    assert found.dropped == {
        "null label": 2,
        "empty label": 1,
        "label that is neither text nor a number": 3,
        "empty prompt": 1,
        "prompt that is not text": 1,
    }
    assert found.report().startswith("11 rows, 3 problems (dropped: 2 null label, ")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"question": "a", "answer": "1"}\n\n{"question": \n', "data.eval: {path}:3: not a line of JSON"),
        ('{"question": "a", "answer": "1"}\n["a"]\n', "data.eval: {path}:2: a row is a JSON object, not list"),
        ('[{"question": "a", "answer": "1"}', "data.eval: {path}: not a JSON array"),
        ('{"question": "a", "answer": "\xff"}\n', "data.eval: {path}:1: not a line of JSON"),
        (f'{{"a": {"[" * 9999}{"]" * 9999}}}\n', "data.eval: {path}:1: not a line of JSON: maximum recursion"),
        (f'[{{"a": {"[" * 9999}{"]" * 9999}}}]', "data.eval: {path}: not a JSON array: maximum recursion"),
        ("\x1f\x8b\x08", "data.eval: {path}: cannot be read: Truncated compressed stream"),
        ("\x28\xb5\x2f\xfd", "data.eval: {path}: cannot be read: "),
        *(("\n\n", "data.eval: {path} has no rows"), ("[]", "data.eval: {path} has no rows")),
        ('{"question": "a"}\n', "data.columns.label: {path}:1 has no column 'answer' (its columns: question)"),
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


# ------------------------------------------------------------------------------------------------ Parquet, Arrow and folders

ROWS = [{"question": f"{i}+1?", "answer": i + 1, "extra": {"list": [i, None]}} for i in range(3000)]


def save_parquet(path: Path, start: int, end: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(ROWS[start:end]), path)
    return path


def save_to_disk(folder: Path, start: int, end: int) -> Path:
    """As `Dataset.save_to_disk` with two shards."""
    folder.mkdir(parents=True)
    middle = (start + end) // 2
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for name, rows in zip(names, (ROWS[start:middle], ROWS[middle:end]), strict=True):
        table = pa.Table.from_pylist(rows)
        with pa.OSFile(str(folder / name), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=100)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def labels(path: Path) -> list[int]:
    return [int(problem.label) for problem in load_problems(str(path), config.Data()).problems]


def test_tables_give_the_rows_that_were_written(tmp_path: Path) -> None:
    parquet = save_parquet(tmp_path / "a.parquet", 0, 3000)
    assert list(read_rows(parquet, "k")) == list(enumerate(ROWS, 1))
    table = pa.Table.from_pylist(ROWS)
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=700)
    assert list(read_rows(tmp_path / "a.arrow", "k")) == list(enumerate(ROWS, 1))


def test_a_saved_dataset_is_read_shard_by_shard(tmp_path: Path) -> None:
    found = load_problems(str(save_to_disk(tmp_path / "sums", 0, 20)), config.Data()).problems
    assert [problem.label for problem in found] == [str(i + 1) for i in range(20)]
    assert [problem.id for problem in found] == [f"{tmp_path.name}/sums:{i + 1}" for i in range(20)]  # unique over shards


def test_of_a_saved_dictionary_the_training_split_is_read(tmp_path: Path) -> None:
    save_to_disk(tmp_path / "sums" / "train", 5, 15)
    save_to_disk(tmp_path / "sums" / "test", 0, 5)
    (tmp_path / "sums" / "dataset_dict.json").write_text('{"splits": ["test", "train"]}')
    assert labels(tmp_path / "sums") == list(range(6, 16))
    assert labels(tmp_path / "sums" / "test") == list(range(1, 6))
    assert data_files(str(tmp_path / "sums"), "k").source == "sums/train"
    (tmp_path / "sums" / "dataset_dict.json").write_text('{"splits": ["test"]}')
    with pytest.raises(UserError, match=r"^k: .*sums has no split named train \(it has test\); name a file of it$"):
        data_files(str(tmp_path / "sums"), "k")


def test_a_downloaded_repository_keeps_its_files_in_data(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# sums")
    save_parquet(tmp_path / "data" / "train-00001-of-00002.parquet", 10, 20)
    save_parquet(tmp_path / "data" / "train-00000-of-00002.parquet", 0, 10)
    save_parquet(tmp_path / "data" / "test-00000-of-00001.parquet", 20, 30)
    assert labels(tmp_path) == list(range(1, 21))
    save_parquet(tmp_path / "whole" / "b.parquet", 10, 20)  # without splits, all of it
    save_parquet(tmp_path / "whole" / "a.parquet", 0, 10)
    assert labels(tmp_path / "whole") == list(range(1, 21))


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^k: .* holds no \.json, \.jsonl, \.parquet or \.arrow file$"):
        data_files(str(tmp_path), "k")
    save_parquet(tmp_path / "a.parquet", 0, 10)
    (tmp_path / "b.jsonl").write_text("{}")
    with pytest.raises(UserError, match=r"^k: .* holds files of several kinds \(\.jsonl, \.parquet\); name one of them$"):
        data_files(str(tmp_path), "k")
    (tmp_path / "b.jsonl").unlink()
    save_parquet(tmp_path / "train.parquet", 0, 10)
    with pytest.raises(UserError, match=r"^k: .* holds files of splits, and a\.parquet, which names none; name the files$"):
        data_files(str(tmp_path), "k")
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(UserError, match=r"^k: .*state\.json is not what save_to_disk writes: Object missing .*`_data_files`"):
        data_files(str(tmp_path), "k")
    (tmp_path / "state.json").write_text('{"_data_files": ' + "[" * 9999 + "]" * 9999 + "}")
    with pytest.raises(UserError, match=r"^k: .*state\.json is not what save_to_disk writes"):
        data_files(str(tmp_path), "k")


COLUMNS = [
    *((pa.scalar(number, kind), text) for kind in (pa.float16(), pa.float32()) for number, text in ((0.3, "0.3"), (12, "12"))),
    (pa.scalar(132.04, pa.float32()), "132.04"),
    (pa.scalar(1e-7, pa.float64()), "1e-07"),
    *((pa.scalar(Decimal("2.50"), kind), "2.50") for kind in (pa.decimal128(9, 2), pa.decimal256(60, 2))),
    (pa.scalar(Decimal("4.00"), pa.decimal128(9, 2)), "4"),
    *((pa.scalar("4", kind), "4") for kind in (pa.string(), pa.large_string())),
    *((pa.scalar(4, kind), "4") for kind in (pa.int8(), pa.uint64())),
    (pa.array([0.3], pa.float32()).dictionary_encode()[0], "0.3"),
    (pa.array(["a"]).dictionary_encode()[0], "a"),
    (pa.scalar({"at": [0.3, None]}, pa.struct([("at", pa.list_(pa.float32()))])), '{"at":[0.3,null]}'),
    (pa.scalar([("at", 0.3)], pa.map_(pa.string(), pa.float32())), '{"at":0.3}'),
    (pa.scalar({"day": date(2026, 1, 2)}), '{"day":"2026-01-02"}'),
    *((pa.scalar(value), "Rejected") for value in (float("nan"), True, date(2026, 1, 2), b"4", [0.3], None)),
]


def test_every_type_of_a_column(tmp_path: Path) -> None:
    for (value, label), name in product(COLUMNS, ("a.parquet", "a.arrow")):
        table = pa.table({"answer": pa.array([value.as_py()], value.type), "question": ["q"]})
        if name == "a.parquet":
            pq.write_table(table, tmp_path / name)
        else:
            with pa.OSFile(str(tmp_path / name), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
                writer.write_table(table)
        ((_, row),) = read_rows(tmp_path / name, "k")
        try:
            found = label_text(row["answer"])
        except Rejected:
            found = "Rejected"
        assert (value, found) == (value, label)


def test_what_python_does_not_have_and_a_row_of_any_size_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dictionary holds once what each of its rows is to be."""
    bad = pa.StringArray.from_buffers(1, pa.py_buffer(np.array([0, 1], np.int32)), pa.py_buffer(b"\xff"))
    nanosecond, year = (pa.array([2**60 + 1], kind) for kind in (pa.timestamp("ns"), pa.timestamp("us")))
    for column in (bad, nanosecond, year):
        pq.write_table(pa.table({"answer": column}), tmp_path / "a.parquet")
        with pytest.raises(UserError, match=r"^k: .*a\.parquet: a Parquet file with a value that cannot be read: [^\n]*$"):
            list(read_rows(tmp_path / "a.parquet", "k"))
    text = "0" * (1 << 20)
    for rows, size, most in ((8, 1, 1 << 20), (8, 1, 3 << 20), (3, 2, 1 << 20)):
        pq.write_table(pa.table({"answer": [text * size] * rows, "chat": [[{"content": text}]] * rows}), tmp_path / "a.parquet")
        assert (tmp_path / "a.parquet").stat().st_size < 400_000
        monkeypatch.setattr(reading, "_ROW_BYTES", most)
        read = read_rows(tmp_path / "a.parquet", "k")
        if most > 1 << 20:
            assert [place for place, row in read if len(row["answer"]) == len(text)] == [*range(1, rows + 1)]
        else:
            with pytest.raises(UserError, match=rf"^k: .*a\.parquet:1: a row of more than {most} bytes$"):
                list(read)


@pytest.mark.parametrize("packed", [gzip.compress, lambda data: pa.compress(data, "zstd", asbytes=True)])
def test_json_may_be_compressed(tmp_path: Path, packed: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    suffix = ".gz" if packed is gzip.compress else ".zst"
    lines = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    for name, data in (
        ("train.jsonl", packed(lines[:100]) + packed(lines[100:])),
        ("train.json", packed(json.dumps(ROWS).encode())),
    ):
        file = tmp_path / name.rpartition(".")[2] / f"{name}{suffix}"
        file.parent.mkdir()
        file.write_bytes(data)
        assert list(read_rows(file, "k")) == list(enumerate(ROWS, 1))
        assert labels(file.parent) == [row["answer"] for row in ROWS]
        assert data_files(str(file), "k").source == f"{file.parent.name}/train"
    file.write_bytes(packed(save_parquet(tmp_path / "a.parquet", 0, 3).read_bytes()))
    with pytest.raises(UserError, match=r"^k: .*: a compressed table, .*; unpack it$"):
        list(read_rows(file, "k"))
    monkeypatch.setattr(reading, "_ROW_BYTES", 100)
    monkeypatch.setattr(reading, "_ARRAY_BYTES", 100)
    for data, what in ((b'{"a": "' + bytes(100), ":1: a row of"), (b"[" + bytes(100), ": a JSON array of")):
        file.write_bytes(packed(data))
        with pytest.raises(UserError, match=rf"^k: .*{suffix}{what} more than 100 bytes"):
            list(read_rows(file, "k"))


PART = {"type": "text", "text": "p", "image_url": None}


CHATS: list[tuple[Any, str | None]] = [
    ([{"role": "user", "content": [PART, {"type": "text", "text": "q"}]}], "p\nq"),
    ([{"from": "system", "value": "s"}, {"from": "human", "value": "p"}], "p"),
    ([{"from": "human", "value": "1"}, {"from": "gpt", "value": "2"}, {"from": "human", "value": "3", "role": None}], "3"),
    ('[{"role": "user", "content": "p"}]', "p"),
    (' [{"from": "human", "value": "p"}]', "p"),
    *((text, text) for text in ('[{"a": 1}] has how many keys?', '[{"a": 1}]', "[1]", "[{" * 9999)),
    ([{"role": "user", "content": [PART, {"type": "image", "image": "x"}]}], None),
    *(([{"role": "user", "content": part}], None) for part in ([PART | {"text": None, "type": None}], ["p"], {"text": "p"})),
    *(([{"from": who, "value": "p"}], None) for who in ("tool", None, ["human"])),
    *(([turn], None) for turn in ("p", ["user", "p"], {"role": ["user"], "content": "p"})),
]


def test_forms_of_a_chat(tmp_path: Path) -> None:
    for prompt, wanted in CHATS:
        try:
            (problem,) = loaded(tmp_path, [{"question": prompt, "answer": "1"}]).problems
            found: str | None = problem.question
        except UserError as error:
            found = None
            assert "1 prompt that is not text" in str(error)
        assert (prompt, found) == (prompt, wanted)


def test_a_torn_table_is_one_line(tmp_path: Path) -> None:
    whole = save_parquet(tmp_path / "a.parquet", 0, 100).read_bytes()
    (tmp_path / "a.parquet").write_bytes(whole[:-20])
    with pytest.raises(UserError, match=r"^k: .*a\.parquet: not a Parquet file: ") as error:
        list(read_rows(tmp_path / "a.parquet", "k"))
    assert "\n" not in str(error.value)
    (tmp_path / "a.arrow").write_bytes(b"\xff\xff\xff\xff" + bytes(100))
    with pytest.raises(UserError, match=r"^k: .*a\.arrow: "):
        list(read_rows(tmp_path / "a.arrow", "k"))


# ------------------------------------------------------------------------------------------------ rows that an agent plays

TASKS: list[dict[str, Any]] = [
    {"who": "maze", "size": 3, "walls": [[0, 1]]},
    {"who": "shop", "messages": [{"role": "user", "content": "a hat"}], "label": "hat", "price": 2.5},
]


def tasks(tmp_path: Path, rows: list[Any] = TASKS, **data: Any) -> list[Problem]:
    return load_problems(write(tmp_path / "train.jsonl", rows), config.Data(handler="task", **data)).problems


def test_rows_say_whose_they_are_and_are_told_whole(tmp_path: Path) -> None:
    maze, shop = tasks(tmp_path, columns={"environment": "who"}, environment="game")
    assert (maze.environment, maze.messages, maze.label, maze.extra) == ("maze", [], "", TASKS[0])
    assert (shop.environment, shop.messages, shop.label) == ("shop", TASKS[1]["messages"], "hat")
    assert shop.extra["price"] == 2.5
    assert json.loads(maze.question) == TASKS[0] and shop.question == "a hat"


def test_a_source_says_whose_its_rows_are_and_else_they_are_nobodys(tmp_path: Path) -> None:
    assert {each.environment for each in tasks(tmp_path, environment="game")} == {"game"}
    nobodys = tasks(tmp_path)
    assert [(each.environment, each.extra) for each in nobodys] == [("", {}), ("", {})]


def test_a_row_without_a_name_is_left_out_and_a_file_without_any_or_the_column_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^data.train: .*"):
        tasks(tmp_path, rows=[])
    rows = [TASKS[0], {"who": ""}, {"who": None}, {"who": 3}]
    path = write(tmp_path / "a.jsonl", rows)
    found = load_problems(path, config.Data(handler="task", columns={"environment": "who"}))
    assert (len(found.problems), found.dropped) == (1, {"row that names no environment": 3})
    with pytest.raises(UserError, match=r"^data.columns.environment: .*a.jsonl:1 has no column 'whose'"):
        load_problems(path, config.Data(handler="task", columns={"environment": "whose"}))


def test_a_row_that_names_an_unknown_environment_is_named(tmp_path: Path) -> None:
    found = tasks(tmp_path, columns={"environment": "who"})
    check_environments(found, ["maze", "shop"])
    with pytest.raises(UserError, match=rf"^{tmp_path.name}/train:2: environment 'shop' is not one of .*: maze, game$"):
        check_environments(found, ["maze", "game"])
    with pytest.raises(UserError, match=r"train:1: environment 'maze' .*: there is none$"):
        check_environments(found, [])
    with pytest.raises(UserError, match=r"train:1: environment '' is not one of .*: game$"):
        check_environments(tasks(tmp_path), ["game"])
    check_environments(tasks(tmp_path), [])


class CountedTokenizer:
    """Of each conversation as many tokens as it has characters."""

    def encode_chats(self, conversations: list[list[dict[str, str]]]) -> list[np.ndarray]:
        assert all(conversations)
        return [np.ones(sum(len(each["content"]) for each in messages), np.int32) for messages in conversations]


def test_a_task_without_a_conversation_has_no_tokens_and_is_never_too_long(tmp_path: Path) -> None:
    found = tasks(tmp_path, columns={"environment": "who"})
    for most, lengths in ((5, [5, 0]), (4, [0])):
        asked = ProblemSet(problems=[found[1], found[0]], rows=2, dropped={})
        kept = tokenise(asked, CountedTokenizer(), most, "data.train")  # type: ignore[arg-type]
        assert [len(each) for each in kept.tokens] == lengths
        assert kept.problems[-1].environment == "maze"


def test_what_a_gateway_is_asked_has_the_task(tmp_path: Path) -> None:
    maze, _ = tasks(tmp_path, columns={"environment": "who"})
    whole = config.Config(run=config.Run(name="a"), gateway=config.Gateway())
    asked = request_for(whole, maze, np.zeros(0, np.int32), group_id=1, n=2, seed=3, sampling=SamplingParams(max_new_tokens=4))
    assert isinstance(asked, RunEpisodesRequest)
    assert (asked.task.environment, asked.task.extra) == ("maze", TASKS[0])


# ------------------------------------------------------------------------------------------------ held-out problems


def of(*questions: str, name: str = "a/b") -> list[Problem]:
    return [
        Problem(f"{name}:{i}", [{"role": "system", "content": "s"}, {"role": "user", "content": text}], str(i), name)
        for i, text in enumerate(questions, 1)
    ]


def test_problems_are_compared_without_whitespace() -> None:
    train = of("What is $1 + 1$?", "Two\n\nlines", "once", "once")
    held_out = of("What is $1+1$?", " Two lines\t", "what is $1+1$?", "another", "once", name="c/d")
    assert [problem.id for problem in overlap(train, held_out)] == ["c/d:1", "c/d:2", "c/d:5"]
    assert overlap(held_out[3:4], train) == []


def test_training_on_held_out_problems_is_refused_with_their_number(caplog: pytest.LogCaptureFixture) -> None:
    train, held_out = of("one", "two " * 40, "three"), of("two " * 40, "four", "one", name="c/d")
    with pytest.raises(UserError) as error:
        keep_apart(train, held_out, "data.eval", allowed=False)
    assert str(error.value).startswith("data.train: 2 of the 3 problems of data.eval are in it too, first c/d:1 ('two two two")
    assert str(error.value).endswith("…'); leave one of the files out, or set data.allow_overlap")
    assert "\n" not in str(error.value)
    keep_apart(train, held_out[1:2], "data.eval", allowed=False)
    with caplog.at_level(logging.WARNING, "sluice"):
        keep_apart(train, held_out, "data.eval", allowed=True)
    assert "2 of the 3 problems of data.eval" in caplog.text
