"""Gateways have tasks played as episodes, by the serving rollouts: how many are played at once, and the peers of a gateway."""

from __future__ import annotations

import asyncio
from operator import add
from typing import Any

from runtime.cluster.topology import ENVIRONMENT, slots
from runtime.commands import PeerAddress, RolePort, UpdateEndpoints
from runtime.config import Config
from runtime.coordinator.metrics_recorder import Load
from runtime.coordinator.pools import RolloutPool
from runtime.coordinator.register import ROLLOUT, Member, Register, UnitChange, UnitState, member_of
from runtime.errors import SluiceError
from runtime.process import keys
from runtime.process.keys import GATEWAY, Keys, process

# ---- Concurrency
#
# How many episodes are played at once: as many as keep the rollouts busy, by measured load (ADR 34). No I/O. The limit is x
# episodes for each slot of the serving rollouts, and x follows the gauges of rollouts and gateways:
#
#     limit = ⌊x · slots / n⌋ + 1 groups of n episodes, x = 2 at first, as for plain replies
#
#     increase    x · (max(slots, w) + slots/8) / w     only the limit bounds, few sequences wait, and use < 0.6
#     trim        0.9 · x                               many sequences wait, or use ≥ 0.8
#     cut         0.7 · x                               use ≥ 0.9; or, at once, more than few sequences are preempted
#
# w: the sequences that run or wait, the demand for slots; use: of the room for keys and values that sequences share. Both are
# means over a cycle, which ends when each episode has made one call on average: the rule has no wall time, so tools may take no
# time or minutes. A decrease starts from the groups under way, if they are fewer than the limit. Measuring stops until it has
# taken effect: no episode is withdrawn.
#
# Demand is proportional to the episodes while the slots take it (Little's law). So an increase fills the slots and an eighth
# more, and at most doubles x. After the first decrease it adds at most an eighth of x, unless half of the slots are empty:
# while episodes begin or end, the measured demand is not the final one. Slots are full most of the time only if some
# sequences wait most of the time; many that wait only make episodes late and tokens stale.
#
# Preemptions prove that shared room ran out. In the embedded engine each slot has its own room, and a full engine shows in its
# queue. prime-rl's controller also grows, trims and cuts at 0.6, 0.8 and 0.9 (`concurrency` of its orchestrator).

START = 2.0  # episodes per slot
STEP = 1 / 8  # of the slots
GROW, TRIM, CUT = 0.6, 0.8, 0.9  # of the room for keys and values
MOST_GROWTH = 2.0
TRIMMED, AFTER_CUT = 0.9, 0.7
FEW_WAIT, MANY_WAIT = 1 / 2, 3 / 2  # of the running sequences
FEW_PREEMPTED = 1 / 20  # of the running sequences, between two samples
LOOKS = 4  # the fewest samples in a cycle


NOTHING = Load(*[0] * len(Load._fields))


def concurrency_of(config: Config) -> Concurrency | None:
    """Return the limiter, up to what gateways and environments play at once. None without gateways: a reply keeps its slot."""
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


# ---- Peers


def rollout_pool(config: Config, register: Register, own_keys: Keys | None, term: int = 1) -> RolloutPool:
    """Create the pool of a run, with its gateways. `own_keys`: the coordinator's. `term`: see `Membership`."""
    gateways = 0 if config.gateway is None else config.services.gateway.replicas
    pool = RolloutPool(register, slots(config), config.deadlines.start, term, gateways)
    if gateways:
        GatewayPeers(pool, own_keys)
    return pool


class GatewayPeers:
    """Sends the serving rollouts and environments to every gateway."""

    def __init__(self, pool: RolloutPool, own_keys: Keys | None):
        self._pool, self._register, self._keys = pool, pool.register, own_keys
        self._known: dict[Member, UpdateEndpoints] = {}  # the last UpdateEndpoints that each gateway confirmed
        self._updates: dict[Member, asyncio.Task[None]] = {}
        self._register.subscribe(self._look)
        self._look()

    def _look(self, _: UnitChange | None = None) -> None:
        for unit in self._register.units(GATEWAY, UnitState.SERVING):
            if unit.member not in self._updates and self._known.get(unit.member) != self._peers_for(unit.member):
                self._updates[unit.member] = asyncio.create_task(self._update(unit.port))

    async def _update(self, gateway: RolePort) -> None:
        """Send UpdateEndpoints until the gateway has the newest one. A gateway that does not confirm is lost."""
        member = member_of(gateway)
        try:
            while (peers := self._peers_for(member)) != self._known.get(member):
                await gateway.call(peers)
                self._known[member] = peers
        except SluiceError as error:
            self._known.pop(member, None)
            self._register.lose(member, str(error))
        finally:
            self._updates.pop(member, None)

    def _peers_for(self, gateway: Member) -> UpdateEndpoints:
        def serving(role: str) -> tuple[PeerAddress, ...]:
            units = self._register.units(role, UnitState.SERVING)
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
            slots=self._pool.slots.get(peer.name, 1),
            token="" if self._keys is None else self._keys.token_of(*parties),
        )
