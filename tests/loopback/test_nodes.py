"""Nodes over gRPC: they join, get their share, leave and come back; the agent, and the parts of a checkpoint."""

from __future__ import annotations

import asyncio
import functools
import operator
import os
import socket
import stat
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import yaml

from launcher.node.agent import Agent
from launcher.node.local_node import Machine
from launcher.node.supervisor import Supervisor
from runtime import run_files, timeouts, types
from runtime.cluster.nodes import Assignment, Death, NodePaths, NodeRegistration, Scale
from runtime.cluster.placement import Binding
from runtime.cluster.topology import Instance
from runtime.commands import Restore, Save
from runtime.config import Config, loading
from runtime.coordinator.failover import KnownUnit, Members
from runtime.coordinator.register import Register, UnitState
from runtime.data.prompts import StreamState
from runtime.errors import ConfigError, DeadlineExceeded, ServiceFault, UserError
from runtime.ledger import checkpoint
from runtime.ledger.checkpoint import Position
from runtime.process import keys, os_process
from runtime.process.keys import Keys
from runtime.status import Registration
from runtime.trainer import rank_group
from runtime.trainer.backend import RankInfo
from runtime.trainer.rank_group import NodePart, exchange
from runtime.types import PolicyVersion
from services.nodes import Nodes
from services.rpc import client, contract
from services.rpc.server import Server
from tests.coroutines import driven_by, handed, within
from tests.loopback.line_views import Lines
from tests.loopback.ranks import run_two

# ---- Nodes join a coordinator over gRPC, get their share, leave, come back, and are refused when they do not fit

PATIENCE = 60.0
JOIN = contract.METHODS["Coordinator", "Join"]
PATHS = contract.METHODS["Coordinator", "ReportPaths"]


def make(**sections: Any) -> Config:
    given = {"run": {"name": "a", "dir": "/r"}, "rewards": {"rules": [{"name": "gsm8k"}]}, "model": {"path": "/m"}}
    return msgspec.convert({**given, **sections}, Config)


def registration(name: str, own: bool = False, **values: Any) -> NodeRegistration:
    """`own`: as of the node whose agent started this process."""
    pid, machine = (os.getppid(), os_process.machine()) if own else (1, "another")
    given = {"address": "127.0.0.1", "devices": 4, "config": "c", "version": "1", "ports": list(range(7001, 7017))}
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

        server = Server({"Coordinator": {"ReportPaths": paths, "Join": self.nodes.join}})
        self.address = server.bind("127.0.0.1", 0)
        await server.start()
        try:
            yield self
        finally:
            self.nodes.close()
            await server.stop(0)


class IdleAgent:
    """A node's agent that starts nothing."""

    def __init__(self, desk: Desk, node: NodeRegistration, found: dict[str, str] | None = None):
        self._desk, self._node = desk, node
        self._found = {"run.dir": "1", "model.path": "2"} if found is None else found
        self._told: asyncio.Queue[Assignment] = asyncio.Queue()
        self.life = asyncio.create_task(self._live())

    async def _live(self) -> None:
        first = True
        async with (
            client.Channel(self._desk.address) as channel,
            aclosing(client.items(channel, "coordinator", JOIN, self._node)) as assignments,
        ):
            async for assignment in assignments:
                if first:
                    await client.call(channel, "coordinator", PATHS, NodePaths(node=self._node.name, found=self._found))
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


async def came(desk: Desk, *names: str) -> list[IdleAgent]:
    """The agents of these nodes, the first of which is the coordinator's own; all is placed."""
    placing = asyncio.create_task(desk.nodes.placed(time.monotonic()))
    agents = [IdleAgent(desk, registration(name, own=name == names[0])) for name in names]
    await placing
    return agents


def register(desk: Desk, name: str, incarnation: int = 0) -> None:
    role = name.rpartition("-")[0]
    desk.register.admit(Registration(role=role, name=name, address="127.0.0.1:1", pid=1, host="h", incarnation=incarnation))


def dies(desk: Desk, name: str, incarnation: int = 0) -> bool:
    """Whether the unit is started again, as its agent tells of a process's death."""
    death = Death(node="a", name=name, incarnation=incarnation, reason="was killed")
    desk.register.lose(death, death.reason)
    return desk.nodes.start_again(name.rpartition("-")[0], death, step=0)


def placed(desk: Desk) -> set[str]:
    """All processes that are to come."""
    return {rank for unit in desk.register.units("", UnitState.PLACED) for rank in unit.ranks}


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - the test's own deadline ends it
        await asyncio.sleep(0.01)


async def leaves(desk: Desk, agent: IdleAgent) -> None:
    await agent.leave()
    await until(lambda: list(desk.nodes.roster.nodes) == ["a"])


NAMED = {"nodes": [{"name": "a"}, {"name": "b"}]}
ON_B = {"rollout": {"replicas": 2, "placement": ["b"]}, "trainer": {"placement": ["a"]}}


@handed(run, make(cluster=NAMED, services=ON_B))
async def test_each_node_is_told_its_own_once_all_have_come_and_who_has_yet_to_come_is_told(desk: Desk) -> None:
    said: list[str] = []
    placing = asyncio.create_task(desk.nodes.placed(time.monotonic(), said.append))
    b = IdleAgent(desk, registration("b"))  # it waits for the coordinator's own
    a = IdleAgent(desk, registration("a", own=True))
    await placing
    assert placed(desk) == {"trainer-0", "rollout-0", "rollout-1", "reward-0"}
    assert await a.told() == {"trainer-0": 0, "reward-0": 0}
    assert await b.told() == {"rollout-0": 0, "rollout-1": 0}
    assert said[0] == "a, b"
    assert said[-1] in ("a", "b")


@handed(run, make(services={"trainer": {"processes": 2}}))
async def test_a_run_on_one_node_does_not_tell_that_it_waits_for_it_and_its_groups_are_started_again(desk: Desk) -> None:
    told: list[str] = []
    placing = asyncio.create_task(desk.nodes.placed(time.monotonic(), told.append))
    a = IdleAgent(desk, registration("a", own=True))
    await placing
    assert told == []
    assert (await a.told())["trainer-0"] == 0
    assert dies(desk, "trainer-0")
    assert (await a.told())["trainer-0"] == 1


@handed(run, make(cluster=NAMED, deadlines={"start": 2.0}))
async def test_a_node_that_never_comes_is_named_and_so_is_why_it_was_refused(desk: Desk) -> None:
    placing = asyncio.create_task(desk.nodes.placed(time.monotonic()))
    IdleAgent(desk, registration("a", own=True))
    other = IdleAgent(desk, registration("b", config="another"))
    with pytest.raises(UserError, match=r"^node b was started with another configuration \(hash another\) than a \(c\)"):
        await other.told()
    with pytest.raises(DeadlineExceeded, match=r"^node b: start: did not come; refused: node b was started .*deadline 2 s"):
        await placing


@handed(run, make(cluster=NAMED, services=ON_B))
async def test_a_model_that_differs_on_a_node_is_refused_there(desk: Desk) -> None:
    placing = asyncio.create_task(desk.nodes.placed(time.monotonic()))
    IdleAgent(desk, registration("a", own=True))
    wrong = IdleAgent(desk, registration("b"), {"run.dir": "1", "model.path": "3"})
    with pytest.raises(UserError, match=r"^model.path: /m is not the same on node b \(hash 3\) as on a \(2\)$"):
        await wrong.told()
    right = IdleAgent(desk, registration("b"))  # mended, and started again
    await placing
    assert "rollout-0" in await right.told()


@handed(run, make(services={"trainer": {"processes": 3}}))
async def test_what_cannot_be_placed_ends_the_run_before_anything_starts(desk: Desk) -> None:
    a = IdleAgent(desk, registration("a", own=True, devices=2))
    with pytest.raises(ConfigError, match=r"^services.trainer: 3 processes do not fit; node a has 2 of 2 devices free$"):
        await desk.nodes.placed(time.monotonic())
    assert not a.life.done()


@handed(run, make(cluster=NAMED, services=ON_B, deadlines={"keepalive": 0.5}))
async def test_an_agent_that_reconnects_is_not_its_own_namesake_and_another_waits_for_its_end(desk: Desk) -> None:
    _, b = await came(desk, "a", "b")
    await b.told()
    again = IdleAgent(desk, registration("b"))  # whose former connection is still there
    assert set(await again.told()) == {"rollout-0", "rollout-1"}
    await b.life
    with pytest.raises(UserError, match=r"^node b: 127.0.0.1 has this name already; one of them needs another --name$"):
        await IdleAgent(desk, msgspec.structs.replace(registration("b"), pid=2)).told()
    assert not again.life.done()


@handed(run, make(cluster={"min_nodes": 1}, services={"rollout": {"replicas": 5}}))
async def test_a_node_that_comes_late_gets_what_had_no_room(desk: Desk) -> None:
    (a,) = await came(desk, "a")
    assert placed(desk) == {"trainer-0", "rollout-0", "rollout-1", "rollout-2", "reward-0"}
    await a.told()
    b = IdleAgent(desk, registration("b"))
    assert await b.told() == {"rollout-3": 0, "rollout-4": 0}


@handed(run, make(cluster={"min_nodes": 2}, services={"rollout": {"replicas": 5}}))
async def test_another_node_takes_over_what_one_that_left_had(desk: Desk) -> None:
    _, b = await came(desk, "a", "b")
    assert await b.told() == {"rollout-3": 0, "rollout-4": 0}
    register(desk, "rollout-3")
    await leaves(desk, b)
    c = IdleAgent(desk, registration("c"))
    assert await c.told() == {"rollout-3": 1, "rollout-4": 0}


@handed(run, make(cluster={"min_nodes": 2}, services=ON_B))
async def test_a_node_that_has_no_room_for_what_another_left_which_comes_back_to_new_incarnations_is_welcome(
    desk: Desk,
) -> None:
    _, b = await came(desk, "a", "b")
    await b.told()
    register(desk, "rollout-0", incarnation=3)
    await leaves(desk, b)
    c = IdleAgent(desk, registration("c"))
    assert await c.told() == {}
    back = IdleAgent(desk, registration("b"))
    assert await back.told() == {"rollout-0": 4, "rollout-1": 0}


RESTARTED = {"trainer": {"processes": 6, "restarts": 1}, "rollout": {"placement": ["b"]}}


@handed(run, make(cluster=NAMED, services=RESTARTED))
async def test_a_group_over_two_nodes_is_started_again_on_both_as_often_as_it_may(desk: Desk) -> None:
    a, b = await came(desk, "a", "b")
    assert await a.told() == {"trainer-0": 0, "reward-0": 0}
    assert await b.told() == {"trainer-4": 0, "rollout-0": 0}
    assert dies(desk, "trainer-0")
    assert dies(desk, "trainer-4")  # the other node tells of the same end
    assert (await a.told())["trainer-0"] == (await b.told())["trainer-4"] == 1
    assert not dies(desk, "trainer-0", incarnation=1)


ELASTIC = {"trainer": {"processes": 4, "placement": ["a", "b"], "elastic": True}, "rollout": {"placement": ["a"]}}


@handed(run, make(cluster=NAMED, services=ELASTIC))
async def test_an_elastic_group_goes_on_without_a_lost_node_and_grows_when_it_is_back(desk: Desk) -> None:
    a, b = await came(desk, "a", "b")
    assert (await a.told())["trainer-0"] == (await b.told())["trainer-2"] == 0
    await b.leave()
    await until(lambda: "b" not in desk.nodes.roster.nodes)
    assert dies(desk, "trainer-0")
    assert (await a.told())["trainer-0"] == 1
    assert desk.register.find("trainer-0").ranks == ("trainer-0", "trainer-1")  # type: ignore[union-attr]
    assert desk.register.find("trainer-2") is None and desk.nodes.config.services.trainer.processes == 2
    assert desk.nodes.grown() == []
    b = IdleAgent(desk, registration("b"))
    await until(lambda: desk.nodes.grown() == ["trainer"])
    assert dies(desk, "trainer-0", incarnation=1)
    while "trainer-2" not in (told := await b.told()):
        pass
    assert told["trainer-2"] == 2 and desk.nodes.config.services.trainer.processes == 4
    assert desk.nodes.grown() == []


@handed(run, make(services={"trainer": {"processes": 2, "placement": "spread"}}, cluster=NAMED))
async def test_a_node_that_comes_to_the_next_coordinator_first_keeps_its_ranks_of_a_group_until_all_have_come(
    desk: Desk,
) -> None:
    ranks = ("trainer-0", "trainer-1")
    seats = [Binding(Instance("trainer", name, rank), node) for rank, (name, node) in enumerate(zip(ranks, "ab", strict=True))]
    told = [Registration(role="trainer", name=name, address="127.0.0.1:1", pid=1, host="h", incarnation=1) for name in ranks]
    unit = KnownUnit("trainer", list(ranks), 1, told)
    desk.nodes.take_up(Members(run="r", began=1, rollouts=0, seats=seats, pending=[], units=[unit]))
    a = IdleAgent(desk, registration("a", own=True, running={"trainer-0": 1}))
    await until(lambda: "a" in desk.nodes.roster.nodes)
    b = IdleAgent(desk, registration("b", running={"trainer-1": 1}))
    said = await a.told()  # its first word: not one without its rank, which it would end
    assert (said["trainer-0"], (await b.told())["trainer-1"]) == (1, 1)
    await b.leave()
    await until(lambda: "b" not in desk.nodes.roster.nodes)
    assert dies(desk, "trainer-0", 1)
    assert "trainer-0" not in await a.told()  # it is lost by now, and b is not there to start it again with


ENGINE = {"engine": "vllm", "parallel": {"tensor": 2, "nodes": 2}, "restarts": 1}
OVER_BOTH = {"rollout": ENGINE, "trainer": {"placement": ["a"]}, "reward": {"placement": ["a"]}}


@handed(run, make(cluster=NAMED, services=OVER_BOTH))
async def test_a_rollout_over_two_nodes_starts_again_as_a_whole_and_waits_for_its_node(desk: Desk) -> None:
    a, b = await came(desk, "a", "b")
    assert ((await a.told())["rollout-0"], await b.told()) == (0, {"rollout-0n1": 0})
    register(desk, "rollout-0")
    assert desk.register.find("rollout-0").state is UnitState.STARTED  # type: ignore[union-attr]
    register(desk, "rollout-0n1")
    assert desk.register.find("rollout-0n1").state is UnitState.REGISTERED  # type: ignore[union-attr]
    assert dies(desk, "rollout-0n1")
    assert ((await a.told())["rollout-0"], await b.told()) == (1, {"rollout-0n1": 1})
    assert dies(desk, "rollout-0")  # which ended because of the other, and is followed
    assert not dies(desk, "rollout-0", 1)  # restarts: 1
    await leaves(desk, b)
    b = IdleAgent(desk, registration("b"))
    assert ((await a.told())["rollout-0"], await b.told()) == (2, {"rollout-0n1": 2})
    with pytest.raises(UserError, match=r"^scale: services.rollout.parallel.nodes is 2; only rollouts on one node can be"):
        desk.nodes.scale(Scale(role="rollout", replicas=2))


@handed(run, make(cluster=NAMED, services=OVER_BOTH))
async def test_the_next_coordinator_leaves_a_rollout_over_two_nodes_alone_until_both_have_come(desk: Desk) -> None:
    names = ("rollout-0", "rollout-0n1")
    seats = [Binding(Instance("rollout", name, at), node) for at, (name, node) in enumerate(zip(names, "ab", strict=True))]
    told = [Registration(role="rollout", name=name, address="127.0.0.1:1", pid=1, host="h", incarnation=1) for name in names]
    unit = KnownUnit("rollout", list(names), 1, told)
    desk.nodes.take_up(Members(run="r", began=1, rollouts=1, seats=seats, pending=[], units=[unit]))
    a = IdleAgent(desk, registration("a", own=True, running={"rollout-0": 1}))
    await until(lambda: "a" in desk.nodes.roster.nodes)
    b = IdleAgent(desk, registration("b", running={"rollout-0n1": 1}))
    said = await a.told()
    assert (said["rollout-0"], await b.told()) == (1, {"rollout-0n1": 1})


@handed(run, make())
async def test_rollouts_are_scaled_up_and_down_and_up_again(desk: Desk) -> None:
    (a,) = await came(desk, "a")
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


@pytest.mark.parametrize(
    ("wanted", "services", "said"),
    [
        (Scale(role="trainer", replicas=2), {}, "scale: trainer=2: only rollout can be scaled, and only as one fleet"),
        (Scale(role="rollout", replicas=2), {"rollout": [{}, {}]}, "scale: rollout=2: only rollout can be scaled"),
        (Scale(role="rollout", replicas=0), {}, "scale: rollout=0: must be at least 1"),
    ],
)
def test_what_cannot_be_scaled_is_one_line(wanted: Scale, services: dict[str, Any], said: str) -> None:
    async def test(desk: Desk) -> None:
        with pytest.raises(UserError, match=r"^scale: the run has not started yet$"):
            desk.nodes.scale(wanted)
        (a,) = await came(desk, "a")
        await a.told()
        with pytest.raises(UserError, match=f"^{said}"):
            desk.nodes.scale(wanted)

    run(make(services=services), test)


# ---- A node's agent against a coordinator that comes, goes and refuses, over gRPC

AGENT_PATIENCE = 100.0
START = 1.0  # seconds for which a coordinator that is not there is tried


class Coordinator:
    """`joins` has what each stream is given besides its first word, until `ends` is set."""

    def __init__(self, config: Config, port: int = 0, own: Keys | None = None):
        self.yaml = loading.to_yaml(config)
        self.joined: asyncio.Queue[NodeRegistration] = asyncio.Queue()
        self.told: asyncio.Queue[NodePaths] = asyncio.Queue()
        self.ends = asyncio.Event()
        self.refuses = ""
        self.name = "first"
        self._server = Server({"Coordinator": {"ReportPaths": self._paths, "Join": self._join}}, keys=own)
        self.address = self._server.bind("127.0.0.1", port)

    async def _paths(self, found: NodePaths) -> None:
        self.told.put_nowait(found)

    async def _join(self, node: NodeRegistration) -> AsyncGenerator[Assignment, None]:
        self.joined.put_nowait(node)
        if self.refuses:
            raise UserError(self.refuses)
        yield Assignment(run=self.name, config=self.yaml)
        await self.ends.wait()

    async def start(self) -> None:
        await self._server.start()

    async def stop(self) -> None:
        self.ends.set()
        await self._server.stop(0)


def config_of(folder: Path, security: str = "auto", **sections: Any) -> Config:
    """Of a run whose model is not there."""
    given = {"run": {"name": "a", "dir": str(folder)}, "model": {"path": str(folder / "none")}, "deadlines": {"start": START}}
    return msgspec.convert({**given, "network": {"security": security}, **sections}, Config)


def agent_of(config: Config, address: str, said: list[str] | None = None) -> Agent:
    supervisor = Supervisor(Path(config.run.dir), *([] if said is None else [Lines(said)]))
    return Agent(NodeRegistration(name="b", address="127.0.0.7"), config, address, supervisor, Machine(), sys.executable)


def run_of_agent(tmp_path: Path, test: Callable[[Coordinator, Agent], Awaitable[None]]) -> None:
    config = config_of(tmp_path, "none")

    async def within() -> None:
        coordinator = Coordinator(config)
        await coordinator.start()
        try:
            await asyncio.wait_for(test(coordinator, agent_of(config, coordinator.address)), AGENT_PATIENCE)
        finally:
            await coordinator.stop()

    asyncio.run(within())


@handed(run_of_agent, needs=("tmp_path",), first=2)
async def test_it_says_what_it_has_and_writes_the_configuration_with_its_own_address(
    coordinator: Coordinator, agent: Agent, tmp_path: Path
) -> None:
    def of_run() -> str:
        from launcher.node.agent import fingerprint

        return fingerprint(tmp_path / ".lock")

    (tmp_path / ".lock").write_bytes(b"this run")

    following = asyncio.create_task(agent.follow())
    assert (await coordinator.told.get()).found == {"run.dir": (await asyncio.to_thread(of_run)), "model.path": ""}
    written = loading.load(tmp_path / run_files.NODES / "b.yaml")
    assert written.network.interface == "127.0.0.7"
    assert [path.name for path in await asyncio.to_thread(lambda: list(agent.path.parent.iterdir()))] == ["b.yaml"]
    assert stat.S_IMODE(agent.path.stat().st_mode) == 0o600
    following.cancel()


@handed(run_of_agent, needs=("tmp_path",), first=2)
async def test_a_stream_that_breaks_after_longer_than_it_may_take_to_come_is_tried_again(
    coordinator: Coordinator, agent: Agent
) -> None:
    following = asyncio.create_task(agent.follow())
    await coordinator.told.get()
    await asyncio.sleep(1.5 * START)  # nothing is said for so long
    coordinator.ends.set()
    await coordinator.joined.get()
    assert (await coordinator.joined.get()).name == "b"
    assert not following.done()
    following.cancel()


@handed(run_of_agent, needs=("tmp_path",), first=2)
async def test_a_coordinator_that_does_not_come_back_is_named_at_the_deadline(coordinator: Coordinator, agent: Agent) -> None:
    following = asyncio.create_task(agent.follow())
    await coordinator.told.get()
    await coordinator.stop()
    with pytest.raises(ServiceFault, match=rf"^coordinator: join: cannot be reached at {coordinator.address} from node b"):
        await following


def test_a_node_says_whom_it_waits_for_as_long_as_a_warm_up_there_may_take_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "CONTROL_CALL", 0.1)
    said: list[str] = []
    config = config_of(tmp_path, warmup={"max_seconds": 1.5}, deadlines={"start": 0.5})
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ServiceFault, match=r"\(deadline 2 s\)$"):
            asyncio.run(agent_of(config, address, said).follow())
    assert said == [f"waits for the coordinator at {address}, 2 s at most"]


@handed(run_of_agent, needs=("tmp_path",), first=2)
async def test_a_node_that_is_refused_says_why(coordinator: Coordinator, agent: Agent) -> None:
    coordinator.refuses = "node b has Sluice 2, and a 1; must be the same"
    with pytest.raises(UserError, match=r"^node b has Sluice 2, and a 1; must be the same$"):
        await agent.follow()


@pytest.mark.parametrize(
    ("security", "said"), [("token", "needs a key of this run"), ("tls", "the certificates do not fit: another run's")]
)
@driven_by(within(PATIENCE))
async def test_a_node_with_the_secret_of_another_start_waits_for_this_ones(tmp_path: Path, security: str, said: str) -> None:
    """Yesterday's lies in the folder until the run's first node writes today's."""
    config = config_of(tmp_path, security)
    keys.begun(tmp_path)
    today = keys.known(tmp_path)
    assert today is not None
    coordinator = Coordinator(config, own=keys.holder(config.network, keys.COORDINATOR, today))
    await coordinator.start()
    keys.begun(tmp_path)  # as if it were yesterday's
    agent = agent_of(config, coordinator.address)
    with pytest.raises(ServiceFault, match=rf"cannot be reached at {coordinator.address} from node b: .*{said}"):
        await agent.follow()
    assert coordinator.joined.empty()
    following = asyncio.create_task(agent.follow())
    run_files.write_private(tmp_path / run_files.SECRET, today.hex())
    assert (await coordinator.joined.get()).name == "b"
    following.cancel()
    await coordinator.stop()


def test_a_node_whose_secret_is_not_there_says_where_it_looked(tmp_path: Path) -> None:
    said = r"agent/b: the run's secret is not known here: neither by \.secret in its folder nor"
    with pytest.raises(ServiceFault, match=said):
        asyncio.run(agent_of(config_of(tmp_path), "127.0.0.1:1").follow())


CODE = {
    "services.trainer.python": "/tmp/python",
    "services.reward.env": "{LD_PRELOAD: /tmp/a.so}",
    "services.rollout.engine_args": "{additional_config: {worker: a}}",
    "rewards.rules": "[{name: '/tmp/rules.py:a'}]",
    "data.handler": "/tmp/handlers.py:a",
}


@pytest.mark.parametrize("key", CODE)
@handed(run_of_agent, needs=("tmp_path",), first=2)
async def test_what_a_node_executes_is_not_the_coordinators_to_say(coordinator: Coordinator, agent: Agent, key: str) -> None:
    said = yaml.safe_load(coordinator.yaml)
    *above, last = key.split(".")
    place = functools.reduce(operator.getitem, above, said)
    place[last] = yaml.safe_load(CODE[key])
    coordinator.yaml = yaml.safe_dump(said)
    fault = "the coordinator's value is not this node's; must be the same"
    with pytest.raises(ConfigError, match=rf"^{key}[\w.]*: {fault}$"):
        await agent.follow()
    assert not await asyncio.to_thread(agent.path.exists)
    assert coordinator.told.empty()


# ---- The parts of a checkpoint on two nodes, each with a rank: what they give each other, and what they refuse

STREAM = StreamState(position=0, ordinal=0, returned=[], seed=0, shuffle=True, problems=1, fingerprint=0)
NODES = ("a", "b")
BOTH = ["trainer/a", "trainer/b"]
LARGE = bytes(range(256)) * 3  # in chunks of CHUNK bytes, the last of which is shorter
CHUNK = 500


class Engine:
    """Reads what a rank of megatron-core does: the files that all need, its own tensors, and the other's of one name."""

    def __init__(self, rank: int):
        self.rank = rank
        self.seen: dict[str, bytes] = {}

    def needed(self, folder: Path) -> set[str]:
        return {f"t/__{self.rank}_0.distcp", "t/__0_1.distcp"}

    def load(self, folder: str) -> None:
        self.seen = {name: (Path(folder) / name).read_bytes() for name in checkpoint.files_of(Path(folder))}


def made(rank: int, folder: Path) -> tuple[NodePart, RankInfo]:
    os.environ[os_process.NODE] = NODES[rank]
    rank_group.CHUNK = CHUNK
    info = RankInfo(rank, 2, torch.device("cpu"))
    given = {"run": {"name": "r", "dir": str(folder / "run")}, "cluster": {"shared_folder": False}}
    return NodePart(msgspec.convert(given, Config), "trainer", info), info


def place(step: int, **values: Any) -> Position:
    return Position(version=PolicyVersion(0, step), stream=STREAM, trained=[], run="5f", **values)


def save(part: NodePart, rank: int, step: int, keep: tuple[int, ...] = ()) -> list[str]:
    command = Save("/nowhere", types.encode(place(step)), keep)
    partial = part.begin(command)
    (partial / "t").mkdir()
    if rank == 0:
        (partial / "trainer.json").write_text(f'{{"step": {step}}}')
        (partial / "t" / "__0_1.distcp").write_bytes(b"")
        (partial / "t" / "__0_2.distcp").write_bytes(b"nobody reads it")
    (partial / "t" / f"__{rank}_0.distcp").write_bytes(LARGE + bytes([rank]))
    return part.complete(partial, command)


def gives_and_takes(rank: int, folder: Path) -> None:
    part, info = made(rank, folder)
    assert save(part, rank, 2) == [BOTH[rank]]
    assert save(part, rank, 4, (2,)) == [BOTH[rank]]  # of which no checkpoint comes
    engine: Any = Engine(rank)
    own = checkpoint.folder_for(checkpoint.part_root(folder / "run", NODES[rank], "trainer"), 2)
    before = checkpoint.files_of(own)
    assert part.load(Restore("/r/step-2", types.encode(place(2, parts=BOTH)), 7), engine.needed, engine.load) == PolicyVersion(
        0, 2
    )
    expected = {"trainer.json": b'{"step": 2}', "t/__0_1.distcp": b"", f"t/__{rank}_0.distcp": LARGE + bytes([rank])}
    assert engine.seen == expected | ({"t/__0_2.distcp": b"nobody reads it"} if rank == 0 else {})
    assert checkpoint.files_of(own) == before, "what was read is kept"
    assert (own.parent / "dead-7" / "step-00000004").is_dir()
    # Gathered: all of it is on the node of the first rank.
    assert [path.name for path in exchange(own, lambda _: rank == 0, info)] == (["__1_0.distcp"] if rank == 0 else [])
    assert len(checkpoint.files_of(own)) == (5 if rank == 0 else 1)


def refuses(rank: int, folder: Path) -> None:
    part, _ = made(rank, folder)
    save(part, rank, 2)
    own = checkpoint.folder_for(checkpoint.part_root(folder / "run", NODES[rank], "trainer"), 2)
    engine: Any = Engine(rank)

    def lacks(node: str, named: list[str], **values: Any) -> None:
        told = rf"^run.resume: /r/step-2: node {node} has no complete part of the trainer, or is not in this run$"
        position = msgspec.structs.replace(place(2, parts=named), **values)
        with pytest.raises(UserError, match=told):
            part.load(Restore("/r/step-2", types.encode(position)), engine.needed, engine.load)

    lacks("c", [*BOTH, "trainer/c"])
    lacks("a", BOTH, run="another")
    lacks("a", BOTH, version=PolicyVersion(1, 2))
    if rank:
        (own / "t" / "__1_0.distcp").write_bytes(b"torn")
    lacks("b", BOTH)
    assert engine.seen == {}
    # What nobody needs may be torn: the other node gives what is read.
    engine.needed = lambda _: {"t/__0_0.distcp"}
    part.load(Restore("/r/step-2", types.encode(place(2, parts=["trainer/a", "critic/d"]))), engine.needed, engine.load)
    assert engine.seen["t/__0_0.distcp"] == LARGE + b"\0"
    assert "t/__1_0.distcp" not in engine.seen


def do_both(rank: int, folder: Path) -> None:
    gives_and_takes(rank, folder / "gives")
    refuses(rank, folder / "refuses")


def test_two_nodes_give_and_take_and_refuse(tmp_path: Path) -> None:
    run_two(do_both, tmp_path)
