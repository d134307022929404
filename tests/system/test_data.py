"""Prepared files, several sources and a curriculum, from the command to trained steps; held-out problems kept apart."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.system.runs import one_line, sluice, summary, trained

pytestmark = pytest.mark.timeout(300)

RUN = 200.0


def test_prepare_then_train_on_several_sources(config: Path, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "prepare.yaml").write_text(
        json.dumps(
            {
                "input": str(tiny / "train.jsonl"),
                "tokenizer_name_or_path": str(tiny / "model"),
                "output_prefix": str(tmp_path / "prepared"),
                "handler": "gsm8k",
                "prompt_type": "default",
                "log_interval": 100,
            }
        )
    )
    ended = sluice("data", "prepare", str(tmp_path / "prepare.yaml"), "workers=2", timeout=RUN)
    assert ended.returncode == 0, ended.stderr
    assert "rows/s" in ended.stdout.splitlines()[-1]

    rows = [{"problem": f"{i}+{i}=", "answer": float(2 * i), "level": f"Level {i}"} for i in range(1, 40)]
    (tmp_path / "own").mkdir()
    own = tmp_path / "own" / "doubles.jsonl"
    own.write_text("".join(json.dumps(row) + "\n" for row in reversed(rows)))
    sources = [
        {"path": str(tmp_path / "prepared.parquet"), "weight": 3},
        {"path": str(own), "handler": "r1", "prompt_key": "problem"},
    ]
    overrides = ["data.prompt_type=default", "training.steps=2", "training.groups_per_step=4", "training.staleness=0"]
    run = trained(config, *overrides, f"data.train={json.dumps(sources)}", folder=tmp_path / "run", timeout=RUN)
    assert summary(run.folder)["groups"]["retired"] == 8
    shown = [json.loads(line) for line in sluice("samples", str(run.folder), "--jsonl", "--limit", "0").stdout.splitlines()]
    prompts = {sample["group"]: sample["prompt"] for sample in shown}
    assert all(prompt.startswith("Human: ") and prompt.endswith("=\nAssistant:") for prompt in prompts.values())
    doubles = {f"Human: {row['problem']}\nAssistant:" for row in rows}
    assert Counter(prompt in doubles for prompt in prompts.values())[True] >= 2  # one in four, and what both files have

    curriculum = [f"data.train={own}", "data.handler=r1", "data.curriculum={key: level}", "data.eval=", "evaluation.every=0"]
    run = trained(config, *overrides, *curriculum, folder=tmp_path / "easy", timeout=RUN)
    shown = [json.loads(line) for line in sluice("samples", str(run.folder), "--jsonl", "--limit", "0").stdout.splitlines()]
    assert {sample["label"] for sample in shown} == {
        str(2 * i) for i in range(1, 9)
    }  # the easiest eight, hardest last in the file

    line = refusal(config, tmp_path, f"data.train={tmp_path / 'prepared.parquet'}")
    assert line.startswith(
        f"error: data.train: {tmp_path / 'prepared.parquet'} was prepared with prompt_type default, which is not"
    )


def test_training_on_the_evaluation_set(config: Path, tiny: Path, tmp_path: Path) -> None:
    held_out = tiny / "eval.jsonl"
    count = len(held_out.read_text().splitlines())
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_text((tiny / "train.jsonl").read_text() + held_out.read_text().replace("=", " =\\n"))
    line = refusal(config, tmp_path, f"data.train={mixed}", f"data.eval={held_out}")
    assert line.startswith(f"error: data.train: {count} of the {count} problems of data.eval are in it too, first ")
    allowed = [f"data.train={mixed}", f"data.eval={held_out}", "data.allow_overlap=true", "training.steps=1"]
    run = trained(config, *allowed, folder=tmp_path / "allowed", timeout=RUN)
    assert f"{count} of the {count} problems of data.eval" in (run.folder / "logs" / "coordinator.log").read_text()


def refusal(config: Path, folder: Path, *overrides: str) -> str:
    ended = sluice("train", str(config), f"run.dir={folder / 'refused'}", *overrides, timeout=RUN)
    assert ended.returncode == 2, ended.stdout + ended.stderr
    return one_line(ended.stderr)
