"""On-policy distillation as a user runs it: a teacher that adds rightly, and a student whose corpus forgot to carry."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from runtime.config import Warmup
from runtime.tuning import warmup
from tests.system.runs import ROOT, Live, sluice, steps, summary, trained

pytestmark = pytest.mark.timeout(900)

TOTAL = 800.0  # seconds, the warm-up on a busy machine included
STEPS = 40
FEW = "training.steps=30"  # of 8 samples each


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("teacher") / "made"
    warmup.warm_up(Warmup(forgotten_carry=0.0, accuracy=0.95, max_accuracy=1.0, max_seconds=TOTAL), folder)
    return folder


def run(warmups: Path, folder: Path, *overrides: str) -> Live:
    common = (f"warmup.cache={warmups}", "warmup.max_seconds=500", f"training.steps={STEPS}", "evaluation.every=0")
    common += ("training.lr_staleness_power=0",)  # as the figures of the guide were measured
    return trained(ROOT / "configs" / "quickstart.yaml", *common, *overrides, folder=folder, timeout=TOTAL)


def test_a_student_comes_near_its_teacher_sooner_than_by_rewards_alone(teacher: Path, warmups: Path, tmp_path: Path) -> None:
    known = json.loads((teacher / "warmup.json").read_text())["accuracy"]
    assert known >= 0.95
    taught = ("algorithm={preset: distillation}", f"model.reference={teacher / 'model'}")
    found = summary(run(warmups, tmp_path / "distilled", *taught).folder)
    assert found["accuracy_before"] < 0.6
    assert found["accuracy_after"] >= 0.9 * known
    divergence = [point["actor/kl"] for point in steps(tmp_path / "distilled")]
    # Over ten steps each: a step's divergence is a mean over few replies, which are others in each run.
    assert sum(divergence[-10:]) < 0.8 * sum(divergence[:10])
    alone, groups = (
        ("training.groups_per_step=8", "sampling.group_size=1"),
        ("training.groups_per_step=2", "sampling.group_size=4"),
    )
    distilled = summary(run(warmups, tmp_path / "few", *taught, *alone, FEW).folder)
    rewarded = summary(run(warmups, tmp_path / "rewarded", *groups, FEW).folder)
    assert distilled["accuracy_after"] > rewarded["accuracy_after"]


def test_it_needs_no_reward(teacher: Path, warmups: Path, tmp_path: Path) -> None:
    alone = ("rewards={}", "evaluation={before: false, after: false}", "training.steps=3")
    overrides = ("algorithm={preset: distillation}", f"model.reference={teacher / 'model'}", *alone)
    found = run(warmups, tmp_path / "alone", *overrides)
    assert all(point["actor/grad_norm"] > 0 and point["score/mean"] == 0 for point in steps(found.folder))
    assert not list((found.folder / "logs").glob("reward-*.log"))


def test_a_teacher_with_another_tokenizer_is_one_line(teacher: Path, warmups: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for file in (teacher / "model").iterdir():
        text = file.read_bytes()
        (other / file.name).write_bytes(text.replace(b"<|user|>", b"<|them|>") if file.name == "tokenizer.json" else text)
    common = (f"warmup.cache={warmups}", f"run.dir={tmp_path / 'run'}", "algorithm={preset: distillation}")
    ended = sluice("train", str(ROOT / "configs" / "quickstart.yaml"), *common, f"model.reference={other}", timeout=TOTAL)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"error: model.reference: '{other}' has another tokenizer than the policy: '<|user|>' is token 259")
