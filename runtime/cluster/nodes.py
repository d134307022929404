"""Messages between node agents and the coordinator, and the admission of nodes. No I/O."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping

import msgspec
from msgspec import Struct

from runtime.cluster.placement import Binding, NodeResources, Placement
from runtime.cluster.topology import is_group, replicas, unit_of
from runtime.config import Cluster, Config
from runtime.errors import UserError
from runtime.types import Holder

SPANNING_ROLES = ("trainer", "critic", "reference")  # the roles that may span nodes
PORTS_PER_ROLE = 4  # ports of each role, used by its incarnations in turn: another process may have taken one meanwhile


class NodeRegistration(Struct, kw_only=True, frozen=True):
    """The registration of a node's agent. `address` is how others reach the node; `machine` as in `status.Registration`.

    `config` is a hash of the agent's configuration, `version` the version of Sluice. `ports` are free ones, at which SPMD
    groups that span nodes may meet. `running`: by launches' names, the incarnations that an earlier coordinator had it run.
    `blobs`: the address of the agent's service Blobs, "" for none."""

    name: str
    address: str
    devices: int = 0
    machine: str = ""
    config: str = ""
    version: str = ""
    ports: list[int] = []
    pid: int = 0
    running: dict[str, int] = {}
    blobs: str = ""


class NodePaths(Struct, kw_only=True, frozen=True):
    """The files of `node` at the configuration's paths: by key, a hash, or "" if there is none. `parts`: the node's parts of
    checkpoints, if nodes share no folder (`ledger.checkpoint.whole_parts`)."""

    node: str
    found: dict[str, str] = {}
    parts: list[str] = []


class Rendezvous(Struct, kw_only=True, frozen=True):
    """The address at which the ranks of an SPMD group, or the processes of a rollout, that span nodes meet: on the first's."""

    host: str
    port: int
    key: bytes  # of the group
    other: int = 0  # a second port, of a rollout

    def __repr__(self) -> str:
        """Format without the key, which must not be logged."""
        return f"Rendezvous({self.host}, {self.port})"


class Launch(Struct, kw_only=True, frozen=True):
    """One process, or the ranks of a group that are on this node. `devices` count from 0 on the node.

    `incarnation`: end processes of a lower one first. Without `rendezvous` the whole group is on this node."""

    role: str
    name: str
    ranks: list[int] = []
    devices: list[int] = []
    incarnation: int = 0
    rendezvous: Rendezvous | None = None


class Assignment(Struct, kw_only=True, frozen=True):
    """All processes of a node. Processes that are no longer named end. `config` is YAML.

    `run` changes whenever all processes begin anew: those of an earlier `run` end. `peer` takes copies of the node's blobs."""

    run: str = ""
    config: str
    launches: list[Launch] = []
    peer: Holder | None = None


class Death(Struct, kw_only=True, frozen=True):
    """A process ended, and its node does not start it again. `mistake`: the cause is a mistake of the user."""

    node: str
    name: str
    incarnation: int = 0
    reason: str = ""
    mistake: bool = False


class Scale(Struct, kw_only=True, frozen=True):
    role: str
    replicas: int


class Scaled(Struct, kw_only=True, frozen=True):
    """The result of Scale. `pending`: replicas for which no node has room."""

    started: list[str] = []
    stopped: list[str] = []
    pending: list[str] = []


_CODE = ("python", "env", "engine_args")  # keys that say what is executed, wherever they stand
_FILE = re.compile(r"\.py(:|$)")  # the name of a Python file, or FILE.py:NAME


def code(config: Config) -> dict[str, object]:
    """Return what a node executes by this configuration, by key: interpreters, their environment, libraries, engines'
    arguments, and Python files. A node takes these values only from the file that it was started with."""
    return dict(_code(msgspec.to_builtins(config), ""))


def _code(value: object, path: str) -> Iterator[tuple[str, object]]:
    if path.rpartition(".")[2] in _CODE or (isinstance(value, str) and _FILE.search(value)):
        yield path, value
        return
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _code(item, f"{path}.{key}" if path else str(key))


class Roster:
    """The present nodes, which agree with the first. A node counts once it has reported its files at the configured paths."""

    def __init__(self, config: Config):
        self._cluster = config.cluster
        self.there: dict[str, NodeRegistration] = {}
        """All admitted nodes."""
        self.nodes: dict[str, NodeRegistration] = {}
        """The nodes that count."""
        self._first: NodeRegistration | None = None

    @property
    def missing(self) -> list[str]:
        """The nodes that must register before the run can start: their names, or their number."""
        nodes, least = self._cluster.nodes, self._cluster.min_nodes
        if nodes == "auto":
            short = max(1, least) - len(self.nodes)
            return [f"{short} of {max(1, least)} nodes"] if short > 0 else []
        absent = [node.name for node in nodes if node.name not in self.nodes]
        return absent if len(self.nodes) < (least or len(nodes)) else []

    @property
    def offers(self) -> list[NodeResources]:
        """The nodes that count, in the order in which they are filled: that of the configuration, or of registration."""
        if self._cluster.nodes == "auto":
            return [NodeResources(each.name, each.devices) for each in self.nodes.values()]
        return [
            NodeResources(node.name, self.nodes[node.name].devices if node.devices is None else node.devices, node.supernode)
            for node in self._cluster.nodes
            if node.name in self.nodes
        ]

    def admit(self, node: NodeRegistration) -> None:
        """Admit a node. Raises UserError with one line for each conflict with the other nodes."""
        if faults := list(self._faults(node)):
            raise UserError("\n".join(faults))
        self._first = self._first or node
        self.there[node.name] = node

    def ready(self, name: str) -> None:
        self.nodes[name] = self.there[name]

    def leave(self, name: str) -> None:
        self.there.pop(name, None)
        self.nodes.pop(name, None)

    def _faults(self, node: NodeRegistration) -> Iterator[str]:
        nodes, one = self._cluster.nodes, self._first
        if node.name in self.there:
            yield f"node {node.name}: {self.there[node.name].address} has this name already; one of them needs another --name"
        if nodes != "auto":
            named = {each.name: each for each in nodes}
            if fault := name_fault(self._cluster, node.name):
                yield fault
            elif (needed := named[node.name].devices) is not None and needed > node.devices:
                yield f"cluster.nodes: {node.name} is to have {needed} devices, but its agent finds {node.devices}"
        if one is not None:
            if node.version != one.version:
                yield f"node {node.name} has Sluice {node.version}, and {one.name} {one.version}; must be the same"
            if node.config != one.config:
                differ = f"another configuration (hash {node.config}) than {one.name} ({one.config})"
                yield f"node {node.name} was started with {differ}; must be the same file and the same overrides"


def name_fault(cluster: Cluster, name: str) -> str:
    """Check whether a node may have this name. Return the fault, or ""."""
    if cluster.nodes == "auto" or name in (names := [node.name for node in cluster.nodes]):
        return ""
    return f"node {name}: not in cluster.nodes, {', '.join(names)}; must be one of these (--name)"


def path_faults(reference: NodePaths, other: NodePaths, paths: Mapping[str, str]) -> Iterator[str]:
    """Yield the differences between two nodes' files. `paths`: the configured path by key; of keys with one path, the first."""
    for key, path in paths.items():
        ours, theirs = reference.found.get(key, ""), other.found.get(key, "")
        if ours == theirs or key != next(one for one in paths if paths[one] == path):
            continue
        if not ours or not theirs:
            without, having = (reference.node, other.node) if not ours else (other.node, reference.node)
            yield f"{key}: {path} is missing on node {without}, and is there on {having}"
        else:
            yield f"{key}: {path} is not the same on node {other.node} (hash {theirs}) as on {reference.node} ({ours})"


def launches(
    config: Config, placement: Placement, roster: Mapping[str, NodeRegistration], incarnations: Mapping[str, int], secret: bytes
) -> dict[str, list[Launch]]:
    """Return the launches of each node; a group only while all of its nodes are there.

    `incarnations`: the lowest allowed, by the name of a replica or of a group's first rank. `secret`, at most 64 bytes: each
    incarnation of a group has a key that is derived from it."""
    out: dict[str, list[Launch]] = {name: [] for name in roster}

    def unit_of_seat(seat: Binding) -> str:
        return f"{seat.instance.role}-0" if is_group(config, seat.instance.role) else unit_of(seat.instance.name)[0]

    absent = {unit_of_seat(seat) for seat in placement.seats if seat.node not in roster}
    units: dict[str, dict[str, list[Binding]]] = {}  # by the name of the first process, then by node
    for seat in sorted(placement.seats, key=lambda seat: is_group(config, seat.instance.role)):
        if (name := unit_of_seat(seat)) not in absent:
            units.setdefault(name, {}).setdefault(seat.node, []).append(seat)
    for unit, parts in units.items():
        incarnation = incarnations.get(unit, 0)
        meeting = _meeting(unit, roster[next(iter(parts))], incarnation, secret) if len(parts) > 1 else None
        for node, (first, *more) in parts.items():
            launch = Launch(
                role=first.instance.role,
                name=first.instance.name,
                ranks=[seat.instance.rank for seat in (first, *more)] if is_group(config, first.instance.role) else [],
                devices=[device for seat in (first, *more) for device in seat.devices],
                incarnation=incarnation,
                rendezvous=meeting,
            )
            out[node].append(launch)
    return out


def _meeting(unit: str, first: NodeRegistration, incarnation: int, secret: bytes) -> Rendezvous:
    """Return where the ranks of the group `unit`, or the processes of that rollout, meet: on its first node."""
    role, _, index = unit.rpartition("-")
    key = hashlib.blake2b(f"{role}/{incarnation}".encode(), key=secret, digest_size=32).digest()
    if role in SPANNING_ROLES:
        port = SPANNING_ROLES.index(role) + len(SPANNING_ROLES) * (incarnation % PORTS_PER_ROLE)
        return Rendezvous(host=first.address, port=first.ports[port], key=key)
    place = (len(SPANNING_ROLES) + int(index)) * PORTS_PER_ROLE + 2 * incarnation % PORTS_PER_ROLE
    return Rendezvous(host=first.address, port=first.ports[place], key=key, other=first.ports[place + 1])


def meeting_ports(config: Config) -> int:
    """Return how many ports a node registers: for the roles that may span nodes, and for the rollouts if some do."""
    rollouts = replicas(config)
    spanning = len(rollouts) if any(fleet.parallel.nodes > 1 for fleet in rollouts.values()) else 0
    return (len(SPANNING_ROLES) + spanning) * PORTS_PER_ROLE
