"""This machine as a node of a run: its name, its address, and what it has."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import socket
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Literal

import psutil
from msgspec import Struct
from msgspec.structs import replace

from runtime.cluster.nodes import PORTS_PER_ROLE, SPANNING_ROLES, NodeRegistration
from runtime.cluster.placement import NodeResources, offers, place, table
from runtime.cluster.topology import has_several_nodes, processes
from runtime.config import Computing, Config, loading
from runtime.errors import ConfigError, UserError
from runtime.process import keys, network, os_process
from runtime.process.network import is_loopback, own_address
from runtime.telemetry.shown import LiteralTable

# ---- Cpus
#
# Lists of processors as Linux writes them, such as 0-15,32. Pure.

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def parse_cpus(text: str) -> tuple[int, ...]:
    """The processors in a list of numbers and ranges, in order. Raises ValueError for what is no such list."""
    found: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise ValueError(f"'{part.strip()}' is no processor and no range of processors")
        found.update(range(first, last + 1))
    return tuple(sorted(found))


def shown_cpus(cpus: Iterable[int]) -> str:
    """The shortest list of these processors."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


# ---- Machine
#
# What of this machine the processes' environment and placement depend on. Loads no torch.

Kind = Literal["npu", "cuda", "cpu"]

# By kind: the variable that says which devices a process sees, and the device files that there are one each of.
VISIBLE: dict[Kind, str] = {"npu": "ASCEND_RT_VISIBLE_DEVICES", "cuda": "CUDA_VISIBLE_DEVICES"}
_FILES: dict[Kind, re.Pattern[str]] = {"npu": re.compile(r"davinci\d+"), "cuda": re.compile(r"nvidia\d+")}


class Machine(Struct, frozen=True, kw_only=True):
    """`devices`: its accelerators of one kind, by the names that the kind's variable knows them by (indices as a rule): those
    which the launcher's own environment leaves. `cpus`: those that processes may be given. `jemalloc`: the library's path, or
    "". `variables`: the names of what is in the environment."""

    kind: Kind = "cpu"
    devices: tuple[str, ...] = ()
    cpus: frozenset[int] = frozenset()
    jemalloc: str = ""
    preload: str = ""  # LD_PRELOAD of the launcher
    variables: frozenset[str] = frozenset()


def this_machine(root: Path = Path("/")) -> Machine:
    """Looks at device files and libraries below `root`, and at the launcher's environment."""
    folder = root / "dev"
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    found = [path for path in jemalloc_paths(platform.machine()) if (root / path.lstrip("/")).is_file()]
    kind: Kind = next((kind for kind, pattern in _FILES.items() if any(map(pattern.fullmatch, names))), "cpu")
    return Machine(
        kind=kind,
        devices=_devices(kind, names) if kind != "cpu" else (),
        cpus=frozenset(os.sched_getaffinity(0)),
        jemalloc=found[0] if found else "",
        preload=os.environ.get("LD_PRELOAD", ""),
        variables=frozenset(os.environ),
    )


def _devices(kind: Kind, names: list[str]) -> tuple[str, ...]:
    """Those that the environment names, else all, in the order of their indices."""
    visible = os.environ.get(VISIBLE[kind])
    if visible is not None:
        return tuple(filter(None, (name.strip() for name in visible.split(","))))
    count = sum(_FILES[kind].fullmatch(name) is not None for name in names)
    return tuple(map(str, range(count)))


def on_this_machine(config: Config, address: str = "") -> Config:
    """With this machine's own address as `network.interface`: `address` where it is given, else what fits that key.

    Raises UserError when there is none, or none that other nodes reach.
    """
    key, given = ("--address", address) if address else ("network.interface", config.network.interface)
    own = own_address(given, config.services.coordinator.host, key)
    if has_several_nodes(config.cluster) and is_loopback(own):
        raise UserError(
            f"{key}: '{given}' gives this node {own}, by which no other is reached; must be "
            "its address, a network that it is in, or an interface"
        )
    return replace(config, network=replace(config.network, interface=own))


def check_secret(config: Config) -> None:
    """Raises UserError where other nodes cannot know the secret of this one."""
    apart = has_several_nodes(config.cluster) and not config.cluster.shared_folder
    if apart and keys.security(config.network) != "none" and keys.SECRET not in os.environ:
        raise UserError(f"{keys.SECRET}: missing; cluster.shared_folder is false, so it must be set, to the same on all nodes")


def jemalloc_paths(architecture: str) -> tuple[str, ...]:
    """Where distributions put jemalloc: Debian and Ubuntu (libjemalloc2), openEuler (jemalloc), one's own build."""
    return (
        f"/usr/lib/{architecture}-linux-gnu/libjemalloc.so.2",
        "/usr/lib64/libjemalloc.so.2",
        "/usr/local/lib64/libjemalloc.so.2",
        "/usr/local/lib/libjemalloc.so.2",
    )


MEETINGS = len(SPANNING_ROLES) * PORTS_PER_ROLE


class LocalNode(Struct, frozen=True):
    name: str
    machine: Machine
    address: str = ""  # "" = as network.interface says
    devices: int | None = None  # how many of the machine's are for the run; None = all
    echo: float = 0.0  # seconds within which a signal that comes again is the same one

    @classmethod
    def of(cls, config: Config, name: str = "", address: str = "", devices: int | None = None) -> LocalNode:
        """Raises UserError for a number of devices that there is not. The only node of a configuration needs no name."""
        machine = this_machine()
        if devices is not None and not 0 <= devices <= len(machine.devices):
            raise UserError(f"--devices: {devices}, but this machine has {len(machine.devices)}; must be from 0 to that")
        nodes = config.cluster.nodes
        alone = nodes[0].name if nodes != "auto" and len(nodes) == 1 else ""
        return cls(name or alone or socket.gethostname(), machine, address, devices)

    @property
    def offer(self) -> NodeResources:
        return NodeResources(self.name, len(self.machine.devices) if self.devices is None else self.devices)

    def memory(self, config: Config) -> int | None:
        """Bytes that are available to a run on this machine's CPUs alone; None where it is to run elsewhere, or on devices."""
        on_devices = any(isinstance(role, Computing) and role.devices for role in processes(config).values())
        if self.machine.kind != "cpu" or on_devices or has_several_nodes(config.cluster):
            return None
        return None if any(node.devices for node in offers(config, self.offer)) else psutil.virtual_memory().available

    def registration(self, given: Config, own: Config) -> NodeRegistration:
        """`given`: the configuration that this node was started with; `own`: with the node's address."""
        address = own.network.interface
        return NodeRegistration(
            name=self.name,
            address=address,
            devices=self.offer.devices,
            machine=os_process.machine(),
            config=hashlib.sha256(loading.to_yaml(given).encode()).hexdigest()[:12],
            version=metadata.version("sluice-rl"),
            ports=_free_ports(address, own.network.port_range) if has_several_nodes(own.cluster) else [],
            pid=os.getpid(),
        )


def placement_faults(config: Config, here: NodeResources, trains: bool) -> list[str]:
    """One line per role that cannot be placed, as far as that is known before the nodes have come."""
    try:
        place(config, offers(config, here), trains=trains, waits=bool(config.cluster.min_nodes))
    except ConfigError as error:
        return error.faults
    return []


def placement_table(config: Config, here: NodeResources) -> LiteralTable:
    """Which process is to be where, by node and device. Raises ConfigError."""
    nodes = offers(config, here)
    placed = place(config, nodes, waits=bool(config.cluster.min_nodes))
    rows = LiteralTable("node", "device", "processes", title="coordinator: " + (config.services.coordinator.host or here.name))
    for row in table(placed, nodes):
        rows.add_row(*row)
    for instance in placed.pending:
        rows.add_row("(a node that comes later)", "", instance.name)
    return rows


def _free_ports(address: str, ports: network.PortRange | None) -> list[int]:
    listening = [network.listen(address, ports, 1) for _ in range(MEETINGS)]
    try:
        return [each.getsockname()[1] for each in listening]
    finally:
        for each in listening:
            each.close()
