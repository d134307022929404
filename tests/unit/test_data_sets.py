"""The data set configurations on the published files: how many rows each has, how many are kept, and why the others are not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from runtime.config import Data
from runtime.data import prepare_settings
from runtime.data.handlers import load_problems
from runtime.data.overlap import overlap
from runtime.data.prepare import prepare
from runtime.data.sources import training_prompts
from runtime.data.tokenizer import Tokenizer
from runtime.models import tiny_model
from tests.real_data import ROOT, real_file

PARTS = "deepscaler_parts"
NO_LEVEL = "difficulty_key="

# configuration, file, overrides, rows, dropped by reason
PREPARED = [
    ("gsm8k", "gsm8k/train.jsonl", [], 7473, {}),
    ("gsm8k", "gsm8k/test.jsonl", [], 1319, {}),
    ("gsm8k", "gsm8k/example_model_solutions.jsonl", ["handler=plain", "map_keys.response=ground_truth"], 1319, {}),
    (
        "math",
        "math/train.json",
        [],
        7474,
        {"null label": 2, "empty label": 2, "unknown difficulty": 2, "duplicate problem": 2},
    ),
    (
        "math",
        "math/test5000.jsonl",
        ["handler=math", "map_keys.response=solution", "difficulty_key=level"],
        5000,
        {},
    ),
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


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model.write_tokenizer(folder)
    return folder


@pytest.mark.parametrize(("name", "file", "overrides", "rows", "dropped"), PREPARED, ids=lambda value: str(value)[:40])
def test_a_published_file_is_prepared(
    tmp_path: Path, model: Path, name: str, file: str, overrides: list[str], rows: int, dropped: dict[str, int]
) -> None:
    keys = [
        f"input={real_file(file)}",
        f"tokenizer_name_or_path={model}",
        f"output_prefix={tmp_path}/out",
        "max_prompt_length=0",
    ]
    settings = prepare_settings.load(ROOT / "configs" / "datasets" / f"{name}.yaml", [*keys, *overrides])
    outcome = prepare(settings)
    (count,) = outcome.sources.values()
    assert (count.rows, count.dropped) == (rows, dropped)
    assert count.kept == rows - sum(dropped.values())
    found = training_prompts(
        Data(train=outcome.path, prompt_type=settings.prompt_type, max_prompt_tokens=outcome.longest),
        Tokenizer(str(model), prompt_type=settings.prompt_type),
    )
    assert len(found.problems) == count.kept


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
        ("math/test5000.jsonl", "math500/test.jsonl", 500, 500),
        ("math/train.json", "math500/test.jsonl", 0, 500),
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
        sets.append(load_problems(str(real_file(file)), Data(handler="r1", prompt_key=key, label_key=label)).problems)
    assert (len(overlap(*sets)), len(sets[1])) == (shared, of)


def test_a_carried_column_keeps_its_type(tmp_path: Path, model: Path) -> None:
    keys = [
        f"input={real_file(f'{PARTS}/aime_train.json')}",
        f"tokenizer_name_or_path={model}",
        f"output_prefix={tmp_path}/out",
    ]
    outcome = prepare(prepare_settings.load(ROOT / "configs" / "datasets" / "aime.yaml", keys))
    schema = pq.read_schema(outcome.path)
    assert (str(schema.field("year").type), str(schema.field("difficulty").type)) == ("int64", "double")
