"""A whole run whose trainer is on megatron-core: what it computes, and that it goes on from its checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.ledger.checkpoint import steps as checkpoints
from runtime.ledger.reader import LedgerReader
from tests.system.conftest import make_tiny
from tests.system.runs import LEARNS, ROOT, check_gone, eventually, started, steps, summary, trained, write_config
from tests.system.test_spmd import SMOOTH, VARIETY, assert_compared

pytest.importorskip("megatron.core", reason="needs megatron-core: pip install 'sluice-rl[megatron]'")
pytestmark = pytest.mark.timeout(900)

RUN = 200.0
STEPS = 3
TENSOR = ["services.trainer.engine=megatron", "services.trainer.processes=2", "services.trainer.parallel.tensor=2"]
PIPELINE = ["services.trainer.engine=megatron", "services.trainer.processes=2", "services.trainer.parallel.pipeline=2"]
REFERENCE = ["services.reference.engine=megatron", "services.reference.processes=2"]  # two blocks, each with its own groups


def test_it_has_the_losses_of_the_torch_engine_and_resumes_in_another_layout(tmp_path: Path) -> None:
    tiny = make_tiny(tmp_path / "tiny", kv_heads=2)
    rule = tmp_path / "variety.py"
    rule.write_text(VARIETY)
    config = write_config(
        tmp_path / "config.yaml",
        tiny,
        rewards={"rules": [{"name": f"{rule}:variety"}]},
        algorithm={"kl_coefficient": 0.1},
        training={"steps": STEPS, "staleness": 0, "optimizer": SMOOTH},
        checkpoint={"every": STEPS - 1},
    )
    alone = trained(config, folder=tmp_path / "torch", timeout=RUN)
    begun = trained(config, *TENSOR, f"training.steps={STEPS - 1}", folder=tmp_path / "megatron", timeout=RUN)
    assert len(steps(begun.folder)) == STEPS - 1
    spread = trained(config, *PIPELINE, *REFERENCE, "run.resume=auto", folder=tmp_path / "megatron", timeout=RUN)
    for own, other in zip(steps(spread.folder), steps(alone.folder), strict=True):
        assert other["actor/grad_norm"] > 1e-3
        assert_compared(own, other)


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


def test_a_trainer_killed_while_it_saves_goes_on_from_the_checkpoint_before(tmp_path: Path) -> None:
    tiny, mark, folder = make_tiny(tmp_path / "tiny", kv_heads=2), tmp_path / "writing", tmp_path / "run"
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "sitecustomize.py").write_text(SLOW_DISK.replace("MARK", str(mark)))
    config = write_config(
        tmp_path / "config.yaml",
        tiny,
        checkpoint={"every": 2, "async_save": True},
        services={"trainer": {"engine": "megatron", "offload_train_optimizer": True, "offload_train_param": True}},
    )
    slow = f"services.trainer.env.PYTHONPATH={tmp_path / 'slow'}:{ROOT}"
    once = "services.trainer.restarts.attempts=0"
    with started(config, "training.steps=100000", slow, once, folder=folder) as run:
        eventually(mark.exists, RUN, "the second checkpoint's files")
        run.reaches(5)  # beside it: the one of step 6 waits
        assert checkpoints(folder) == [2]
        run.member("trainer-0").kill()
        assert run.wait(RUN) == 1, run.output + run.errors
        check_gone(folder)
    assert checkpoints(folder) == [2]
    trained(config, "training.steps=6", "run.resume=auto", folder=folder, timeout=RUN)
    assert checkpoints(folder) == [4, 6]
    resumed = steps(folder)[-4:]
    assert [point["step"] for point in resumed] == [3, 4, 5, 6]
    assert all(point["timing/onload"] > 0 for point in resumed)
    assert any(point.get("timing/checkpoint") for point in resumed)
    assert any(point.get("timing/save") for point in resumed)
    with LedgerReader(folder / "ledger") as reader:
        assert reader.check_final(None)["retired"] == 4 * 6


def test_the_quickstart_learns_to_add(warmups: Path, tmp_path: Path) -> None:
    overrides = [f"warmup.cache={warmups}", "warmup.max_seconds=500", "evaluation.every=0", f"training.steps={LEARNS}"]
    run = trained(ROOT / "configs" / "quickstart_megatron.yaml", *overrides, folder=tmp_path / "run", timeout=800.0)
    found = summary(run.folder)
    assert found["accuracy_before"] <= 0.60 and found["accuracy_after"] >= 0.80
