"""The roles of a simulation: what each does with its commands, in which time.

A group's payload is what the checks need of it: its id and versions. Evaluations read replies, so theirs are whole.
"""

from __future__ import annotations

import asyncio
import random
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from runtime import codec
from runtime.commands import (
    AbortWeights,
    Accumulate,
    Apply,
    BeginStep,
    CommitWeights,
    Export,
    HostWeights,
    JoinWeights,
    Level,
    Move,
    Offload,
    Onload,
    ReceiveWeights,
    ResendWeights,
    Restore,
    Save,
    SendWeights,
    WeightsCommitted,
    WeightsHosted,
    WeightsReceived,
    WeightsSent,
)
from runtime.simulation.engine import SimulatedEngine
from runtime.simulation.lending import Lending
from runtime.simulation.process import SimulatedProcess
from runtime.simulation.weights import host, send
from runtime.types import (
    SCORERS,
    GeneratedGroup,
    GroupPayload,
    GroupRequest,
    LogprobRequest,
    PolicyVersion,
    Sample,
    ScoreRequest,
    Scores,
    StepResult,
    TrainGroup,
    ValueRequest,
)

if TYPE_CHECKING:
    from runtime.simulation.cluster import SimulatedCluster

STATE = "simulated.json"  # what a model leaves in a checkpoint


class Stamp(msgspec.Struct, frozen=True):
    """A payload: whose it is, the packed versions of its oldest and newest token, and how many tokens it has."""

    group_id: int
    oldest: int
    newest: int
    tokens: int  # prompts included


class ModelState(msgspec.Struct):
    """What an update changes: the next step, and every group that was trained, in order."""

    step: int = 0
    trained: list[int] = []


class SimulatedRollout(SimulatedProcess):
    role = "rollout"
    withdraws = True

    def __init__(self, cluster: SimulatedCluster, name: str, incarnation: int, machine: str):
        super().__init__(cluster, name, incarnation, machine)
        self.version: PolicyVersion | None = None
        self.received: PolicyVersion | None = None
        self.asleep = False
        self.engine = SimulatedEngine(cluster.loop, cluster.costs, cluster.slots[name], self.cores)

    async def generate(self, request: GroupRequest) -> GeneratedGroup:
        if request.purpose == "probe":
            await self.spend(self.cluster.costs.decode_step * request.sampling.max_new_tokens)
            versions = [self._serving()] * request.n
            return self._answer(request, [1] * request.n, versions, versions)
        chance = random.Random(request.seed * 31 + request.first)
        limit, owner = request.sampling.max_new_tokens, object()
        lengths = self.cluster.costs.lengths(chance, request.n, limit)
        oldest, newest = ([self._serving()] * request.n for _ in range(2))
        left, ended = set(range(request.n)), self.loop.create_future()

        def begun(index: int) -> None:
            oldest[index] = self._serving()

        def done(index: int) -> None:
            newest[index] = self._serving()
            left.discard(index)
            if not left and not ended.done():
                ended.set_result(None)

        for index, tokens in enumerate(lengths):
            self.engine.submit(owner, len(request.prompt), tokens, partial(begun, index), partial(done, index))
        try:
            await ended
        finally:
            if left:
                self.engine.withdraw(owner)
        if seconds := max(self.cluster.costs.tools.draw(chance) for _ in lengths):
            await asyncio.sleep(seconds)
        return self._answer(request, lengths, oldest, newest)

    def _serving(self) -> PolicyVersion:
        assert self.version is not None, f"{self.name} is asked before it has weights"
        return self.version

    def _answer(
        self, request: GroupRequest, lengths: list[int], oldest: list[PolicyVersion], newest: list[PolicyVersion]
    ) -> GeneratedGroup:
        old, new = min(oldest), max(newest)
        if request.purpose == "eval":
            payload = codec.encode(GroupPayload.of(request.group_id, request.prompt, _samples(lengths, oldest)))
        else:
            tokens = len(request.prompt) * request.n + sum(lengths)
            payload = msgspec.msgpack.encode(Stamp(request.group_id, old.pack(), new.pack(), tokens))
        return GeneratedGroup(
            group_id=request.group_id,
            prompt_tokens=len(request.prompt),
            response_tokens=lengths,
            truncated=sum(length == request.sampling.max_new_tokens for length in lengths),
            oldest=old,
            newest=new,
            payload=payload,
        )

    async def host_weights(self, command: HostWeights) -> WeightsHosted:
        return host(self, command)

    async def resend_weights(self, command: ResendWeights) -> WeightsSent:
        if self.version != command.version:
            raise self.fault("snapshot", f"version {command.version} is not here, but {self.version}")
        return await send(self, command, intact=True)

    async def join_weights(self, command: JoinWeights) -> None:
        epoch = self.cluster.epochs[command.address.epoch]
        await epoch.meet(self, self.cluster.config.publication.join_timeout)

    async def receive_weights(self, command: ReceiveWeights) -> WeightsReceived:
        costs, limits = self.cluster.costs, self.cluster.config.publication
        self.received = None
        patience = self.cluster.config.deadlines.train + 2 * limits.transfer_timeout
        seconds = self.slow * costs.weights_bytes / costs.bandwidth
        await self.cluster.epochs[command.epoch].receive(self, command.version, seconds, patience)
        self.received = command.version
        return WeightsReceived()

    async def commit_weights(self, command: CommitWeights) -> WeightsCommitted:
        if self.received != command.version:
            raise self.fault("commit", f"version {command.version} is not here, but {self.received}")
        if self.cluster.config.publication.in_flight == "drain":
            await self.engine.drained()
        self.engine.pause()
        await self.spend(self.cluster.costs.swap)
        self.cluster.observer.swapped(self, command.version, self.cluster.epochs[command.epoch])
        self.version = command.version
        self.engine.go_on()
        return WeightsCommitted(self.cluster.costs.swap)

    async def abort_weights(self, command: AbortWeights) -> None:
        self.cluster.epochs[command.epoch].leave(self.name)
        self.received = None

    async def move(self, command: Move) -> None:
        if (asleep := command.level < Level.AWAKE) != self.asleep:
            self.asleep = asleep
            (self.engine.pause if asleep else self.engine.wake)()
        await self.spend(self.cluster.costs.swap)

    def ended(self) -> None:
        self.engine.pause()
        for epoch in self.cluster.epochs.values():
            epoch.leave(self.name, "is gone")

    def paused(self, paused: bool) -> None:
        if paused:
            self.engine.pause()
        else:
            self.engine.go_on()

    def gauges(self) -> dict[str, float]:
        engine = self.engine
        return {
            "busy_seconds_total": engine.busy,
            "decode_steps_total": engine.steps,
            "tokens_total": engine.tokens,
            "drafted_tokens_total": 0.0,
            "accepted_tokens_total": 0.0,
            "slots": engine.slots,
            "running": engine.running,
            "waiting": engine.waiting,
            "kv_use": 0.0,  # each slot has room of its own, and what it holds is not modelled
            "kv_shared": 0.0,
            "preemptions_total": 0.0,
        }


def _samples(lengths: list[int], versions: list[PolicyVersion]) -> list[Sample]:
    return [
        Sample(
            tokens=np.ones(length, np.int32),
            loss_mask=np.ones(length, np.uint8),
            logprobs=np.full(length, -0.5, np.float32),
            versions=np.full(length, version.pack(), np.int64),
            finish_reason="stop",
        )
        for length, version in zip(lengths, versions, strict=True)
    ]


class SimulatedReward(SimulatedProcess):
    """Finds each reply right or wrong by chance, the same each time."""

    role = "reward"

    def __init__(self, cluster: SimulatedCluster, name: str, incarnation: int, machine: str):
        super().__init__(cluster, name, incarnation, machine)
        self.role = name.rpartition("-")[0]
        self._workers = asyncio.Semaphore(cluster.reward_workers)

    async def score(self, request: ScoreRequest) -> Scores:
        chance = random.Random(request.group_id)
        size = self.cluster.config.sampling.group_size
        if request.answers:
            size = codec.decode(GroupPayload, request.payload).n
        async with self._workers:
            await self.spend(self.cluster.costs.score.draw(self.chance))
        values = np.array([float(chance.random() < 0.5) for _ in range(size)], np.float32)
        answers: list[str | None] = [request.label] * size if request.answers else []
        rules = {self.cluster.judge: values}
        return Scores(group_id=request.group_id, rewards=values, valid=np.ones(size, np.uint8), rules=rules, answers=answers)


class SimulatedReference(SimulatedProcess):
    role = "reference"

    async def logprobs(self, request: LogprobRequest) -> bytes:
        tokens = msgspec.msgpack.decode(request.payload, type=Stamp).tokens
        await self.in_turn(self.cluster.costs.reference_token * tokens)
        return request.payload

    async def onload(self, command: Onload) -> None:
        await self.in_turn(self.cluster.costs.swap)

    async def offload(self, command: Offload) -> None:
        await self.in_turn(self.cluster.costs.swap)


class SimulatedModel(SimulatedProcess):
    """A model under training: its ranks are one unit, and carry out commands of data in order."""

    is_group = True

    def __init__(self, cluster: SimulatedCluster, name: str, incarnation: int, machine: str):
        super().__init__(cluster, name, incarnation, machine)
        self.role = name.rpartition("-")[0]
        self.state = ModelState()
        self._batch: list[TrainGroup] = []
        self._computed = 0.0

    async def restore(self, command: Restore) -> None:
        folder = Path(command.folder)
        path = (folder / "critic" if self.role == "critic" else folder) / STATE
        self.state = msgspec.json.decode(path.read_bytes(), type=ModelState)
        await self.in_turn(self.cluster.costs.save)

    async def begin_step(self, command: BeginStep) -> None:
        await self.in_turn(0.0)

    async def accumulate(self, command: Accumulate) -> None:
        seconds = self.cluster.costs.train_token * sum(group.tokens for group in command.groups)
        async with self._in_turn:
            self._computed += await self.spend(seconds)
            self._batch += command.groups

    async def apply(self, command: Apply) -> StepResult:
        async with self._in_turn:
            self._computed += await self.spend(self.cluster.costs.update)
            batch, self._batch = self._batch, []
            self.cluster.observer.applied(self, command.step, batch)
            self.state = ModelState(command.step + 1, [*self.state.trained, *(group.group_id for group in batch)])
            seconds, self._computed = self._computed, 0.0
        gaps = [
            float(msgspec.msgpack.decode(probe, type=Stamp).newest & 0xFFFFFFFF != command.step) for probe in command.probes
        ]
        return StepResult(metrics={}, seconds=seconds, probes=gaps)

    async def save(self, command: Save) -> list[str]:
        async with self._in_turn:
            await self.spend(self.cluster.costs.save)
            try:
                (Path(command.folder) / STATE).write_bytes(msgspec.json.encode(self.state))
            except OSError as error:
                raise self.fault("save", str(error)) from error
        return []

    async def onload(self, command: Onload) -> None:
        await self.in_turn(self.cluster.costs.swap)

    async def offload(self, command: Offload) -> None:
        await self.in_turn(self.cluster.costs.swap)


class SimulatedTrainer(SimulatedModel):
    def __init__(self, cluster: SimulatedCluster, name: str, incarnation: int, machine: str):
        super().__init__(cluster, name, incarnation, machine)
        self._held: PolicyVersion | None = None  # the version that was gathered last
        self._intact = True  # whether it is still what was gathered
        self._lending = Lending(cluster.loop, cluster.costs.lend, cluster)

    async def begin_step(self, command: BeginStep) -> None:
        self._lending.begin_step()
        await super().begin_step(command)

    async def spend(self, seconds: float) -> float:
        await self._lending.take_back()
        took = await super().spend(seconds)
        self._lending.offer()
        return took

    async def host_weights(self, command: HostWeights) -> WeightsHosted:
        return host(self, command)

    async def send_weights(self, command: SendWeights) -> WeightsSent:
        async with self._in_turn:  # gathered after the commands before
            await self.spend(self.cluster.costs.swap)
            self._held = command.version
            self._intact = self.name not in self.cluster.corrupt
            self.cluster.corrupt.discard(self.name)
        return await self._send(command)

    async def resend_weights(self, command: ResendWeights) -> WeightsSent:
        if self._held != command.version or not self._intact:
            raise self.fault("snapshot", f"version {command.version} was not kept: {self._held} is there")
        return await self._send(command)

    async def _send(self, command: SendWeights | ResendWeights) -> WeightsSent:
        return await send(self, command, self._intact)

    async def abort_weights(self, command: AbortWeights) -> None:
        if (epoch := self.cluster.epochs.get(command.epoch)) is not None:
            epoch.leave(self.name)

    async def export(self, command: Export) -> None:
        await self.in_turn(self.cluster.costs.save)

    def ended(self) -> None:
        for epoch in self.cluster.epochs.values():
            epoch.leave(self.name, "is gone")


class SimulatedCritic(SimulatedModel):
    async def values(self, request: ValueRequest) -> bytes:
        await self.in_turn(self.cluster.costs.reference_token * request.tokens)
        return request.payload


ROLES: dict[str, type[SimulatedProcess]] = {
    "rollout": SimulatedRollout,
    **dict.fromkeys(SCORERS, SimulatedReward),
    "reference": SimulatedReference,
    "trainer": SimulatedTrainer,
    "critic": SimulatedCritic,
}
