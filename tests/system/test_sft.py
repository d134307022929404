"""`sluice sft` as a user runs it: what it learns, a stop and going on, several ranks, a run of its model, and mistakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.system.runs import START, check_gone, eventually, points, refused, sluice, started, summary, trained
from tests.unit.sft_cases import greedy_accuracy, make_sums

pytestmark = pytest.mark.timeout(300)

RUN = 200.0


@pytest.fixture
def sums(tmp_path: Path) -> Path:
    """A configuration beside a tiny model and its sums."""
    make_sums(tmp_path)
    raw: dict[str, Any] = {
        "run": {"name": "sums"},
        "model": {"path": str(tmp_path / "model")},
        "data": {"train": str(tmp_path / "sums.jsonl")},
        "sft": {"epochs": 60, "batch_size": 12, "max_tokens": 64, "learning_rate": 5e-3},
        "training": {"optimizer": {"warmup_steps": 2}},
        "checkpoint": {"every": 50},
        "rewards": {"rules": [{"name": "math"}]},  # a run's own, which is no mistake
        "trackers": [{"name": "jsonl"}],
    }
    (tmp_path / "sums.yaml").write_text(yaml.safe_dump(raw))
    return tmp_path / "sums.yaml"


@pytest.mark.long
def test_it_learns_sums_though_it_was_stopped(sums: Path, tmp_path: Path) -> None:
    folder, two = tmp_path / "run", "services.trainer.processes=2"
    with started(sums, two, folder=folder, command="sft") as run:
        metrics = folder / "metrics.jsonl"
        eventually(lambda: metrics.exists() and len(points(folder)) > 60, START, "60 steps")
        run.interrupt()
        assert run.wait(RUN) == 0, run.output + run.errors
        check_gone(folder)
    done = len(points(folder))
    assert done < 180
    assert f"{done} of 180 steps, loss " in run.output
    assert refused(sums, folder, command="sft", whole=True).startswith(f"run.dir: {folder} holds a run already")
    with started(sums, "run.resume=auto", folder=folder, command="sft") as run:  # one rank goes on from two
        assert run.wait(RUN) == 0, run.output + run.errors
        check_gone(folder)
    assert [point["step"] for point in points(folder)] == list(range(1, 181))
    assert "data: 36 rows, 36 problems" in run.output
    assert greedy_accuracy(folder / "model") >= 0.9
    # `sluice train` goes on with the model and the same file.
    overrides = ["data.max_prompt_tokens=16", "sampling.max_new_tokens=8", "training.steps=2", "evaluation.after=false"]
    trained(sums, f"model.path={folder / 'model'}", *overrides, folder=tmp_path / "on", timeout=RUN)
    assert summary(tmp_path / "on")["steps"] == 2


def test_on_megatron_core(sums: Path, tmp_path: Path) -> None:
    pytest.importorskip("megatron.core", reason="needs megatron-core: make install-dev")
    layout = ("services.trainer.engine=megatron", "services.trainer.parallel={tensor: 2}", "sft.epochs=4")
    folders = tmp_path / "torch", tmp_path / "megatron"
    for folder, overrides in zip(folders, (("sft.epochs=4",), layout), strict=True):
        ended = sluice("sft", str(sums), f"run.dir={folder}", *overrides, timeout=RUN)
        assert ended.returncode == 0, ended.stderr
    ours, theirs = (points(folder) for folder in folders)
    assert len(ours) == len(theirs) == 12
    for one, other in zip(ours, theirs, strict=True):
        assert one["sft/loss"] == pytest.approx(other["sft/loss"], rel=0.05)
    assert ours[0]["sft/loss"] == pytest.approx(theirs[0]["sft/loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (("data.train=/no",), "data.train: '/no' is not a file"),
        (("data.handler=messages",), "has no column 'messages' (its columns: answer, question)"),
        (("sft.max_tokens=2",), "no conversation has 2 tokens or less; see sft.max_tokens"),
        (("sft.epoch=1",), "sft.epoch: unknown key; nearest is 'epochs'"),
        (("services.trainer.cpu_offload=true",), "services.trainer.cpu_offload: true needs accelerators"),
        (("run.resume=/no",), "run.resume: '/no' is not a checkpoint's folder"),
    ],
)
def test_a_mistake_is_one_line(sums: Path, tmp_path: Path, overrides: tuple[str, ...], line: str) -> None:
    assert line in refused(sums, tmp_path / "run", *overrides, command="sft")
