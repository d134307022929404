"""The roles as the coordinator sees them: `runtime.ports` over sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from runtime import commands
from runtime.cluster.topology import data_leaders
from runtime.config import Config, Deadlines, Publication
from runtime.trainer.batching import balance_each
from runtime.types import (
    GeneratedGroup,
    GroupRequest,
    LogprobRequest,
    PolicyVersion,
    ScoreRequest,
    Scores,
    StepResult,
    TrainGroup,
    ValueRequest,
)
from runtime.weights.plan import GroupAddress, Manifest
from services.rpc.group import GroupPeer
from services.rpc.parts import Parts
from services.rpc.peer import Peer
from services.rpc.session import Session


def _longest_publication(deadlines: Deadlines, publication: Publication) -> float:
    """Seconds, for calls that are posted before the step that makes the weights has ended, and may wait behind another: longer
    than the phases of a publication, whose deadlines tell who was late."""
    return 2 * (deadlines.train + publication.transfer_timeout)


class WeightPeer(Peer):
    async def abort_weights(self, version: PolicyVersion, epoch: int) -> None:
        await self.session.call("AbortWeights", commands.AbortWeights(version, epoch), self._publication.abort_timeout)


class ReplicaPeer(Peer):
    """One of several replicas, in whose place another process may come; `incarnation` counts those before it."""

    def __init__(self, session: Session, deadlines: Deadlines, publication: Publication, incarnation: int = 0):
        super().__init__(session, deadlines, publication)
        self.incarnation = incarnation
        self.when_lost = session.when_broken
        self.give_up = session.give_up


class RolloutClient(ReplicaPeer, WeightPeer):
    async def generate(self, request: GroupRequest) -> GeneratedGroup:
        return await self.session.call("Generate", request, self._deadlines.generate)

    async def cancel(self, group_ids: list[int]) -> None:
        await self.session.call("Cancel", commands.Cancel(group_ids), self._publication.commit_timeout)

    async def join_weights(self, address: GroupAddress, manifest: Manifest) -> None:
        await self.session.call("JoinWeights", commands.JoinWeights(address, manifest), self._publication.join_timeout)

    async def receive_weights(self, version: PolicyVersion, epoch: int) -> None:
        timeout = _longest_publication(self._deadlines, self._publication)
        await self.session.call("ReceiveWeights", commands.ReceiveWeights(version, epoch), timeout)

    async def commit_weights(self, version: PolicyVersion, epoch: int) -> float:
        command = commands.CommitWeights(version, epoch)
        committed: commands.WeightsCommitted = await self.session.call(
            "CommitWeights", command, self._publication.commit_timeout
        )
        return committed.pause_seconds

    async def move(self, level: commands.Level) -> None:
        """As long may it take as to take over a version."""
        await self.session.call("Move", commands.Move(level), self._publication.commit_timeout)


class RewardClient(ReplicaPeer):
    async def score(self, request: ScoreRequest) -> Scores:
        return await self.session.call("Score", request, self._deadlines.score)


class ReferenceClient(ReplicaPeer):
    def onload(self) -> Coroutine[Any, Any, None]:
        return self.session.post("Onload", commands.Onload(), self._deadlines.score)

    def offload(self) -> Coroutine[Any, Any, None]:
        return self.session.post("Offload", commands.Offload(), self._deadlines.score)

    async def logprobs(self, request: LogprobRequest) -> bytes:
        return await self.session.call("Logprobs", request, self._deadlines.score)


class ReferenceGroupClient(GroupPeer):
    """A reference that is a group of ranks. Log-probabilities that are asked for together are computed together."""

    @cached_property
    def _parts(self) -> Parts[LogprobRequest]:
        return Parts(
            *(self._sessions, self._leaders, "Logprobs", commands.ComputeLogprobs),
            lambda request: len(request.payload),  # about its tokens, times a constant
            self._deadlines.score,
        )

    def onload(self) -> Coroutine[Any, Any, None]:
        return self.answered(self.session.post("Onload", commands.Onload(), self._deadlines.score))

    def offload(self) -> Coroutine[Any, Any, None]:
        return self.answered(self.session.post("Offload", commands.Offload(), self._deadlines.score))

    async def logprobs(self, request: LogprobRequest) -> bytes:
        return await self.answered(self._parts.ask(request))


class UpdateClient(GroupPeer):
    """A group under training: commands to rank 0, each data-parallel leader's share of the data to the leader itself."""

    _part = 0

    def restore(self, folder: str) -> Coroutine[Any, Any, None]:
        return self._post("Restore", commands.Restore(folder), self._deadlines.start)

    def begin_step(self, step: int) -> Coroutine[Any, Any, None]:
        self._part = 0
        return self._post("BeginStep", commands.BeginStep(step), self._deadlines.train)

    def accumulate(self, step: int, groups: list[TrainGroup], last: bool) -> Coroutine[Any, Any, None]:
        """The groups of each mini-batch are balanced among themselves: all ranks take part in every update."""
        part, self._part = self._part, self._part + 1
        tokens, mini_batches = [group.tokens for group in groups], [group.mini_batch for group in groups]
        shares = dict(zip(self._leaders, balance_each(tokens, mini_batches, len(self._leaders)), strict=True))
        of_rank = [[groups[i] for i in shares.get(rank, [])] for rank in range(len(self._sessions))]
        shared = _all(
            session.post("Accumulate", commands.Accumulate(step, part, share, last), self._deadlines.train)
            for session, share in zip(self._sessions, of_rank, strict=True)
        )
        return self.answered(shared)

    def apply(self, step: int) -> Coroutine[Any, Any, StepResult]:
        return self._post("Apply", commands.Apply(step), self._deadlines.train)

    def onload(self) -> Coroutine[Any, Any, None]:
        return self._post("Onload", commands.Onload(), self._deadlines.train)

    def offload(self) -> Coroutine[Any, Any, None]:
        return self._post("Offload", commands.Offload(), self._deadlines.train)

    def save(self, folder: str) -> Coroutine[Any, Any, None]:
        return self._post("Save", commands.Save(folder), self._deadlines.save)

    def _post(self, method: str, command: commands.Command, timeout: float) -> Coroutine[Any, Any, Any]:
        """To rank 0, now."""
        return self.answered(self.session.post(method, command, timeout))


class TrainerClient(UpdateClient, WeightPeer):
    def apply(self, step: int, probes: Sequence[bytes] = ()) -> Coroutine[Any, Any, StepResult]:
        return self._post("Apply", commands.ApplyProbed(step, list(probes)), self._deadlines.train)

    @cached_property
    def machines(self) -> Mapping[str, str]:
        """Of every process that sends, by its name."""
        senders = self._sessions if self._publication.senders == "all" else self._sessions[:1]
        return {session.name: session.machine for session in senders}

    async def host_weights(self, epoch: int, names: Sequence[str], transport: str) -> tuple[GroupAddress, Manifest]:
        command = commands.HostWeights(epoch, len(names), transport, tuple(names))
        hosting = self.session.call("HostWeights", command, self._publication.join_timeout)
        hosted: commands.WeightsHosted = await self.answered(hosting, alone=False)
        return hosted.address, hosted.manifest

    def send_weights(self, version: PolicyVersion, epoch: int) -> Coroutine[Any, Any, commands.WeightsSent]:
        timeout = _longest_publication(self._deadlines, self._publication)
        sending = self.session.post("SendWeights", commands.SendWeights(version, epoch), timeout)
        return self.answered(sending, alone=False)

    def export(self, folder: str) -> Coroutine[Any, Any, None]:
        return self._post("Export", commands.Export(folder), self._deadlines.save)


class CriticClient(UpdateClient):
    """Values that are asked for together are computed together."""

    @cached_property
    def _parts(self) -> Parts[ValueRequest]:
        return Parts(
            *(self._sessions, self._leaders, "Values", commands.ComputeValues),
            lambda request: request.tokens,
            self._deadlines.train,
        )

    async def values(self, request: ValueRequest) -> bytes:
        return await self.answered(self._parts.ask(request))


def _all(calls: Iterable[Coroutine[Any, Any, None]]) -> Coroutine[Any, Any, None]:
    """Waits for calls that are on their way already."""
    posted = list(calls)

    async def wait() -> None:
        await asyncio.gather(*posted)

    return wait()


def service_of(role: str, config: Config) -> str:
    """The name in proto/ of the service that a process of `role` serves."""
    if role == "reference" and config.services.reference.engine == "megatron":
        return "ReferenceGroup"
    return "Reward" if role == "reward_model" else role.capitalize()


_ALONE: dict[str, type[ReplicaPeer]] = {
    "rollout": RolloutClient,
    "reward": RewardClient,
    "reward_model": RewardClient,
    "reference": ReferenceClient,
}
_GROUPS: dict[str, type[GroupPeer]] = {
    "trainer": TrainerClient,
    "critic": CriticClient,
    "reference": ReferenceGroupClient,
}


def client(role: str, sessions: Sequence[Session], config: Config, incarnation: int) -> ReplicaPeer | GroupPeer:
    """What stands for a process of `role`, or for the group whose ranks `sessions` lead to."""
    settings = config.deadlines, config.publication
    if role in _ALONE and service_of(role, config) != "ReferenceGroup":
        return _ALONE[role](sessions[0], *settings, incarnation)
    return _GROUPS[role](sessions, *settings, data_leaders(getattr(config.services, role)), incarnation)
