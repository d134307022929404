"""The bench of the training engines, on a tiny model: that both do their work; no speed is asserted."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import pytest

from benchmarks import engines
from benchmarks.engines import EnginesSettings
from benchmarks.packing import PackingSettings as Samples
from benchmarks.packing import PackingShape, packing_config
from benchmarks.worker import Worker

TINY = EnginesSettings(
    PackingShape(32, 1, 2, 1, 64), rounds=2, seconds=0.1, checkpoints=1, samples=Samples(prompt_tokens=20, reply_tokens=24)
)


def test_both_engines_run_and_save(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core", reason="needs megatron-core: pip install 'sluice-rl[megatron]'")
    report = asyncio.run(engines.measure(tmp_path, TINY))
    assert report.engines.keys() == {"torch", "megatron"}
    for engine in report.engines.values():
        assert min(engine.tokens_per_second, engine.save_seconds, engine.load_seconds) > 0
    assert len(report.megatron_over_torch.pairs) == 2


def test_what_a_worker_leaves_goes_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are killed at their end, with a checkpoint on their disk."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))

    async def measured() -> list[str]:
        async with Worker.started(packing_config(tmp_path, TINY.shape, TINY.budget, TINY.samples), 1) as worker:
            assert (await worker.measure(engines.SAVE, 0.0)).seconds > 0
            return [path.name for path in temporary.rglob("*")]

    assert "checkpoint" in asyncio.run(measured())
    assert list(temporary.iterdir()) == []
