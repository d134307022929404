"""What a run listens on, and what strangers of it get there: those on the network, and other users of the machine. Nothing."""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import subprocess
import sys
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from runtime import run_files
from runtime.cluster.nodes import NodeRegistration
from runtime.commands import Export
from runtime.config import loading
from runtime.errors import Forbidden
from runtime.status import Registration, Stop
from services.rpc import client, contract
from tests.system.cluster import NAMES, PORT, Cluster, cluster
from tests.system.listeners import LOOPBACK, addresses, check_documented, check_run, listeners
from tests.system.namespaces import Node, joined
from tests.system.runs import (
    LONG,
    ROOT,
    Live,
    belonging,
    check_gone,
    eventually,
    one_line,
    started,
    steps,
    summary,
    write_config,
)
from tests.system.strangers import Found, Targets
from tests.system.test_cluster import NODES, START, ends_well, goes_on

pytestmark = pytest.mark.timeout(600)

PATIENCE = 150.0  # seconds that a stranger takes at most
TWO = "services.trainer.processes=2"
JOIN = contract.METHODS["Coordinator", "Join"]
PPO = {"algorithm": {"preset": "ppo"}, "critic": {"learning_rate": 1e-3}}


@pytest.fixture(scope="module")
def live(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A run on one node with groups of two ranks, that has to end well after all that strangers do to it."""
    folder = tmp_path_factory.mktemp("live")
    config = write_config(folder / "config.yaml", tiny, **PPO)
    groups = (TWO, "services.critic.processes=2", "weight_sync.transport=collective", "network.security=token")
    with started(config, *LONG, *groups, folder=folder / "run") as run:
        run.reaches(2)
        yield run
        run.interrupt()
        assert run.wait(PATIENCE) == 0, run.output + run.errors
        check_gone(run.folder)


def test_what_listens_is_what_the_guide_lists(live: Live) -> None:
    """Those with megatron-core and vLLM are looked at in test_spmd.py and test_vllm.py."""
    check_run(live)


# ------------------------------------------------------------------------------------------ on the machine


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_another_user_of_the_machine_gets_nothing(live: Live) -> None:
    pids = [process.pid for process in belonging(live.folder)]
    nodes = list((live.folder / run_files.NODES).iterdir())
    private = [str(path) for path in (live.folder / run_files.SECRET, live.folder / run_files.CONFIG, *nodes)]
    assert len(private) == 3 and all(Path(path).exists() for path in private)
    assert live.folder.stat().st_mode & 0o777 == 0o700
    for folder in live.folder.parents:  # not the rights of pytest's folders are looked at
        if folder.stat().st_uid == os.geteuid() and not folder.stat().st_mode & 0o001:
            folder.chmod(folder.stat().st_mode | 0o011)
    hidden = [str(live.folder / run_files.METRICS)]
    visible = ["/etc/passwd"]
    targets = Targets(addresses(live.folder), [], [*private, *hidden, *visible], pids, pwd.getpwnam("nobody").pw_uid)
    found = tried(subprocess.Popen([sys.executable, *program(targets)], cwd=ROOT, stdout=subprocess.PIPE, text=True))
    assert found.served == []
    assert found.codes.keys() == {"UNAUTHENTICATED", "UNAVAILABLE"}
    assert found.read == visible, "it looked, and could read what is for everybody"
    live.reaches(live.steps() + 2)
    assert "is lost" not in (live.folder / run_files.LOGS / "coordinator.log").read_text()
    assert "stalled" not in live.output


def program(targets: Targets) -> list[str]:
    return ["-m", "tests.system.strangers", json.dumps(msgspec.to_builtins(targets))]


def tried(process: subprocess.Popen[str]) -> Found:
    """What the stranger says in the end."""
    try:
        said, _ = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode == 0
    return msgspec.json.decode(said, type=Found)


async def asked(address: str, method: tuple[str, str], request: Any) -> None:
    async with client.Channel(address) as channel:
        await client.call(channel, "peer", contract.METHODS[method], request)


def refused(address: str, method: tuple[str, str], request: Any) -> None:
    """A call that is whole, but has no key, is refused, and is told no more than that."""
    with pytest.raises(Forbidden) as error:
        asyncio.run(asyncio.wait_for(asked(address, method, request), PATIENCE))
    assert str(error.value) == f"peer: {method[1]}: /sluice.v1.{'/'.join(method)} needs a key of this run"


def test_a_stranger_who_asks_for_one_thing_does_not_get_it(live: Live, tmp_path: Path) -> None:
    """Nothing is exported over a folder of the user's, no node joins, no rollout's place is taken, and nothing is stopped."""
    found, before = addresses(live.folder), {process.pid for process in belonging(live.folder)}
    book = tmp_path / "book" / "chapter1.tex"
    book.parent.mkdir()
    book.write_text("Once upon a time")
    for name in ("trainer-0", "trainer-1"):
        refused(found[name], ("Trainer", "Export"), Export(folder=str(book.parent)))
    assert [path.name for path in book.parent.iterdir()] == ["chapter1.tex"]

    async def join() -> None:
        node = NodeRegistration(name="evil", address=LOOPBACK)
        channel = client.Channel(found["coordinator"])
        async with channel, aclosing(client.items(channel, "coordinator", JOIN, node)) as assignments:
            async for assignment in assignments:
                pytest.fail(f"was told {assignment.config}")

    with pytest.raises(Forbidden, match=r"^coordinator: Join: /sluice\.v1\.Coordinator/Join needs a key of this run$"):
        asyncio.run(asyncio.wait_for(join(), PATIENCE))
    false = Registration(role="rollout", name="rollout-0", address=f"{LOOPBACK}:1", pid=1, host="evil", incarnation=7)
    refused(found["coordinator"], ("Coordinator", "Register"), false)
    for address in found.values():
        refused(address, ("Process", "Stop"), Stop(term=1 << 30))

    live.reaches(live.steps() + 2)
    eventually(lambda: steps(live.folder)[-1]["rollout/serving"] == 2, PATIENCE, "both rollouts")
    log = (live.folder / run_files.LOGS / "coordinator.log").read_text()
    assert log.count(" rollout-0 registered: ") == 1
    assert before == {process.pid for process in belonging(live.folder)}


# ------------------------------------------------------------------------------------------ on the network


@pytest.mark.usefixtures("namespaces")
def test_a_stranger_on_the_network_gets_nothing_and_the_run_goes_on(tiny: Path, tmp_path: Path) -> None:
    """Three nodes, a trainer with ranks on two of them, and a fourth that is nobody's."""
    config = write_config(tmp_path / "config.yaml", tiny, **NODES)
    group = (TWO, "services.trainer.placement=[first, second]", "deadlines.stop=60")
    with cluster(config, *LONG, *group, "checkpoint.every=2", folder=tmp_path / "run", count=4, start=3) as run:
        run.run.reaches(3, START)
        found = [one for node in run.network.nodes[:3] for one in listeners(node.processes())]
        grpc = addresses(run.folder)
        targets = Targets(grpc, [one.address for one in found if one.address not in grpc.values()])
        seen = tried(stranger(run, targets))
        assert seen.served == []
        assert seen.codes.keys() == {"UNAVAILABLE"}, "over TLS nobody is heard who has no certificate"
        assert {address.partition(":")[0] for address in seen.stores} == {run.node("first").address}
        assert len(seen.stores) == 2, "that of the ranks, and that of the epoch"
        assert all(seen.stores.values()), "a stranger finds names, and spoils them"
        for name in NAMES:
            node = run.node(name)
            own = [one for one in found if one.ip == node.address]
            assert {one.pid for one in own} <= {process.pid for process in node.processes()}
            check_documented(own, set(grpc.values()), set(seen.stores), node.address)
        assert {one.ip for one in found} == {run.node(name).address for name in NAMES}
        goes_on(run)
        eventually(lambda: run.serving() == 2, START, "both rollouts")
        ends_well(run, *NAMES)
        assert summary(run.folder)["stop_reason"] == "interrupted", run.said()


def stranger(run: Cluster, targets: Targets) -> subprocess.Popen[str]:
    return run.network.nodes[3].start([sys.executable, *program(targets)], cwd=ROOT, stdout=subprocess.PIPE)


# A coordinator that has a secret of its own, none, or the run's, and wants its programs executed.
FALSE = """
import asyncio, os, sys
from runtime.cluster.nodes import Assignment, Launch
from runtime.config import loading
from runtime.process import keys
from services.rpc.server import Server

config, address, own = sys.argv[1:4]

async def told(node):
    launches = [Launch(role="rollout", name="rollout-0")]
    yield Assignment(run="false", config=open(config).read())
    yield Assignment(run="false", config=open(config).read(), launches=launches)
    await asyncio.Event().wait()

async def paths(found):
    pass

async def main():
    network = loading.load(config).network
    held = keys.holder(network, keys.COORDINATOR, bytes.fromhex(own)) if own else None
    server = Server({"Coordinator": {"ReportPaths": paths, "Join": told}}, keys=held)
    server.bind(*address.split(":")[:1], int(address.split(":")[1]))
    await server.start()
    print("listening", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""
OWN, OTHER = "11" * 32, "22" * 32
SAID = {
    "": (1, "does not speak TLS"),
    OTHER: (1, "the certificates do not fit"),
    OWN: (2, "services.rollout.python: the coordinator's value is not this node's; must be the same"),
}


@pytest.mark.usefixtures("namespaces")
def test_an_agent_executes_nothing_for_a_false_coordinator(tiny: Path, tmp_path: Path) -> None:
    """Without a secret, with another one, and with the run's own, but with another program."""
    config = write_config(tmp_path / "config.yaml", tiny, cluster={"nodes": [{"name": name} for name in NAMES[:2]]})
    program, mark = tmp_path / "python", tmp_path / "executed"
    program.write_text(f"#!/bin/sh\ntouch {mark}\n")
    program.chmod(0o755)
    with joined(2) as network:
        first, second = network.nodes
        false = tmp_path / "false.yaml"
        false.write_text(told(config, first, f"services.rollout.python={program}"))
        where = overrides(first, tmp_path)
        for secret, (code, said) in SAID.items():
            command = [sys.executable, "-c", FALSE, str(false), f"{first.address}:{PORT}", secret]
            server = first.start(command, cwd=ROOT, stdout=subprocess.PIPE)
            assert server.stdout is not None and server.stdout.readline() == "listening\n"
            agent = second.start(
                [sys.executable, "-m", "launcher.node", str(config), "--name", "second", *where],
                {"SLUICE_SECRET": OWN},
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
            _, errors = agent.communicate(timeout=PATIENCE)
            assert agent.returncode == code, errors
            assert said in one_line(errors)
            assert not mark.exists()
            first.kill()
            server.communicate(timeout=PATIENCE)


def overrides(first: Node, folder: Path) -> list[str]:
    where = [f"services.coordinator.host={first.address}", f"services.coordinator.port={PORT}", "network.interface=auto"]
    return [f"run.dir={folder / 'run'}", "deadlines.start=3", *where]


def told(config: Path, first: Node, *changes: str) -> str:
    """The configuration as a coordinator on the first node tells it."""
    loaded = loading.resolve(loading.load(config, [*overrides(first, config.parent), *changes]))
    network = msgspec.structs.replace(loaded.network, interface=first.address)
    return loading.to_yaml(msgspec.structs.replace(loaded, network=network))
