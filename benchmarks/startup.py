"""`sluice bench startup`: the start of a whole run, and of a control plane with idle processes beside Ray's."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import IO

import psutil
from msgspec import Struct
from rich.markup import escape

from benchmarks.compared import Compared
from runtime.errors import DeadlineExceeded, ServiceFault, UserError
from runtime.telemetry import startup
from runtime.telemetry.shown import LiteralTable
from runtime.telemetry.startup import Memory
from runtime.telemetry.summary import CONTROL, Summary
from sluice import start

CONFIG = Path("configs") / "quickstart.yaml"
WITHOUT_RAY = "ray is not installed, and left out: pip install 'sluice-rl[bench]'"
DEADLINE = 300.0  # seconds of one start, whatever else the machine does
ENDING = 20.0  # seconds until what was started is gone


class StartupSettings(Struct, frozen=True):
    rounds: int = 3
    idle: int = 6  # processes
    steps: int = 40  # of a run, so that its memory is that of a run under way


FULL = StartupSettings()
QUICK = StartupSettings(rounds=2)


class Start(Struct):
    """Of a control plane with its idle processes: until each has answered, and what they hold then together."""

    seconds: float
    processes: int
    memory: Memory


class RunStart(Struct):
    """Of the quickstart, its warm-up cached; the memory is that of the processes that only direct others, at its largest:
    of those that were there when it was sampled."""

    phases: dict[str, float]
    memory: dict[str, Memory]


class StartupReport(Struct):
    load: tuple[float, float]  # of the machine, the mean over a minute: before the first start and after the last
    runs: list[RunStart]
    idle: dict[str, list[Start]]  # by system
    note: str = ""


async def measure(folder: Path, settings: StartupSettings, show: Callable[[str], None] = lambda line: None) -> StartupReport:
    """Everything in turn. Raises UserError outside a checkout, ServiceFault."""
    if not CONFIG.is_file():
        raise UserError(f"bench startup: there is no {CONFIG}; run it in Sluice's folder")
    systems = ["sluice", *(["ray"] if importlib.util.find_spec("ray") is not None else [])]
    runs: list[RunStart] = []
    idle: dict[str, list[Start]] = {system: [] for system in systems}
    before = os.getloadavg()[0]
    show("the warm-up of the quickstart, and everything once")
    await _run(folder, 1)
    for number in range(settings.rounds):
        show(f"round {number + 1} of {settings.rounds}")
        runs.append(await _run(folder, settings.steps))
        for system in systems:
            idle[system].append(await _idle(system, settings.idle))
    note = "" if "ray" in systems else WITHOUT_RAY
    return StartupReport(load=(before, os.getloadavg()[0]), runs=runs, idle=idle, note=note)


async def _run(folder: Path, steps: int) -> RunStart:
    run = folder / "run"
    overrides = (f"run.dir={run}", f"training.steps={steps}", "evaluation.after=false")
    command = start.command("launcher.cli", "train", str(CONFIG), *overrides)
    child = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        said, _ = await asyncio.wait_for(child.communicate(), DEADLINE)
    except TimeoutError:
        raise DeadlineExceeded("quickstart", "run", "did not end", DEADLINE) from None
    finally:
        await _ended(child)
    if child.returncode:
        raise ServiceFault("quickstart", "run", said.decode(errors="replace").strip().splitlines()[-1])
    summary = Summary.read(run)
    return RunStart(phases=summary.startup, memory={name: summary.memory[name] for name in CONTROL if name in summary.memory})


async def _idle(system: str, count: int) -> Start:
    with tempfile.TemporaryFile() as errors:
        return await _idle_processes(system, count, errors)


async def _idle_processes(system: str, count: int, errors: IO[bytes]) -> Start:
    began = time.monotonic()
    child = await asyncio.create_subprocess_exec(
        *start.command("benchmarks.startup_trial", system, str(count)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=errors,
    )
    assert child.stdin is not None and child.stdout is not None
    try:
        while (line := await asyncio.wait_for(child.stdout.readline(), DEADLINE)) != b"ready\n":
            if not line:
                errors.seek(0)
                why = errors.read().decode(errors="replace").strip().rpartition("\n")[2]
                raise ServiceFault(system, "start", f"ended before {count} processes were there: {why}")
        seconds = time.monotonic() - began
        parent = psutil.Process(child.pid)
        pids = [child.pid, *(one.pid for one in parent.children(recursive=True))]
        found = Start(seconds=seconds, processes=len(pids), memory=startup.of(pids))
        child.stdin.close()
        await asyncio.wait_for(child.wait(), ENDING)
    except TimeoutError:
        raise DeadlineExceeded(system, "start", f"{count} processes did not start and end", DEADLINE) from None
    finally:
        await _ended(child)
    return found


async def _ended(child: asyncio.subprocess.Process) -> None:
    """Nothing of it is left, however it ended."""
    if child.returncode is None:
        with suppress(ProcessLookupError):
            child.send_signal(signal.SIGTERM)
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(child.wait(), ENDING)
    if child.returncode is None:
        child.kill()
        await child.wait()


def compared(report: StartupReport) -> list[Compared]:
    return [Compared("seconds to the first step", [run.phases[startup.TOTAL] for run in report.runs], "≤ 8")]


def render(report: StartupReport) -> list[LiteralTable]:
    return [_of_a_run(report), _of_idle_processes(report)]


def _of_a_run(report: StartupReport) -> LiteralTable:
    table = LiteralTable(title="Quickstart, to the first step", title_justify="left", title_style="bold")
    table.add_column("phase")
    table.add_column("seconds: median (lowest – highest)", justify="right")
    for phase in (startup.TOTAL, *startup.PHASES, startup.NOT_COUNTED):
        if found := [run.phases[phase] for run in report.runs if phase in run.phases]:
            name = f"{phase}, not counted" if phase == startup.NOT_COUNTED else phase
            table.add_row(name, f"{median(found):.1f} ({min(found):.1f} – {max(found):.1f})")
    held = (
        f"{name} {_mebibytes(max(one.rss_bytes for one in seen))} resident, "
        f"{_mebibytes(max(one.pss_bytes for one in seen))} proportional"
        for name in CONTROL
        if (seen := [run.memory[name] for run in report.runs if name in run.memory])
    )
    table.caption = f"at most: {'; '.join(held)}. Load of the machine {report.load[0]:.1f} before, {report.load[1]:.1f} after"
    table.caption_justify = "left"
    return table


def _of_idle_processes(report: StartupReport) -> LiteralTable:
    table = LiteralTable(title="A control plane and idle processes", title_justify="left", title_style="bold")
    for name in ("", "seconds: median (lowest – highest)", "processes", "resident", "proportional"):
        table.add_column(name, justify="right" if name else "left")
    for system, starts in report.idle.items():
        seconds = [start.seconds for start in starts]
        largest = max(starts, key=lambda start: start.memory.pss_bytes)
        table.add_row(
            "Sluice" if system == "sluice" else "Ray",
            f"{median(seconds):.1f} ({min(seconds):.1f} – {max(seconds):.1f})",
            str(largest.processes),
            _mebibytes(largest.memory.rss_bytes),
            _mebibytes(largest.memory.pss_bytes),
        )
    table.caption = escape(report.note) or "from the command until each idle process has answered"
    table.caption_justify = "left"
    return table


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
