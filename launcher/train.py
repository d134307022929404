"""`sluice train`: the whole topology on this machine, from the configuration to the summary."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable
from contextlib import suppress
from pathlib import Path
from typing import IO, TypeVar

import msgspec
from msgspec.structs import replace

from launcher import jobs, run_folder, topology
from launcher.known import known_names
from launcher.supervisor import Child, Supervisor
from launcher.view import View
from runtime import config_checks, config_loading, layout, os_process
from runtime.config import Config
from runtime.errors import ConfigError, DeadlineExceeded, SluiceError
from runtime.summary import PeakMemory, Summary
from services import session

T = TypeVar("T")

MEMORY_INTERVAL = 4.0  # seconds between two samples of the processes' memory, each of some 40 ms
INTERRUPTED_GRACE = 9.0  # seconds a run has to drain and save after Ctrl-C
FAILED_GRACE = 3.0  # seconds the others have after a process died


class Interrupted(Exception):
    """The user's wish ended the run at once. `code` is the exit code."""

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.code = code


async def train(config: Config, view: View) -> Summary:
    """Run to the end. Raises UserError for the user's mistakes, ServiceFault for a fault; no process is left either way."""
    run = _Run(config, view)
    try:
        return await run.run()
    finally:
        await run.end()


class _Run:
    def __init__(self, config: Config, view: View):
        self._started = self._launched = time.monotonic() - os_process.age()
        self._config = config
        self._view = view
        self._folder = Path(config.run.dir)
        self._memory = PeakMemory()
        self._supervisor: Supervisor
        self._lock: IO[bytes]
        self._signals = 0
        self._twice = asyncio.Event()
        self._coordinator: Child | None = None
        self._began = False  # whether the run has come to have something to save

    async def run(self) -> Summary:
        logs, self._lock = run_folder.prepare(self._folder, self._config.run)
        self._supervisor = Supervisor(logs)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        memory = asyncio.create_task(self._watch_memory())
        try:
            config = await self._prepared()
            address = await self._start(config)
            summary = await self._until_done(address)
            if summary.steps:
                with suppress(Interrupted):  # everything is saved: only the picture is missing
                    await self._guarded(jobs.plot(self._supervisor, self._folder))
        finally:
            memory.cancel()
        summary = msgspec.structs.replace(
            summary, total_seconds=time.monotonic() - self._started, peak_pss_bytes=self._memory.peak_bytes
        )
        summary.write(self._folder)
        return summary

    async def end(self) -> None:
        """Whatever happened: no process stays."""
        if hasattr(self, "_supervisor"):
            await self._supervisor.end_all(0.0 if self._signals > 1 else FAILED_GRACE)
            (self._folder / layout.ADDRESS).unlink(missing_ok=True)  # which a coordinator that was killed left

    async def _prepared(self) -> Config:
        """The resolved, checked configuration, after the warm-up if there is one to do; written to the run's folder."""
        config = self._config
        _check(config)
        if config.warmup is not None:
            config = await self._guarded(jobs.warm_up(self._supervisor, config, self._view))
            config = config_loading.resolve(config)
            _check(config)
            self._launched = time.monotonic()
        config = replace(config, run=replace(config.run, resume=run_folder.begin(self._folder, config)))
        (self._folder / layout.CONFIG).write_text(config_loading.to_yaml(config))
        return config

    async def _start(self, config: Config) -> str:
        """Start every process; returns the coordinator's address."""
        self._view.phase("starting")
        reader, writer = os.pipe()
        path, python = self._folder / layout.CONFIG, sys.executable
        try:
            spec = topology.coordinator_spec(config, path, python, writer, self._launched)
            self._coordinator = await self._supervisor.start(spec, pass_fds=(writer,))
        finally:
            os.close(writer)
        address = await self._guarded(self._first_word(reader, config.deadlines.start))
        for spec in topology.service_specs(config, path, python, address, len(os.sched_getaffinity(0))):
            await self._supervisor.start(spec)
        return address

    async def _first_word(self, descriptor: int, timeout: float) -> str:
        """The coordinator's address. Raises what it ended with when it did not come to say one."""
        assert self._coordinator is not None
        if line := await _read_line(descriptor, timeout):
            return line
        await asyncio.wait_for(self._coordinator.process.wait(), timeout)
        raise self._coordinator.fault()

    async def _until_done(self, address: str) -> Summary:
        watching = asyncio.create_task(self._watch(address))
        try:
            await self._guarded(self._finished())
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        return Summary.read(self._folder)

    async def _finished(self) -> None:
        """The coordinator ends first, having stopped the others."""
        assert self._coordinator is not None
        if await self._coordinator.process.wait():
            raise self._coordinator.fault()
        await self._supervisor.wait_all(self._config.deadlines.stop)

    async def _watch(self, address: str) -> None:
        with suppress(SluiceError):  # the stream ends with the coordinator, whose exit code says how
            async for progress in session.watch(address):
                self._began = self._began or progress.phase != "starting"
                self._view.progress(progress)

    async def _guarded(self, work: Awaitable[T]) -> T:
        """Wait for `work`, or for the first process that dies: then for the coordinator's word on it, then its own."""
        task = asyncio.ensure_future(work)
        death = asyncio.create_task(self._supervisor.first_failure())
        twice = asyncio.create_task(self._twice.wait())
        try:
            await asyncio.wait({task, death, twice}, return_when=asyncio.FIRST_COMPLETED)
            if twice.done():
                if self._began:
                    raise Interrupted("stopped at once; the newest checkpoint stays", 130)
                raise Interrupted("stopped before training began: there is nothing to save", 0)
            if death.done() and not task.done():  # the coordinator notices, stops the others and says why
                await asyncio.wait({task, twice}, timeout=FAILED_GRACE, return_when=asyncio.FIRST_COMPLETED)
            if (culprit := self._supervisor.culprit()) is not None:
                raise culprit.fault()
            return await task
        finally:
            for waiting in (task, death, twice):
                waiting.cancel()
            await asyncio.gather(task, death, twice, return_exceptions=True)

    def _on_signal(self) -> None:
        self._signals += 1
        if self._signals > 1:
            self._twice.set()
            return
        self._view.phase("stopping (again to stop now)")
        if self._began and self._coordinator is not None and self._coordinator.running:
            self._coordinator.signal_group(signal.SIGTERM)
            asyncio.get_running_loop().call_later(INTERRUPTED_GRACE, self._twice.set)
        else:
            self._twice.set()

    async def _watch_memory(self) -> None:
        while True:
            await asyncio.to_thread(self._memory.sample)
            await asyncio.sleep(MEMORY_INTERVAL)


def _check(config: Config) -> None:
    if faults := config_checks.semantic_faults(config, known_names()):
        raise ConfigError(faults)


async def _read_line(descriptor: int, timeout: float) -> str:
    """One line from a pipe, "" when the other end closes first. Raises DeadlineExceeded."""
    loop = asyncio.get_running_loop()
    stream = asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(descriptor, "rb"))
    try:
        line = await asyncio.wait_for(stream.readline(), timeout)
    except asyncio.TimeoutError:
        raise DeadlineExceeded("coordinator", "start", "did not say its address", timeout) from None
    finally:
        transport.close()
    return line.decode().strip()
