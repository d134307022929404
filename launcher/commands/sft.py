"""`sluice sft`: supervised fine-tuning of a configuration's model on the replies of its data. Runs only the trainer's ranks,
on this machine."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import signal
import sys
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from rich.console import Console

from launcher import run_folder
from launcher.job import Interrupted, watched
from launcher.node import topology
from launcher.node.local_node import LocalNode
from launcher.node.supervisor import Child, Supervisor
from launcher.registered_names import known_names
from launcher.view import View
from runtime import run_files, timeouts
from runtime.config import Config, loading
from runtime.config.checks import alone, tune_faults
from runtime.errors import ConfigError
from runtime.models import tiny_model
from runtime.process.os_process import ending_signals
from runtime.telemetry.shown import say
from sluice import start

NAME = "trainer-0"


def run(options: argparse.Namespace) -> None:
    config = loading.resolve(loading.load(options.config, options.overrides))
    say(Console(), watched(options.verbose, lambda view: sft(config, view)))


async def sft(config: Config, view: View) -> str:
    """Tune in `run.dir`, and return lines on the result. Raises UserError, ServiceFault, Interrupted. Ends all processes."""
    here, folder = LocalNode.of(config), Path(config.run.dir)
    faults = [*tune_faults(config, known_names(), here.memory(alone(config)))]
    if faults := faults or [*topology.machine_faults(alone(config), here.machine)]:
        raise ConfigError(faults)
    logs, lock = run_folder.prepare(folder, config.run)
    supervisor = Supervisor(logs, view, config.logs)
    try:
        made = tiny_model.made(config)
        resume = run_folder.begin(folder, made, view.say)
        made = replace(made, run=replace(made.run, resume=resume))
        run_files.write_private(folder / run_files.CONFIG, loading.to_yaml(made))
        view.phase("starting")
        last = await _followed(await supervisor.start(_spec(made, here), capture=True), view)
        loss = f", loss {last['loss']:.4f}" if math.isfinite(last["loss"]) else ""
        return f"data: {last['said']}\n{last['step']} of {last['steps']} steps{loss}\nmodel: {folder / run_files.MODEL}"
    finally:
        await supervisor.end_all(timeouts.FAILED_GRACE)
        lock.close()


def _spec(config: Config, here: LocalNode) -> topology.ProcessSpec:
    settings = config.services.trainer
    program: tuple[str, ...] = ("runtime.sft.rank", str(Path(config.run.dir) / run_files.CONFIG))
    python, ranks = settings.python or sys.executable, settings.processes
    if ranks > 1:
        which = ("--ranks", ",".join(map(str, range(ranks))), "--world", str(ranks))
        program = ("launcher.node.ranks", "--group", NAME, *which, start.__file__, *program)
    threads = max(1, len(here.machine.cpus) // ranks)
    return topology.ProcessSpec(
        name=NAME,
        role="trainer",
        command=start.command(*program, python=python),
        env=topology.environment(settings, threads, here.machine, settings.devices[:ranks]),
        cpus=topology.affinity(settings),
    )


async def _followed(child: Child, view: View) -> dict[str, Any]:
    """Show the progress of the ranks until they end. Return their last message: step, steps, loss, and what became of the
    data's rows. The first signal lets them end in order; the second ends them at once."""
    loop = asyncio.get_running_loop()
    signals: list[signal.Signals] = []

    def on_signal(number: signal.Signals) -> None:
        if number is signal.SIGHUP and signals:
            return  # a lost terminal may send the signal several times
        signals.append(signal.SIGKILL if signals else signal.SIGTERM)
        view.phase("stopping (again to stop now)")
        child.signal_group(signals[-1])

    for number in ending_signals():
        loop.add_signal_handler(number, on_signal, number)
    message: dict[str, Any] = {}
    assert child.process.stdout is not None
    async for line in child.process.stdout:
        message = json.loads(line)
        if message["event"] == "progress" and not signals:
            view.phase("tuning", message["step"], message["steps"], f"loss {message['loss']:.4f}")
    await child.process.wait()
    if len(signals) > 1:
        raise Interrupted("stopped at once; the newest checkpoint stays", 130)
    if signals and not message:
        raise Interrupted(start.STOPPED["sft"], 0)
    if child.process.returncode:
        raise child.fault()
    return message
