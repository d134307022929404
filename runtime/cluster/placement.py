"""The placement of processes on nodes and devices. No I/O.

Some processes must be on one node: those of a replica with all its devices, and the ranks of an SPMD group that share every
layer. SPMD groups are placed first, then replicas, those with the most devices first, so that the fewest choices come first. A
colocated role comes after its host. If no node has accelerators, no process gets a device, and `placement` decides the node."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from runtime import timeouts
from runtime.cluster import topology
from runtime.cluster.topology import Instance, devices_each, is_group, path_of, settings_of
from runtime.config import Computing, Config, Placed, Rollout, Spread, Trainer
from runtime.errors import ConfigError

# ---- Limits on the restarts of a process; the caller gives the time


def backoff(before: int) -> float:
    """Return the seconds until a process is started again. It was started again `before` times within the window."""
    return min(timeouts.FIRST_BACKOFF * 2.0 ** min(before, 30), timeouts.LONGEST_BACKOFF)


class RestartBackoff:
    """Restarts of one process: at most `allowed` within the window."""

    def __init__(self, allowed: int):
        self._allowed = allowed
        self._granted: list[float] = []

    def delay(self, now: float) -> float | None:
        """Return the seconds until the process that died at `now` may be started again; None if it may not."""
        self._granted = [then for then in self._granted if now - then < timeouts.RESTART_WINDOW]
        if len(self._granted) >= self._allowed:
            return None
        self._granted.append(now)
        return backoff(len(self._granted) - 1)


Hosted = TypeVar("Hosted", bound=Computing)


class NodeResources(Struct, frozen=True):
    """A node of the cluster, and its number of accelerators."""

    name: str
    devices: int = 0
    supernode: str = ""


class Binding(Struct, frozen=True):
    """The node and devices of a process. `devices` count from 0 on the node."""

    instance: Instance
    node: str
    devices: tuple[int, ...] = ()


class Placement(Struct, frozen=True):
    """The bindings of all placed processes. `pending`: replicas for which no node has room."""

    seats: tuple[Binding, ...]
    pending: tuple[Instance, ...] = ()

    def on(self, node: str) -> list[Binding]:
        return [seat for seat in self.seats if seat.node == node]


class _NoRoom(Exception):
    """The reason why a process cannot be placed. The message continues the role's path."""


def offers(config: Config, here: NodeResources) -> list[NodeResources]:
    """Return the nodes that the configuration describes, before any has registered. Defaults are taken from `here`."""
    nodes = config.cluster.nodes
    if nodes == "auto":
        count = max(1, config.cluster.min_nodes)
        return [here] if count == 1 else [NodeResources(f"node-{index}", here.devices) for index in range(count)]
    return [NodeResources(node.name, here.devices if node.devices is None else node.devices, node.supernode) for node in nodes]


def place(
    config: Config, nodes: Sequence[NodeResources], kept: Sequence[Binding] = (), *, trains: bool = True, waits: bool = False
) -> Placement:
    """Place every process that registers. `kept` stay where they are; `nodes` are filled in their order.

    `waits`: a replica without room is pending, if another of its role or fleet is placed. Raises ConfigError, a line a role."""
    if not trains:
        config = _without_hosts(config)
    seated = {seat.instance for seat in kept}
    roles: dict[str, list[Instance]] = {}
    for instance in topology.instances(config, trains):
        if instance not in seated:
            roles.setdefault(path_of(config, instance), []).append(instance)
    table, faults, pending = _Table(config, nodes, kept, waits), [], []
    for path, wanted in sorted(roles.items(), key=lambda item: _turn(config, item[1][0])):
        try:
            if is_group(config, wanted[0].role):
                table.seat_group(path, wanted)
            else:
                pending += table.seat_replicas(path, wanted)
        except _NoRoom as reason:
            faults.append(f"{path}{reason}")
    for role in topology.UPDATED if config.checkpoint.in_memory == "another_node" else ():
        held = {seat.node for seat in table.seats if seat.instance.role == role}
        if len(held) == 1 and len(nodes) > 1:
            where = f"all ranks of services.{role} are on node {held.pop()}, and copies of their state would be there too"
            faults.append(f"checkpoint.in_memory: another_node, but {where}; place the ranks on several nodes, or must be auto")
    if faults:
        raise ConfigError(faults)
    return Placement(tuple(table.seats), tuple(pending))


def _without_hosts(config: Config) -> Config:
    """Remove colocation with roles that an evaluation does not have."""
    there = {instance.role for instance in topology.instances(config, trains=False)}

    def own(role: Hosted) -> Hosted:
        return role if role.colocate in there else replace(role, colocate="")

    services = config.services
    rollout = own(services.rollout) if isinstance(services.rollout, Rollout) else [own(fleet) for fleet in services.rollout]
    return replace(config, services=replace(services, rollout=rollout, reward_model=own(services.reward_model)))


def _turn(config: Config, instance: Instance) -> tuple[bool, bool, bool, int]:
    """Return the sort key of a role: named devices first, then groups, then the largest replicas; a colocated role last."""
    settings = settings_of(config, instance)
    guest = isinstance(settings, Computing) and bool(settings.colocate)
    named = isinstance(settings, Computing) and bool(settings.devices)
    return guest, not named, not is_group(config, instance.role), -devices_each(settings)


class _Table:
    """The bindings so far, and the owner of each device."""

    def __init__(self, config: Config, nodes: Sequence[NodeResources], kept: Sequence[Binding], waits: bool):
        self.seats = list(kept)
        self._config, self._waits = config, waits
        self._nodes = {node.name: node for node in nodes}
        self._accelerated = any(node.devices for node in nodes)
        self._seats_of: dict[str, list[Binding]] = defaultdict(list)  # by the role's path
        self._owner: dict[tuple[str, int], str] = {}
        for seat in kept:
            self._seats_of[path_of(config, seat.instance)].append(seat)
            self._take(seat)

    def seat_replicas(self, path: str, replicas: Sequence[Instance]) -> list[Instance]:
        """Place each replica as `placement` says. Return the replicas without room."""
        wanted, ahead = len(self._seats_of[path]) + len(replicas), list(replicas)
        while ahead:
            unit, found = topology.group_of(self._config, ahead[0]), dict[str, tuple[int, ...]]()
            try:
                place = topology.place_in_fleet(self._config, unit[0])
                for instance in unit:  # each on a node of its own
                    node, devices = self._room_for(path, instance, place, wanted, found)
                    found[node] = devices
            except _NoRoom:
                if not self._waits or not self._seats_of[path]:
                    raise
                return ahead
            for instance, (node, devices) in zip(unit, found.items(), strict=True):
                self._seat(path, instance, node, devices)
            del ahead[: len(unit)]
        return []

    def seat_group(self, path: str, ranks: Sequence[Instance]) -> None:
        """Place ranks in order over the nodes, so that ranks that share every layer are on one node."""
        settings = settings_of(self._config, ranks[0])
        assert isinstance(settings, Spread)
        if settings.colocate:
            for instance, (node, device) in zip(ranks, self._host_devices(settings.colocate, len(ranks)), strict=True):
                self._seat(path, instance, node, () if device is None else (device,))
            return
        block = settings.parallel.tensor * settings.parallel.context  # the ranks that share every layer
        ahead = list(ranks)
        for node, count in self._shares(path, settings, len(ranks), block):
            devices = list(settings.devices) or self._free(node)
            for instance in ahead[:count]:
                self._seat(path, instance, node, (devices.pop(0),) if self._accelerated else ())
            del ahead[:count]

    def _shares(self, path: str, settings: Computing, ranks: int, block: int) -> Iterator[tuple[str, int]]:
        """Yield (node, the most of the remaining ranks that it takes) for a group. Raises _NoRoom."""
        allowed = self._allowed(settings)
        whole = not (self._waits and isinstance(settings, Trainer) and settings.elastic)
        absent = [name for name in settings.placement if name not in allowed] if isinstance(settings.placement, list) else []
        if absent and whole:
            raise _NoRoom(f".placement: node '{absent[0]}' is not there, and a group needs all of its nodes")
        if settings.devices:
            yield self._node_of_named(path, settings, allowed), ranks
            return
        room = {node: len(self._free(node)) // block * block if self._accelerated else ranks for node in allowed}
        if settings.placement == "pack":
            near = next((nodes for nodes in self._neighbourhoods(allowed) if sum(room[node] for node in nodes) >= ranks), None)
            if near is None:
                raise _NoRoom(f": {ranks} processes do not fit{_of_blocks(block)}; {self._free_devices(allowed)}")
            yield from ((node, room[node]) for node in near)
            return
        each = ranks // len(allowed)
        if ranks % (len(allowed) * block):
            raise _NoRoom(f".placement: {ranks} processes cannot be spread evenly over {', '.join(allowed)}{_of_blocks(block)}")
        if short := [node for node in allowed if room[node] < each]:
            raise _NoRoom(f".placement: {each} of {ranks} processes do not fit on {short[0]}; {self._free_devices(short)}")
        for node in allowed:
            yield node, each

    def _neighbourhoods(self, allowed: Sequence[str]) -> Iterator[list[str]]:
        """Yield the sets of nodes in which to look for room for a group: each node, each supernode, all nodes."""
        yield from ([node] for node in allowed)
        supernodes = dict.fromkeys(self._nodes[node].supernode for node in allowed)
        for supernode in filter(None, supernodes):
            yield [node for node in allowed if self._nodes[node].supernode == supernode]
        yield sorted(allowed, key=lambda node: list(supernodes).index(self._nodes[node].supernode))

    def _room_for(
        self, path: str, instance: Instance, index: int, wanted: int, others: Collection[str]
    ) -> tuple[str, tuple[int, ...]]:
        """Return node and devices of one replica, with index `index` of all the `wanted`, or of its process that is on none of
        the nodes `others`. Raises _NoRoom."""
        settings = settings_of(self._config, instance)
        each = devices_each(settings)
        assert isinstance(settings, Placed)
        allowed = self._allowed(settings)
        if isinstance(settings, Computing) and settings.colocate:
            found = self._host_devices(settings.colocate, (index + 1) * each)[index * each :]
            if len({node for node, _ in found}) > 1:
                raise _NoRoom(f".colocate: {instance.name} would have devices of two nodes of {settings.colocate}")
            return found[0][0], tuple(device for _, device in found if device is not None)
        if isinstance(settings, Computing) and settings.devices and self._accelerated:
            node = self._node_of_named(path, settings, allowed)
            return node, tuple(settings.devices[index * each : (index + 1) * each])
        needed = each if self._accelerated else 0
        mine, share = Counter(seat.node for seat in self._seats_of[path]), self._share(settings, wanted)
        fitting = [node for node in allowed if len(self._free(node)) >= needed and mine[node] < share and node not in others]
        most = max(self._nodes[node].devices for node in allowed)
        if 1 < each > most and self._accelerated:
            raise _NoRoom(f".parallel: takes {each} devices of one node, and nodes have at most {most}")
        if not fitting and isinstance(settings, Rollout) and (nodes := settings.parallel.nodes) > 1:
            beside = f", beside {', '.join(others)}," if others else ""
            raise _NoRoom(
                f".parallel.nodes: {nodes}, but{beside} no node has room for {instance.name}; {self._free_devices(allowed)}"
            )
        if not fitting:
            raise _NoRoom(f": no node has {each} free devices for {instance.name}; {self._free_devices(allowed)}")
        if settings.placement != "pack":
            fitting.sort(key=mine.__getitem__)
        return fitting[0], tuple(self._free(fitting[0])[:needed])

    def _seat(self, path: str, instance: Instance, node: str, devices: Sequence[int]) -> None:
        seat = Binding(instance, node, tuple(devices))
        self._take(seat)
        self.seats.append(seat)
        self._seats_of[path].append(seat)

    def _take(self, seat: Binding) -> None:
        """Make the process the owner of its devices, unless its host owns them."""
        for device in seat.devices:
            self._owner.setdefault((seat.node, device), seat.instance.name)

    def _free(self, node: str) -> list[int]:
        return [device for device in range(self._nodes[node].devices) if (node, device) not in self._owner]

    def _allowed(self, settings: Placed) -> list[str]:
        """Return the nodes that a role may be on. Raises _NoRoom for an unknown node."""
        if isinstance(settings.placement, str):
            return list(self._nodes)
        named = self._config.cluster.nodes
        known = self._nodes if named == "auto" else [node.name for node in named]
        if unknown := [name for name in settings.placement if name not in known and not (self._waits and named == "auto")]:
            raise _NoRoom(f".placement: there is no node '{unknown[0]}'; nodes are {', '.join(known)}")
        if there := [name for name in settings.placement if name in self._nodes]:
            return there
        raise _NoRoom(f".placement: none of {', '.join(settings.placement)} has come; nodes are {', '.join(self._nodes)}")

    def _share(self, settings: Placed, wanted: int) -> int:
        """Return the most of `wanted` replicas on one node, so that they are even also over nodes that come later."""
        if isinstance(settings.placement, list):
            return -(-wanted // len(settings.placement))
        named = self._config.cluster.nodes
        return wanted if settings.placement == "pack" or named == "auto" else -(-wanted // len(named))

    def _node_of_named(self, path: str, settings: Computing, allowed: Sequence[str]) -> str:
        """Return the first node with the devices that the role names, and with all of them free. Raises _NoRoom."""
        if not self._accelerated:
            return allowed[0]
        highest = max(settings.devices)
        having = [node for node in allowed if highest < self._nodes[node].devices]
        if not having:
            raise _NoRoom(f".devices: there is no device {highest}; {self._free_devices(allowed)}")
        mine = {seat.instance.name for seat in self._seats_of[path]}
        taken = {}
        for node in having:
            owners = {device: self._owner.get((node, device), "") for device in settings.devices}
            taken = {device: owner for device, owner in owners.items() if owner and owner not in mine}
            if not taken:
                return node
        device, owner = next(iter(taken.items()))
        host = owner.rpartition("-")[0]
        must = f"must be another, or {path}.colocate has to be {host}"
        raise _NoRoom(f".devices: {device} of node {having[-1]} is used by {owner}; {must}")

    def _host_devices(self, host: str, count: int) -> list[tuple[str, int | None]]:
        """Return the first `count` devices of the role `host`, as (node, device); device None without accelerators."""
        seats = [seat for seat in self.seats if seat.instance.role == host]
        if not seats:
            raise _NoRoom(f".colocate: no process of {host} is placed; must be a role of the run that is not colocated itself")
        if not self._accelerated:
            return [(seats[index % len(seats)].node, None) for index in range(count)]
        found = [(seat.node, device) for seat in seats for device in seat.devices]
        if len(found) < count:
            raise _NoRoom(f".colocate: needs {count} devices, but {host} has {len(found)}")
        return found[:count]  # type: ignore[return-value]

    def _free_devices(self, nodes: Sequence[str]) -> str:
        """Describe the free devices of the nodes, and the owners of the others."""
        if not self._accelerated:
            return f"nodes are {', '.join(nodes)}"
        lines = []
        for node in nodes:
            owners = dict.fromkeys(owner for (where, _), owner in self._owner.items() if where == node)
            whose = f" (others are used by {', '.join(owners)})" if owners else ""
            lines.append(f"node {node} has {len(self._free(node))} of {self._nodes[node].devices} devices free{whose}")
        return "; ".join(lines)


def _of_blocks(block: int) -> str:
    return f" by {block} that have to be on one node" if block > 1 else ""


def table(placement: Placement, nodes: Sequence[NodeResources]) -> list[tuple[str, str, str]]:
    """Return rows (node, device, processes) for the user: each device of each node, then the processes without a device."""
    rows: list[tuple[str, str, str]] = []
    for node in nodes:
        here = placement.on(node.name)
        rows += (
            (node.name, str(device), ", ".join(seat.instance.name for seat in here if device in seat.devices))
            for device in range(node.devices)
        )
        if without := ", ".join(seat.instance.name for seat in here if not seat.devices):
            rows.append((node.name, "-", without))
    return rows
