"""The page beside a run: a process of the launcher that nothing waits for."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

from launcher.view import View
from runtime import run_files, timeouts
from runtime.config import Config
from runtime.process import keys, os_process
from sluice import start

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
        if self._process is None:
            return
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.terminate()
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._process.wait(), timeouts.PAGE_END)
        if self._process.returncode is None:
            self._process.kill()
        if self._reporting is not None:
            self._reporting.cancel()
