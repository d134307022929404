"""One training, on-policy, in other layouts. Two ranks of trainer and critic, where one rank is killed; and megatron-core
without copies in memory, which is killed while it saves and goes on in another layout. All make what one undisturbed rank of
engine torch makes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from runtime.ledger.checkpoint import steps as checkpoints
from runtime.ledger.reader import GroupRow, LedgerReader
from runtime.ledger.states import Phase
from runtime.telemetry.record import read_jsonl
from tests.system.conftest import make_tiny
from tests.system.listeners import check_run
from tests.system.runs import LEARNS, ROOT, Live, check_gone, one_line, started, steps, summary, trained, write_config
from tests.unit.training_steps import assert_metrics

pytestmark = pytest.mark.timeout(600)

RUN = 240.0
STEPS, EVERY = 8, 2
REPEATED = EVERY + 1  # steps that all runs are to make alike, with the one that is made again, counted from 0
COMPARED = {
    *("actor/pg_loss", "actor/kl_loss", "actor/entropy", "actor/grad_norm", "score/mean", "response_length/mean"),
    *("critic/vf_loss", "critic/grad_norm", "critic/returns/mean"),
}
# With a small eps, the rounding of a gradient near 0 decides the sign of an update.
SMOOTH = {"learning_rate": 1e-2, "eps": 1e-2}
# Random weights earn nothing from rules of arithmetic, and without differences in reward there is no gradient.
VARIETY = """
from runtime.rewards.rules import rule


@rule("variety")
def variety(text, label, context):
    return len(set(text)) / 16
"""
MEGATRON = ("services.trainer.engine=megatron", "services.trainer.processes=2", "services.critic.engine=megatron")
TENSOR, PIPELINE = "services.trainer.parallel.tensor=2", "services.trainer.parallel.pipeline=2"
REFERENCE = ("services.reference.engine=megatron", "services.reference.processes=2")  # two blocks, each with its own groups
AWAY = ("services.trainer.offload=[optimizer, param]",)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """On-policy, so that all runs train the same groups: what is generated depends on the weights and seeds alone."""
    folder = tmp_path_factory.mktemp("spmd")
    (folder / "variety.py").write_text(VARIETY)
    return write_config(
        folder / "config.yaml",
        make_tiny(folder / "tiny", kv_heads=2),
        rewards={"rules": [{"name": f"{folder / 'variety.py'}:variety"}]},
        algorithm={"preset": "ppo", "kl_coefficient": 0.1, "kl_placement": "loss", "kl": "k3"},
        critic={"learning_rate": SMOOTH["learning_rate"]},
        training={"steps": STEPS, "staleness": 0, "optimizer": SMOOTH},
        checkpoint={"every": EVERY},
        deadlines={"stop": 60.0},
    )


@pytest.fixture(scope="module")
def alone(config: Path) -> Live:
    run = trained(config, folder=config.with_name("alone"), timeout=RUN)
    points = steps(run.folder)
    assert len(points) == STEPS
    assert all(point["actor/grad_norm"] > 1e-3 for point in points)
    assert points[-1]["actor/kl_loss"] > 1e-5  # the weights have moved
    # Values begin at 0, and approach the returns.
    first, last = (abs(point["critic/values/mean"] - point["critic/returns/mean"]) for point in (points[0], points[-1]))
    assert abs(points[0]["critic/values/mean"]) < 0.1 * abs(points[0]["critic/returns/mean"]) and last < first
    return run


def groups(run: Live) -> list[tuple[Any, ...]]:
    """What was trained, in the order in which it was begun."""
    with LedgerReader(run.folder / "ledger") as reader:
        found: Sequence[GroupRow] = sorted(reader.groups(states=[Phase.RETIRED]), key=lambda group: group.group_id)
    return [(one.group_id, one.problem, one.step, one.response_tokens, one.reward) for one in found]


def assert_same(run: Live, alone: Live) -> None:
    """What is trained is the same, and what each step reports but for rounding, which adds up from the first step on. In the
    last steps rounding may move a token, as what is generated together depends on time. Then only the steps before agree."""
    pairs = list(zip(groups(run), groups(alone), strict=True))
    moved = [own[2] for own, other in pairs if own != other]
    same = min(moved, default=STEPS)
    assert same > REPEATED and moved.count(same) <= 1, [pair for pair in pairs if pair[0] != pair[1]]
    of_steps = list(zip(read_jsonl(run.folder / "metrics.jsonl"), steps(alone.folder), strict=True))
    for own, other in of_steps[:same]:
        compared, expected = ({name: each[name] for name in COMPARED} for each in (own, other))
        assert_metrics(compared, expected, steps=int(other["step"]) + 1)


def test_two_ranks_are_one_though_one_of_them_is_killed(config: Path, tmp_path: Path, alone: Live) -> None:
    """Both ranks' weights, moments and all are restored: what is made again is what would have been."""
    two = ("services.trainer.processes=2", "services.critic.processes=2")
    with started(config, *two, folder=tmp_path / "run") as run:
        run.reaches(EVERY + 1, RUN)
        run.member("trainer-0", rank=1).kill()
        run.says("trainer-0: run: ", RUN)
        assert run.wait(RUN) == 0, run.output + run.errors
        check_gone(run.folder)
    assert_same(run, alone)


# In the trainer's interpreter: the files of the second checkpoint reach the disk no more.
SLOW_DISK = """
import os, pathlib, threading

really = os.fsync

def fsync(file):
    if ".step-00000004.partial/megatron" in os.readlink(f"/proc/self/fd/{file}"):
        pathlib.Path("MARK").touch()
        threading.Event().wait(100)
    really(file)

os.fsync = fsync
"""


@pytest.mark.long
def test_megatron_killed_while_it_saves_goes_on_in_another_layout(config: Path, tmp_path: Path, alone: Live) -> None:
    """It is killed twice: the second time it may not be started again."""
    pytest.importorskip("megatron.core", reason="needs megatron-core: pip install 'sluice-rl[megatron]'")
    mark, folder = tmp_path / "writing", tmp_path / "run"
    (tmp_path / "sitecustomize.py").write_text(SLOW_DISK.replace("MARK", str(mark)))
    slow = (f"services.trainer.env.PYTHONPATH={tmp_path}:{ROOT}", "checkpoint.async_save=true")
    once = ("services.trainer.restarts=1", "checkpoint.in_memory=off")
    with started(config, *MEGATRON, TENSOR, *AWAY, *slow, *once, folder=folder) as run:
        run.comes(mark.exists, RUN, "the second checkpoint's files")
        run.reaches(5)  # beside it: the one of step 6 waits
        assert checkpoints(folder) == [2]
        check_run(run)
        done = len(steps(folder))
        run.member("trainer-0").kill()
        run.comes(lambda: len(steps(folder)) >= done + 2, RUN, "steps 3 and 4 again")
        run.member("trainer-0").kill()
        assert run.wait(RUN) == 1, run.output + run.errors
        check_gone(folder)
        line = one_line(run.errors)
        assert line.startswith("error: trainer-0: run: ") and "services.trainer.restarts allows no further start" in line
    assert checkpoints(folder) == [2]
    other = (*MEGATRON, PIPELINE, *REFERENCE, *AWAY, "checkpoint.async_save=true", "checkpoint.keep=9")
    run = trained(config, *other, "run.resume=auto", folder=folder, timeout=RUN)
    assert checkpoints(folder) == [2, 4, 6, 8]
    assert_same(run, alone)
    resumed = steps(folder)[2 - STEPS :]
    assert [point["step"] for point in resumed] == list(range(3, STEPS + 1))
    assert all(point["timing/onload"] > 0 for point in resumed)
    assert any(point.get("timing/checkpoint") for point in resumed)
    assert any(point.get("timing/save") for point in resumed)
    with LedgerReader(folder / "ledger") as reader:
        assert reader.check_final(None)["retired"] == 4 * STEPS


@pytest.mark.long
def test_the_quickstart_on_megatron_learns_to_add(warmups: Path, tmp_path: Path) -> None:
    pytest.importorskip("megatron.core", reason="needs megatron-core: pip install 'sluice-rl[megatron]'")
    overrides = [f"warmup.cache={warmups}", "warmup.max_seconds=500", "evaluation.every=0", f"training.steps={LEARNS}"]
    run = trained(ROOT / "configs" / "quickstart_megatron.yaml", *overrides, folder=tmp_path / "run", timeout=800.0)
    found = summary(run.folder)
    assert found["accuracy_before"] <= 0.60 and found["accuracy_after"] >= 0.80
