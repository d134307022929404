"""Several machines on one: network namespaces joined by a bridge, whose links can be cut and whose processes can be killed.

Each node has a loopback device and `eth0`, with an address of one network. The bridge lives in a namespace too, so that
nothing of this machine's own network changes. Names carry the pid of who made them; what a maker that was killed left behind is
removed by the next one.
"""

from __future__ import annotations

import ipaddress
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import psutil

DEVICE = "eth0"
NETWORK = "10.203.0.0/24"  # of every maker: their bridges are not connected
NETWORK_6 = "fd00:203::/64"  # of nodes that have no address of IPv4, not even loopback
DEADLINE = 20.0  # seconds that the end of a namespace's processes is waited for

_HUB = "hub"
_MADE = re.compile(r"sluice-(\d+)-(\w+)")


@dataclass(frozen=True)
class Node:
    """A namespace: a machine of its own, as far as its network is concerned."""

    namespace: str
    address: str

    def start(self, command: Sequence[str], env: Mapping[str, str] | None = None, **options: Any) -> subprocess.Popen[str]:
        """A process group of its own within the node; `options` as of Popen. It ends with the node, or with `kill`."""
        whole = ("ip", "netns", "exec", self.namespace, *command)
        return subprocess.Popen(whole, env={**os.environ, **(env or {})}, text=True, start_new_session=True, **options)

    def processes(self) -> list[psutil.Process]:
        """All that run in it, and nothing else."""
        found = []
        for pid in _ip("netns", "pids", self.namespace).split():
            with suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(int(pid)))
        return found

    def kill(self) -> None:
        """Every process at once. The kernel closes their connections; when the power goes it does not: for that, cut first."""
        _end(self.namespace)


class Network:
    """Nodes that reach each other, but neither this machine nor anything outside."""

    def __init__(self, nodes: Sequence[Node], hub: str):
        self.nodes = nodes
        self._hub = hub

    def cut(self, node: Node) -> None:
        """Pull its cable: packets to and from it are lost, connections stay open."""
        _ip("-n", self._hub, "link", "set", _port(self.nodes.index(node)), "down")

    def mend(self, node: Node) -> None:
        _ip("-n", self._hub, "link", "set", _port(self.nodes.index(node)), "up")

    @contextmanager
    def disturbed(self, node: Node, how: str) -> Iterator[None]:
        """What goes to it is late, or lost: `how` is a queueing discipline, as tc takes it."""
        device = ("-n", self._hub, "qdisc", "replace", "dev", _port(self.nodes.index(node)), "root")
        _run("tc", *device, *how.split())
        try:
            yield
        finally:
            _run("tc", *device, "pfifo")


def why_not() -> str:
    """What keeps this machine from having namespaces; "" when nothing does."""
    if shutil.which("ip") is None:
        return "needs the command ip (iproute2)"
    probe = _name(os.getpid(), "probe")
    try:
        _ip("netns", "add", probe)
        _ip("netns", "delete", probe)
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not allowed here, which takes root: {error.stderr.strip()}"
    return ""


@contextmanager
def joined(count: int, network: str = NETWORK) -> Iterator[Network]:
    """A network of `count` nodes, gone with all their processes at the end."""
    sweep()
    hub = _name(os.getpid(), _HUB)
    nodes = [Node(_name(os.getpid(), f"node{index}"), _address(network, index)) for index in range(count)]
    with ExitStack() as stack:
        for namespace in (hub, *(node.namespace for node in nodes)):
            stack.callback(_remove, namespace)
            _ip("netns", "add", namespace)
        _ip("-n", hub, "link", "add", "bridge", "type", "bridge")
        _ip("-n", hub, "link", "set", "bridge", "up")
        for index, node in enumerate(nodes):
            _connect(hub, _port(index), node)
        yield Network(nodes, hub)


def sweep() -> None:
    """Remove what makers that live no more have left, with the processes in it."""
    for line in _ip("netns", "list").splitlines():
        if (made := _MADE.match(line)) and not psutil.pid_exists(int(made[1])):
            _remove(made[0])


def _connect(hub: str, port: str, node: Node) -> None:
    _ip("-n", hub, "link", "add", port, "type", "veth", "peer", "name", DEVICE, "netns", node.namespace)
    _ip("-n", hub, "link", "set", port, "master", "bridge")
    _ip("-n", hub, "link", "set", port, "up")
    _ip("-n", node.namespace, "link", "set", "lo", "up")
    if ":" in node.address:
        _ip("-n", node.namespace, "address", "delete", "127.0.0.1/8", "dev", "lo")
        _ip("-n", node.namespace, "address", "add", f"{node.address}/64", "dev", DEVICE, "nodad")
    else:
        _ip("-n", node.namespace, "address", "add", f"{node.address}/24", "dev", DEVICE)
    _ip("-n", node.namespace, "link", "set", DEVICE, "up")


def _remove(namespace: str) -> None:
    with suppress(subprocess.CalledProcessError):  # it was never made
        _end(namespace)
        _ip("netns", "delete", namespace)


def _end(namespace: str) -> None:
    """Kill what runs in it, until nothing does: who is killed may have been starting others."""
    give_up = time.monotonic() + DEADLINE
    while pids := [int(pid) for pid in _ip("netns", "pids", namespace).split()]:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > give_up:
            raise TimeoutError(f"{namespace}: {pids} do not end")
        time.sleep(0.02)


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=DEADLINE).stdout


def _name(pid: int, part: str) -> str:
    return f"sluice-{pid}-{part}"


def _port(index: int) -> str:
    return f"port{index}"


def _address(network: str, index: int) -> str:
    return str(ipaddress.ip_network(network)[index + 1])
