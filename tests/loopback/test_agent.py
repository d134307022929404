"""A node's agent against a coordinator that comes, goes and refuses, over gRPC."""

from __future__ import annotations

import asyncio
import stat
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from launcher.node.agent import Agent
from launcher.node.machine import Machine
from launcher.node.supervisor import Supervisor
from runtime import run_files
from runtime.cluster.nodes import Assignment, NodePaths, NodeRegistration
from runtime.config import Config, loading
from runtime.errors import ServiceFault, UserError
from services.rpc.server import Server

PATIENCE = 100.0
START = 1.0  # seconds for which a coordinator that is not there is tried


class Coordinator:
    """`joins` has what each stream is given besides its first word, until `ends` is set."""

    def __init__(self, config: Config, port: int = 0):
        self._yaml = loading.to_yaml(config)
        self.joined: asyncio.Queue[NodeRegistration] = asyncio.Queue()
        self.told: asyncio.Queue[NodePaths] = asyncio.Queue()
        self.ends = asyncio.Event()
        self.refuses = ""
        self.name = "first"
        self._server = Server({"Coordinator": {"ReportPaths": self._paths}}, {("Coordinator", "Join"): self._join})
        self.address = self._server.bind("127.0.0.1", port)

    async def _paths(self, found: NodePaths) -> None:
        self.told.put_nowait(found)

    async def _join(self, node: NodeRegistration) -> AsyncGenerator[Assignment, None]:
        self.joined.put_nowait(node)
        if self.refuses:
            raise UserError(self.refuses)
        yield Assignment(run=self.name, config=self._yaml)
        await self.ends.wait()

    async def start(self) -> None:
        await self._server.start()

    async def stop(self) -> None:
        self.ends.set()
        await self._server.stop(0)


def run(tmp_path: Path, test: Callable[[Coordinator, Agent], Awaitable[None]]) -> None:
    given = {
        "run": {"name": "a", "dir": str(tmp_path)},
        "model": {"path": str(tmp_path / "none")},
        "deadlines": {"start": START},
        "network": {"security": "none"},
    }
    config = msgspec.convert(given, Config)

    async def within() -> None:
        coordinator = Coordinator(config)
        await coordinator.start()
        node = NodeRegistration(name="b", address="127.0.0.7")
        agent = Agent(node, config, coordinator.address, Supervisor(tmp_path), Machine(), sys.executable)
        try:
            await asyncio.wait_for(test(coordinator, agent), PATIENCE)
        finally:
            await coordinator.stop()

    asyncio.run(within())


def test_it_says_what_it_has_and_writes_the_configuration_with_its_own_address(tmp_path: Path) -> None:
    async def test(coordinator: Coordinator, agent: Agent) -> None:
        following = asyncio.create_task(agent.follow())
        assert (await coordinator.told.get()).found == {"run.dir": (await asyncio.to_thread(of_run)), "model.path": ""}
        written = loading.load(tmp_path / run_files.NODES / "b.yaml")
        assert written.network.interface == "127.0.0.7"
        assert [path.name for path in await asyncio.to_thread(lambda: list(agent.path.parent.iterdir()))] == ["b.yaml"]
        assert stat.S_IMODE(agent.path.stat().st_mode) == 0o600
        following.cancel()

    def of_run() -> str:
        from launcher.node.agent import fingerprint

        return fingerprint(tmp_path)

    (tmp_path / ".lock").write_bytes(b"this run")
    run(tmp_path, test)


def test_a_stream_that_breaks_after_longer_than_it_may_take_to_come_is_tried_again(tmp_path: Path) -> None:
    async def test(coordinator: Coordinator, agent: Agent) -> None:
        following = asyncio.create_task(agent.follow())
        await coordinator.told.get()
        await asyncio.sleep(1.5 * START)  # nothing is said for so long
        coordinator.ends.set()
        await coordinator.joined.get()
        assert (await coordinator.joined.get()).name == "b"
        assert not following.done()
        following.cancel()

    run(tmp_path, test)


def test_a_coordinator_that_does_not_come_back_is_named_at_the_deadline(tmp_path: Path) -> None:
    async def test(coordinator: Coordinator, agent: Agent) -> None:
        following = asyncio.create_task(agent.follow())
        await coordinator.told.get()
        await coordinator.stop()
        with pytest.raises(ServiceFault, match=rf"^coordinator: join: not to be reached at {coordinator.address} from node b"):
            await following

    run(tmp_path, test)


def test_a_node_that_is_refused_says_why(tmp_path: Path) -> None:
    async def test(coordinator: Coordinator, agent: Agent) -> None:
        coordinator.refuses = "node b has Sluice 2, and a 1; must be the same"
        with pytest.raises(UserError, match=r"^node b has Sluice 2, and a 1; must be the same$"):
            await agent.follow()

    run(tmp_path, test)
