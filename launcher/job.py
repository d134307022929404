"""The processes of one command that runs a topology: started in order, watched, and ended in any case."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
from msgspec.structs import replace
from rich.console import Console

from launcher import run_folder
from launcher.node import topology
from launcher.node.agent import Agent, CoordinatorKeeper
from launcher.node.local_node import LocalNode, check_secret, on_this_machine, placement_faults
from launcher.node.supervisor import Child, Supervisor
from launcher.node.topology import ProcessSpec
from launcher.registered_names import known_names
from launcher.view import View
from runtime import run_files, timeouts
from runtime.config import Config, loading
from runtime.config.checks import semantic_faults
from runtime.errors import ConfigError, DeadlineExceeded, SluiceError, UserError
from runtime.models import tiny_model
from runtime.process import keys, os_process
from runtime.process.os_process import ending_signals
from runtime.process.waiting import unless_failed
from runtime.sft.warmup import cache_folder
from runtime.status import Progress
from runtime.telemetry import startup
from runtime.telemetry.shown import say
from runtime.telemetry.startup import Startup
from services.rpc import client
from sluice import start


async def warm_up(supervisor: Supervisor, config: Config, view: View) -> Config:
    """Make the tiny model and its problems in a process of its own, unless they are cached; return the configuration that names
    them. A model or data that the user names stays; with both there is nothing to make."""
    settings = config.warmup
    assert settings is not None
    if config.model.path and config.data.train:
        return config
    folder = cache_folder(settings)
    if not folder.exists():
        view.phase("warm-up", detail="a tiny model, by supervised training")
        command = start.command("runtime.sft.warmup", msgspec.json.encode(settings).decode())
        child = await supervisor.start(ProcessSpec(name="warmup", role="warmup", command=command, env={}), capture=True)
        deadline = settings.max_seconds + timeouts.WARM_UP_START
        try:
            await asyncio.wait_for(_follow(child, view), deadline)
        except TimeoutError:
            raise DeadlineExceeded(child.spec.name, "run", "did not end", deadline) from None
        if child.process.returncode:
            raise child.fault()
    data = config.data
    if not data.train:
        data = replace(data, train=str(folder / "train.jsonl"), eval=data.eval or str(folder / "eval.jsonl"))
    return replace(config, model=replace(config.model, path=config.model.path or str(folder / "model")), data=data)


async def _follow(child: Child, view: View) -> None:
    """Show the warm-up's progress until it ends. Raises UserError with the warm-up's message if it gives up."""
    assert child.process.stdout is not None
    async for line in child.process.stdout:
        report = json.loads(line)
        if report["event"] == "progress":
            target = round(100 * report["target"])
            detail = f"step {report['step']}  loss {report['loss']:.2f}  held-out accuracy {report['accuracy']:.1%}"
            view.phase("warm-up", min(target, round(100 * report["accuracy"])), target, detail)
        elif report["event"] == "error":
            raise UserError(report["message"])
    await child.process.wait()


T = TypeVar("T")
Result = TypeVar("Result")


class Interrupted(Exception):
    """The user stopped the job. `code` is the exit code."""

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.code = code


def watched(verbose: bool, work: Callable[[View], Coroutine[Any, Any, T]]) -> T:
    """Return the result of `work`, and show its progress meanwhile. Exits with the code of an interruption."""
    console = Console()
    try:
        with View(console, verbose=verbose) as view:
            return asyncio.run(work(view))
    except Interrupted as how:
        say(console, str(how))
        sys.exit(how.code)


class Job(ABC, Generic[Result]):
    """One command, from its folder to its result."""

    trains: bool  # False: no trainer, nor what belongs to it
    stopped_early: str  # the message of a job that is stopped before it has anything to keep
    stopped_late: str  # ... and of a job that is stopped later, at once

    def __init__(self, config: Config, view: View, here: LocalNode):
        """Create the job. `here`: this machine's name and devices, as a node of the run."""
        self.started = self.launched = time.monotonic() - os_process.age()
        self.config = config
        self.view = view
        self._here = here
        self.folder = Path(config.run.dir)
        self._signals = 0
        self._signalled = 0.0
        self._twice = asyncio.Event()
        self._too_late: asyncio.TimerHandle | None = None  # ends an orderly stop that takes too long
        self._startup_shown = False
        self._lost: set[str] = set()
        self._began = False  # whether there is something to keep

    @abstractmethod
    async def prepared(self) -> Config:
        """Return the resolved, checked configuration."""

    @abstractmethod
    async def outcome(self) -> Result:
        """Return what the processes left, once all have ended well. Raises Interrupted if they were stopped too early."""

    async def run(self) -> Result:
        """Run the job. Raises UserError for a user's mistake, ServiceFault for a fault. No process is left in either case."""
        try:
            loop = asyncio.get_running_loop()
            for number in ending_signals():
                loop.add_signal_handler(number, self._on_signal, number)
            logs, self._lock = run_folder.prepare(self.folder, self.config.run)
            check_secret(self.config)
            keys.begun(self.folder)
            if self.config.network.security == "none":
                self.view.say(keys.OPEN)
            self.supervisor = Supervisor(logs, self.view, self.config.logs)
            self._coordinator = CoordinatorKeeper(self.supervisor)
            config = on_this_machine(tiny_model.made(await self.prepared()), self._here.address)  # may run the warm-up
            run_files.write_private(self.folder / run_files.CONFIG, loading.to_yaml(config))
            await self._until_done(await self._start(config))  # by the coordinator's address, until it has ended
            return await self.outcome()  # all processes have ended
        finally:
            if hasattr(self, "supervisor"):  # in any case, so that no process stays
                await self.supervisor.end_all(0.0 if self._signals > 1 else timeouts.FAILED_GRACE)
                (self.folder / run_files.ADDRESS).unlink(missing_ok=True)  # a killed coordinator leaves it

    def check(self, config: Config) -> None:
        faults = semantic_faults(config, known_names(), self._here.memory(config), trains=self.trains)
        faults += topology.machine_faults(config, self._here.machine)
        if faults := faults or placement_faults(config, self._here.offer, self.trains):
            raise ConfigError(faults)

    async def warmed_up(self, config: Config) -> Config:
        """Return the configuration with the results of the warm-up."""
        before = time.monotonic()
        config = await self.guarded(warm_up(self.supervisor, config, self.view))
        self.launched += time.monotonic() - before  # the warm-up is no part of the start-up
        config = loading.resolve(config)
        self.check(config)
        return config

    async def _start(self, config: Config) -> str:
        """Start the coordinator, and this node's agent, which starts the other processes. Returns the coordinator's address."""
        self.view.phase("starting")
        (self.folder / run_files.STARTUP).unlink(missing_ok=True)  # of the run that this one resumes
        reader, writer = os.pipe()
        try:
            child = await self._coordinator.start(self._spec(config, "--ready-fd", str(writer)), (writer,))
        finally:
            os.close(writer)
        address = await self.guarded(_reported_address(child, reader, config.deadlines.start))
        node = self._here.registration(self.config, config)
        self._agent = Agent(node, config, address, self.supervisor, self._here.machine, sys.executable)
        return address

    def _spec(self, config: Config, *where: str) -> ProcessSpec:
        path, machine = self.folder / run_files.CONFIG, self._here.machine
        return topology.coordinator_spec(config, path, sys.executable, where, self.launched, self.trains, machine)

    async def _until_done(self, address: str) -> None:
        await asyncio.to_thread(self._agent.look_for_keys)
        watching = asyncio.create_task(self._watch(address))
        following = asyncio.create_task(self._agent.follow())
        try:
            again = self._spec(self._agent.config, "--address", address)
            await self.guarded(unless_failed({watching, following}, self._finished(again)))
        finally:
            for task in (watching, following):
                task.cancel()
            await asyncio.gather(watching, following, return_exceptions=True)

    async def _finished(self, again: ProcessSpec) -> None:
        """Wait for the coordinator, which stops the other processes before it ends, and then for these."""
        await self._coordinator.until_finished(again, self._agent.config.services.coordinator.restarts)
        if self._too_late is not None:
            self._too_late.cancel()  # everything is saved
        await self.supervisor.finish(self.config.deadlines.stop)

    async def _watch(self, address: str) -> None:
        """Follow the run until it has ended. A coordinator that lives but is silent is ended, and another one replaces it."""
        silence, phase = self._agent.config.deadlines.keepalive, ""
        while True:
            reporting: Child | None = None
            with suppress(SluiceError):  # the stream ends with the coordinator; its exit code gives the reason
                async for progress in client.watch(address, silence, self._agent.keys):
                    self._began = self._began or progress.phase != "starting"
                    self._agent.apply_progress(progress)
                    self._show_losses(progress)
                    if progress.phase == "training" and not self._startup_shown and (found := Startup.read(self.folder)):
                        self._startup_shown = True
                        self.view.say(startup.line(found))
                    if progress.phase != phase:
                        phase = progress.phase
                        self.began(phase)
                    self.view.progress(progress)
                    if progress.phase in ("finished", "failed"):
                        return
                    reporting = self._coordinator.child
            if reporting is not None:
                why = f"is silent (deadlines.keepalive {silence:g} s)"
                self.supervisor.give_up(reporting.spec.name, reporting.incarnation, why)
            await asyncio.sleep(timeouts.AGENT_RETRY)

    def _show_losses(self, progress: Progress) -> None:
        """Show the losses on other nodes. The supervisor shows those on this node."""
        lost = {f"{one.name}: {one.reason}" for one in progress.lost if one.name not in self.supervisor.incarnations}
        for line in sorted(lost - self._lost):
            self.view.say(f"lost on another node: {line}")
        self._lost = lost

    def began(self, phase: str) -> None:
        """Handle the beginning of a phase of the run."""

    async def guarded(self, work: Awaitable[T]) -> T:
        """Wait for `work`, or for a death or a second signal. After a death the coordinator may first give the reason. Raises
        Interrupted, the fault of the process that failed first, or the error of `work`."""
        task = asyncio.ensure_future(work)
        death = asyncio.create_task(self.supervisor.first_failure())
        twice = asyncio.create_task(self._twice.wait())
        try:
            await asyncio.wait({task, death, twice}, return_when=asyncio.FIRST_COMPLETED)
            if death.done() and not task.done() and not twice.done():  # the coordinator stops the others and gives the reason
                death.result()  # raises if a dead process could not be replaced
                await asyncio.wait({task, twice}, timeout=timeouts.FAILED_GRACE, return_when=asyncio.FIRST_COMPLETED)
            if twice.done():  # first: a scheduler may have ended all processes
                raise Interrupted(self.stopped_late, 130) if self._began else Interrupted(self.stopped_early, 0)
            if (cause_of_failure := self.supervisor.cause_of_failure()) is not None:
                raise cause_of_failure.fault()
            return await task
        finally:
            for waiting in (task, death, twice):
                waiting.cancel()
            await asyncio.gather(task, death, twice, return_exceptions=True)

    def _on_signal(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if now - self._signalled < self._here.echo or (number is signal.SIGHUP and self._signals):
            return  # a lost terminal may signal it several times
        self._signalled = now
        self._signals += 1
        if self._signals > 1:
            self._twice.set()
            return
        self.view.phase("stopping (again to stop now)")
        if self._began:
            self._coordinator.terminate()
            grace = max(timeouts.INTERRUPTED_GRACE, self.config.deadlines.stop)
            self._too_late = asyncio.get_running_loop().call_later(grace, self._twice.set)
        else:
            self._twice.set()


async def _reported_address(coordinator: Child, descriptor: int, timeout: float) -> str:
    """Return the address that the coordinator writes into the pipe. Raises DeadlineExceeded, or the coordinator's fault."""
    stream = asyncio.StreamReader()
    protocol, pipe = asyncio.StreamReaderProtocol(stream), os.fdopen(descriptor, "rb")
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, pipe)
    try:
        line = await asyncio.wait_for(stream.readline(), timeout)
    except TimeoutError:
        raise DeadlineExceeded("coordinator", "start", "did not report its address", timeout) from None
    finally:
        transport.close()
    if address := line.decode().strip():
        return address
    await asyncio.wait_for(coordinator.process.wait(), timeout)
    raise coordinator.fault()
