"""The processes that a run calls: living rollouts, what happens to the work of a lost one, and gateways that play episodes."""

from __future__ import annotations

import asyncio
import heapq
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from operator import add
from typing import Any, NamedTuple, TypeVar

import numpy as np
from msgspec.structs import replace

from runtime.cluster.topology import ENVIRONMENT
from runtime.commands import FinishGroup, PeerAddress, RolePort, TrainerPort, UpdateEndpoints
from runtime.config import Config
from runtime.coordinator.register import ROLLOUT, Member, Register, Unit, UnitChange, UnitState, member_of
from runtime.coordinator.weight_sync_protocol import Epoch, Membership
from runtime.data.handlers import Problem
from runtime.errors import InvariantViolated, ServiceFault, SluiceError, Unanswered, Unreachable
from runtime.process import keys
from runtime.process.keys import GATEWAY, Keys, process
from runtime.process.waiting import done_within, now, still_missing
from runtime.rewards.scorer import combine, played
from runtime.telemetry.metrics import SpanClock
from runtime.types import (
    SCORERS,
    Command,
    EpisodeTask,
    GeneratedGroup,
    GroupRequest,
    PolicyVersion,
    RunEpisodesRequest,
    ScoreRequest,
    Scores,
)

# ---- Roles
#
# The processes that the run calls, by role, and what becomes of a request after the loss of its replica.

UPDATED = ("trainer", "critic")  # the roles whose state no other process can get, except from a checkpoint

R = TypeVar("R")


def models(register: Register) -> list[Unit]:
    """Return the units of trainer and critic."""
    return [unit for role in UPDATED for unit in register.units(role)]


async def wait_for(register: Register, missing: Callable[[], Sequence[str]], deadline: float) -> Sequence[str]:
    """Wait until nothing is missing in the register, or until `deadline` on the loop's clock. Return what is still missing."""
    changed = asyncio.Event()

    def look(_: UnitChange) -> None:
        changed.set()

    register.subscribe(look)
    try:
        return await still_missing(missing, changed, deadline)
    finally:
        register.unsubscribe(look)


class Replicas:
    """Interchangeable replicas of a role, called in turn. A replica that does not answer in time is lost. The request of a lost
    replica goes to another replica, or waits for the lost one's replacement if there is none. No request is skipped.
    """

    def __init__(self, register: Register, role: str, patience: float):
        """Create the view. `patience`: seconds that a request waits if there is no replica."""
        self._register, self._role = register, role
        self._patience = patience

    def __bool__(self) -> bool:
        """Return True if the run has this role."""
        return bool(self._register.units(self._role))

    @property
    def _serving(self) -> Sequence[Unit]:
        return self._register.units(self._role, UnitState.SERVING)

    async def ask(
        self,
        turn: int,
        request: Command[R],
        asked: set[str] | None = None,
        answered: list[Callable[[], None]] | None = None,
    ) -> R:
        """Return the answer of a replica. `asked` has the replica's name until then; `answered` gets the callback that
        acknowledges the answer. Raises the replica's error, or ServiceFault if there is no replica for `patience` seconds."""
        names: set[str] = set() if asked is None else asked
        while True:
            replica = await self._choose(turn)
            names.add(replica.name)
            try:
                answer = await replica.call(request)
                if answered is not None:
                    answered.append(partial(replica.acknowledge, request))
                return answer
            except (Unreachable, Unanswered) as error:
                self._lose(replica, error)
            finally:
                names.discard(replica.name)

    async def broadcast(self, command: Command[None]) -> None:
        """Send `command` to all serving replicas and wait for the answers. Ignore replicas that are lost meanwhile."""

        async def send(replica: RolePort) -> None:
            try:
                await replica.call(command)
            except (Unreachable, Unanswered) as error:
                self._lose(replica, error)

        await asyncio.gather(*(send(unit.port) for unit in self._serving))

    def _lose(self, replica: RolePort, error: ServiceFault) -> None:
        self._register.lose(replica, error.reason if isinstance(error, Unreachable) else str(error))

    async def _choose(self, turn: int) -> RolePort:
        def missing() -> list[str]:
            return [] if self._serving else [self._role]

        while not (serving := self._serving):  # check again: the replica may be lost before this task runs
            if await wait_for(self._register, missing, now() + self._patience):
                why = "; ".join(f"{unit.name}: {unit.reason}" for unit in self._register.units(self._role) if unit.reason)
                raise ServiceFault(self._role, "run", f"{why}; no replacement has come", self._patience)
        replica: RolePort = serving[turn % len(serving)].port
        return replica


class EvaluationRoles:
    """The scorers of replies: all roles that an evaluation needs besides rollouts."""

    def __init__(self, register: Register, patience: float):
        """Create the scorers. `patience`: see `Replicas`."""
        self.scorers = {phase: Replicas(register, role, patience) for role, phase in SCORERS.items()}


class Roles(EvaluationRoles):
    """Adds reference, trainer and critic as they serve now. An attempt keeps the processes that it began with."""

    def __init__(self, register: Register, patience: float):
        """Look up the roles. Raises Unreachable if trainer or critic is lost."""
        super().__init__(register, patience)
        self.references: Replicas = Replicas(register, "reference", patience)
        trained = models(register)
        if lost := next((unit for unit in trained if unit.port is None), None):
            raise Unreachable(lost.name, "start", lost.reason)
        self.trainer: TrainerPort = trained[0].port
        self.critic: RolePort | None = trained[1].port if len(trained) > 1 else None


class RewardScoring:
    """Asks one replica of each role that gives rewards. Adds up these rewards and the environment's."""

    def __init__(self, roles: EvaluationRoles, environment: float, spans: SpanClock | None = None, unrewarded: int = 0):
        """Create the scoring. `environment`: the factor of the environment's rewards; 0 ignores them. `spans`: gets the time
        under the phases of `SCORERS`. `unrewarded`: the size of groups without any reward, which get reward 0; 0 forbids such
        groups."""
        self._replicas = {phase: replicas for phase, replicas in roles.scorers.items() if replicas}
        self._spans = spans
        self._environment, self._unrewarded = environment, unrewarded

    async def score(
        self,
        request: ScoreRequest,
        given: Sequence[float],
        turn: int,
        asked: set[str] | None = None,
        answered: list[Callable[[], None]] | None = None,
    ) -> Scores:
        """Score one group. `given`: `GeneratedGroup.rewards`. Replicas take turns by `turn`. Until this returns, `asked` has
        the names of the replicas that have not answered; `answered` as in `Replicas.ask`."""

        async def ask(phase: str, replicas: Replicas) -> Scores:
            with self._spans.span(phase) if self._spans else nullcontext():
                return await replicas.ask(turn, request, asked, answered)

        parts = await asyncio.gather(*(ask(phase, replicas) for phase, replicas in self._replicas.items()))
        if given and self._environment:
            parts.append(played(request.group_id, self._environment, given))
        if not parts and self._unrewarded:
            rewards, valid = np.zeros(self._unrewarded, np.float32), np.ones(self._unrewarded, np.uint8)
            return Scores(group_id=request.group_id, rewards=rewards, valid=valid)
        if not parts:
            raise InvariantViolated(f"group {request.group_id} has no reward: no rule, reward model or environment gives one")
        return combine(parts)


class RolloutLoads:
    """Samples under way by rollout, and the rollout with the fewest for its slots: the top of a heap. Outdated entries are
    dropped when they reach the top, so a group costs O(log n) for n rollouts."""

    def __init__(self, slots: Mapping[str, int]):
        self.samples = Counter[Member]()
        self.slots = slots
        self._among: tuple[Member, ...] = ()
        self._index: dict[Member, int] = {}  # in `_among`
        self._heap: list[tuple[float, int]] = []  # a load, and the index of its member; the load may be outdated

    def add(self, member: Member, samples: int) -> None:
        self.samples[member] += samples
        if member in self._index:
            heapq.heappush(self._heap, (self._load(member), self._index[member]))

    def least(self, among: tuple[Member, ...]) -> Member:
        """Return the first member of `among` with the lowest load. Requires a nonempty `among`."""
        if among is not self._among or len(self._heap) > 4 * len(among) + 64:
            self._among, self._index = among, {member: index for index, member in enumerate(among)}
            self._heap = sorted((self._load(member), index) for index, member in enumerate(among))
        while True:
            load, index = self._heap[0]
            if load == self._load(self._among[index]):
                return self._among[index]
            heapq.heappop(self._heap)

    def _load(self, member: Member) -> float:
        return self.samples[member] / self.slots[member.name]


class WorkPool(ABC):
    """Spreads groups over the serving units of a role: each goes to the unit with the fewest samples under way for its slots.
    A lost unit fails all its calls with Unreachable, and another unit generates its groups.
    """

    def __init__(self, register: Register, role: str, slots: Mapping[str, int]):
        """Create the pool. `slots`: how many sequences each unit runs at once, by name."""
        self.register = register
        self._role = role
        self._loads = RolloutLoads(slots)
        self._changed = asyncio.Event()
        self._watchers: list[Callable[[], None]] = [self._changed.set]
        register.subscribe(self._look)

    def _look(self, change: UnitChange) -> None:
        if change.unit.role == self._role:
            self._notify()

    @property
    def slots(self) -> Mapping[str, int]:
        """The slots of each possible or former unit: a unit that is being removed may serve for a moment yet."""
        return self._loads.slots

    @slots.setter
    def slots(self, slots: Mapping[str, int]) -> None:
        self._loads.slots = {**self._loads.slots, **slots}

    @property
    @abstractmethod
    def is_open(self) -> bool:
        """Whether serving units are given groups now."""

    @property
    def serving(self) -> list[RolePort]:
        return [unit.port for unit in self.register.units(self._role, UnitState.SERVING)]

    @property
    def admitting(self) -> list[RolePort]:
        """The units that are given groups now."""
        return self.serving if self.is_open else []

    @property
    def admits(self) -> bool:
        """Whether any unit is given groups now."""
        return self.is_open and bool(self.register.units(self._role, UnitState.SERVING))

    def least_loaded(self) -> RolePort:
        """Return the serving unit with the lowest load. Requires one serving unit."""
        least: RolePort = self.register.port(self._loads.least(self.register.members(self._role, UnitState.SERVING)))
        return least

    @abstractmethod
    def repeat(self) -> None:
        """Count a group that is requested again after the loss of its unit."""

    def subscribe(self, watcher: Callable[[], None]) -> None:
        """Call `watcher` whenever a unit arrives, is lost, or begins to serve."""
        self._watchers.append(watcher)

    def unsubscribe(self, watcher: Callable[[], None]) -> None:
        """Remove `watcher`. Idempotent."""
        self._watchers = [other for other in self._watchers if other != watcher]

    def find(self, name: str) -> RolePort | None:
        """Return the unit called `name`, if it is connected."""
        unit = self.register.find(name)
        return None if unit is None else unit.port

    def load(self, who: RolePort) -> int:
        """Return the unit's samples under way."""
        return self._loads.samples[member_of(who)]

    async def generate(
        self, who: RolePort, request: GroupRequest | RunEpisodesRequest, first: Awaitable[None] | None = None
    ) -> GeneratedGroup:
        """Send the request to `who` once `first` is done. Raises Unreachable if the unit is lost meanwhile; a unit that does
        not answer in time is lost."""
        member = member_of(who)
        self._loads.add(member, request.n)
        try:
            if first is not None:
                await first
            return await who.call(request)
        except Unanswered as error:
            self.register.lose(member, str(error))
            raise Unreachable(who.name, error.phase, error.reason) from error
        except Unreachable as error:
            self.register.lose(member, error.reason)
            raise
        finally:
            self._loads.add(member, -request.n)

    async def generate_anywhere(self, request: GroupRequest | RunEpisodesRequest) -> GeneratedGroup:
        """Send the request to the least loaded unit, again after a loss. `RolloutPool.guard` limits how long this may go on."""
        while True:
            await self._wait(lambda: self.admits)
            try:
                return await self.generate(self.least_loaded(), request)
            except Unreachable:
                self.repeat()

    async def _wait(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._changed.clear()
            await self._changed.wait()

    def _notify(self) -> None:
        for watcher in self._watchers:
            watcher()


class RolloutPool(WorkPool):
    """The rollouts. A rollout serves once it has the committed version."""

    def __init__(self, register: Register, slots: Mapping[str, int], patience: float, term: int = 1):
        """Create the pool. `patience`: seconds that a run goes on without any rollout. `term`: see `Membership`."""
        super().__init__(register, ROLLOUT, slots)
        self.membership = Membership(register, term)
        self.players: WorkPool = self
        """The pool that gets the groups under training and evaluation: the rollouts themselves, or the gateways before them."""
        self._patience = patience
        self._lost = self._repeated = 0  # since `close_step`
        self._closed = False

    # ------------------------------------------------------------------------------------------ membership

    def _look(self, change: UnitChange) -> None:
        self._lost += change.lost and change.unit.role == ROLLOUT
        super()._look(change)

    def commit(self, epoch: Epoch, version: PolicyVersion, swapped: Collection[str]) -> None:
        """Commit `version` in `epoch`. The members named in `swapped` have it; the other members were lost."""
        self.membership.commit(epoch.number, version, [member for member in epoch.members if member.name in swapped])
        self._notify()

    def take_up(self, version: PolicyVersion, having: Collection[Member]) -> None:
        """Take over the version that an earlier coordinator committed. The members `having` it serve."""
        self.membership.take_up(version, having)
        self._notify()

    def serve_as_loaded(self) -> None:
        """Let all living rollouts serve with the weights that they loaded, in a run without weight sync."""
        epoch = self.membership.open()
        self.commit(epoch, PolicyVersion(), {member.name for member in epoch.members})

    @property
    def gateways(self) -> list[RolePort]:
        """The serving gateways, if the run has any."""
        return [unit.port for unit in self.register.units(GATEWAY, UnitState.SERVING)]

    @property
    def is_open(self) -> bool:
        return not self._closed

    def close(self) -> None:
        """Admit no groups until `open`: other roles use the rollouts' devices."""
        self._closed = True

    def open(self) -> None:
        self._closed = False
        self._notify()

    async def wait_for_living(self) -> None:
        """Wait until a rollout lives. Raises ServiceFault if none comes in time."""
        await self._until(lambda: bool(self.membership.living))

    async def guard(self) -> None:
        """Watch until cancelled. Raises ServiceFault with the lost rollouts once none has served for `patience` seconds. While
        the pool is closed, where a newcomer cannot begin to serve, a living rollout is enough."""

        def served() -> bool:
            return bool(self.membership.serving or (self._closed and self.membership.living))

        while True:
            if served():
                self._changed.clear()
                await self._changed.wait()
            else:
                await self._until(served)

    def repeat(self) -> None:
        self._repeated += 1

    def close_step(self) -> dict[str, float]:
        """Return the metrics: the rollouts that serve now, and the losses since the last call."""
        figures = {
            "rollout/serving": float(len(self.membership.serving)),
            "rollout/lost": float(self._lost),
            "rollout/repeated_groups": float(self._repeated),
        }
        self._lost = self._repeated = 0
        return figures

    def __str__(self) -> str:
        """Return one line: the epoch, its serving rollouts, the newcomers, and the lost rollouts with reasons."""
        parts = [f"epoch {self.membership.epoch.number}: {_names(self.membership.serving) or 'no rollout'}"]
        if newcomers := _names(self.membership.newcomers):
            parts.append(f"catching up: {newcomers}")
        parts += [f"lost: {unit.name} ({unit.reason})" for unit in self._losses]
        return ", ".join(parts)

    # ------------------------------------------------------------------------------------------ internals

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():  # check again: it may have changed before this task runs
            if not await done_within(self._wait(holds), self._patience):
                who, why = ", ".join(unit.name for unit in self._losses), "; ".join(unit.reason for unit in self._losses)
                message = f"{why or 'lost'}; no rollout has served since"
                raise ServiceFault(who or "rollout", "run", message, self._patience)

    @property
    def _losses(self) -> list[Unit]:
        """The lost rollouts without a replacement."""
        return [unit for unit in self.register.units(ROLLOUT) if unit.reason]


def _names(members: Sequence[Member]) -> str:
    return ", ".join(member.name for member in members)


# ---- Gateways
#
# They have tasks played as episodes, by the serving rollouts: GroupStage and Evaluator send a RunEpisodesRequest to the
# GatewayPool, whose gateways call the serving rollouts, which GatewayPool lists for them.


# ---- Concurrency
#
# How many episodes are played at once: as many as keep the rollouts busy, by measured load. No I/O.
#
# While a tool runs, its episode has no slot. So the number of episodes that fills the slots depends on the tools' run time,
# which differs by task and changes as the policy learns. The limit is x episodes for each slot of the serving rollouts, and
# x follows the gauges of rollouts and gateways:
#
#     limit = ⌊x · slots / n⌋ + 1 groups of n episodes, x = 2 at first, as for plain replies
#
#     increase    x · (max(slots, w) + slots/8) / w     only the limit bounds, few sequences wait, and use < 0.6
#     trim        0.9 · x                               many sequences wait, or use ≥ 0.8
#     cut         0.7 · x                               use ≥ 0.9; or, at once, more than few sequences are preempted
#
# w: the sequences that run or wait, which is the demand for slots; use: of the room for keys and values. Both are means over
# a cycle. After each cycle x changes once, or stays. A cycle ends when the number of calls reaches the number of episodes:
# on average each episode has made one call and waited for one tool. So the rule has no wall time, and tools may take no time
# or minutes. A decrease starts from the groups under way, if they are fewer than the limit. Measuring stops until the
# decrease has taken effect: no episode is withdrawn for it.
#
# The demand is proportional to the episodes while the slots take it (Little's law). So an increase fills the slots, and then
# adds an eighth of the slots to the demand. It at most doubles x. After the first decrease it adds at most an eighth of x,
# unless half of the slots are empty: while episodes begin or end, the measured demand is not the final one. An increase
# must not bring use above 0.6.
#
# Few sequences wait if they are at most half of the running ones: demand varies, and slots are full most of the time only if
# some sequences wait most of the time. Many sequences wait if they are one and a half times the running ones: they only make
# episodes late and tokens stale.
#
# Use is of the room that growing sequences share, which can run out: vLLM's, unless it holds the longest sequences of all
# slots. Preemptions prove that the room ran out. prime-rl's controller also grows, trims and cuts at 0.6, 0.8 and 0.9
# (module `concurrency` of its orchestrator). In the embedded engine each slot has its own room, and a full engine shows in
# its queue.

START = 2.0  # episodes per slot
STEP = 1 / 8  # of the slots
GROW, TRIM, CUT = 0.6, 0.8, 0.9  # of the room for keys and values
MOST_GROWTH = 2.0
TRIMMED, AFTER_CUT = 0.9, 0.7
FEW_WAIT, MANY_WAIT = 1 / 2, 3 / 2  # of the running sequences
FEW_PREEMPTED = 1 / 20  # of the running sequences, between two samples
LOOKS = 4  # the fewest samples in a cycle


class Load(NamedTuple):
    """The gauges of all rollouts and gateways at one sample, summed."""

    slots: int
    running: float  # sequences with a slot
    waiting: float  # sequences without a slot or room
    kv_use: float  # share of the room that sequences share, 0 to 1, a mean over the rollouts
    preempted: float  # sequences, since the sample before
    calls: float  # of the policy, since the sample before
    episodes: float  # that programs play
    unasked: float  # tasks that wait for a program


NOTHING = Load(*[0] * len(Load._fields))


def load_of(before: Mapping[Any, Mapping[str, float]], now: Mapping[Any, Mapping[str, float]]) -> Load | None:
    """Sum the gauges of rollouts and gateways from `now`. Counters count the growth since `before`, for processes in both.
    Return None if no rollout reported."""
    rollouts = [gauges for gauges in now.values() if "slots" in gauges]
    gateways = [gauges for gauges in now.values() if "episodes" in gauges]
    if not rollouts:
        return None

    def grown(counter: str) -> float:
        return sum(gauges[counter] - before[key][counter] for key, gauges in now.items() if key in before and counter in gauges)

    return Load(
        slots=int(sum(gauges["slots"] for gauges in rollouts)),
        running=sum(gauges["running"] for gauges in rollouts),
        waiting=sum(gauges["waiting"] for gauges in rollouts),
        kv_use=sum(gauges["kv_use"] * gauges["kv_shared"] for gauges in rollouts) / len(rollouts),
        preempted=grown("preemptions_total"),
        calls=grown("calls_total"),
        episodes=sum(gauges["episodes"] for gauges in gateways),
        unasked=sum(gauges["waiting"] for gauges in gateways),
    )


def concurrency_of(config: Config) -> Concurrency | None:
    """Return the limiter, or None without gateways: a reply keeps its slot until it ends. The limit is at most what gateways
    and environments play at once."""
    if config.gateway is None:
        return None
    size, own = config.sampling.group_size, config.services.environment.values()
    gateways = config.gateway.episodes * config.services.gateway.replicas
    agents = sum(each.concurrency * each.replicas for each in own) if own else gateways
    return Concurrency(size, max(1, min(gateways, agents) // size))


class Concurrency:
    """Limits the groups of episodes under way. `size`: episodes of a group. `most`: the highest limit, in groups."""

    def __init__(self, size: int, most: int):
        self._size, self._most = size, most
        self._slots = 0
        self._looks, self._sum = 0, NOTHING  # of the cycle
        self._decreased = False
        self.per_slot = START

    def limit(self, slots: int) -> int:
        """Return the limit in groups if the serving rollouts have `slots` slots."""
        return min(self._most, int(self.per_slot * slots / self._size) + 1)

    def look(self, load: Load, groups: int) -> None:
        """Take a sample of the load, with `groups` groups under way. At the end of a cycle, change the limit."""
        if not self._slots and groups > self.limit(load.slots):  # taken over from an earlier coordinator
            self.per_slot = groups * self._size / load.slots
        if load.slots != self._slots or groups > self.limit(load.slots):
            self._slots = load.slots
            self._begin_cycle()  # the samples belong to another state
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
        """Change x by the means of the cycle. `bounds`: the limit, and no other bound, held."""
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
        """Lower x by the factor `share`, at least to half a group, where the limit is one group."""
        under_way = groups * self._size / self._slots
        self.per_slot = max(min(self.per_slot, under_way) * share, self._size / self._slots / 2)
        self._decreased = True
        self._begin_cycle()


def request_for(config: Config, problem: Problem, prompt: np.ndarray, **rest: Any) -> GroupRequest | RunEpisodesRequest:
    """Build the request for replies to `prompt`, or for episodes of the task with gateways. `rest`: the other fields."""
    if config.gateway is None:
        return GroupRequest(prompt=prompt, **rest)
    task = EpisodeTask(
        messages=problem.messages,
        label=problem.label,
        source=problem.source,
        extra=problem.extra,
        environment=problem.environment,
    )
    return RunEpisodesRequest(task=task, **rest)


class GatewayPool(WorkPool):
    """Sends groups of episodes to the gateway with the fewest under way, and sends the serving rollouts to every gateway.
    Another gateway plays the groups of a lost gateway."""

    def __init__(self, rollouts: RolloutPool, config: Config, own_keys: Keys | None):
        """Create the pool and update all gateways. `own_keys`: the coordinator's."""
        share = max(1, sum(rollouts.slots.values()) // config.services.gateway.replicas)
        names = (f"{GATEWAY}-{index}" for index in range(config.services.gateway.replicas))
        super().__init__(rollouts.register, GATEWAY, dict.fromkeys(names, share))
        self._rollouts, self._keys = rollouts, own_keys
        self._known_peers: dict[Member, UpdateEndpoints] = {}  # the last UpdateEndpoints that each gateway confirmed
        self._updates: dict[Member, asyncio.Task[None]] = {}
        rollouts.players = self
        rollouts.subscribe(self._notify)
        self.subscribe(self._update_all)
        self._update_all()

    @property
    def is_open(self) -> bool:
        return self._rollouts.admits

    async def generate(
        self, who: RolePort, request: GroupRequest | RunEpisodesRequest, first: Awaitable[None] | None = None
    ) -> GeneratedGroup:
        assert isinstance(request, RunEpisodesRequest)
        version = self._rollouts.membership.committed or PolicyVersion()
        return await super().generate(who, replace(request, version=version), first)

    def repeat(self) -> None:
        self._rollouts.repeat()

    def _look(self, change: UnitChange) -> None:
        super()._look(change)
        if change.unit.role == ENVIRONMENT:
            self._update_all()

    async def finish_group(self, gateway: RolePort, group_id: int) -> None:
        """Notify the gateway that the trainer waits for this group alone. Ignore failures: a lost gateway's groups are
        repeated."""
        with suppress(SluiceError):
            await gateway.call(FinishGroup(group_id))

    # ------------------------------------------------------------------------------------------ peers of the gateways

    def _update_all(self) -> None:
        for unit in self.register.units(GATEWAY, UnitState.SERVING):
            if unit.member not in self._updates and self._known_peers.get(unit.member) != self._peers_for(unit.member):
                self._updates[unit.member] = asyncio.create_task(self._update(unit.port))

    async def _update(self, gateway: RolePort) -> None:
        """Send UpdateEndpoints until the gateway has the newest one. A gateway that does not confirm is lost."""
        member = member_of(gateway)
        try:
            while (peers := self._peers_for(member)) != self._known_peers.get(member):
                await gateway.call(peers)
                self._known_peers[member] = peers
        except SluiceError as error:
            self._known_peers.pop(member, None)
            self.register.lose(member, str(error))
        finally:
            self._updates.pop(member, None)

    def _peers_for(self, gateway: Member) -> UpdateEndpoints:
        def serving(role: str) -> tuple[PeerAddress, ...]:
            units = self.register.units(role, UnitState.SERVING)
            return tuple(self._address(gateway, unit.processes[0]) for unit in units if unit.processes[0] is not None)

        key = "" if self._keys is None else keys.of_programs(self._keys.secret)
        return UpdateEndpoints(rollouts=serving(ROLLOUT), environments=serving(ENVIRONMENT), key=key)

    def _address(self, gateway: Member, peer: Any) -> PeerAddress:
        """Return the address and token by which `gateway` calls `peer`, a Registration."""
        parties = process(gateway.name, gateway.incarnation), process(peer.name, peer.incarnation)
        return PeerAddress(
            name=peer.name,
            incarnation=peer.incarnation,
            address=peer.address,
            machine=peer.machine,
            slots=self._rollouts.slots.get(peer.name, 1),
            token="" if self._keys is None else self._keys.token_of(*parties),
        )
