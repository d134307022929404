"""Prepared files and several sources, from the command to trained steps; a teacher and no reward; a run of some hours."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from runtime.config import Warmup
from runtime.sft import warmup
from tests.system.conftest import make_tiny
from tests.system.runs import ROOT, Live, here, refused, shown, steps, summary, trained

pytestmark = pytest.mark.timeout(900)

RUN = 200.0
TOTAL = 800.0  # seconds, the warm-up on a busy machine included
STEPS = 40
FEW = "training.steps=30"  # of 8 samples each


def test_prepare_then_train_on_several_sources_with_a_teacher_alone(config: Path, tiny: Path, tmp_path: Path) -> None:
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
    prepared, own = tmp_path / "prepared.parquet", tmp_path / "own" / "doubles.jsonl"
    ended = here("data", "prepare", str(tmp_path / "prepare.yaml"), "workers=2")
    assert ended.returncode == 0, ended.stderr
    assert "rows/s" in ended.stdout.splitlines()[-1]
    line = refused(config, tmp_path / "refused", f"data.train={prepared}", whole=True)
    assert line.startswith(f"data.train: {prepared} was prepared with prompt_type default, which is not")

    # The held-out problems are in it too, which has to be allowed.
    held_out = tiny / "eval.jsonl"
    rows = [{"problem": f"{i}+{i}=", "answer": float(2 * i)} for i in range(1, 40)]
    own.parent.mkdir()
    own.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = [
        {"path": str(prepared), "weight": 3},
        {"path": str(own), "handler": "r1", "columns": {"prompt": "problem"}, "weight": 3},
        {"path": str(held_out)},
    ]
    count = len(held_out.read_text().splitlines())
    data = ["data.prompt_type=default", f"data.train={json.dumps(sources)}"]

    teacher = make_tiny(tmp_path / "teacher") / "model"
    taught = ("algorithm={preset: distillation}", f"model.reference={teacher}", "rewards={}")
    ends = ("training.steps=100000", "training.groups_per_step=5", "stop.hours=0.0015")
    run = trained(config, *data, "data.allow_overlap=true", *taught, *ends, folder=tmp_path / "run", timeout=RUN)
    assert f"{count} of the {count} problems of data.eval" in (run.folder / "logs" / "coordinator.log").read_text()
    result, points = summary(run.folder), steps(run.folder)
    assert "hours are over" in result["stop_reason"]
    assert result["groups"]["retired"] == 5 * result["steps"]
    assert not list((run.folder / "logs").glob("reward-*.log"))
    assert all(point["actor/grad_norm"] > 0 and point["score/mean"] == 0 for point in points)
    prompts = {sample["group"]: sample["prompt"] for sample in shown(run.folder, "--limit", "0")}
    assert all(prompt.startswith("Human: ") and prompt.endswith("=\nAssistant:") for prompt in prompts.values())
    doubles = {f"Human: {row['problem']}\nAssistant:" for row in rows}
    assert Counter(prompt in doubles for prompt in prompts.values())[True] >= 1  # three in seven, and what others have


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that adds rightly."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("teacher") / "made"
    careful = replace(warmup.RECIPES["sums"], careless=0.0)
    warmup.warm_up(Warmup(accuracy=0.95, max_seconds=TOTAL), folder, recipe=careful)
    return folder


def distilled(warmups: Path, folder: Path, *overrides: str) -> Live:
    common = (f"warmup.cache={warmups}", "warmup.max_seconds=500", f"training.steps={STEPS}", "evaluation.every=0")
    common += ("training.lr_staleness_power=0",)  # as the figures of the guide were measured
    return trained(ROOT / "configs" / "quickstart.yaml", *common, *overrides, folder=folder, timeout=TOTAL)


@pytest.mark.long
def test_a_student_comes_near_its_teacher_sooner_than_by_rewards_alone(teacher: Path, warmups: Path, tmp_path: Path) -> None:
    known = json.loads((teacher / "warmup.json").read_text())["accuracy"]
    assert known >= 0.95
    taught = ("algorithm={preset: distillation}", f"model.reference={teacher / 'model'}")
    found = summary(distilled(warmups, tmp_path / "distilled", *taught).folder)
    assert found["accuracy_before"] < 0.6
    assert found["accuracy_after"] >= 0.9 * known
    divergence = [point["actor/kl"] for point in steps(tmp_path / "distilled")]
    # Over ten steps each: a step's divergence is a mean over few replies, which are others in each run.
    assert sum(divergence[-10:]) < 0.8 * sum(divergence[:10])
    alone, groups = (
        ("training.groups_per_step=8", "sampling.group_size=1"),
        ("training.groups_per_step=2", "sampling.group_size=4"),
    )
    by_teacher = summary(distilled(warmups, tmp_path / "few", *taught, *alone, FEW).folder)
    rewarded = summary(distilled(warmups, tmp_path / "rewarded", *groups, FEW).folder)
    assert by_teacher["accuracy_after"] > rewarded["accuracy_after"]
