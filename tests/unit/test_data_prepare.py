"""`sluice data prepare`: the same file for any number of workers, every row accounted for; and the published files."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from launcher import cli
from runtime.config import Curriculum, Data, Source
from runtime.data import prepare as prepare_module
from runtime.data.handlers import load_problems
from runtime.data.prepare import CHUNK_ROWS, PreparedData, overlap, prepare
from runtime.data.prepared import training_prompts
from runtime.data.prompts import Share
from runtime.data.tokenizer import Tokenizer
from runtime.errors import ConfigError, UserError
from runtime.models import tiny_model
from tests.real_data import ROOT, real_file


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not to be written to."""
    folder = tmp_path_factory.mktemp("model")
    tiny_model.write_tokenizer(folder)
    return folder


def rows(count: int) -> list[dict[str, Any]]:
    """Problems of which some cannot be used, none of them in every chunk."""
    made = [{"question": f"{i} + {i} é ?", "answer": 2 * i, "level": 1 + i % 5, "note": None} for i in range(count)]
    for i in range(3, count, 97):
        made[i]["answer"] = None
    for i in range(10, count, 89):
        made[i]["question"] = " " + made[i - 1]["question"].replace(" ", "\n")
    for i in range(20, count, 150):
        made[i]["question"] = "long " * 40 + str(i)
    for i in range(count // 2, count):
        made[i]["note"] = i / 2
    made[-1]["question"] = " "  # a reason that comes up late
    return made


def write(path: Path, made: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return path


def settings_of(folder: Path, model: Path, *overrides: str, **keys: Any) -> prepare_module.PrepareSettings:
    raw = {"input": f"{folder}/in/train.jsonl", "tokenizer_name_or_path": str(model), "output_prefix": f"{folder}/out"}
    (folder / "prepare.yaml").write_text(json.dumps(raw | keys))
    return prepare_module.load(folder / "prepare.yaml", overrides)


def test_the_output_is_the_same_for_any_number_of_workers(tmp_path: Path, model: Path) -> None:
    write(tmp_path / "in" / "train.jsonl", rows(4 * CHUNK_ROWS + 17))
    keys = {"dataset_additional_keys": ["labels", "level", "note"], "max_prompt_length": 150, "prompt_type": "qwen"}
    made = {}
    for workers in (1, 2, 4):
        outcome = prepare(settings_of(tmp_path, model, f"workers={workers}", f"output_prefix={tmp_path}/{workers}", **keys))
        made[workers] = (Path(outcome.path).read_bytes(), outcome.sources)
    assert made[1] == made[2] == made[4]


def test_every_row_is_in_the_output_or_counted(tmp_path: Path, model: Path) -> None:
    made = rows(1000)
    write(tmp_path / "in" / "train.jsonl", made)
    told: list[int] = []
    keys = {"max_prompt_length": 150, "difficulty_key": "level", "dataset_additional_keys": ["note"], "log_interval": 300}
    outcome = prepare(settings_of(tmp_path, model, **keys), told.append)
    (count,) = outcome.sources.values()
    assert count.dropped == {"duplicate problem": 12, "null label": 11, "prompt over 150 tokens": 7, "empty prompt": 1}
    assert count.rows == 1000 == outcome.prompts + sum(count.dropped.values())
    assert told == [300, 600, 900, 1000]
    table = pq.read_table(outcome.path, memory_map=True).to_pylist()
    tokenizer = Tokenizer(str(model))
    assert len(table) == outcome.prompts
    kept = [int(row["id"].rpartition(":")[2]) - 1 for row in table]
    assert kept == sorted(kept)
    for index, row in zip(kept, table, strict=True):
        source = made[index]
        assert row["problem"] == source["question"]
        assert row["text"] == f"<|user|>{source['question']}<|im_end|><|assistant|>"
        assert row["tokens"] == tokenizer.encode_texts([row["text"]])[0].tolist()
        assert (row["label"], row["source"]) == (str(source["answer"]), "in/train")
        assert (row["difficulty"], row["note"]) == (source["level"], source["note"])
    report = outcome.report()
    dropped = "12 duplicate problem, 11 null label, 7 prompt over 150 tokens, 1 empty prompt"
    assert report[0] == f"in/train: 1000 rows, {outcome.prompts} problems (dropped: {dropped})"
    assert report[-1].startswith("1000 rows in ")


def test_several_inputs_are_one_output(tmp_path: Path, model: Path) -> None:
    write(tmp_path / "in" / "train.jsonl", rows(30))
    write(tmp_path / "more" / "extra.jsonl", rows(40))
    outcome = prepare(settings_of(tmp_path, model, input=[str(tmp_path / "in" / "train.jsonl"), str(tmp_path / "more")]))
    assert list(outcome.sources) == ["in/train", f"{tmp_path.name}/more"]
    assert outcome.sources[f"{tmp_path.name}/more"].dropped["duplicate problem"] == 28  # those of the first file
    assert outcome.rows == 70


def prepared(folder: Path, model: Path, **keys: Any) -> PreparedData:
    write(folder / "in" / "train.jsonl", rows(300))
    return prepare(settings_of(folder, model, **keys))


def test_training_takes_a_prepared_file_as_it_is(tmp_path: Path, model: Path) -> None:
    outcome = prepared(tmp_path, model, prompt_type="qwen_r1", system_prompt="Be brief.")
    tokenizer = Tokenizer(str(model), prompt_type="qwen_r1")
    read = training_prompts(Data(train=outcome.path, prompt_type="qwen_r1", max_prompt_tokens=10_000), tokenizer)
    direct = Data(
        train=str(tmp_path / "in" / "train.jsonl"), prompt_type="qwen_r1", system_prompt="Be brief.", max_prompt_tokens=10_000
    )
    raw = training_prompts(direct, tokenizer)
    by_id = {problem.id: ids for problem, ids in zip(raw.problems, raw.tokens, strict=True)}
    assert len(read.problems) == outcome.prompts
    for problem, ids in zip(read.problems, read.tokens, strict=True):
        assert ids.dtype == np.int32
        np.testing.assert_array_equal(ids, by_id[problem.id])
        assert not ids.flags.owndata and not ids.flags.writeable  # a view into the file's buffers
    assert read.report() == f"300 rows, {outcome.prompts} problems (dropped: 4 duplicate problem, 4 null label, 1 empty prompt)"
    shorter = outcome.longest - 1
    some = training_prompts(Data(train=outcome.path, prompt_type="qwen_r1", max_prompt_tokens=shorter), tokenizer)
    assert some.dropped[f"prompt over {shorter} tokens"] == outcome.prompts - len(some.problems) > 0


def test_columns_that_were_carried_over_are_there_for_rules(tmp_path: Path, model: Path) -> None:
    path = prepared(tmp_path, model, dataset_additional_keys=["level", "note"]).path
    tokenizer = Tokenizer(str(model))
    read = training_prompts(Data(train=path, additional_keys=["note", "level"], max_prompt_tokens=10_000), tokenizer)
    source = {f"in/train:{at}": row for at, row in enumerate(rows(300), 1)}
    assert read.problems
    for problem in read.problems:
        row = source[problem.id]
        assert problem.extra == {"note": row["note"], "level": row["level"]}
    with pytest.raises(UserError, match=r"^data\.additional_keys: .* has no column 'year' "):
        training_prompts(Data(train=path, additional_keys=["year"]), tokenizer)


def test_a_prepared_file_for_another_model_is_refused(tmp_path: Path, model: Path) -> None:
    path = prepared(tmp_path, model, prompt_type="qwen").path
    data = Data(train=path, prompt_type="qwen")
    training_prompts(data, Tokenizer(str(model), prompt_type="qwen"))
    with pytest.raises(UserError) as error:
        training_prompts(data, Tokenizer(str(model)))
    assert str(error.value) == (
        f"data.train: {path} was prepared with prompt_type qwen, which is not the template of data.prompt_type model; "
        "set that, or prepare it again"
    )
    other = shutil.copytree(model, tmp_path / "other")
    raw = json.loads((other / "tokenizer.json").read_text())
    # Settings that do not touch a prompt may differ.
    raw |= {"truncation": {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}}
    (other / "tokenizer.json").write_text(json.dumps(raw, indent=4))  # as transformers may write it
    assert training_prompts(data, Tokenizer(str(other), prompt_type="qwen")).problems
    raw["added_tokens"][0]["content"] = "<|another|>"
    (other / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(UserError, match=rf"^data\.train: {path} was prepared with another tokenizer than that of {other}; "):
        training_prompts(data, Tokenizer(str(other), prompt_type="qwen"))


def test_sources_of_all_kinds_are_mixed(tmp_path: Path, model: Path) -> None:
    first = prepared(tmp_path, model, difficulty_key="level").path
    (tmp_path / "gsm").mkdir()
    write(tmp_path / "gsm" / "x.jsonl", [{"q": f"{i}?", "a": f"#### {i}", "difficulty": "3"} for i in range(10)])
    second = Source(path=str(tmp_path / "gsm" / "x.jsonl"), weight=2.5, handler="gsm8k", columns={"prompt": "q", "label": "a"})
    data = Data(train=[Source(path=first), second], curriculum=Curriculum(), system_prompt="S")
    found = training_prompts(data, Tokenizer(str(model)))
    assert found.shares == [Share(len(found.problems) - 10, 1.0), Share(10, 2.5)]
    assert [problem.label for problem in found.problems[-10:]] == [str(i) for i in range(10)]
    assert {problem.difficulty for problem in found.problems[-10:]} == {3.0}
    assert {problem.difficulty for problem in found.problems[:-10]} == {1.0, 2.0, 3.0, 4.0, 5.0}
    assert found.problems[-1].messages[0] == {"role": "system", "content": "S"}
    assert found.rows == 310
    with pytest.raises(UserError, match=r"^data\.curriculum\.key: .*out\.parquet has no column 'hard' \(its columns: id, "):
        training_prompts(Data(train=first, curriculum=Curriculum(key="hard")), Tokenizer(str(model)))
    wrong = Source(path=second.path, handler="gsm8k", columns={"prompt": "z", "label": "a"})
    with pytest.raises(UserError, match=r"^data\.train\.1\.columns\.prompt: .*x\.jsonl:1 has no column 'z'"):
        training_prompts(Data(train=[Source(path=first), wrong]), Tokenizer(str(model)))


def test_a_failed_write_leaves_what_was_there(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = prepared(tmp_path, model)
    before = Path(outcome.path).read_bytes()

    def torn(table: Any, path: Path, **options: Any) -> None:
        path.write_bytes(before[:100])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(pq, "write_table", torn)
    with pytest.raises(UserError, match=r"^output_prefix: .*out\.parquet: no space left on device$"):
        prepare(settings_of(tmp_path, model, prompt_type="qwen"))
    assert Path(outcome.path).read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out.parquet", "prepare.yaml"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"map_keys": {"prompt": "q"}},
            "map_keys.prompt: {input}:1 has no column 'q' (its columns: answer, level, note, question)",
        ),
        ({"map_keys": {"response": "a"}}, "map_keys.response: {input}:1 has no column 'a'"),
        ({"difficulty_key": "hard"}, "difficulty_key: {input}:1 has no column 'hard'"),
        ({"dataset_additional_keys": ["year"]}, "dataset_additional_keys: {input}:1 has no column 'year'"),
        ({"max_prompt_length": 3}, "input: no prompt is left of 300 rows, 0 problems (dropped: "),
        ({"seq_length": 4}, "input: no prompt is left of 300 rows, 0 problems (dropped: "),
        ({"dataset_additional_keys": ["mixed"]}, "dataset_additional_keys: "),
    ],
)
def test_rows_that_will_not_do(tmp_path: Path, model: Path, keys: dict[str, Any], message: str) -> None:
    made = rows(300)
    if keys == {"dataset_additional_keys": ["mixed"]}:
        made = [row | {"mixed": "text" if i > 280 else i} for i, row in enumerate(made)]
    path = write(tmp_path / "in" / "train.jsonl", made)
    with pytest.raises(UserError) as error:
        prepare(settings_of(tmp_path, model, **keys))
    assert str(error.value).startswith(message.format(input=path))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out.parquet").exists()


@pytest.mark.parametrize(
    ("keys", "fault"),
    [
        ({"handler_name": "R1AlpacaStyleInstructionHandler"}, "handler_name: is called handler here: plain, gsm8k, "),
        ({"tokenizer_type": "HuggingFaceTokenizer"}, "tokenizer_type: leave it out; tokenizer.json says what it is"),
        ({"handler": "R1AlpacaStyleInstructionHandler"}, "handler: 'R1AlpacaStyleInstructionHandler' is called r1 here"),
        ({"handler": "gsm9k"}, "handler: 'gsm9k' is not one of alpaca, "),
        ({"handlr": "gsm8k"}, "handlr: unknown key; nearest is 'handler'"),
        ({"map_keys": {"history": "h"}}, "map_keys.history: unknown key; "),
        ({"workers": 0}, "workers: 0 is not an integer >= 1"),
        *(({"input": "/no/where"}, "input: /no/where is not a file"), ({"input": []}, "input: empty; ")),
        ({"input": ["/no/where"]}, "input.0: /no/where is not a file"),
        ({"tokenizer_name_or_path": "/no"}, "tokenizer_name_or_path: '/no' is not a folder with a tokenizer.json"),
        ({"prompt_type": "qwen4"}, "prompt_type: 'qwen4' is not one of model, deepseek3, "),
        ({"prompt_type_path": "/no.json"}, "prompt_type_path: /no.json: no such file or directory"),
        ({"max_prompt_length": 8, "seq_length": 8}, "max_prompt_length: 8 leaves no room for a reply in seq_length 8"),
        ({"dataset_additional_keys": ["tokens"]}, "dataset_additional_keys: 'tokens' is a column of the output already"),
        ({"dataset_additional_keys": ["x", "x"]}, "dataset_additional_keys: 'x' is there twice"),
    ],
)
def test_faults_of_the_file_are_one_line_each(tmp_path: Path, model: Path, keys: dict[str, Any], fault: str) -> None:
    write(tmp_path / "in" / "train.jsonl", rows(3))
    with pytest.raises(ConfigError) as error:
        settings_of(tmp_path, model, **keys)
    (line,) = error.value.faults
    assert line.startswith(fault)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("input: x")
    with pytest.raises(ConfigError) as error:
        prepare_module.load(tmp_path / "a.yaml", ["workers=x"])
    missing = sorted(line.partition(":")[0] for line in error.value.faults)
    assert missing == ["output_prefix", "tokenizer_name_or_path", "workers"]


def test_the_command(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "in" / "train.jsonl", rows(300))
    settings_of(tmp_path, model)
    command = ["data", "prepare", str(tmp_path / "prepare.yaml"), "log_interval=100", f"output_prefix={tmp_path}/other.parquet"]
    with pytest.raises(SystemExit) as ended:
        cli.main(command)
    assert ended.value.code == 0
    told = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in told if line.startswith("prepare ")][1:] == ["100", "200", "300"]
    assert told[-3].startswith("in/train: 300 rows, ")
    assert told[-2].startswith(f"{tmp_path}/other.parquet: ")
    assert told[-1].startswith("300 rows in ") and told[-1].endswith(" rows/s")
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, "handler=gsm9k"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("error: handler: 'gsm9k' is not one of ")


# ------------------------------------------------------------------------------------------------ published files

PARTS = "deepscaler_parts"
NO_LEVEL = "difficulty_key="

# configuration, file, overrides, rows, dropped by reason
PREPARED = [
    ("gsm8k", "gsm8k/train.jsonl", [], 7473, {}),
    ("gsm8k", "gsm8k/test.jsonl", [], 1319, {}),
    ("gsm8k", "gsm8k/example_model_solutions.jsonl", ["handler=plain", "map_keys.response=ground_truth"], 1319, {}),
    ("math", "math/train.json", [], 7474, {"null label": 2, "empty label": 2, "unknown difficulty": 2, "duplicate problem": 2}),
    ("math", "math/test5000.jsonl", ["handler=math", "map_keys.response=solution", "difficulty_key=level"], 5000, {}),
    ("math", "math500/test.jsonl", ["difficulty_key=level", "dataset_additional_keys=[subject]"], 500, {}),
    (
        "math",
        "qwen_math_cot_100/math_cot_100.jsonl",
        ["map_keys={prompt: question, response: gt}", "difficulty_key=level", "dataset_additional_keys=[]"],
        100,
        {},
    ),
    ("math_lvl3to5", "math_lvl3to5_8k/train.json", [], 8523, {"empty label": 2, "duplicate problem": 2}),
    ("deepscaler", f"{PARTS}/deepscaler_subset.json", [], 803, {"duplicate problem": 24}),
    ("deepscaler", f"{PARTS}/minerva_test.json", [NO_LEVEL], 272, {}),
    ("deepscaler", f"{PARTS}/olympiad_bench_test.json", [NO_LEVEL, "dataset_additional_keys=[unit]"], 675, {}),
    ("deepscaler", f"{PARTS}/amc_test.json", [], 83, {}),
    ("aime", f"{PARTS}/aime_train.json", ["max_prompt_length=0"], 975, {}),
    ("aime", f"{PARTS}/aime24_test.json", [], 30, {}),
    ("aime", "aime25/test.jsonl", [NO_LEVEL, "dataset_additional_keys=[]"], 30, {}),
]


@pytest.mark.parametrize(("name", "file", "overrides", "rows", "dropped"), PREPARED, ids=lambda value: str(value)[:40])
def test_a_published_file_is_prepared(
    tmp_path: Path, model: Path, name: str, file: str, overrides: list[str], rows: int, dropped: dict[str, int]
) -> None:
    keys = [f"input={real_file(file)}", f"tokenizer_name_or_path={model}", f"output_prefix={tmp_path}/out"]
    settings = prepare_module.load(ROOT / "configs" / "datasets" / f"{name}.yaml", [*keys, "max_prompt_length=0", *overrides])
    outcome = prepare(settings)
    (count,) = outcome.sources.values()
    assert (count.rows, count.dropped) == (rows, dropped)
    assert outcome.prompts == rows - sum(dropped.values())
    if file.endswith("aime_train.json"):  # a column that is carried over keeps its type
        schema = pq.read_schema(outcome.path)
        assert (str(schema.field("year").type), str(schema.field("difficulty").type)) == ("int64", "double")
    if rows < 1000 or name == "math_lvl3to5":
        data = Data(train=outcome.path, prompt_type=settings.prompt_type, max_prompt_tokens=outcome.longest)
        found = training_prompts(data, Tokenizer(str(model), prompt_type=settings.prompt_type))
        assert len(found.problems) == outcome.prompts


def test_every_configuration_is_among_them() -> None:
    assert {path.stem for path in (ROOT / "configs" / "datasets").glob("*.yaml")} == {name for name, *_ in PREPARED}


def labels(file: str, handler: str = "r1", **keys: str) -> Iterator[str]:
    data = Data(handler=handler, **keys)  # type: ignore[arg-type]
    return (problem.label for problem in load_problems(str(real_file(file)), data).problems)


def test_labels_are_answers_and_nothing_else() -> None:
    assert all(label.lstrip("-").isdigit() for label in labels("gsm8k/train.jsonl", "gsm8k"))
    assert all(label.lstrip("-").isdigit() for label in labels(f"{PARTS}/amc_test.json"))
    assert set(labels(f"{PARTS}/aime_train.json")) >= {"60", "012"}
    boxed = dict(zip(*[iter_of("math500/test.jsonl", key) for key in ("problem", "answer")], strict=True))
    found = load_problems(str(real_file("math500/test.jsonl")), Data(handler="math")).problems
    same = sum("".join(problem.label.split()) == "".join(boxed[problem.question].split()) for problem in found)
    assert same == 500  # the last box of each solution is the answer that the file gives


def iter_of(file: str, key: str) -> list[str]:
    return [json.loads(line)[key] for line in real_file(file).read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(
    ("train", "held_out", "shared", "of"),
    [
        *(("math/test5000.jsonl", "math500/test.jsonl", 500, 500), ("math/train.json", "math500/test.jsonl", 0, 500)),
        ("math_lvl3to5_8k/train.json", "math500/test.jsonl", 0, 500),
        ("math_lvl3to5_8k/train.json", "math/test5000.jsonl", 2936, 5000),
        ("math/train.json", "math/test5000.jsonl", 2, 5000),
        (f"{PARTS}/aime_train.json", f"{PARTS}/aime24_test.json", 0, 30),
    ],
)
def test_what_published_files_have_in_common(train: str, held_out: str, shared: int, of: int) -> None:
    sets = []
    for file in (train, held_out):
        key = "prompt" if file.startswith("math_lvl") else "problem"
        label = "solution" if file == "math/test5000.jsonl" else "answer"
        sets.append(load_problems(str(real_file(file)), Data(handler="r1", columns={"prompt": key, "label": label})).problems)
    assert (len(overlap(*sets)), len(sets[1])) == (shared, of)
