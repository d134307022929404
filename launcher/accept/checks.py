"""`sluice accept`: checks of this machine, one after the other, and one report to send back. Every check is a process
with a deadline, so a check that hangs or crashes on a device becomes a line of the report."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.status import Status

from runtime import timeouts
from runtime.errors import ServiceFault, UserError
from runtime.telemetry.shown import literal, say
from runtime.telemetry.summary import Summary
from sluice import start

Device = Literal["cpu", "cuda", "npu"]

DEADLINES = {"platform": 600.0, "weight_sync": 300.0, "rollout": 300.0, "trainer": 600.0, "quickstart": 1800.0}
CHECKS = tuple(DEADLINES)
STEPS = 20
WHEELS = ("torch", "torch_npu", "transformers", "vllm", "vllm-ascend", "megatron-core", "mindspeed", "triton-ascend", "grpcio")
TOOLS = {"npu": ("npu-smi", "info"), "cuda": ("nvidia-smi",), "cpu": ("lscpu",)}
CANN_HOME = "/usr/local/Ascend/ascend-toolkit/latest"
VARIABLES = re.compile("ASCEND_|CANN|CUDA_VISIBLE|HCCL_|NCCL_|PYTORCH_NPU_ALLOC|TASK_QUEUE|VLLM_ASCEND|LD_PRELOAD")
LAST = 20  # lines of a failed check's output that the report keeps


class CheckOutcome(Struct, kw_only=True):
    """`detail`: why a check failed or was left out, or what was different about it."""

    check: str
    result: Literal["passed", "failed", "left out"]
    seconds: float = 0.0
    detail: str = ""
    figures: dict[str, Any] = {}


class AcceptReport(Struct, kw_only=True):
    device: str
    began: str  # local time
    machine: dict[str, str]
    versions: dict[str, str]
    variables: dict[str, str]
    tool: str  # the output of npu-smi, nvidia-smi or lscpu
    outcomes: list[CheckOutcome]

    @property
    def passed(self) -> bool:
        return all(outcome.result != "failed" for outcome in self.outcomes)


def run(options: argparse.Namespace) -> int:
    """Run the checks and show each. Returns the exit code: 1 if a check has failed."""
    console = Console()
    folder = options.out or Path("accept") / options.device
    with console.status("starting") as status:
        report = asyncio.run(accept(options.device, folder, options.config, options.steps, status))
    for one in report.outcomes:
        say(console, f"{one.check}: {one.result}" + (f" ({one.detail.splitlines()[-1]})" if one.detail else ""))
    say(console, f"to send back: {folder / 'report.md'} and {folder / 'report.json'}")
    return 0 if report.passed else 1


async def accept(device: Device, folder: Path, config: Path, steps: int, status: Status) -> AcceptReport:
    """Run every check, and write report.md and report.json. Raises UserError unless `folder` is empty and `config` exists."""
    if not config.is_file():
        raise UserError(f"--config: there is no file {config}; must be a configuration")
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"--out: {folder} is not empty")
    folder.mkdir(parents=True, exist_ok=True)
    report = await _about(device)  # the vendor's tool runs in a thread
    model, worker = folder / "model", partial(start.command, "launcher.accept.worker")
    count = 0
    for check in CHECKS:
        status.update(literal(check))
        if check == "quickstart":
            outcome = await _quickstart(device, count, folder, config, steps)  # ends by its deadline, like every check
        elif check == "weight_sync" and device != "cpu" and count == 1:
            outcome = CheckOutcome(check=check, result="left out", detail="needs two devices")
        else:
            outcome = await _run(check, worker(check, device, str(model)), folder / f"{check}.log")
            count = outcome.figures.get("devices", count)
        report.outcomes.append(outcome)
        _write(folder, report)
        if check == "platform" and outcome.result == "failed":
            report.outcomes += [CheckOutcome(check=one, result="left out", detail="there is no device") for one in CHECKS[1:]]
            break
    shutil.rmtree(model, ignore_errors=True)  # as without a device
    _write(folder, report)
    return report


def placement(device: Device, count: int) -> list[str]:
    """Return overrides that spread the quickstart over `count` accelerators: trainer with reference, apart from the rollouts.
    The ranks of one communicator need a device each. So a single device syncs weights over gloo, and its roles take turns. With
    several devices their own collective is checked."""
    if device == "cpu":
        return ["weight_sync.backend=gloo"]
    if count == 1:
        return [
            "weight_sync.backend=gloo",
            "services.rollout.replicas=1",
            "services.rollout.colocate=trainer",
            "services.reference.colocate=trainer",
            "training.staleness=1",
        ]
    rollouts = list(range(1, min(count, 3)))
    return [
        f"services.rollout.replicas={len(rollouts)}",
        f"services.rollout.devices={rollouts}",
        "services.trainer.devices=[0]",
        "services.reference.colocate=trainer",
        "weight_sync.transport=collective",
    ]


async def _quickstart(device: Device, count: int, folder: Path, config: Path, steps: int) -> CheckOutcome:
    """Run the quickstart by GRPO: warm-up, rollouts, rewards, reference, trainer, weight syncs and an evaluation."""
    overrides = [*placement(device, count), f"run.dir={folder / 'run'}", f"training.steps={steps}", "run.overwrite=true"]
    if device == "npu":
        overrides.append("services.platform=ascend")
    command = start.command("launcher.cli", "train", str(config), *overrides)
    outcome = await _run("quickstart", command, folder / "quickstart.log", figures=False)
    if outcome.result == "passed":
        outcome.figures = msgspec.to_builtins(Summary.read(folder / "run"))
        if outcome.figures["steps"] != steps:
            outcome.result, outcome.detail = "failed", f"{outcome.figures['steps']} steps instead of {steps}"
    if device != "cpu" and count == 1:
        outcome.detail = outcome.detail or "one device: published over gloo"
    return outcome


async def _run(check: str, command: Sequence[str], log: Path, figures: bool = True) -> CheckOutcome:
    began, deadline = time.monotonic(), DEADLINES[check]
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=out, start_new_session=True
        )
    assert process.stdout is not None
    try:
        printed, _ = await asyncio.wait_for(process.communicate(), deadline)
    except TimeoutError:
        printed = b""
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # a check that hangs or fails may leave processes
        code = await process.wait()
    seconds = time.monotonic() - began
    lines = printed.decode(errors="replace").strip().splitlines()
    if code == 0:
        return CheckOutcome(check=check, result="passed", seconds=seconds, figures=json.loads(lines[-1]) if figures else {})
    late = [f"did not end within {deadline:g} s"] if seconds >= deadline else []
    said = [*lines, *log.read_text(errors="replace").strip().splitlines()][-LAST:]
    return CheckOutcome(check=check, result="failed", seconds=seconds, detail="\n".join(late + said))


async def _about(device: Device) -> AcceptReport:
    versions = {}
    for name in ("sluice-rl", *WHEELS):
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return AcceptReport(
        device=device,
        began=time.strftime("%Y-%m-%d %H:%M:%S %z"),
        machine={
            "system": platform.platform(),
            "architecture": platform.machine(),
            "python": platform.python_version(),
            "cores": str(len(os.sched_getaffinity(0))),
        },
        versions=versions | _cann(),
        variables={name: value for name, value in sorted(os.environ.items()) if VARIABLES.match(name)},
        tool=await asyncio.to_thread(_tool, TOOLS[device]),
        outcomes=[],
    )


def _cann() -> dict[str, str]:
    """Return CANN's version, from its own files under ASCEND_TOOLKIT_HOME."""
    home = Path(os.environ.get("ASCEND_TOOLKIT_HOME", CANN_HOME))
    files = [*sorted(home.glob("*/ascend_toolkit_install.info")), *home.glob("version.cfg")]
    return {"CANN": " ".join(files[0].read_text(errors="replace").split())[:300]} if files else {}


def _tool(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeouts.ACCEPT_TOOL, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]}: {error}"
    return done.stdout or done.stderr


def _write(folder: Path, report: AcceptReport) -> None:
    (folder / "report.json").write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    (folder / "report.md").write_text(render(report), encoding="utf-8")


def render(report: AcceptReport) -> str:
    whole = len(report.outcomes) == len(CHECKS)
    verdict = "**Failed**" if not report.passed else "Passed" if whole else "Not all checks were made"
    lines = [f"# Sluice on {report.device}", "", f"{report.began}. {verdict}.", ""]
    lines += ["| check | result | seconds | figures |", "| --- | --- | --- | --- |"]
    for one in report.outcomes:
        texts = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in one.figures.items()}
        figures = ", ".join(f"{name} {value}" for name, value in texts.items())
        lines.append(f"| {one.check} | {one.result} | {one.seconds:.1f} | {figures} |")
    for one in report.outcomes:
        if one.detail:
            lines += ["", f"## {one.check}: {one.result}", "", "```", one.detail, "```"]
    for title, table in (("Machine", report.machine), ("Versions", report.versions), ("Variables", report.variables)):
        lines += ["", f"## {title}", "", "| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in table.items())]
    return "\n".join([*lines, "", "## Devices", "", "```", report.tool.strip(), "```", ""])
