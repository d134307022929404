"""Profiles that a process records of itself while it runs (`Process.Profile`, `sluice profile`).

::

    trainer, critic          torch's profiler in the engine's thread, for N steps after the current one
    others that have torch   the same, for N seconds
    all others               py-spy, which watches the process and its children for N seconds
"""

from __future__ import annotations

import asyncio
import gzip
import math
import os
import sys
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import Literal

from runtime import run_files, timeouts
from runtime.config import Config
from runtime.errors import Cancelled, UserError
from runtime.process import os_process
from runtime.status import Profile, Profiled

Unit = Literal["steps", "seconds"]


class Profiles:
    """The profiles of one process, one at a time."""

    def __init__(self, name: str, take: Callable[[Profile], Awaitable[list[Path]]], unit: Unit = "seconds"):
        self._name, self._take, self._unit = name, take, unit
        self._taken: asyncio.Future[list[Path]] | None = None

    async def profile(self, asked: Profile) -> Profiled:
        """Record a profile; the handler of the call. Raises UserError, with the process's name, if the length is in the other
        unit, if `take` refuses, or if files cannot be written. Raises Cancelled if the process ends meanwhile."""
        if getattr(asked, self._unit) <= 0:
            raise UserError(f"{self._name}: is profiled for a number of {self._unit}: --{self._unit} must be above 0")
        if self._taken is not None and not self._taken.done():
            raise UserError(f"{self._name}: another profile of it is under way")
        self._taken = taken = asyncio.ensure_future(self._take(asked))
        try:
            await asyncio.wait([taken])
        finally:
            taken.cancel()
        try:
            return Profiled(files=[str(path) for path in taken.result()])
        except asyncio.CancelledError:
            raise Cancelled(f"{self._name} ended before its profile was complete") from None
        except UserError as error:
            raise UserError(f"{self._name}: {error}") from error
        except OSError as error:
            raise UserError(f"{self._name}: {error.filename}: {(error.strerror or str(error)).lower()}") from error

    async def close(self) -> None:
        """End the profile under way: torch cannot bear a process that ends in the middle of a profile."""
        if self._taken is not None and not self._taken.done():
            self._taken.cancel()
            await asyncio.wait([self._taken], timeout=timeouts.PROFILE_END)


def stem(config: Config, name: str, rank: int, step: int) -> Path:
    """Return the path of a profile's files without their suffix, and make their folder."""
    folder = Path(config.run.dir) / run_files.PROFILES
    folder.mkdir(exist_ok=True)
    return folder / f"{name}.{rank}.{step}"


async def of_thread(thread: Executor, path: Path, memory: bool, end: Awaitable[object]) -> list[Path]:
    """Record what `thread`, of one worker, computes with torch until `end`. Raises UserError for `memory` without CUDA."""
    from runtime.process import platform

    loop, profile = asyncio.get_running_loop(), platform.TorchProfile(path, memory)
    try:
        await loop.run_in_executor(thread, profile.start)  # in the thread that is recorded, between two commands
        await end  # the seconds have passed, or the steps are queued
    finally:  # also after a cancellation
        await loop.run_in_executor(thread, profile.stop)  # behind the commands that are queued
    return await asyncio.to_thread(profile.write)


async def by_spy(path: Path, asked: Profile) -> list[Path]:
    """Sample this process and its children 100 times a second. Raises UserError without py-spy, or for one of memory."""
    if asked.memory:
        raise UserError("--memory: is of CUDA's allocator, and this process does not use torch")
    if (spy := os_process.find_program("py-spy")) is None:
        by_hand = f"or run py-spy record --pid {os.getpid()} where it is installed"
        pip = Path(sys.executable).with_name("pip")
        raise UserError(f"has no torch, and py-spy is missing: {pip} install py-spy; {by_hand}")
    plain, trace = path.with_name(f"{path.name}.json"), path.with_name(f"{path.name}.json.gz")
    how = ("--nonblocking", "--subprocesses", "--format", "chrometrace", "--duration", str(math.ceil(asked.seconds)))
    try:
        with os_process.children_may_look():
            limit = asked.seconds + timeouts.PROFILE_END
            await _ran(limit, spy, "record", "--pid", str(os.getpid()), *how, "--output", str(plain))
        await asyncio.to_thread(lambda: trace.write_bytes(gzip.compress(plain.read_bytes())))
    finally:
        plain.unlink(missing_ok=True)
    return [trace]


async def _ran(timeout: float, *command: str) -> None:
    """Run the command. Raises UserError if it fails, with its last line, or takes longer than `timeout` seconds."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=asyncio.subprocess.STDOUT)
    try:
        said, _ = await asyncio.wait_for(process.communicate(), timeout)
    except TimeoutError:
        raise UserError(f"py-spy has not ended within {timeout:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        lines = [line for line in said.decode(errors="replace").splitlines() if line.strip()]
        raise UserError(f"py-spy: {lines[-1].strip() if lines else f'exit code {process.returncode}'}")
