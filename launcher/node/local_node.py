"""This machine as a node of a run: its name, its address and its resources."""

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

from runtime.cluster.nodes import NodeRegistration, meeting_ports
from runtime.cluster.placement import NodeResources, offers, place, table
from runtime.cluster.topology import has_several_nodes, processes
from runtime.config import Computing, Config, loading
from runtime.errors import ConfigError, UserError
from runtime.process import keys, network, os_process
from runtime.process.network import is_loopback, own_address
from runtime.telemetry.shown import LiteralTable

# ---- Lists of processors as Linux writes them, such as 0-15,32. Pure.

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def parse_cpus(text: str) -> tuple[int, ...]:
    """Return the processors in a list of numbers and ranges, sorted. Raises ValueError if the text is no such list."""
    found: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise ValueError(f"'{part.strip()}' is neither a processor nor a range of processors")
        found.update(range(first, last + 1))
    return tuple(sorted(found))


def shown_cpus(cpus: Iterable[int]) -> str:
    """Return the shortest list of these processors."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


# ---- The properties of this machine on which the environment and placement of processes depend. Loads no torch.

Kind = Literal["npu", "cuda", "cpu"]

# By kind: the variable that says which devices a process sees, and the names of the device files, one for each device.
VISIBLE: dict[Kind, str] = {"npu": "ASCEND_RT_VISIBLE_DEVICES", "cuda": "CUDA_VISIBLE_DEVICES"}
_FILES: dict[Kind, re.Pattern[str]] = {"npu": re.compile(r"davinci\d+"), "cuda": re.compile(r"nvidia\d+")}


class Machine(Struct, frozen=True, kw_only=True):
    """`devices`: accelerators of one kind that the environment allows, named as the kind's variable does (usually by index).
    `cpus`: processors for processes. `jemalloc`: the library's path, or "". `variables`: names in the environment."""

    kind: Kind = "cpu"
    devices: tuple[str, ...] = ()
    cpus: frozenset[int] = frozenset()
    jemalloc: str = ""
    preload: str = ""  # LD_PRELOAD of the launcher
    variables: frozenset[str] = frozenset()


def this_machine(root: Path = Path("/")) -> Machine:
    """Return this machine, from device files and libraries below `root` and from the launcher's environment."""
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
    """Return the devices that the environment names; without that variable, all in the order of their indices."""
    visible = os.environ.get(VISIBLE[kind])
    if visible is not None:
        return tuple(filter(None, (name.strip() for name in visible.split(","))))
    count = sum(_FILES[kind].fullmatch(name) is not None for name in names)
    return tuple(map(str, range(count)))


def on_this_machine(config: Config, address: str = "") -> Config:
    """Return the configuration with this machine's address as `network.interface`: `address`, else one that fits the key.
    Raises UserError if there is no such address, or other nodes cannot reach it."""
    key, given = ("--address", address) if address else ("network.interface", config.network.interface)
    own = own_address(given, config.services.coordinator.host, key)
    if has_several_nodes(config.cluster) and is_loopback(own):
        raise UserError(
            f"{key}: '{given}' gives this node {own}, which other nodes cannot reach; must be "
            "its address, a network that it is in, or an interface"
        )
    return replace(config, network=replace(config.network, interface=own))


def check_secret(config: Config) -> None:
    """Raise UserError if the run has a secret that other nodes cannot know."""
    apart = has_several_nodes(config.cluster) and not config.cluster.shared_folder
    if apart and keys.security(config.network) != "none" and keys.SECRET not in os.environ:
        raise UserError(f"{keys.SECRET}: missing; cluster.shared_folder is false, so it must be set, to the same on all nodes")


def jemalloc_paths(architecture: str) -> tuple[str, ...]:
    """Return where jemalloc may be: from Debian and Ubuntu (libjemalloc2), openEuler (jemalloc), or the user's own build."""
    return (
        f"/usr/lib/{architecture}-linux-gnu/libjemalloc.so.2",
        "/usr/lib64/libjemalloc.so.2",
        "/usr/local/lib64/libjemalloc.so.2",
        "/usr/local/lib/libjemalloc.so.2",
    )


class LocalNode(Struct, frozen=True):
    name: str
    machine: Machine
    address: str = ""  # "" = from network.interface
    devices: int | None = None  # how many of the machine's devices the run may use; None = all
    echo: float = 0.0  # seconds within which a repeated signal counts as the same signal

    @classmethod
    def of(cls, config: Config, name: str = "", address: str = "", devices: int | None = None) -> LocalNode:
        """Return this node. Raises UserError if the machine has fewer devices. A single configured node gives its name."""
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
        """Return the available bytes for a run on this machine's CPUs alone; None if it runs elsewhere or on devices."""
        on_devices = any(isinstance(role, Computing) and role.devices for role in processes(config).values())
        if self.machine.kind != "cpu" or on_devices or has_several_nodes(config.cluster):
            return None
        return None if any(node.devices for node in offers(config, self.offer)) else psutil.virtual_memory().available

    def registration(self, given: Config, own: Config) -> NodeRegistration:
        """Return what this node registers. `given`: the configuration it was started with; `own`: with the node's address."""
        address = own.network.interface
        return NodeRegistration(
            name=self.name,
            address=address,
            devices=self.offer.devices,
            machine=os_process.machine(),
            config=hashlib.sha256(loading.to_yaml(given).encode()).hexdigest()[:12],
            version=metadata.version("sluice-rl"),
            ports=_free_ports(address, own.network.port_range, meeting_ports(own)) if has_several_nodes(own.cluster) else [],
            pid=os.getpid(),
        )


def placement_faults(config: Config, here: NodeResources, trains: bool) -> list[str]:
    """Return one line per role that cannot be placed, as far as that is known before the nodes have joined."""
    try:
        place(config, offers(config, here), trains=trains, waits=bool(config.cluster.min_nodes))
    except ConfigError as error:
        return error.faults
    return []


def placement_table(config: Config, here: NodeResources) -> LiteralTable:
    """Return the placement of processes by node and device. Raises ConfigError."""
    nodes = offers(config, here)
    placed = place(config, nodes, waits=bool(config.cluster.min_nodes))
    rows = LiteralTable("node", "device", "processes", title="coordinator: " + (config.services.coordinator.host or here.name))
    for row in table(placed, nodes):
        rows.add_row(*row)
    for instance in placed.pending:
        rows.add_row("(a node that comes later)", "", instance.name)
    return rows


def _free_ports(address: str, ports: network.PortRange | None, count: int) -> list[int]:
    listening = [network.listen(address, ports, 1) for _ in range(count)]
    try:
        return [each.getsockname()[1] for each in listening]
    finally:
        for each in listening:
            each.close()
