"""The environment role: the user's agents play episodes, in processes of their own. `python -m services.environment`.

gateway ── Run, Cancel ──► EnvironmentService ──► AgentWorkers ──► nursery ──► workers, in the user's interpreter
                                                                                └──► the gateway, by HTTP
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

from runtime import run_files
from runtime.cluster.topology import Instance, path_of, settings_of
from runtime.config import Config, Environment
from runtime.config.secret_values import resolved
from runtime.environments.messages import CancelRequest, EnvironmentDescription, EpisodeEvent, EpisodeRequest
from runtime.environments.workers import AgentWorkers
from runtime.process import keys
from runtime.rewards.pool import worker_environment
from runtime.sandbox import check
from services import process


class EnvironmentService(process.Service):
    """Implements the service of proto/environment.proto, which gateways call."""

    role = "environment"

    def __init__(self, config: Config, name: str, rank: int):
        super().__init__(config, name, rank)
        instance = Instance(self.role, name)
        settings = settings_of(config, instance)
        assert isinstance(settings, Environment)
        self._key, self._settings = path_of(config, instance), settings
        self._counts: Counter[str] = Counter()
        self._workers: AgentWorkers

    def load(self) -> None:
        """Do nothing: only the user's interpreter imports the agents' file."""

    async def start(self) -> None:
        """Start the nursery. Raises UserError if the agents' file or the sandbox does not work here."""
        if self._settings.sandbox is not None:
            await check(self._settings.sandbox, f"{self._key}.sandbox")
        self._workers = AgentWorkers(self._key, self._settings, self._variables())
        await self._workers.start()
        self.background = self._workers.ended

    def _variables(self) -> dict[str, str]:
        made = worker_environment(()) | {"PYTHONUNBUFFERED": "1"}
        made.pop("PYTHONPATH", None)  # the agents' interpreter has modules of its own
        if self.keys is not None and keys.https(self.config.network):
            ca = Path(self.config.run.dir) / run_files.GATEWAYS_CA
            ca.write_bytes(self.keys.pem().ca)
            made["SSL_CERT_FILE"] = str(ca.absolute())
        return made | resolved(self._settings.env, os.environ, f"{self._key}.env")

    async def close(self) -> None:
        if hasattr(self, "_workers"):
            await self._workers.close()

    async def describe(self, _: None) -> EnvironmentDescription:
        return EnvironmentDescription(name=self._key.rpartition(".")[2], concurrency=self._settings.concurrency)

    async def run(self, request: EpisodeRequest) -> AsyncGenerator[EpisodeEvent, None]:
        self._counts["episodes"] += 1
        async with aclosing(self._workers.play(request)) as events:
            async for event in events:
                if event.end is not None and event.end.failure:
                    self._counts[event.end.failure] += 1
                yield event

    async def cancel(self, request: CancelRequest) -> None:
        self._workers.end(request.id)

    def gauges(self) -> dict[str, float]:
        workers = self._workers
        return {
            "episodes": workers.under_way,
            "processes": workers.processes,
            "processes_lost": workers.lost,
            "episodes_total": self._counts["episodes"],
            "failures_total": self._counts["infrastructure"],
            "bad_tasks_total": self._counts["data"],
        }


if __name__ == "__main__":
    process.main(EnvironmentService)
