"""`sluice bench rollout` on a tiny setting: the engines are measured in two environments; no speed is asserted."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import command, rollout
from benchmarks.packing import PackingShape
from benchmarks.rollout import RolloutBenchSettings, measure, rank, render
from runtime.errors import UserError
from tests.system.runs import VLLM_PYTHON, needs_vllm

TINY = RolloutBenchSettings(shapes=(PackingShape(128, 1, 4, 2, 64),), sequences=(8, 16), rounds=2, seconds=0.5, updates=2)


@needs_vllm
@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_both_engines_are_measured(tmp_path: Path) -> None:
    report = asyncio.run(measure(tmp_path, str(VLLM_PYTHON), TINY))
    assert [case.sequences for case in report.cases] == [8, 16]
    for case in report.cases:
        assert case.tokens_per_second.keys() == {"torch", "vllm"}
        assert all(rate > 0 for rate in case.tokens_per_second.values())
        assert len(case.ratios) == 2
        assert len(case.own_ratios) == 2
        for pauses in (*case.pauses.values(), case.own_pauses):
            assert pauses.updates == 4
            assert 0 < pauses.p50 <= pauses.p99
    assert report.start_seconds["1 layers of 128"]["vllm"] > 0
    console = Console(record=True, width=180)
    for table in render(report):
        console.print(table)
    text = console.export_text()
    assert "vllm / torch" in text
    assert "vllm / own" in text


def test_ranks() -> None:
    assert [rank([4.0, 1.0, 3.0, 2.0], share) for share in (0.01, 0.5, 0.51, 0.99)] == [1.0, 2.0, 3.0, 4.0]


def test_an_interpreter_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"'\.venv-vllm/bin/python' is not an executable; run make install-vllm$"):
        command.run("rollout", command.Options())
    with pytest.raises(UserError, match=r"'/no/python' is not an executable$"):
        command.run("rollout", command.Options(vllm_python=Path("/no/python")))
    with pytest.raises(UserError, match="bench engine runs no vLLM"):
        command.run("engine", command.Options(vllm_python=Path("/no/python")))
    assert rollout.interpreter(Path("python3")) == "python3"
