"""`sluice bench startup`: what it starts is there, is counted, and is gone afterwards. No speed is asserted."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from benchmarks import startup
from benchmarks.startup import RunStart, Start, StartupReport, StartupSettings
from runtime.errors import ServiceFault, UserError
from runtime.telemetry.memory import Memory

RUN = RunStart(
    phases={"launcher": 0.5, "services": 4.0, "first step": 0.25, "evaluation": 0.5, "to first step": 5.0},
    memory={"coordinator": Memory(80 << 20, 45 << 20), "launcher": Memory(66 << 20, 40 << 20)},
)


def text_of(report: StartupReport) -> str:
    console = Console(width=120)
    with console.capture() as capture:
        for table in startup.render(report):
            console.print(table)
    return capture.get()


def test_idle_processes_are_started_counted_and_ended() -> None:
    before = {*psutil.Process().children()}
    found = asyncio.run(startup._idle("sluice", 2))
    assert found.processes == 3
    assert 0 < found.seconds < startup.DEADLINE
    assert 0 < found.memory.pss_bytes <= found.memory.rss_bytes
    left = {*psutil.Process().children()} - before
    assert not [child for child in left if child.is_running() and child.status() != "zombie"]


def test_one_that_cannot_start_is_a_fault_that_says_why() -> None:
    with pytest.raises(ServiceFault, match="neither: start: ended before 2 processes were there: KeyError: 'neither'"):
        asyncio.run(startup._idle("neither", 2))


def test_it_says_what_it_measured_and_that_ray_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[str] = []

    async def run(folder: Path, steps: int) -> RunStart:
        asked.append(f"run {steps}")
        return RUN

    async def idle(system: str, count: int) -> Start:
        asked.append(f"{system} {count}")
        return Start(seconds=1.5, processes=1 + count, memory=Memory(400 << 20, 200 << 20))

    monkeypatch.setattr(startup, "_run", run)
    monkeypatch.setattr(startup, "_idle", idle)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    report = asyncio.run(startup.measure(tmp_path, StartupSettings(rounds=2, idle=3, steps=7)))
    assert asked == ["run 1", "run 7", "sluice 3", "run 7", "sluice 3"]
    shown = text_of(report)
    assert "Ray" not in shown
    assert startup.WITHOUT_RAY in " ".join(shown.split())
    assert "coordinator 80 MiB resident, 45 MiB proportional; launcher 66 MiB resident" in " ".join(shown.split())
    assert "evaluation, not counted" in shown


def test_it_wants_the_quickstart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"there is no configs/quickstart\.yaml"):
        asyncio.run(startup.measure(tmp_path, StartupSettings()))
