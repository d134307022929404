"""This machine as a node of a run: its name, its address, and what it has."""

from __future__ import annotations

import hashlib
import os
import socket
from importlib import metadata

import psutil
from msgspec import Struct

from launcher.node.machine import Machine, this_machine
from runtime.cluster.nodes import PORTS_PER_ROLE, SPANNING_ROLES, NodeRegistration
from runtime.cluster.placement import NodeOffer, offers, place, table
from runtime.cluster.topology import has_several_nodes, processes
from runtime.config import Computing, Config, loading
from runtime.errors import ConfigError, UserError
from runtime.process import network, os_process
from runtime.telemetry.shown import LiteralTable

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
    def offer(self) -> NodeOffer:
        return NodeOffer(self.name, len(self.machine.devices) if self.devices is None else self.devices)

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


def placement_faults(config: Config, here: NodeOffer, trains: bool) -> list[str]:
    """One line per role that cannot be placed, as far as that is known before the nodes have come."""
    try:
        place(config, offers(config, here), trains=trains, waits=bool(config.cluster.min_nodes))
    except ConfigError as error:
        return error.faults
    return []


def placement_table(config: Config, here: NodeOffer) -> LiteralTable:
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
