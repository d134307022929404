"""A whole run whose trainer is on megatron-core: what it computes, and that it goes on from its checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.conftest import make_tiny
from tests.system.runs import ROOT, steps, summary, trained, write_config
from tests.system.test_spmd import COMPARED, VARIETY

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
        training={"steps": STEPS, "staleness": 0, "optimizer": {"learning_rate": 1e-3}},
        checkpoint={"every": STEPS - 1},
    )
    alone = trained(config, folder=tmp_path / "torch", timeout=RUN)
    begun = trained(config, *TENSOR, f"training.steps={STEPS - 1}", folder=tmp_path / "megatron", timeout=RUN)
    assert len(steps(begun.folder)) == STEPS - 1
    spread = trained(config, *PIPELINE, *REFERENCE, "run.resume=auto", folder=tmp_path / "megatron", timeout=RUN)
    for own, other in zip(steps(spread.folder), steps(alone.folder), strict=True):
        assert other["grad_norm"] > 1e-3
        for name in COMPARED:
            assert own[name] == pytest.approx(other[name], rel=1e-4, abs=1e-5), f"{name} of step {own['step']}"


def test_the_quickstart_learns_to_add(tmp_path: Path) -> None:
    overrides = [f"warmup.cache={tmp_path / 'cache'}", "warmup.max_seconds=500"]
    run = trained(ROOT / "configs" / "quickstart_megatron.yaml", *overrides, folder=tmp_path / "run", timeout=800.0)
    assert summary(run.folder)["accuracy_after"] >= 0.90
