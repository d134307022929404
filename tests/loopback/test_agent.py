"""A node's agent against a coordinator that comes, goes and refuses, over gRPC."""

from __future__ import annotations

import asyncio
import functools
import operator
import socket
import stat
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
import yaml
from msgspec.structs import replace

from launcher.node.agent import Agent
from launcher.node.machine import Machine
from launcher.node.supervisor import Supervisor
from runtime import run_files, timeouts
from runtime.cluster.nodes import Assignment, NodePaths, NodeRegistration
from runtime.config import Config, Network, loading
from runtime.errors import ConfigError, ServiceFault, UserError
from runtime.process import keys
from runtime.process.keys import Keys
from services.rpc.server import Server
from tests.loopback.line_views import Lines

PATIENCE = 100.0
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
        self._server = Server({"Coordinator": {"ReportPaths": self._paths}}, {("Coordinator", "Join"): self._join}, keys=own)
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

        return fingerprint(tmp_path / ".lock")

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


def test_a_node_says_whom_it_waits_for_as_long_as_a_warm_up_there_may_take_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "CONTROL_CALL", 0.1)
    said: list[str] = []
    given = {"run": {"name": "a", "dir": str(tmp_path)}, "warmup": {"max_seconds": 1.5}, "deadlines": {"start": 0.5}}
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        supervisor = Supervisor(tmp_path, Lines(said))
        node = NodeRegistration(name="b", address="127.0.0.7")
        agent = Agent(node, msgspec.convert(given, Config), address, supervisor, Machine(), sys.executable)
        with pytest.raises(ServiceFault, match=r"\(deadline 2 s\)$"):
            asyncio.run(agent.follow())
    assert said == [f"waits for the coordinator at {address}, 2 s at most"]


def test_a_node_that_is_refused_says_why(tmp_path: Path) -> None:
    async def test(coordinator: Coordinator, agent: Agent) -> None:
        coordinator.refuses = "node b has Sluice 2, and a 1; must be the same"
        with pytest.raises(UserError, match=r"^node b has Sluice 2, and a 1; must be the same$"):
            await agent.follow()

    run(tmp_path, test)


def of_secret(network: Network, party: str, secret: bytes) -> Keys:
    found = keys.holder(network, party, secret)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("security", "said"), [("token", "needs a key of this run"), ("tls", "the certificates do not fit: another run's")]
)
def test_a_node_with_the_secret_of_another_start_waits_for_this_ones(tmp_path: Path, security: str, said: str) -> None:
    """Yesterday's lies in the folder until the run's first node writes today's."""
    network = Network(security=security)
    given = {
        "run": {"name": "a", "dir": str(tmp_path)},
        "deadlines": {"start": START},
        "model": {"path": str(tmp_path / "none")},
    }
    config = replace(msgspec.convert(given, Config), network=network)
    node = NodeRegistration(name="b", address="127.0.0.1")

    async def test() -> None:
        keys.begun(tmp_path)
        today = keys.known(tmp_path)
        assert today is not None
        coordinator = Coordinator(config, own=of_secret(network, keys.COORDINATOR, today))
        await coordinator.start()
        keys.begun(tmp_path)  # as if it were yesterday's
        agent = Agent(node, config, coordinator.address, Supervisor(tmp_path), Machine(), sys.executable)
        with pytest.raises(ServiceFault, match=rf"not to be reached at {coordinator.address} from node b: .*{said}"):
            await agent.follow()
        assert coordinator.joined.empty()
        following = asyncio.create_task(agent.follow())
        run_files.write_private(tmp_path / run_files.SECRET, today.hex())
        assert (await coordinator.joined.get()).name == "b"
        following.cancel()
        await coordinator.stop()

    asyncio.run(asyncio.wait_for(test(), PATIENCE))


def test_a_node_whose_secret_is_not_there_says_where_it_looked(tmp_path: Path) -> None:
    given = {"run": {"name": "a", "dir": str(tmp_path)}, "deadlines": {"start": START}}
    node = NodeRegistration(name="b", address="127.0.0.1")
    agent = Agent(node, msgspec.convert(given, Config), "127.0.0.1:1", Supervisor(tmp_path), Machine(), sys.executable)
    with pytest.raises(
        ServiceFault, match=r"agent/b: the run's secret is not known here: neither by \.secret in its folder nor"
    ):
        asyncio.run(agent.follow())


CODE = {
    "services.trainer.python": "/tmp/python",
    "services.reward.env": "{LD_PRELOAD: /tmp/a.so}",
    "services.critic.jemalloc": "/tmp/a.so",
    "services.rollout.engine_args": "{additional_config: {worker: a}}",
    "rewards.rules": "[{name: '/tmp/rules.py:a'}]",
    "data.handler": "/tmp/handlers.py:a",
}


@pytest.mark.parametrize("key", CODE)
def test_what_a_node_executes_is_not_the_coordinators_to_say(tmp_path: Path, key: str) -> None:
    async def test(coordinator: Coordinator, agent: Agent) -> None:
        said = yaml.safe_load(coordinator.yaml)
        *above, last = key.split(".")
        place = functools.reduce(operator.getitem, above, said)
        place[last] = yaml.safe_load(CODE[key])
        coordinator.yaml = yaml.safe_dump(said)
        fault = "the coordinator says something else than this node was started with; must be the same"
        with pytest.raises(ConfigError, match=rf"^{key}[\w.]*: {fault}$"):
            await agent.follow()
        assert not await asyncio.to_thread(agent.path.exists)
        assert coordinator.told.empty()

    run(tmp_path, test)
