"""A whole node of `sluice bench coordinator` in one process: every service of a run, with engines that compute nothing.

`python -m benchmarks.coordinator_trial CONFIG` starts a coordinator and prints its process id and address. The node's
agent is the real one, and so are the services, their actors, gRPC servers, registrations, reward rules and weight syncs. Only
where a process would be started, a service begins here, and where a model would be run, an answer is made up. It ends with its
standard input.
"""

from __future__ import annotations

import asyncio
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvloop

from launcher.node.agent import Agent
from launcher.node.local_node import LocalNode
from launcher.node.supervisor import Child, Supervisor
from launcher.node.topology import ProcessSpec
from runtime import types
from runtime.config import Config, loading
from runtime.process import os_process
from runtime.rollout.engine import EngineStats, RolloutEngine
from runtime.scoring.scorer_torch import OffloadableScorer, answers
from runtime.telemetry.startup import Phases
from runtime.trainer.backend import RankInfo
from runtime.trainer.rank import TrainRank
from runtime.trainer.step import ModelTrainer
from runtime.types import (
    GeneratedGroup,
    GroupPayload,
    GroupRequest,
    LogprobRequest,
    Logprobs,
    PolicyVersion,
    Sample,
    StepResult,
    TrainGroup,
)
from runtime.weights.group import Shard
from runtime.weights.plan import Cut, TensorSpec
from services import process
from services.reference import ReferenceService
from services.reward import RewardService
from services.rollout import RolloutService
from services.trainer import TrainerService
from sluice import start

SECONDS = 0.05  # that a generation takes, whatever is generated
REPLY = 16  # tokens


class Generating(RolloutEngine):
    """Finishes, after a while, everything that waits."""

    torn = False

    def __init__(self, slots: int):
        self._slots = slots
        self._waiting: list[GroupRequest] = []
        self._tokens = 0

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        self._waiting += requests

    async def advance(self, interrupted: Callable[[], bool]) -> list[GeneratedGroup]:
        await asyncio.sleep(SECONDS)
        requests, self._waiting = self._waiting, []
        self._tokens += REPLY * sum(request.n for request in requests)
        return [_generated(request, self.version) for request in requests]

    def abort(self, group_ids: Sequence[int]) -> list[int]:
        known = [request.group_id for request in self._waiting if request.group_id in group_ids]
        self._waiting = [request for request in self._waiting if request.group_id not in known]
        return known

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    async def stage(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Weights do not matter."""

    async def swap(self, version: PolicyVersion, recompute: bool = False) -> None:
        self.version = version

    async def sleep(self) -> None:
        """There is no memory."""

    async def wake(self, cache: bool = True) -> None:
        """Nor is there now."""

    def stats(self) -> EngineStats:
        return EngineStats(slots=self._slots, waiting=len(self._waiting), decode_tokens=self._tokens)

    async def close(self) -> None:
        """There is nothing."""


def _generated(request: GroupRequest, version: PolicyVersion) -> GeneratedGroup:
    tokens = np.full(REPLY, request.group_id % 200 + 32, np.int32)
    sample = Sample(
        tokens=tokens,
        loss_mask=np.ones(REPLY, np.uint8),
        logprobs=np.full(REPLY, -1.0, np.float32),
        versions=np.full(REPLY, version.pack(), np.int64),
        finish_reason="stop",
    )
    payload = GroupPayload.of(request.group_id, request.prompt, [sample] * request.n)
    return GeneratedGroup(
        group_id=request.group_id,
        prompt_tokens=len(request.prompt),
        response_tokens=[REPLY] * request.n,
        truncated=0,
        oldest=version,
        newest=version,
        payload=types.encode(payload),
    )


class InstantTrainer(ModelTrainer):
    """Takes every group, and makes a version of one small tensor."""

    def __init__(self) -> None:
        self.backend: Any = self
        self.rank_info = RankInfo(0, 1, torch.device("cpu"))
        self._weights = torch.zeros(1024)

    def begin_step(self, step: int) -> None:
        """It has no state to begin with."""

    def accumulate(self, groups: Sequence[TrainGroup], last: bool = False) -> None:
        """They are not even decoded."""

    def compare(self, probes: Sequence[bytes]) -> list[float]:
        return [0.0] * len(probes)

    def apply(self) -> StepResult:
        self._weights += 1
        return StepResult(metrics={"actor/pg_loss": 0.0, "actor/grad_norm": 1.0}, seconds=0.0)

    def begin_save(self, folder: str) -> Callable[[], None]:
        return lambda: None

    def load(self, folder: str) -> None:
        """There is nothing to restore."""

    def offload(self) -> None:
        """Nothing is on a device."""

    def onload(self) -> None:
        """Nor has it to be."""

    def tensor_specs(self) -> list[TensorSpec]:
        return [TensorSpec("weights", "float32", tuple(self._weights.shape))]

    def cuts(self) -> list[Cut]:
        return [Cut()]

    def shards(self) -> Iterator[Shard]:
        yield Shard(0, (), self._weights)

    def export(self, folder: Path) -> None:
        """Nobody asks for it."""


class InstantScoring:
    device = torch.device("cpu")
    weights: Iterable[torch.Tensor] = ()

    def logprobs(self, requests: Sequence[LogprobRequest]) -> list[Logprobs]:
        out = []
        for request in requests:
            payload = types.decode(GroupPayload, request.payload)
            tokens = sum(len(sample.tokens) for sample in payload.samples)
            out.append(Logprobs(group_id=request.group_id, values=np.full(tokens, -1.0, np.float32)))
        return out


class InstantRollout(RolloutService):
    def load(self) -> None:
        self.use(Generating(self.config.sampling.group_size))


class InstantTrainerService(TrainerService):
    def load(self) -> None:
        self._worker = TrainRank(InstantTrainer(), self.config)


class InstantReference(ReferenceService):
    def load(self) -> None:
        self.answers = partial(answers, {"": OffloadableScorer(InstantScoring(), away=False)})


SERVICES: dict[str, Callable[[Config, str, int], process.Service]] = {
    "rollout": InstantRollout,
    "trainer": InstantTrainerService,
    "reference": InstantReference,
    "reward": RewardService,
}


class Troupe(Supervisor):
    """Where a process would be started, its service begins in this one."""

    def __init__(self, coordinator: str):
        super().__init__(Path())
        self._coordinator = coordinator
        self._configs: dict[str, Config] = {}
        self._running: dict[str, asyncio.Task[None]] = {}

    async def start(
        self, spec: ProcessSpec, pass_fds: Sequence[int] = (), capture: bool = False, incarnation: int = 0
    ) -> Child:
        config = self._config(spec.command[spec.command.index("--config") + 1])
        service = SERVICES[spec.role](config, spec.name, 0)
        self._running[spec.name] = asyncio.create_task(process.ServiceProcess(service, self._coordinator, Phases()).run())
        self._running[spec.name].add_done_callback(_raised)
        self.incarnations[spec.name] = incarnation
        return None  # type: ignore[return-value]  # the agent does not look at it

    def _config(self, path: str) -> Config:
        if path not in self._configs:
            self._configs[path] = loading.load(path, ())
        return self._configs[path]


def _raised(task: asyncio.Task[None]) -> None:
    """A service that fails is the trial's failure."""
    if not task.cancelled() and (error := task.exception()) is not None:
        traceback.print_exception(error)
        os._exit(1)


async def serve(path: Path) -> None:
    config = loading.load(path, ())
    coordinator, address = await _coordinator(path)
    here = LocalNode.of(config)
    agent = Agent(here.registration(config, config), config, address, Troupe(address), here.machine, sys.executable)
    following = asyncio.create_task(agent.follow())
    following.add_done_callback(_raised)
    print(coordinator.pid, address, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    coordinator.kill()
    await coordinator.wait()
    os._exit(0)  # hundreds of servers, of which nobody wants anything any more


async def _coordinator(path: Path) -> tuple[asyncio.subprocess.Process, str]:
    """A process of its own, as in a run, started by its node; and its address."""
    reader, writer = os.pipe()
    command = start.command("services.coordinator", "--config", str(path), "--ready-fd", str(writer))
    coordinator = await asyncio.create_subprocess_exec(*command, pass_fds=(writer,))
    os.close(writer)
    with os.fdopen(reader) as told:
        return coordinator, (await asyncio.to_thread(told.readline)).strip()


if __name__ == "__main__":
    os_process.die_with_parent()
    uvloop.install()
    torch.set_num_threads(1)
    asyncio.run(serve(Path(sys.argv[1])))
