"""Processes that a bench starts: those of a run, and those that end by themselves with their standard input."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from launcher.node.local_node import Machine
from launcher.node.topology import environment
from runtime import run_files
from runtime.config import loading
from runtime.errors import ServiceFault
from sluice import start

ENDING = 30.0  # seconds: vLLM ends its own processes one after the other


@asynccontextmanager
async def service(role: str, folder: Path, coordinator: str) -> AsyncIterator[None]:
    """The first process of a role, as the launcher would start it, with the configuration of the run's `folder`. Raises
    ServiceFault in place of what goes wrong meanwhile, with the last line of its log."""
    path = folder / run_files.CONFIG
    settings = getattr(loading.load(path, ()).services, role)
    own = {name: str(value) for name, value in environment(settings, 1, Machine()).items()}
    arguments = ("--config", str(path), "--name", f"{role}-0", "--coordinator", coordinator)
    log = folder / f"{role}.log"
    with log.open("wb") as written:
        process = await asyncio.create_subprocess_exec(
            *start.command(f"services.{role}", *arguments), env={**os.environ, **own}, stderr=written
        )
        try:
            yield
        except Exception as error:
            last = log.read_text(errors="replace").strip().rpartition("\n")[2]
            raise ServiceFault(role, "run", f"{error}; the last line of its log: {last}") from error
        finally:
            process.kill()
            await process.wait()


async def end(process: asyncio.subprocess.Process) -> None:
    """Close its input, and kill it if that is not enough."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), ENDING)
    except TimeoutError:
        process.kill()
        await process.wait()
