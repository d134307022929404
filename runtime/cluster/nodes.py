"""What agents of nodes and the coordinator tell each other, and whom the coordinator admits. No I/O."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence

import msgspec
from msgspec import Struct

from runtime.cluster.placement import Binding, NodeResources, Placement
from runtime.cluster.topology import is_group
from runtime.config import Cluster, Config
from runtime.errors import UserError

SPANNING_ROLES = ("trainer", "critic", "reference")  # that may span nodes
PORTS_PER_ROLE = 4  # ports of each, one for each incarnation in turn: another process may have taken one meanwhile


class NodeRegistration(Struct, kw_only=True, frozen=True):
    """A node's agent announces itself. `address` is the node's, for the others; `machine` as in `status.Registration`.

    `config` is a hash of the configuration that it was started with, `version` that of Sluice. `ports` are free ones, at which
    SPMD groups that span nodes may meet. `running`: the incarnations of what it was told to run before, by the launches' names.
    """

    name: str
    address: str
    devices: int = 0
    machine: str = ""
    config: str = ""
    version: str = ""
    ports: list[int] = []
    pid: int = 0
    running: dict[str, int] = {}


class NodePaths(Struct, kw_only=True, frozen=True):
    """What `node` has at the paths that the configuration names: by its key, a hash, or "" where there is nothing. `parts`:
    of checkpoints, where nodes share no folder (`ledger.node_checkpoints.whole`)."""

    node: str
    found: dict[str, str] = {}
    parts: list[str] = []


class Rendezvous(Struct, kw_only=True, frozen=True):
    """Where the ranks of an SPMD group that spans nodes meet: on the node of rank 0."""

    host: str
    port: int
    key: bytes  # of the group

    def __repr__(self) -> str:
        """Without the key, which no log is to hold."""
        return f"Rendezvous({self.host}, {self.port})"


class Launch(Struct, kw_only=True, frozen=True):
    """One process, or the ranks of a group that are on this node. `devices` count from 0 among the node's.

    `incarnation`: what runs with a lower one is to be ended first. Without `rendezvous` the whole group is on this node.
    """

    role: str
    name: str
    ranks: list[int] = []
    devices: list[int] = []
    incarnation: int = 0
    rendezvous: Rendezvous | None = None


class Assignment(Struct, kw_only=True, frozen=True):
    """All that is to run on a node: what is not named there any more is to end. `config` is YAML.

    `run` is another whenever all begin anew: what was started before is to end.
    """

    run: str = ""
    config: str
    launches: list[Launch] = []


class Death(Struct, kw_only=True, frozen=True):
    """A process ended, and its node does not start it again. `mistake`: the user's."""

    node: str
    name: str
    incarnation: int = 0
    reason: str = ""
    mistake: bool = False


class Scale(Struct, kw_only=True, frozen=True):
    role: str
    replicas: int


class Scaled(Struct, kw_only=True, frozen=True):
    """`pending`: no node has room for them."""

    started: list[str] = []
    stopped: list[str] = []
    pending: list[str] = []


_CODE = ("python", "env", "jemalloc", "engine_args")  # keys that say what is executed, wherever they stand
_FILE = re.compile(r"\.py(:|$)")  # what names a file of Python, or FILE.py:NAME


def code(config: Config) -> dict[str, object]:
    """What a node executes by this configuration, by key: interpreters, their environment, libraries, engines' arguments, and
    files of Python. A node takes it from the file that it was started with alone."""
    return dict(_code(msgspec.to_builtins(config), ""))


def _code(value: object, path: str) -> Iterator[tuple[str, object]]:
    if path.rpartition(".")[2] in _CODE or (isinstance(value, str) and _FILE.search(value)):
        yield path, value
        return
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _code(item, f"{path}.{key}" if path else str(key))


class Roster:
    """The nodes that are there. Whoever comes first is the one that the others have to agree with. A node counts once it has
    said what it has at the configuration's paths."""

    def __init__(self, config: Config):
        self._cluster = config.cluster
        self.there: dict[str, NodeRegistration] = {}
        """All that were admitted."""
        self.nodes: dict[str, NodeRegistration] = {}
        """Those that count."""
        self._first: NodeRegistration | None = None

    @property
    def missing(self) -> list[str]:
        """Who has to come before the run can start: names, or how many."""
        nodes, least = self._cluster.nodes, self._cluster.min_nodes
        if nodes == "auto":
            short = max(1, least) - len(self.nodes)
            return [f"{short} of {max(1, least)} nodes"] if short > 0 else []
        absent = [node.name for node in nodes if node.name not in self.nodes]
        return absent if len(self.nodes) < (least or len(nodes)) else []

    @property
    def offers(self) -> list[NodeResources]:
        """Those that count, in the order in which they are filled: as the configuration names them, or as they came."""
        if self._cluster.nodes == "auto":
            return [NodeResources(each.name, each.devices) for each in self.nodes.values()]
        return [
            NodeResources(node.name, self.nodes[node.name].devices if node.devices is None else node.devices, node.supernode)
            for node in self._cluster.nodes
            if node.name in self.nodes
        ]

    def admit(self, node: NodeRegistration) -> None:
        """Raises UserError with one line for each thing in which the node does not fit the others."""
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
                yield (
                    f"node {node.name} was started with another configuration (hash {node.config}) than {one.name} "
                    f"({one.config}); must be the same file and the same overrides"
                )


def name_fault(cluster: Cluster, name: str) -> str:
    """Why a node of this name may not come; "" when it may."""
    if cluster.nodes == "auto" or name in (names := [node.name for node in cluster.nodes]):
        return ""
    return f"node {name}: not in cluster.nodes, {', '.join(names)}; must be one of these (--name)"


def path_faults(reference: NodePaths, other: NodePaths, paths: Mapping[str, str]) -> Iterator[str]:
    """What two nodes do not have alike. `paths`: by key, what the configuration names; of keys for one path, the first."""
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
    config: Config,
    placement: Placement,
    roster: Mapping[str, NodeRegistration],
    incarnations: Mapping[str, int],
    secret: bytes,
) -> dict[str, list[Launch]]:
    """By node, what it is to run; a group only while all its nodes are there.

    `incarnations`: the lowest allowed, by the name of a replica or of a group's first rank. `secret`, at most 64 bytes: each
    incarnation of a group has a key that is derived from it.
    """
    out: dict[str, list[Launch]] = {name: [] for name in roster}
    absent = {seat.instance.role for seat in placement.seats if seat.node not in roster}
    groups: dict[str, dict[str, list[Binding]]] = {}
    for seat in placement.seats:
        instance = seat.instance
        if seat.node not in roster or (instance.role in absent and is_group(config, instance.role)):
            continue
        if is_group(config, instance.role):
            groups.setdefault(instance.role, {}).setdefault(seat.node, []).append(seat)
        else:
            incarnation = incarnations.get(instance.name, 0)
            out[seat.node].append(
                Launch(role=instance.role, name=instance.name, devices=list(seat.devices), incarnation=incarnation)
            )
    for role, parts in groups.items():
        incarnation = incarnations.get(f"{role}-0", 0)
        place = SPANNING_ROLES.index(role) + len(SPANNING_ROLES) * (incarnation % PORTS_PER_ROLE)
        for node, launch in _group(role, parts, roster, place, incarnation, secret):
            out[node].append(launch)
    return out


def _group(
    role: str,
    parts: Mapping[str, Sequence[Binding]],
    roster: Mapping[str, NodeRegistration],
    place: int,
    incarnation: int,
    secret: bytes,
) -> Iterator[tuple[str, Launch]]:
    """The launches of one group, whose nodes are in the order of its ranks. They meet at the first, at port number `place`."""
    first = roster[next(iter(parts))]
    key = hashlib.blake2b(f"{role}/{incarnation}".encode(), key=secret, digest_size=32).digest()
    meeting = Rendezvous(host=first.address, port=first.ports[place], key=key) if len(parts) > 1 else None
    for node, seats in parts.items():
        yield (
            node,
            Launch(
                role=role,
                name=seats[0].instance.name,
                ranks=[seat.instance.rank for seat in seats],
                devices=[device for seat in seats for device in seat.devices],
                incarnation=incarnation,
                rendezvous=meeting,
            ),
        )
