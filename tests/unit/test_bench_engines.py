"""The bench of the training engines: who is measured when, and what the report says of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from benchmarks import engines
from benchmarks.engines import LOAD, PASSES, SAVE, EnginesSettings
from benchmarks.worker import Measured, Worker
from runtime.config import Config, Run, model_checks
from runtime.errors import UserError


def test_the_engines_take_turns_and_the_report_pairs_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    class Told:
        def __init__(self, engine: str):
            self._engine = engine

        async def measure(self, what: str, seconds: float) -> Measured:
            asked.append((self._engine, what))
            slower = {"torch": 1.0, "megatron": 2.0}[self._engine]
            return Measured(100.0, {PASSES: 1.0, SAVE: 3.0, LOAD: 5.0}[what] * slower)

    @asynccontextmanager
    async def started(config: Config, threads: int) -> AsyncIterator[Told]:
        assert threads == 1
        yield Told(config.services.trainer.engine)

    monkeypatch.setattr(Worker, "started", started)
    monkeypatch.setattr(engines, "packing_config", lambda *_: Config(run=Run(name="bench")))
    monkeypatch.setattr(model_checks, "_installed", lambda: True)
    report = asyncio.run(engines.measure(tmp_path, EnginesSettings(rounds=2, checkpoints=1)))
    passes = [engine for engine, what in asked if what == PASSES]
    assert passes[2:] == ["megatron", "torch", "torch", "megatron"]  # after those that build the engines
    assert report.megatron_over_torch.pairs == [0.5, 0.5]
    assert report.megatron_over_torch.median == 0.5
    core = report.engines["megatron"]
    assert (core.tokens_per_second, core.save_seconds, core.load_seconds) == (50.0, 6.0, 10.0)
    assert engines.render(report)[0].row_count == 2


def test_without_megatron_core_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "packing_config", lambda *_: Config(run=Run(name="bench")))
    monkeypatch.setattr(model_checks, "_installed", lambda: False)
    with pytest.raises(UserError, match=r"bench engines: .*megatron needs a package: pip install"):
        asyncio.run(engines.measure(tmp_path, EnginesSettings()))
