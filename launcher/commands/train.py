"""`sluice train`: a whole run on this machine, from the configuration to the summary."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path

from msgspec.structs import replace
from rich.console import Console

from launcher import run_folder
from launcher.job import Job, watched
from launcher.node.local_node import LocalNode
from launcher.view import View
from runtime import run_files, timeouts
from runtime.config import Config, loading
from runtime.evaluation import results as evaluation
from runtime.process import keys, os_process, waiting
from runtime.telemetry import summary
from runtime.telemetry.shown import say, shown
from runtime.telemetry.startup import PeakMemory
from runtime.telemetry.summary import LAUNCHER, Summary
from sluice import start


def run(options: argparse.Namespace) -> None:
    config = loading.resolve(loading.load(options.config, options.overrides))
    run_training(config, LocalNode.of(config), options.verbose)


def run_training(config: Config, here: LocalNode, verbose: bool = False) -> None:
    """Train, with this machine as the coordinator's node, and print the result. `verbose`: all output. Raises SluiceError."""
    os_process.close_to_others()
    console = Console()
    result = watched(verbose, lambda view: train(config, view, here))
    console.print(summary.render(result))
    if found := evaluation.read(Path(config.run.dir)):
        console.print(evaluation.render([found[0], *found[1:][-1:]]))
    say(console, f"run folder: {config.run.dir}")
    if result.mismatch_alarm:
        print(shown(f"alarm: {summary.alarm(result)}"), file=sys.stderr)


async def train(config: Config, view: View, here: LocalNode | None = None, asked: float | None = None) -> Summary:
    """Run to the end, with this machine as the coordinator's node. `asked`: when the user asked for it, by time.monotonic; None
    = when this process began. Raises UserError for a user's mistake, ServiceFault for a fault. Ends all processes."""
    job = _TrainJob(config, view, here or LocalNode.of(config))
    if asked is not None:
        job.started = job.launched = asked
    return await job.run()


class _TrainJob(Job[Summary]):
    trains = True
    stopped_early = start.STOPPED["train"]
    stopped_late = "stopped at once; the newest checkpoint stays"

    def __init__(self, config: Config, view: View, here: LocalNode):
        super().__init__(config, view, here)
        self._memory = PeakMemory(LAUNCHER)
        self._page = PageBeside(config, view)

    async def run(self) -> Summary:
        watching = asyncio.create_task(self._watch_memory())
        try:
            return await super().run()
        finally:
            watching.cancel()
            await self._page.end()

    async def _start(self, config: Config) -> str:
        await self._page.start()
        return await super()._start(config)

    async def prepared(self) -> Config:
        """Return the configuration, after the warm-up if there is one. Delete what an earlier run left, or resume it."""
        config = self.config
        self.check(config)
        if config.warmup is not None:
            config = await self.warmed_up(config)
        resume = await self.guarded(asyncio.to_thread(run_folder.begin, self.folder, config, self.view.say))  # it reads much
        return replace(config, run=replace(config.run, resume=resume))

    async def outcome(self) -> Summary:
        summary, memory = Summary.read(self.folder), self._memory
        summary = replace(summary, peak_pss_bytes=memory.pss_bytes, memory=memory.by_process)
        summary.total_seconds = time.monotonic() - self.started
        await waiting.done(lambda: summary.write(self.folder), self.folder, self.view.say)
        return summary

    async def _watch_memory(self) -> None:
        """Sample the memory of the processes. An error ends the sampling, not the run."""
        try:
            while True:
                children = self.supervisor.children if hasattr(self, "supervisor") else ()
                await asyncio.to_thread(self._memory.sample, {child.pid: child.spec.name for child in children})
                await asyncio.sleep(timeouts.MEMORY_INTERVAL)
        except Exception as error:  # noqa: BLE001 - it is reported
            self.view.say(f"the memory of the processes is not measured any more: {type(error).__name__}: {error}")


# ---- The page beside a run

LOG = "page.log"


class PageBeside:
    """Starts and ends the page. `view` shows the page's address, or why there is no page: the run goes on without it."""

    def __init__(self, config: Config, view: View):
        self._config, self._view = config, view
        self._log = Path(config.run.dir) / run_files.LOGS / LOG
        self._process: asyncio.subprocess.Process | None = None
        self._reporting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        page = self._config.page
        if page is None:
            return
        try:
            with self._log.open("wb") as errors:
                self._process = await asyncio.create_subprocess_exec(
                    *start.command("launcher.cli", "page", self._config.run.dir, "--host", page.host, "--port", str(page.port)),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=errors,
                    env=keys.inherited(),
                    start_new_session=True,  # Ctrl-C ends the run first
                    preexec_fn=os_process.die_with_parent,
                )
        except OSError as error:
            self._view.say(f"page: not started: {error}")
            return
        self._reporting = asyncio.create_task(self._report(self._process))

    async def _report(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        if address := (await process.stdout.readline()).decode().strip():
            self._view.say(f"page: {address}")
        if await process.wait() > 0:
            errors = (await asyncio.to_thread(self._log.read_text, errors="replace")).strip()
            self._view.say(f"page: {errors.splitlines()[-1] if errors else 'it has ended'} ({self._log})")

    async def end(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()  # it only reads
            await self._process.wait()
        if self._reporting is not None:
            self._reporting.cancel()
