"""Nodes: which are admitted, what each runs, options of the command line, addresses, and the agent's job."""

from __future__ import annotations

import argparse
import asyncio
import io
import re
import socket
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from rich.console import Console

from launcher import job
from launcher.commands.status import address_of, scale
from launcher.job import Job
from launcher.node.__main__ import run_node
from launcher.node.agent import Agent, CoordinatorKeeper
from launcher.node.local_node import LocalNode, Machine, on_this_machine
from launcher.node.supervisor import Supervisor
from launcher.view import View
from runtime import config
from runtime.cluster.nodes import NodePaths, NodeRegistration, Rendezvous, Roster, code, launches, meeting_ports, path_faults
from runtime.cluster.placement import NodeResources, place
from runtime.config import Config, Run
from runtime.errors import UserError
from runtime.process import network
from runtime.process.network import (
    candidates,
    interface_of,
    is_host_port,
    is_loopback,
    is_own,
    own_address,
    transport_variables,
)
from runtime.status import Loss, Progress
from services.rollout import RolloutService
from tests.unit.test_shown import GLOO

# ---- Whom the coordinator admits as a node, and what each node is to run


def make(**sections: Any) -> Config:
    return msgspec.convert({"run": {"name": "a"}, "rewards": {"rules": [{"name": "gsm8k"}]}, **sections}, Config)


def node(name: str, **values: Any) -> NodeRegistration:
    given = {"address": "10.0.0.1", "devices": 8, "config": "c0", "version": "1.0", "ports": list(range(7001, 7013))}
    return NodeRegistration(name=name, **{**given, **values})


def roster(*names: str, **cluster: Any) -> Roster:
    made = Roster(make(cluster=cluster))
    for name in names:
        made.admit(node(name))
        made.ready(name)
    return made


NAMED = [{"name": "a", "devices": 8, "supernode": "s"}, {"name": "b"}]


def test_named_nodes_are_waited_for_in_the_configurations_order_and_with_auto_whoever_comes() -> None:
    assert roster(nodes=NAMED).missing == ["a", "b"]
    assert roster("b", nodes=NAMED).missing == ["a"]
    assert roster("b", nodes=NAMED, min_nodes=1).missing == []
    both = roster("b", "a", nodes=NAMED)
    assert both.missing == []
    assert both.offers == [NodeResources("a", 8, "s"), NodeResources("b", 8)]
    assert roster().missing == ["1 of 1 nodes"]
    assert roster("z", min_nodes=3).missing == ["2 of 3 nodes"]
    assert roster("z", "a", min_nodes=2).offers == [NodeResources("z", 8), NodeResources("a", 8)]


def test_a_node_counts_once_it_has_told_its_paths_and_until_it_leaves() -> None:
    made = roster("a")
    made.admit(node("b"))
    assert list(made.nodes) == ["a"]
    made.ready("b")
    assert list(made.nodes) == ["a", "b"]
    made.leave("a")
    assert list(made.nodes) == ["b"]
    made.admit(node("a"))  # and it may come back


@pytest.mark.parametrize(
    ("comes", "said"),
    [
        (node("a"), "node a: 10.0.0.1 has this name already; one of them needs another --name"),
        (node("c"), "node c: not in cluster.nodes, a, b; must be one of these (--name)"),
        (node("b", version="0.9"), "node b has Sluice 0.9, and a 1.0; must be the same"),
        (
            node("b", config="c1"),
            "node b was started with another configuration (hash c1) than a (c0); must be the same file and the same overrides",
        ),
    ],
)
def test_who_does_not_fit_is_refused_in_one_line_that_names_both(comes: NodeRegistration, said: str) -> None:
    made = roster("a", nodes=NAMED)
    with pytest.raises(UserError) as caught:
        made.admit(comes)
    assert str(caught.value) == said
    assert list(made.nodes) == ["a"]


def test_a_node_that_lacks_devices_is_refused() -> None:
    with pytest.raises(UserError, match=r"^cluster.nodes: a is to have 8 devices, but its agent finds 6$"):
        Roster(make(cluster={"nodes": NAMED})).admit(node("a", devices=6))


def test_what_two_nodes_do_not_have_alike_is_a_line_for_each_path() -> None:
    paths = {"run.dir": "/r", "model.path": "/m", "model.reference": "/f", "critic.path": "/c", "rewards.model.path": "/m"}
    ours = {"run.dir": "1", "model.path": "2", "model.reference": "3", "critic.path": "", "rewards.model.path": "2"}
    theirs = {"run.dir": "1", "model.path": "9", "model.reference": "", "critic.path": "4", "rewards.model.path": "9"}
    mine, other = NodePaths(node="a", found=ours), NodePaths(node="b", found=theirs)
    assert list(path_faults(mine, other, paths)) == [
        "model.path: /m is not the same on node b (hash 9) as on a (2)",
        "model.reference: /f is missing on node b, and is there on a",
        "critic.path: /c is missing on node a, and is there on b",
    ]


OVER_TWO = make(services={"trainer": {"processes": 4}, "rollout": {"replicas": 2}})
PLACED = place(OVER_TWO, [NodeResources("a", 3), NodeResources("b", 3)])
THERE = {"a": node("a", devices=3), "b": node("b", address="10.0.0.2", devices=3)}


def test_a_group_over_two_nodes_meets_at_the_first_and_a_replica_keeps_its_incarnation() -> None:
    told = launches(OVER_TWO, PLACED, THERE, {"rollout-0": 2, "trainer-0": 1}, b"secret")
    first, second = ({launch.name: launch for launch in told[name]} for name in ("a", "b"))
    assert (first["trainer-0"].ranks, first["trainer-0"].devices, first["trainer-0"].incarnation) == ([0, 1, 2], [0, 1, 2], 1)
    meeting = first["trainer-0"].rendezvous
    assert meeting == Rendezvous(host="10.0.0.1", port=7004, key=b"" if meeting is None else meeting.key)
    assert (second["trainer-3"].ranks, second["trainer-3"].rendezvous) == ([3], meeting)
    assert (second["rollout-0"].devices, second["rollout-0"].incarnation, second["rollout-1"].incarnation) == ([1], 2, 0)


def test_a_rollout_over_two_nodes_meets_at_ports_of_its_own_and_waits_for_both() -> None:
    engine = {"engine": "vllm", "replicas": 2, "parallel": {"tensor": 2, "nodes": 2}}
    config = make(services={"rollout": engine, "trainer": {"processes": 2, "placement": "spread"}})
    ports = list(range(7001, 7001 + meeting_ports(config)))
    there = {name: node(name, address=f"10.0.0.{at}", devices=3, ports=ports) for at, name in enumerate("ab")}
    placed = place(config, [NodeResources(name, 3) for name in there])
    taken = Counter[int]()
    for incarnation in range(2):
        told = launches(config, placed, there, {"rollout-0": incarnation, "rollout-1": incarnation}, b"secret")
        first, second = ({launch.name: launch for launch in told[name]} for name in ("a", "b"))
        for unit in ("rollout-0", "rollout-1"):
            meeting = first[unit].rendezvous
            assert meeting is not None and second[f"{unit}n1"].rendezvous == meeting and meeting.host == "10.0.0.0"
            assert (first[unit].incarnation, second[f"{unit}n1"].incarnation) == (incarnation, incarnation)
            taken.update((meeting.port, meeting.other))
    assert len(taken) == 8 and max(taken.values()) == 1 and taken.keys() <= set(ports[12:])
    assert [launch.role for launch in launches(config, placed, {"a": there["a"]}, {}, b"")["a"]] == ["reward"]


def test_a_part_of_an_engine_that_waits_too_long_for_the_others_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = {"engine": "vllm", "parallel": {"tensor": 2, "nodes": 2}}
    late, said = threading.Event(), list[str]()

    def end(error: str) -> None:
        said.append(error)
        late.set()

    monkeypatch.setattr("runtime.process.os_process.end_at_once", end)
    monkeypatch.setattr("services.rollout.make_engine", lambda *_: late.wait(60.0))
    service = RolloutService(make(services={"rollout": engine}, deadlines={"start": 0.01}), "rollout-0n1", 0)
    monkeypatch.setattr(service, "use", lambda _: None)
    service.load()
    assert said == ["rollout-0n1: start: vLLM's processes of rollout-0 on other nodes did not come (deadline 0.01 s)"]
    assert service.rank == 1


def test_each_incarnation_of_a_group_has_a_key_that_nobody_foretells_and_no_log_shows() -> None:
    keys = []
    for incarnation, secret in ((0, b"one"), (1, b"one"), (0, b"other"), (0, b"one")):
        told = launches(OVER_TWO, PLACED, THERE, {"trainer-0": incarnation}, secret)
        (meeting,) = {launch.rendezvous for each in told.values() for launch in each if launch.role == "trainer"}
        assert meeting is not None and len(meeting.key) == 32 and repr(meeting.key) not in repr(told)
        keys.append(meeting.key)
    assert len(set(keys[:3])) == 3 and keys[3] == keys[0]


def test_a_group_waits_for_all_its_nodes_and_a_replica_for_its_own() -> None:
    assert [launch.role for launch in launches(OVER_TWO, PLACED, {"a": node("a")}, {}, b"")["a"]] == ["reward"]
    of_b = launches(OVER_TWO, PLACED, {"b": node("b")}, {}, b"")["b"]
    assert {launch.name for launch in of_b} == {"rollout-0", "rollout-1"}


def test_what_a_node_executes_is_known_by_its_key_or_as_a_file_of_python() -> None:
    given = {
        "run": {"name": "a"},
        "model": {"path": "/home/me/.pyenv/models/a.pyramid"},  # which a warm-up may say otherwise
        "rewards": {"rules": [{"name": "own.py:judge"}, {"name": "gsm8k"}]},
        "services": {"rollout": {"engine_args": {"x": 1}}, "trainer": {"env": {"A": "b"}}},
    }
    found = code(msgspec.convert(given, Config))
    assert found["rewards.rules.0.name"] == "own.py:judge"
    assert found["services.trainer.env"] == {"A": "b"} and found["services.rollout.engine_args"] == {"x": 1}
    assert {key.rpartition(".")[2] for key in found} == {"name", "python", "env", "engine_args"}


# ---- What somebody gives on the command line of a node, or of `sluice scale`, and cannot be: one line that names it

TWO_NODES = """
run: {name: test}
cluster: {nodes: [{name: a}, {name: b}]}
network: {interface: auto}
services: {coordinator: {host: 192.0.2.77, port: 7000}}
"""


@pytest.mark.parametrize("devices", [-1, 1_000_000])
def test_a_number_of_devices_that_there_is_not(devices: int) -> None:
    with pytest.raises(UserError, match=f"^--devices: {devices}, but this machine has [0-9]+; must be from 0 to that$"):
        LocalNode.of(make(), devices=devices)


def test_a_node_whose_name_the_configuration_does_not_have_asks_nobody(tmp_path: Path) -> None:
    path = tmp_path / "two.yaml"
    path.write_text(TWO_NODES)
    options = argparse.Namespace(config=path, overrides=[], name="c", address="", devices=None, verbose=False)
    with pytest.raises(UserError, match=r"^node c: not in cluster.nodes, a, b; must be one of these \(--name\)$"):
        run_node(options)


def test_an_address_is_told_by_the_option_that_gave_it() -> None:
    with pytest.raises(UserError, match=r"^--address: '203.0.113.9' is not an address of this machine"):
        on_this_machine(make(), "203.0.113.9")
    with pytest.raises(UserError, match=r"^--address: '127.0.0.1' gives this node 127.0.0.1, which other nodes cannot reach"):
        on_this_machine(make(cluster={"min_nodes": 2}), "127.0.0.1")
    with pytest.raises(UserError, match=r"^network.interface: 'lo0nowhere' is neither"):
        on_this_machine(make(network={"interface": "lo0nowhere"}))


@pytest.mark.parametrize("wanted", ["rollout", "rollout=", "rollout=-1", "rollout=two", "trainer=2"])
def test_what_cannot_be_scaled_asks_nobody(wanted: str) -> None:
    with pytest.raises(UserError, match=f"^scale: '{wanted}' is not rollout=N"):
        asyncio.run(scale("127.0.0.1:9", wanted))


# ---- What a job does with the run's progress: it heeds all of it, and does not go on without

DEADLINE = 60.0
LOST = Loss(name="rollout-1", incarnation=0, reason=GLOO)
COURSE = [
    Progress(phase="training"),
    Progress(phase="recovering", detail=f"trainer-0: {GLOO}"),
    Progress(phase="training", lost=[LOST]),
    Progress(phase="recovering", detail=f"trainer-0: {GLOO}"),
]


class Coordinator:
    """In the place of its Child: a process that ends once `over` is set."""

    def __init__(self) -> None:
        self.over = asyncio.Event()
        self.process = self.spec = self
        self.name, self.incarnation = "coordinator", 0

    async def wait(self) -> int:
        await self.over.wait()
        return 0


class Heeding(Agent):
    """Follows nobody; hears."""

    def __init__(self, config: Config, hear: Callable[[Progress], None]):
        self.keys = None
        self.config = config
        self.apply_progress = hear  # type: ignore[method-assign]

    def look_for_keys(self) -> None:
        """Nobody needs any."""

    async def follow(self) -> None:
        await asyncio.Event().wait()


class Watching(Job[None]):
    trains = True
    stopped_early = stopped_late = ""

    async def prepared(self) -> Config:
        return self.config

    async def outcome(self) -> None:
        pass


def watched(folder: Path, view: View, monkeypatch: pytest.MonkeyPatch, course: list[Progress]) -> list[Progress]:
    """What is heeded of `course`, after all of which the coordinator ends. Raises what the job does."""
    heeded: list[Progress] = []

    async def until_done() -> None:
        found = Watching(config.Config(run=Run(name="a", dir=str(folder))), view, LocalNode("here", Machine()))
        coordinator: Any = Coordinator()
        heeding = Heeding(found.config, heeded.append)
        found.supervisor, found._agent = Supervisor(folder, view), heeding
        found._coordinator = CoordinatorKeeper(found.supervisor)
        found._coordinator.child = coordinator

        async def watch(address: str, silence: float, own: object) -> AsyncIterator[Progress]:
            for progress in course:
                yield progress
            coordinator.over.set()

        monkeypatch.setattr(job.client, "watch", watch)
        await asyncio.wait_for(found._until_done("here:1"), DEADLINE)

    asyncio.run(until_done())
    return heeded


@pytest.mark.parametrize("terminal", [False, True])
def test_whatever_an_error_says_the_progress_after_it_is_heeded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    out = io.StringIO()
    with View(Console(file=out, width=200, force_terminal=terminal), line_interval=0.0) as view:
        assert watched(tmp_path, view, monkeypatch, COURSE) == COURSE
    assert f"lost on another node: rollout-1: {GLOO[:20]}" in out.getvalue()


def test_a_job_that_cannot_watch_its_run_any_more_ends_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(View):
        def progress(self, progress: Progress) -> None:
            raise ValueError("cannot be shown")

    endless = Progress(phase="training")
    with Broken(Console(file=io.StringIO())) as view:

        async def never(*_: object) -> int:
            await asyncio.Event().wait()
            return 0

        monkeypatch.setattr(Coordinator, "wait", never)
        with pytest.raises(ValueError, match="cannot be shown"):
            watched(tmp_path, view, monkeypatch, [endless])


# ---- Which address of this machine is meant, which device has it, and what is said of one that is not there

NOT_OURS = "198.51.100.7"  # of a block for documentation, RFC 5737


def loopback_device() -> str:
    return next(
        name for name, entries in psutil.net_if_addrs().items() if any(entry.address == "127.0.0.1" for entry in entries)
    )


def outer() -> tuple[str, str]:
    """A device that is not loopback, and the first of its IPv4 addresses."""
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family == socket.AF_INET and not is_loopback(entry.address):
                return name, entry.address
    pytest.skip("this machine has no address but loopback")


@pytest.mark.parametrize("interface", ["127.0.0.1", "127.0.0.0/8", "127.0.0.1/32", "auto"])
def test_loopback_by_address_network_and_default(interface: str) -> None:
    assert own_address(interface) == "127.0.0.1"


@pytest.mark.parametrize(
    ("own", "address"),
    [({"127.0.0.1"}, "127.0.0.1"), ({"127.0.0.1", "::1"}, "127.0.0.1"), ({"::1"}, "::1"), (set(), "127.0.0.1")],
)
def test_loopback_is_of_ipv6_where_there_is_no_other(own: set[str], address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "is_own", own.__contains__)
    assert network.loopback() == own_address("auto") == address


@pytest.mark.parametrize("text", ["host:1", "10.1.0.7:65535", "[::1]:7077", "[fd00:1::2]:7077"])
def test_what_has_host_and_port(text: str) -> None:
    assert is_host_port(text)
    assert address_of(text, "scale") == text


@pytest.mark.parametrize(
    "text", ["host", "host:", ":1", "host:0", "host:65536", "host:x", "::1", "::1:7077", "[::1]", "[::1:7077", "[host]:1"]
)
def test_what_has_not(text: str) -> None:
    assert not is_host_port(text)
    with pytest.raises(UserError, match=f"^scale: '{re.escape(text)}' is neither a run's folder nor host:port or .IPv6.:port$"):
        address_of(text, "scale")


def test_a_device_by_its_name_and_auto_is_the_address_from_which_the_other_is_reached() -> None:
    assert own_address(loopback_device()) == "127.0.0.1"
    device, address = outer()
    assert own_address(device) == address
    assert own_address("auto", "127.0.0.1") == own_address("auto", "localhost") == "127.0.0.1"
    _, address = outer()
    assert own_address("auto", address) == address


@pytest.mark.parametrize(
    ("interface", "towards", "fault"),
    [
        (NOT_OURS, "", f"network.interface: '{NOT_OURS}' is not an address of this machine, which has 127.0.0.1"),
        ("0.0.0.0", "", "network.interface: '0.0.0.0' is no address that other machines reach; must be one of 127.0.0.1"),
        ("198.51.100.0/24", "", "network.interface: this machine has no address in 198.51.100.0/24; it has 127.0.0.1"),
        ("nowhere0", "", "network.interface: 'nowhere0' is neither an address, nor a network, nor auto, nor one of"),
        ("auto", "a name", "services.coordinator.host: the name 'a name' is unknown on this machine"),
    ],
)
def test_what_is_not_there_is_one_line_that_says_what_is(interface: str, towards: str, fault: str) -> None:
    with pytest.raises(UserError) as caught:
        own_address(interface, towards)
    assert str(caught.value).startswith(fault)
    assert "\n" not in str(caught.value)


def test_the_device_of_an_address_is_what_torch_is_told_and_on_loopback_gloo_alone() -> None:
    device, address = outer()
    assert interface_of(address) == device
    assert interface_of("127.0.0.1") == interface_of("127.5.5.5") == loopback_device()
    for unknown in (NOT_OURS, "localhost"):
        with pytest.raises(UserError, match=f"network.interface: '{unknown}' is not an address"):
            interface_of(unknown)
    device, address = outer()
    assert transport_variables(address) == {
        "GLOO_SOCKET_IFNAME": device,
        "NCCL_SOCKET_IFNAME": f"={device}",
        "HCCL_SOCKET_IFNAME": device,
        "TP_SOCKET_IFNAME": device,
    }
    assert transport_variables("127.0.0.1") == {"GLOO_SOCKET_IFNAME": loopback_device()}


def test_what_is_loopback_by_how_it_is_written_and_what_can_be_bound_here() -> None:
    for value in ("127.0.0.1", "127.1.2.3", "127.0.0.0/8", "::1", "localhost", "lo"):
        assert is_loopback(value)
    for value in ("10.0.0.1", "10.0.0.0/8", "fd00::1", "eth0", "node-1", "auto"):
        assert not is_loopback(value)
    assert is_own("127.0.0.1")
    assert is_own("localhost")
    for other in (NOT_OURS, "0.0.0.0", "a name"):
        assert not is_own(other)


def test_ports_of_a_range_come_once_each_but_those_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = listener.getsockname()[1]
        first, last = (taken - 3, taken + 3) if taken < 65000 else (taken - 6, taken)
        found = []
        with pytest.raises(UserError, match=f"all ports from {first} to {last} are in use"):
            found.extend(candidates("127.0.0.1", (first, last)))
        assert len(set(found)) == len(found)
        assert set(found) <= set(range(first, last + 1)) - {taken}
    assert next(candidates("127.0.0.1", (taken, taken))) == taken
    assert list(candidates("127.0.0.1", None)) == [0]
