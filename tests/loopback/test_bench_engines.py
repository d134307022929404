"""The bench of the training engines, on a tiny model: that both do their work; no speed is asserted."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from launcher.benches import engines
from launcher.benches.engines import Settings
from launcher.benches.packing import Settings as Samples
from launcher.benches.packing import Shape

TINY = Settings(
    Shape(32, 1, 2, 1, 64), rounds=2, seconds=0.1, checkpoints=1, samples=Samples(prompt_tokens=20, reply_tokens=24)
)


def test_both_engines_run_and_save(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core", reason="needs megatron-core: pip install 'sluice-rl[megatron]'")
    report = asyncio.run(engines.measure(tmp_path, TINY))
    assert report.engines.keys() == {"torch", "megatron"}
    for engine in report.engines.values():
        assert min(engine.tokens_per_second, engine.save_seconds, engine.load_seconds) > 0
    assert len(report.megatron_over_torch.pairs) == 2
