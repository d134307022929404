"""The evaluation sets of a configuration: what each takes over, what is refused, and how they are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from runtime.config import Config, Data, Source, Warmup
from runtime.config.checks import semantic_faults
from runtime.data.source_settings import row_format_of
from runtime.data.tokenizer import Tokenizer
from runtime.errors import UserError
from runtime.evaluation.held_out import load_held_out
from runtime.evaluation.sets import HELD_OUT, evaluation_sets, set_faults
from runtime.models.tiny_model import write_tokenizer


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
    config = make(
        {"name": "plain", "path": "p"},
        {
            "name": "own",
            "path": "o",
            "handler": "gsm8k",
            "prompt_key": "q",
            "label_key": "l",
            "system_prompt": "",
            "problems": 0,
        }
        | {"samples": 2, "k": [2], "temperature": 0.5, "max_new_tokens": 16},
        data={"eval": "e", "system_prompt": "s", "prompt_key": "x"},
        evaluation={"problems": 7, "samples": 4, "temperature": 1.0, "max_new_tokens": 64},
    )
    held_out, plain, own = evaluation_sets(config)
    assert [each.key for each in (held_out, plain, own)] == ["data.eval", "evaluation.sets.0.path", "evaluation.sets.1.path"]
    assert (plain.problems, plain.samples, plain.k, plain.temperature, plain.max_new_tokens) == (7, 4, (1,), 1.0, 64)
    assert plain.row_format == held_out.row_format == row_format_of(Source(path=""), config.data)
    assert (own.problems, own.samples, own.k, own.temperature, own.max_new_tokens) == (0, 2, (1, 2), 0.5, 16)
    rows = own.row_format
    assert (rows.handler, rows.prompt_key, rows.label_key, rows.system_prompt) == ("gsm8k", "q", "l", "")


def test_a_temperature_of_zero_is_a_value() -> None:
    (found,) = evaluation_sets(make({"name": "a", "path": "p", "temperature": 0}, evaluation={"temperature": 1.0}))
    assert found.temperature == 0.0


SAMPLED = {"samples": 4, "temperature": 1.0}


@pytest.mark.parametrize(
    ("entry", "fault"),
    [
        ({"name": "a/b"}, "evaluation.sets.0.name: 'a/b' is not letters"),
        ({"name": ".."}, "evaluation.sets.0.name: '..' is not letters"),
        ({"k": [1, 8]}, "evaluation.sets.0.k: 8 is more than the 4 samples to a problem (evaluation.sets.0.samples)"),
        ({"samples": 2, "k": [4]}, "evaluation.sets.0.k: 4 is more than the 2 samples"),
        ({"k": [4], "temperature": 0}, "evaluation.sets.0.temperature: 0 makes all samples of a problem alike; k 4 needs"),
        ({"max_new_tokens": 100}, "evaluation.sets.0.max_new_tokens: 100 is more than evaluation.max_new_tokens, 64"),
    ],
)
def test_a_set_that_cannot_be(entry: dict[str, Any], fault: str) -> None:
    found = faults({"name": "a", "path": "p", **entry}, evaluation={**SAMPLED, "max_new_tokens": 64})
    assert len(found) == 1
    assert found[0].startswith(fault)


def test_names_are_unique_also_beside_data_eval() -> None:
    same = {"name": "a", "path": "p"}
    assert faults(same, same) == ["evaluation.sets.1.name: 'a' names two sets"]
    (fault,) = faults({"name": HELD_OUT, "path": "p"}, data={"eval": "e"})
    assert fault == f"evaluation.sets.0.name: '{HELD_OUT}' names two sets; {HELD_OUT} is the set of data.eval"


def test_k_is_checked_where_only_data_eval_is_named_and_where_a_warm_up_will_name_it() -> None:
    for sections in ({"data": {"eval": "e"}}, {"warmup": {}}):
        assert faults(evaluation={"k": [2]}, **sections) == [
            "evaluation.k: 2 is more than the 1 samples to a problem (evaluation.samples)"
        ]
    assert faults(evaluation={"k": [2]}) == []  # nothing is evaluated


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
    with pytest.raises(UserError, match=r"evaluation\.sets\.0\.label_key: .* has no column 'none'"):
        load_held_out(make({"name": "a", "path": path, "label_key": "none"}), Tokenizer(str(tmp_path)))
