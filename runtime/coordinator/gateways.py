"""The gateways: who has tasks played, and by which rollouts.

GroupStage, Evaluator ── PlayRequest ──► GatewayPool ──► gateway 0   which calls those rollouts that serve,
                                                   └──► gateway 1   as GatewayPool tells it
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any

import numpy as np
from msgspec.structs import replace

from runtime.cluster.topology import ENVIRONMENT
from runtime.commands import Hurry, PeerAddress, UsePeers
from runtime.config import Config
from runtime.coordinator.pools import RolloutPool, WorkPool
from runtime.coordinator.register import ROLLOUT, Member, UnitChange, UnitState, member_of
from runtime.data.handlers import Problem
from runtime.errors import SluiceError
from runtime.ports import RolePort
from runtime.process import keys
from runtime.process.keys import GATEWAY, Keys, process
from runtime.types import EpisodeTask, GeneratedGroup, GroupRequest, PlayRequest, PolicyVersion


def request_for(config: Config, problem: Problem, prompt: np.ndarray, **rest: Any) -> GroupRequest | PlayRequest:
    """What has a group generated: replies to `prompt`, or episodes of the task where the run has gateways. `rest`: their other
    fields."""
    if config.gateway is None:
        return GroupRequest(prompt=prompt, **rest)
    task = EpisodeTask(
        messages=problem.messages,
        label=problem.label,
        source=problem.source,
        extra=problem.extra,
        environment=problem.environment,
    )
    return PlayRequest(task=task, **rest)


class GatewayPool(WorkPool):
    """Groups of episodes go to the gateway with the fewest under way, and every gateway is told which rollouts serve. What a
    gateway that is lost had is another's to play."""

    def __init__(self, rollouts: RolloutPool, config: Config, own_keys: Keys | None):
        """`own_keys`: the coordinator's."""
        share = max(1, sum(rollouts.slots.values()) // config.services.gateway.replicas)
        names = (f"{GATEWAY}-{index}" for index in range(config.services.gateway.replicas))
        super().__init__(rollouts.register, GATEWAY, dict.fromkeys(names, share))
        self._rollouts, self._keys = rollouts, own_keys
        self._told: dict[Member, UsePeers] = {}
        self._telling: dict[Member, asyncio.Task[None]] = {}
        rollouts.players = self
        rollouts.subscribe(self._notify)
        self.subscribe(self._tell_all)
        self._tell_all()

    @property
    def is_open(self) -> bool:
        return self._rollouts.admits

    async def generate(
        self, who: RolePort, request: GroupRequest | PlayRequest, first: Awaitable[None] | None = None
    ) -> GeneratedGroup:
        assert isinstance(request, PlayRequest)
        version = self._rollouts.membership.committed or PolicyVersion()
        return await super().generate(who, replace(request, version=version), first)

    def repeat(self) -> None:
        self._rollouts.repeat()

    def _look(self, change: UnitChange) -> None:
        super()._look(change)
        if change.unit.role == ENVIRONMENT:
            self._tell_all()

    async def hurry(self, gateway: RolePort, group_id: int) -> None:
        """Tell the gateway that the trainer waits for this group alone. Where that fails nothing is to be done: the groups of a
        gateway that is lost are played anew by another."""
        with suppress(SluiceError):
            await gateway.call(Hurry(group_id))

    # ------------------------------------------------------------------------------------------ which rollouts serve

    def _tell_all(self) -> None:
        for unit in self.register.units(GATEWAY, UnitState.SERVING):
            if unit.member not in self._telling and self._told.get(unit.member) != self._news_for(unit.member):
                self._telling[unit.member] = asyncio.create_task(self._tell(unit.port))

    async def _tell(self, gateway: RolePort) -> None:
        """Until it knows what is so now. One that does not take it is lost."""
        member = member_of(gateway)
        try:
            while (news := self._news_for(member)) != self._told.get(member):
                await gateway.call(news)
                self._told[member] = news
        except SluiceError as error:
            self._told.pop(member, None)
            self.register.lose(member, str(error))
        finally:
            self._telling.pop(member, None)

    def _news_for(self, gateway: Member) -> UsePeers:
        def serving(role: str) -> tuple[PeerAddress, ...]:
            units = self.register.units(role, UnitState.SERVING)
            return tuple(self._address(gateway, unit.processes[0]) for unit in units if unit.processes[0] is not None)

        key = "" if self._keys is None else keys.of_programs(self._keys.secret)
        return UsePeers(rollouts=serving(ROLLOUT), environments=serving(ENVIRONMENT), key=key)

    def _address(self, gateway: Member, peer: Any) -> PeerAddress:
        """`peer`: its Registration."""
        parties = process(gateway.name, gateway.incarnation), process(peer.name, peer.incarnation)
        return PeerAddress(
            name=peer.name,
            incarnation=peer.incarnation,
            address=peer.address,
            machine=peer.machine,
            slots=self._rollouts.slots.get(peer.name, 1),
            token="" if self._keys is None else self._keys.token_of(*parties),
        )
