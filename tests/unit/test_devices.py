"""Shared devices: no two roles have them at once, and no turn waits for ever, whatever comes and goes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime import config
from runtime.commands import Level
from runtime.coordinator.devices import ColocatedDevices
from runtime.coordinator.pools import Replicas, RolloutPool
from runtime.coordinator.register import Register
from runtime.errors import InvariantViolated
from runtime.ledger.states import Mark
from runtime.telemetry.metrics import SpanClock
from runtime.types import PolicyVersion
from tests.loopback.losable import Losable
from tests.unit.clock import run_by_clock

LACKS = SimpleNamespace(generated=True, state=SimpleNamespace(needs=Mark.REFERENCED, marks=Mark(0)))


class Having:
    """Who has the devices, or the order to take them."""

    def __init__(self) -> None:
        self.now: set[str] = set()
        self.told: list[str] = []

    def take(self, name: str) -> None:
        self.now.add(name)
        assert len({name.partition("-")[0] for name in self.now}) == 1, self.now


class Model(Losable):
    """Trainer or reference."""

    def __init__(self, name: str, having: Having, seconds: Callable[[], float]):
        super().__init__()
        self.name, self._having, self._seconds = name, having, seconds

    async def onload(self) -> None:
        self._having.told.append(f"{self.name} on")
        self._having.take(self.name)
        await asyncio.sleep(self._seconds())

    async def offload(self) -> None:
        self._having.told.append(f"{self.name} off")
        await asyncio.sleep(self._seconds())
        self._having.now.remove(self.name)


class Sleeper(Model):
    """A rollout."""

    level = Level.ASLEEP

    def __init__(self, name: str, having: Having, seconds: Callable[[], float], incarnation: int = 0):
        super().__init__(name, having, seconds)
        self.incarnation = incarnation

    async def set_level(self, level: Level, keeps: bool) -> None:
        self._having.told.append(f"{self.name} {level.name}")
        if level == Level.AWAKE:
            self._having.take(self.name)
        await self.reached(asyncio.sleep(self._seconds()))
        self.level = level
        if level != Level.AWAKE:
            self._having.now.discard(self.name)

    def kill(self) -> None:
        self._having.now.discard(self.name)
        self.die("was killed")


class Shared:
    """Shared devices, and all that has them."""

    def __init__(self, rollouts: int, seconds: Callable[[], float] = lambda: 0.1, refers: bool = False):
        self.having, self.seconds, self.register = Having(), seconds, Register()
        self.rollouts: list[Sleeper] = []
        self.come(*(f"rollout-{index}" for index in range(rollouts)))
        if refers:
            self.register.add("reference", Model("reference-0", self.having, seconds))
        services = config.Services(
            rollout=config.Rollout(colocate="trainer"), reference=config.ReferenceScorer(colocate="trainer" if refers else "")
        )
        settings = config.Config(
            run=config.Run(name="a"), services=services, algorithm=config.Algorithm(kl_coefficient=0.1 * refers)
        )
        roles: Any = SimpleNamespace(
            trainer=Model("trainer-0", self.having, seconds), references=Replicas(self.register, "reference", 1.0)
        )
        self.pool = RolloutPool(self.register, {f"rollout-{index}": 1 for index in range(3)}, 1.0)
        self.buffer: Any = Groups()
        context: Any = SimpleNamespace(config=settings, spans=SpanClock(asyncio.get_running_loop().time))
        self.devices = ColocatedDevices(context, roles, self.pool, self, self.buffer, None)  # type: ignore[arg-type]

    def come(self, *names: str) -> None:
        for name in names:
            self.rollouts.append(Sleeper(name, self.having, self.seconds, len(self.rollouts)))
            self.register.add("rollout", self.rollouts[-1])

    @property
    def living(self) -> list[Sleeper]:
        return [rollout for rollout in self.rollouts if not rollout.gone]

    async def hold(self) -> None:
        """There is no weight sync but those of the turns."""

    def free(self) -> None:
        """As `hold`."""

    async def publish(self, version: PolicyVersion) -> None:
        """All that live and have joined have room for the weights."""
        joined = self.pool.membership.living
        assert all(self.register.port(member).level == Level.WEIGHTS for member in joined)
        if joined:
            self.pool.serve_as_loaded()

    async def turn(self, publishes: bool = True) -> None:
        async with self.devices.lease("trainer") as lease:
            assert self.having.now == {"trainer-0"}
            await asyncio.sleep(self.seconds())
            if publishes:
                lease.version = PolicyVersion()

    async def refer(self) -> None:
        """Answer for the groups that lack it, in the reference's turn."""
        async with self.devices.lease("reference"):
            assert self.having.now == {"reference-0"}
            await asyncio.sleep(self.seconds())
            self.buffer.clear()
            self.buffer.ready_changed.set()


class Groups(list[Any]):
    def __init__(self) -> None:
        super().__init__()
        self.ready_changed = asyncio.Event()


def test_a_whole_round() -> None:
    async def course() -> None:
        shared = Shared(2, refers=True)
        await shared.turn()
        begins = ["trainer-0 on", *([f"rollout-{index} WEIGHTS" for index in range(2)]), "trainer-0 off"]
        wakes = [f"rollout-{index} AWAKE" for index in range(2)]
        assert shared.having.told == [*begins, *wakes]  # they are asleep at first
        shared.having.told.clear()
        shared.buffer.append(LACKS)
        referring = asyncio.ensure_future(shared.refer())
        await shared.turn(publishes=False)
        await referring
        sleeps, reference = [f"rollout-{index} ASLEEP" for index in range(2)], ["reference-0 on", "reference-0 off"]
        assert shared.having.told == [*sleeps, *reference, "trainer-0 on", "trainer-0 off", *wakes]

    run_by_clock(course())


def test_a_newcomer_joins_at_the_level_of_the_others_and_one_on_its_way_is_waited_for() -> None:
    async def course() -> None:
        shared = Shared(1)
        await shared.turn()
        shared.come("rollout-1")  # is told to wake, which takes a moment
        await asyncio.sleep(0.05)
        assert len(shared.pool.membership.living) == 1
        async with shared.devices.lease("trainer"):
            assert [rollout.level for rollout in shared.rollouts] == [Level.ASLEEP] * 2
            assert shared.having.now == {"trainer-0"}
            shared.come("rollout-2")
            assert len(shared.pool.membership.living) == 3  # as far as the others are
        assert shared.having.told.count("rollout-2 AWAKE") == 1

    run_by_clock(course())


def test_what_breaks_a_guarantee_ends_the_turn() -> None:
    async def course() -> None:
        shared = Shared(1)

        async def broken(level: Level, keeps: bool) -> None:
            raise InvariantViolated("no such level")

        shared.rollouts[0].set_level = broken  # type: ignore[method-assign]
        with pytest.raises(InvariantViolated, match="no such level"):
            await shared.turn()

    run_by_clock(course())


@given(st.integers(0), st.booleans())
def test_rollouts_come_and_go_at_any_time(seed: int, refers: bool) -> None:
    """Rollouts do what they are told after any time; they die, and others of their names come, at any time."""
    chance = random.Random(seed)

    def seconds() -> float:
        return chance.choice([0.0, 0.01 * chance.random()])

    async def change(shared: Shared) -> None:
        while True:
            await asyncio.sleep(seconds())
            missing = {f"rollout-{index}" for index in range(3)} - {rollout.name for rollout in shared.living}
            if missing and chance.random() < 0.5:
                shared.come(min(missing))
            elif shared.living:
                chance.choice(shared.living).kill()
            await asyncio.sleep(3 * seconds())

    async def course() -> None:
        shared = Shared(chance.randint(0, 3), seconds, refers)
        changing = asyncio.ensure_future(change(shared))
        await shared.turn()
        for _ in range(6):
            await asyncio.sleep(seconds())
            shared.buffer += [LACKS] * refers
            referring = [asyncio.ensure_future(shared.refer()) for _ in range(refers)]
            await shared.turn(publishes=chance.random() < 0.7)
            await asyncio.gather(*referring)
        changing.cancel()
        await asyncio.sleep(1.0)
        assert {rollout.level for rollout in shared.living} <= {Level.AWAKE}
        assert len(shared.pool.membership.living) == len(shared.living)

    run_by_clock(course())
