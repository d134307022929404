"""The gateways: who has tasks played, and by which rollouts.

GroupStage, Evaluator ── PlayRequest ──► GatewayPool ──► gateway 0   which calls those rollouts that serve,
                                                   └──► gateway 1   as GatewayPool tells it
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from operator import add
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from runtime.cluster.topology import ENVIRONMENT
from runtime.commands import Hurry, PeerAddress, RolePort, UsePeers
from runtime.config import Config
from runtime.coordinator.pools import RolloutPool, WorkPool
from runtime.coordinator.register import ROLLOUT, Member, UnitChange, UnitState, member_of
from runtime.data.handlers import Problem
from runtime.errors import SluiceError
from runtime.process import keys
from runtime.process.keys import GATEWAY, Keys, process
from runtime.types import EpisodeTask, GeneratedGroup, GroupRequest, PlayRequest, PolicyVersion

# ---- Concurrency
#
# How many episodes are played at once: as many as keep the rollouts busy, by what is measured. No I/O.
#
# While a tool runs, its episode has no slot: how many episodes fill the slots depends on how long tools take, which differs
# by task and changes as the policy learns. So the limit is x episodes for each slot of the rollouts that serve, and x
# follows what rollouts and gateways tell:
#
#     limit = ⌊x · slots / n⌋ + 1 groups of n episodes, x = 2 at first, as for plain replies
#
#     increase    x · (max(slots, w) + slots/8) / w     the limit is what bounds, few sequences wait, and use < 0.6
#     trim        0.9 · x                               many sequences wait, or use ≥ 0.8
#     cut         0.7 · x                               use ≥ 0.9; or, at once, more than few sequences are preempted
#
# w: the sequences that run or wait, which is what is wanted of the slots; use: of the room for keys and values. They are
# means over a cycle, after which x is changed once, or stays. A cycle is over when as many calls were made as episodes are
# played: each has made one, and waited for one tool, on average. So tools may take no time or minutes, and no wall time
# stands in the rule. A decrease counts from what is under way, if that is less than the limit, and nothing is measured
# until it has taken effect: no episode is withdrawn for it.
#
# What is wanted is in proportion to the episodes while the slots take it (Little's law). So an increase fills the slots,
# and then adds an eighth of them to what is wanted. At most it doubles x; once there was a decrease it adds at most an
# eighth of x, unless half of the slots stand empty: what is measured as episodes are begun, or end, is not what they come
# to. Nor is it to bring use above 0.6.
#
# Few sequences wait if they are at most half of those that run: wants vary, and slots are full most of the time only if
# some sequences wait most of the time. Many are one and a half times those that run: they only make episodes late, and
# their tokens stale.
#
# The use is of room that sequences share as they grow, which can run out: vLLM's, unless it holds the longest sequences of
# all slots. Preemptions are the proof that it ran out. At 0.6, 0.8 and 0.9 prime-rl's controller grows, trims and cuts too
# (module `concurrency` of its orchestrator). In the embedded engine each slot has room of its own, and its queue says when
# it is full.

START = 2.0  # episodes for a slot
STEP = 1 / 8  # of the slots
GROW, TRIM, CUT = 0.6, 0.8, 0.9  # of the room for keys and values
MOST_GROWTH = 2.0
TRIMMED, AFTER_CUT = 0.9, 0.7
FEW_WAIT, MANY_WAIT = 1 / 2, 3 / 2  # of those that run
FEW_PREEMPTED = 1 / 20  # of those that run, from one look to the next
LOOKS = 4  # that a cycle has at least


class Load(NamedTuple):
    """What rollouts and gateways told at one look, all together."""

    slots: int
    running: float  # sequences that have a slot
    waiting: float  # sequences that have none, or no room
    kv_use: float  # of the room that sequences share, 0 to 1, a mean over the rollouts
    preempted: float  # sequences, since the look before
    calls: float  # of the policy, since the look before
    episodes: float  # that programs play
    unasked: float  # tasks that wait for a program


NOTHING = Load(*[0] * len(Load._fields))


def load_of(before: Mapping[Any, Mapping[str, float]], now: Mapping[Any, Mapping[str, float]]) -> Load | None:
    """The gauges that each told at the look before and at this one, rollouts and gateways; None where no rollout did. Counters
    count for whoever told both times."""
    rollouts = [told for told in now.values() if "slots" in told]
    gateways = [told for told in now.values() if "episodes" in told]
    if not rollouts:
        return None

    def grown(counter: str) -> float:
        return sum(told[counter] - before[who][counter] for who, told in now.items() if who in before and counter in told)

    return Load(
        slots=int(sum(told["slots"] for told in rollouts)),
        running=sum(told["running"] for told in rollouts),
        waiting=sum(told["waiting"] for told in rollouts),
        kv_use=sum(told["kv_use"] * told["kv_shared"] for told in rollouts) / len(rollouts),
        preempted=grown("preemptions_total"),
        calls=grown("calls_total"),
        episodes=sum(told["episodes"] for told in gateways),
        unasked=sum(told["waiting"] for told in gateways),
    )


def concurrency_of(config: Config) -> Concurrency | None:
    """None where nobody plays: a reply has its slot until it ends. The limit is bounded by what gateways and environments
    take at once."""
    if config.gateway is None:
        return None
    size, own = config.sampling.group_size, config.services.environment.values()
    gateways = config.gateway.episodes * config.services.gateway.replicas
    agents = sum(each.concurrency * each.replicas for each in own) if own else gateways
    return Concurrency(size, max(1, min(gateways, agents) // size))


class Concurrency:
    """The limit. `size`: episodes of a group. `most`: groups."""

    def __init__(self, size: int, most: int):
        self._size, self._most = size, most
        self._slots = 0
        self._looks, self._sum = 0, NOTHING  # of the cycle
        self._decreased = False
        self.per_slot = START

    def limit(self, slots: int) -> int:
        """Groups that may be under way, where the rollouts that serve have so many slots."""
        return min(self._most, int(self.per_slot * slots / self._size) + 1)

    def look(self, load: Load, groups: int) -> None:
        """What was told, with so many groups under way."""
        if not self._slots and groups > self.limit(load.slots):  # an earlier coordinator has left them
            self.per_slot = groups * self._size / load.slots
        if load.slots != self._slots or groups > self.limit(load.slots):
            self._slots = load.slots
            self._begin_cycle()  # what was measured is of another state
            return
        self._looks += 1
        self._sum = Load(*map(add, self._sum, load))
        if load.preempted > FEW_PREEMPTED * load.running:
            self._decrease(AFTER_CUT, groups)
        elif self._looks >= LOOKS and self._sum.calls >= max(1, self._sum.episodes / self._looks):
            self._end_cycle(groups, bounds=self.limit(load.slots) <= groups < self._most and not load.unasked)

    def _begin_cycle(self) -> None:
        self._looks, self._sum = 0, NOTHING

    def _end_cycle(self, groups: int, bounds: bool) -> None:
        """`bounds`: the limit, and nothing else."""
        running, waiting, use = (each / self._looks for each in (self._sum.running, self._sum.waiting, self._sum.kv_use))
        if waiting > MANY_WAIT * running or use >= TRIM:
            self._decrease(AFTER_CUT if use >= CUT else TRIMMED, groups)
        elif bounds and waiting <= FEW_WAIT * running and use < GROW and not self._sum.preempted:
            wanted = running + waiting
            most = MOST_GROWTH if wanted <= self._slots / 2 or not self._decreased else 1 + STEP
            filled = (max(self._slots, wanted) + STEP * self._slots) / wanted if wanted else most
            self.per_slot *= min(filled, most, GROW / use if use else most)
        self._begin_cycle()

    def _decrease(self, share: float, groups: int) -> None:
        """Down to half a group, which makes the limit one."""
        under_way = groups * self._size / self._slots
        self.per_slot = max(min(self.per_slot, under_way) * share, self._size / self._slots / 2)
        self._decreased = True
        self._begin_cycle()


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
