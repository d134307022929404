"""Checks of nodes, addresses and ports: who is to come, and whether all can reach each other. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterator

from runtime.cluster.topology import instances, processes
from runtime.config import Cluster, Config, Placed
from runtime.config.checks.devices import RESERVED
from runtime.process.network import is_loopback

RENDEZVOUS = 2  # of the weights: the next epoch's opens before the last one's is closed


def network_faults(config: Config, trains: bool) -> Iterator[str]:
    """One line per fault."""
    yield from cluster_faults(config.cluster)
    for path, role in processes(config).items():
        if isinstance(role, Placed) and isinstance(role.placement, list):
            yield from _names(f"{path}.placement", role.placement)
    several = has_several_nodes(config.cluster)
    if several:
        yield from _reachable(config)
    if config.network.port_range is not None:
        yield from _port_range(config, config.network.port_range, 0 if several else _listeners(config, trains))


def cluster_faults(cluster: Cluster) -> Iterator[str]:
    """What is wrong with the nodes themselves, one line each."""
    if cluster.nodes == "auto":
        return
    if not cluster.nodes:
        yield "cluster.nodes: empty; must be auto, or name at least one node"
        return
    names = [node.name for node in cluster.nodes]
    for index, name in enumerate(names):
        if not name:
            yield f"cluster.nodes.{index}.name: '' is no name; must be what its agent is called (--name, or its host name)"
        elif name in names[:index]:
            yield f"cluster.nodes.{index}.name: '{name}' is that of another node; must be its own"
    if cluster.min_nodes > len(names):
        yield f"cluster.min_nodes: {cluster.min_nodes}, but cluster.nodes names {len(names)}; must be at most that"


def _names(key: str, names: list[str]) -> Iterator[str]:
    if not names:
        yield f"{key}: empty; must be pack, spread, or name at least one node"
    elif twice := next((name for index, name in enumerate(names) if name in names[:index]), None):
        yield f"{key}: names '{twice}' twice; must name each node once"


def has_several_nodes(cluster: Cluster) -> bool:
    """Whether the run cannot be on one machine."""
    return cluster.min_nodes > 1 or (cluster.nodes != "auto" and len(cluster.nodes) > 1)


def _reachable(config: Config) -> Iterator[str]:
    interface, coordinator = config.network.interface, config.services.coordinator
    if is_loopback(interface):
        yield (
            f"network.interface: '{interface}' is loopback, by which no other node is reached; on several nodes it must be a "
            "network (10.1.0.0/16), an interface (eth0), or auto"
        )
    if not coordinator.host:
        yield "services.coordinator.host: missing; on several nodes it must be the address that all reach the coordinator by"
    elif is_loopback(coordinator.host):
        yield (
            f"services.coordinator.host: '{coordinator.host}' is loopback; on several nodes it must be the address that all "
            "reach the coordinator by"
        )
    if not coordinator.port:
        yield "services.coordinator.port: 0 is any free port, on one node; on several it must be named"


def _listeners(config: Config, trains: bool) -> int:
    """How many sockets of the run's own listen at once, where all are on one machine."""
    return len(instances(config, trains)) + (not config.services.coordinator.port) + trains * RENDEZVOUS


def _port_range(config: Config, ports: tuple[int, int], needed: int) -> Iterator[str]:
    """`needed`: the ports that the run takes of it; 0 where that is known only when its processes have been placed."""
    (first, last), network = ports, config.network
    if not RESERVED <= first <= last:
        yield f"network.port_range: [{first}, {last}] is not a range of ports from {RESERVED} to 65535, first and last"
        return
    if last - first + 1 < needed:
        yield f"network.port_range: [{first}, {last}] has fewer ports than the run listens on, {needed}"
    for name, (start, end) in (("hccl_host_ports", network.hccl_host_ports), ("hccl_npu_ports", network.hccl_npu_ports)):
        if first <= end and start <= last:
            yield f"network.port_range: [{first}, {last}] overlaps {name} [{start}, {end}]"
