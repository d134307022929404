"""Nodes join a coordinator over gRPC, get their share, leave, come back, and are refused when they do not fit."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import msgspec
import pytest

from runtime.cluster.nodes import Assignment, Death, NodePaths, NodeRegistration, Scale
from runtime.cluster.placement import Seat
from runtime.cluster.topology import Instance
from runtime.config import Config
from runtime.coordinator.register import Register, UnitState
from runtime.coordinator.takeover import KnownUnit, Members
from runtime.errors import ConfigError, DeadlineExceeded, UserError
from runtime.process import os_process
from runtime.status import Registration
from services.nodes import Nodes
from services.rpc import contract, session
from services.rpc.server import Server

PATIENCE = 60.0
JOIN = contract.METHODS["Coordinator", "Join"]
PATHS = contract.METHODS["Coordinator", "ReportPaths"]


def make(**sections: Any) -> Config:
    given = {"run": {"name": "a", "dir": "/r"}, "rewards": {"rules": [{"name": "gsm8k"}]}, "model": {"path": "/m"}}
    return msgspec.convert({**given, **sections}, Config)


def registration(name: str, own: bool = False, **values: Any) -> NodeRegistration:
    """`own`: as of the node whose agent started this process."""
    pid, machine = (os.getppid(), os_process.machine()) if own else (1, "another")
    given = {"address": "127.0.0.1", "devices": 4, "config": "c", "version": "1", "ports": list(range(7001, 7013))}
    return NodeRegistration(name=name, pid=pid, machine=machine, **{**given, **values})


class Desk:
    """A coordinator's part of it, served."""

    def __init__(self, config: Config):
        self.register = Register()
        self.nodes = Nodes(config, True, self.register)
        self.address = ""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Desk]:
        async def paths(found: NodePaths) -> None:
            self.nodes.report_paths(found)

        server = Server({"Coordinator": {"ReportPaths": paths}}, {("Coordinator", "Join"): self.nodes.join})
        self.address = server.bind("127.0.0.1", 0)
        await server.start()
        try:
            yield self
        finally:
            self.nodes.close()
            await server.stop(0)


class Agent:
    """A node's agent that starts nothing."""

    def __init__(self, desk: Desk, node: NodeRegistration, found: dict[str, str] | None = None):
        self._desk, self._node = desk, node
        self._found = {"run.dir": "1", "model.path": "2"} if found is None else found
        self._told: asyncio.Queue[Assignment] = asyncio.Queue()
        self.life = asyncio.create_task(self._live())

    async def _live(self) -> None:
        first = True
        async with (
            session.Channel(self._desk.address) as channel,
            aclosing(session.items(channel, "coordinator", JOIN, self._node)) as assignments,
        ):
            async for assignment in assignments:
                if first:
                    await session.call(channel, "coordinator", PATHS, NodePaths(node=self._node.name, found=self._found))
                else:
                    self._told.put_nowait(assignment)
                first = False

    async def told(self) -> dict[str, int]:
        """The next word: names, and the lowest incarnation of each."""
        waiting = asyncio.create_task(self._told.get())
        await asyncio.wait({waiting, self.life}, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            waiting.cancel()
            self.life.result()
        return {launch.name: launch.incarnation for launch in waiting.result().launches}

    async def leave(self) -> None:
        self.life.cancel()
        await asyncio.gather(self.life, return_exceptions=True)


def run(config: Config, test: Callable[[Desk], Awaitable[None]]) -> None:
    async def within() -> None:
        async with Desk(config).serving() as desk:
            await asyncio.wait_for(test(desk), PATIENCE)

    asyncio.run(within())


async def a_and_b(desk: Desk) -> Agent:
    """Both have come, a being the coordinator's own. The agent of b."""
    placing = asyncio.create_task(desk.nodes.placed(time.monotonic()))
    Agent(desk, registration("a", own=True))
    b = Agent(desk, registration("b"))
    await placing
    return b


def register(desk: Desk, name: str, incarnation: int = 0) -> None:
    role = name.rpartition("-")[0]
    desk.register.admit(Registration(role=role, name=name, address="127.0.0.1:1", pid=1, host="h", incarnation=incarnation))


def dies(desk: Desk, name: str, incarnation: int = 0) -> bool:
    """Whether the group is started again, as its agent tells of a rank's death."""
    death = Death(node="a", name=name, incarnation=incarnation, reason="was killed")
    desk.register.lose(death, death.reason)
    return desk.nodes.start_again("trainer", death)


def placed(desk: Desk) -> set[str]:
    """All processes that are to come."""
    return {rank for unit in desk.register.units("", UnitState.PLACED) for rank in unit.ranks}


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - the test's own deadline ends it
        await asyncio.sleep(0.01)


NAMED = {"nodes": [{"name": "a"}, {"name": "b"}]}
ON_B = {"rollout": {"replicas": 2, "placement": ["b"]}, "trainer": {"placement": ["a"]}}


def test_each_node_is_told_its_own_once_all_have_come() -> None:
    async def test(desk: Desk) -> None:
        placing = asyncio.create_task(desk.nodes.placed(time.monotonic()))
        b = Agent(desk, registration("b"))  # it waits for the coordinator's own
        a = Agent(desk, registration("a", own=True))
        await placing
        assert placed(desk) == {"trainer-0", "rollout-0", "rollout-1", "reward-0"}
        assert await a.told() == {"trainer-0": 0, "reward-0": 0}
        assert await b.told() == {"rollout-0": 0, "rollout-1": 0}

    run(make(cluster=NAMED, services=ON_B), test)


def test_who_has_yet_to_come_is_told_each_time_that_it_changes() -> None:
    async def test(desk: Desk) -> None:
        told: list[str] = []
        placing = asyncio.create_task(desk.nodes.placed(time.monotonic(), told.append))
        Agent(desk, registration("b"))
        Agent(desk, registration("a", own=True))
        await placing
        assert told[0] == "a, b"
        assert told[-1] in ("a", "b")

    run(make(cluster=NAMED, services=ON_B), test)


def test_a_run_on_one_node_does_not_tell_that_it_waits_for_it() -> None:
    async def test(desk: Desk) -> None:
        told: list[str] = []
        placing = asyncio.create_task(desk.nodes.placed(time.monotonic(), told.append))
        Agent(desk, registration("a", own=True))
        await placing
        assert told == []

    run(make(), test)


def test_a_node_that_never_comes_is_named_and_so_is_why_it_was_refused() -> None:
    async def test(desk: Desk) -> None:
        placing = asyncio.create_task(desk.nodes.placed(time.monotonic()))
        Agent(desk, registration("a", own=True))
        other = Agent(desk, registration("b", config="another"))
        with pytest.raises(UserError, match=r"^node b was started with another configuration \(hash another\) than a \(c\)"):
            await other.told()
        with pytest.raises(DeadlineExceeded, match=r"^node b: start: did not come; refused: node b was started .*deadline 2 s"):
            await placing

    run(make(cluster=NAMED, deadlines={"start": 2.0}), test)


def test_a_model_that_differs_on_a_node_is_refused_there() -> None:
    async def test(desk: Desk) -> None:
        placing = asyncio.create_task(desk.nodes.placed(time.monotonic()))
        Agent(desk, registration("a", own=True))
        wrong = Agent(desk, registration("b"), {"run.dir": "1", "model.path": "3"})
        with pytest.raises(UserError, match=r"^model.path: /m is not the same on node b \(hash 3\) as on a \(2\)$"):
            await wrong.told()
        right = Agent(desk, registration("b"))  # mended, and started again
        await placing
        assert "rollout-0" in await right.told()

    run(make(cluster=NAMED, services=ON_B), test)


def test_what_cannot_be_placed_ends_the_run_before_anything_starts() -> None:
    async def test(desk: Desk) -> None:
        a = Agent(desk, registration("a", own=True, devices=2))
        with pytest.raises(ConfigError, match=r"^services.trainer: 3 processes do not fit; node a has 2 of 2 devices free$"):
            await desk.nodes.placed(time.monotonic())
        assert not a.life.done()

    run(make(services={"trainer": {"processes": 3}}), test)


def test_a_node_that_leaves_and_comes_back_gets_what_it_had_as_new_incarnations() -> None:
    async def test(desk: Desk) -> None:
        b = await a_and_b(desk)
        await b.told()
        register(desk, "rollout-0", incarnation=3)
        await b.leave()
        await until(lambda: list(desk.nodes.roster.nodes) == ["a"])
        back = Agent(desk, registration("b"))
        assert await back.told() == {"rollout-0": 4, "rollout-1": 0}

    run(make(cluster=NAMED, services=ON_B), test)


def test_an_agent_that_reconnects_is_not_its_own_namesake_and_another_waits_for_its_end() -> None:
    async def test(desk: Desk) -> None:
        placing = asyncio.create_task(desk.nodes.placed(time.monotonic()))
        Agent(desk, registration("a", own=True))
        b = Agent(desk, registration("b"))
        await placing
        await b.told()
        again = Agent(desk, registration("b"))  # whose former connection is still there
        assert set(await again.told()) == {"rollout-0", "rollout-1"}
        await b.life
        with pytest.raises(UserError, match=r"^node b: 127.0.0.1 has this name already; one of them needs another --name$"):
            await Agent(desk, msgspec.structs.replace(registration("b"), pid=2)).told()
        assert not again.life.done()

    run(make(cluster=NAMED, services=ON_B, deadlines={"silence": 0.5}), test)


def test_a_node_that_comes_late_gets_what_had_no_room() -> None:
    async def test(desk: Desk) -> None:
        a = Agent(desk, registration("a", own=True))
        await desk.nodes.placed(time.monotonic())
        assert placed(desk) == {"trainer-0", "rollout-0", "rollout-1", "rollout-2", "reward-0"}
        await a.told()
        b = Agent(desk, registration("b"))
        assert await b.told() == {"rollout-3": 0, "rollout-4": 0}

    run(make(cluster={"min_nodes": 1}, services={"rollout": {"replicas": 5}}), test)


def test_another_node_takes_over_what_one_that_left_had() -> None:
    async def test(desk: Desk) -> None:
        b = await a_and_b(desk)
        assert await b.told() == {"rollout-3": 0, "rollout-4": 0}
        register(desk, "rollout-3")
        await b.leave()
        await until(lambda: list(desk.nodes.roster.nodes) == ["a"])
        c = Agent(desk, registration("c"))
        assert await c.told() == {"rollout-3": 1, "rollout-4": 0}

    run(make(cluster={"min_nodes": 2}, services={"rollout": {"replicas": 5}}), test)


def test_a_node_that_has_no_room_for_what_another_left_is_welcome_all_the_same() -> None:
    async def test(desk: Desk) -> None:
        b = await a_and_b(desk)
        await b.told()
        await b.leave()
        await until(lambda: list(desk.nodes.roster.nodes) == ["a"])
        c = Agent(desk, registration("c"))
        assert await c.told() == {}
        back = Agent(desk, registration("b"))
        assert set(await back.told()) == {"rollout-0", "rollout-1"}

    run(make(cluster={"min_nodes": 2}, services=ON_B), test)


def test_a_group_over_two_nodes_is_started_again_on_both_as_often_as_it_may() -> None:
    restarts = {"attempts": 1, "backoff": 0.0}
    services = {"trainer": {"processes": 6, "restarts": restarts}, "rollout": {"placement": ["b"]}}

    async def test(desk: Desk) -> None:
        placing = asyncio.create_task(desk.nodes.placed(time.monotonic()))
        a = Agent(desk, registration("a", own=True))
        b = Agent(desk, registration("b"))
        await placing
        assert await a.told() == {"trainer-0": 0, "reward-0": 0}
        assert await b.told() == {"trainer-4": 0, "rollout-0": 0}
        assert dies(desk, "trainer-0")
        assert dies(desk, "trainer-4")  # the other node tells of the same end
        assert (await a.told())["trainer-0"] == (await b.told())["trainer-4"] == 1
        assert not dies(desk, "trainer-0", incarnation=1)

    run(make(cluster=NAMED, services=services), test)


def test_a_node_that_comes_to_the_next_coordinator_first_keeps_its_ranks_of_a_group_until_all_have_come() -> None:
    async def test(desk: Desk) -> None:
        ranks = ("trainer-0", "trainer-1")
        seats = [Seat(Instance("trainer", name, rank), node) for rank, (name, node) in enumerate(zip(ranks, "ab", strict=True))]
        told = [
            Registration(role="trainer", name=name, address="127.0.0.1:1", pid=1, host="h", incarnation=1) for name in ranks
        ]
        unit = KnownUnit("trainer", list(ranks), 1, told)
        desk.nodes.take_up(Members(run="r", began=1, rollouts=0, seats=seats, pending=[], units=[unit]))
        a = Agent(desk, registration("a", own=True, running={"trainer-0": 1}))
        await until(lambda: "a" in desk.nodes.roster.nodes)
        b = Agent(desk, registration("b", running={"trainer-1": 1}))
        said = await a.told()  # its first word: not one without its rank, which it would end
        assert (said["trainer-0"], (await b.told())["trainer-1"]) == (1, 1)
        await b.leave()
        await until(lambda: "b" not in desk.nodes.roster.nodes)
        assert dies(desk, "trainer-0", 1)
        assert "trainer-0" not in await a.told()  # it is lost by now, and b is not there to start it again with

    run(make(services={"trainer": {"processes": 2, "placement": "spread"}}, cluster=NAMED), test)


def test_a_group_on_one_node_is_that_nodes_to_start_again() -> None:
    async def test(desk: Desk) -> None:
        a = Agent(desk, registration("a", own=True))
        await desk.nodes.placed(time.monotonic())
        await a.told()
        assert not dies(desk, "trainer-0")

    run(make(services={"trainer": {"processes": 2}}), test)


def test_rollouts_are_scaled_up_and_down_and_up_again() -> None:
    async def test(desk: Desk) -> None:
        a = Agent(desk, registration("a", own=True))
        await desk.nodes.placed(time.monotonic())
        assert set(await a.told()) == {"trainer-0", "reward-0", "rollout-0"}
        done = desk.nodes.scale(Scale(role="rollout", replicas=4))
        assert (done.started, done.stopped, done.pending) == (["rollout-1", "rollout-2"], [], ["rollout-3"])
        assert set(await a.told()) == {"trainer-0", "reward-0", "rollout-0", "rollout-1", "rollout-2"}
        register(desk, "rollout-1")
        done = desk.nodes.scale(Scale(role="rollout", replicas=1))
        assert (done.started, done.stopped) == ([], ["rollout-1", "rollout-2"])
        assert set(await a.told()) == {"trainer-0", "reward-0", "rollout-0"}
        with pytest.raises(UserError, match=r"rollout-1 .*is not in this run's topology"):
            register(desk, "rollout-1", incarnation=1)
        desk.nodes.scale(Scale(role="rollout", replicas=2))
        assert (await a.told())["rollout-1"] == 1
        register(desk, "rollout-1", incarnation=1)

    run(make(), test)


@pytest.mark.parametrize(
    ("wanted", "services", "said"),
    [
        (Scale(role="trainer", replicas=2), {}, "scale: trainer=2: only rollout can be scaled, where it is one fleet"),
        (Scale(role="rollout", replicas=2), {"rollout": [{}, {}]}, "scale: rollout=2: only rollout can be scaled"),
        (Scale(role="rollout", replicas=0), {}, "scale: rollout=0: must be at least 1"),
    ],
)
def test_what_cannot_be_scaled_is_one_line(wanted: Scale, services: dict[str, Any], said: str) -> None:
    async def test(desk: Desk) -> None:
        with pytest.raises(UserError, match=r"^scale: the run has not started yet$"):
            desk.nodes.scale(wanted)
        a = Agent(desk, registration("a", own=True))
        await desk.nodes.placed(time.monotonic())
        await a.told()
        with pytest.raises(UserError, match=f"^{said}"):
            desk.nodes.scale(wanted)

    run(make(services=services), test)
