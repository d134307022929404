"""The programs that play: started beside the gateway, and again when they end. What one that ended had is played again."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from runtime import run_files
from runtime.cluster.restarts import Allowance
from runtime.config import Config, Player
from runtime.config.secret_values import resolved
from runtime.errors import ServiceFault
from runtime.gateway.episodes import Episodes
from runtime.process import os_process
from runtime.process.aio import TaskGroup, first_error, now
from runtime.rewards.worker_process import worker_environment

log = logging.getLogger("sluice")


class Players:
    """`player.processes` of them, each in a process group of its own. What they print goes to the gateway's log."""

    def __init__(self, config: Config, player: Player, url: str, episodes: Episodes):
        """`url`, `episodes`: the gateway's. Raises UserError for a variable that is not there."""
        self._player, self._restarts = player, config.services.gateway.restarts
        self._episodes = episodes
        self._environment = worker_environment(()) | {"SLUICE_GATEWAY_URL": url}
        self._environment.pop("PYTHONPATH", None)  # its interpreter has modules of its own
        ca = Path(config.run.dir) / run_files.GATEWAYS_CA
        if ca.exists():
            self._environment["SSL_CERT_FILE"] = str(ca.absolute())
        self._environment |= resolved(player.env, os.environ, "gateway.player.env")

    async def run(self) -> None:
        """Until cancelled. Raises ServiceFault when one has ended more often than `services.gateway.restarts` allow."""
        try:
            async with TaskGroup() as group:
                for index in range(self._player.processes):
                    group.create_task(self._keep(index))
        except Exception as error:  # noqa: BLE001 - it comes in a group
            raise first_error(error) from None

    async def _keep(self, index: int) -> None:
        allowance, name = Allowance(self._restarts), f"gateway.player.run: {self._player.run} ({index})"
        while True:
            key = self._episodes.admit()
            process = await asyncio.create_subprocess_exec(
                self._player.python or sys.executable,
                self._player.run,
                env=self._environment | {"SLUICE_GATEWAY_KEY": key},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sys.stderr,
                preexec_fn=os_process.before_exec,
                start_new_session=True,
            )
            try:
                code = await process.wait()
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # what it has started, too
                self._episodes.give_up(key)
                await process.wait()
            pause = allowance.delay(now())
            if pause is None:
                raise ServiceFault("gateway", "play", f"{name}: ended again, with exit code {code}")
            log.warning("%s: ended with exit code %d; it is started again", name, code)
            await asyncio.sleep(pause)
