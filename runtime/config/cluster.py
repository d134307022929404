"""The machines, the network between them, and the deadlines."""

from __future__ import annotations

from typing import Literal

from runtime.config.base import NonNegative, Port, Seconds, Section


class Node(Section, frozen=True):
    """A machine."""

    name: str
    """The name of its agent. Unique."""
    devices: NonNegative | None = None
    """Number of its accelerators. Null: as many as its agent finds."""
    supernode: str = ""
    """Nodes of one supernode are close to each other. A group of ranks is placed in one supernode, if it fits. Empty: none."""


class Cluster(Section, frozen=True):
    """The nodes of a run, each with an agent (`python -m sluice.node CONFIG`)."""

    nodes: Literal["auto"] | list[Node] = "auto"
    """`auto`: each node whose agent joins. A list: no other node may join."""
    min_nodes: NonNegative = 0
    """The run starts when so many nodes have joined; at most the number of named nodes. Rollouts, rewards and references
    without room on them start on nodes that join later. 0: all named nodes; with `auto`, one."""
    shared_folder: bool = True
    """Whether all nodes share one folder at `run.dir`. `false`: each node has its own folder, with logs, spans, its part of
    checkpoints and a copy of each model. Only the coordinator's node has ledger and data."""


class Tls(Section, frozen=True):
    """Your own certificates, PEM. Each node has its own files at these paths. Each new connection reads the files again."""

    ca: str
    """A file with the trusted certificate authorities."""
    certificate: str
    """A file with this node's certificate, for servers and clients and for the node's addresses, followed by the intermediate
    certificates."""
    key: str
    """A file with the private key, without a password."""


class Network(Section, frozen=True):
    """Addresses, ports and access."""

    interface: str = "127.0.0.1"
    """The address of all services. On several nodes: a network (`10.1.0.0/16`) or an interface (`eth0`), in which each node
    finds its own address, or `auto`: the address by which the node reaches the coordinator."""
    port_range: tuple[Port, Port] | None = None
    """First and last port of the services. The ports of gloo's and NCCL's own connections cannot be chosen. Null: any free
    ports."""
    security: Literal["auto", "token", "tls", "none"] = "auto"
    """Who may call a process of the run. `token`: callers with the run's secret, or a key derived from it. `tls`: the same,
    with certificates on both sides and encryption (TLS 1.3). `auto`: `tls`, but gateways use plain HTTP if `interface` is
    loopback and there is no section `tls`. `none`: all callers that reach the process."""
    tls: Tls | None = None
    """Null: the run creates its own certificates."""


StallPhase = Literal["loop", "decode", "forward", "backward", "reduce", "update", "command"]


class Deadlines(Section, frozen=True):
    """Deadlines of processes, commands and phases."""

    start: Seconds = 120.0
    """Of a process, from its start to its registration. Of a run without rollouts, or a request without a reward or reference
    service, until one is back. Of a trainer or critic to be back, after the longest backoff, and to read its checkpoint."""
    keepalive: Seconds = 30.0
    """Of a process that answers no ping, and a rollout without status reports. The run continues without the process, which is
    started again; a rank with its group, a coordinator alone."""
    watchdog: dict[StallPhase, Seconds] = {}
    """By phase: longest time without progress. The agent writes the process's stacks to its log, ends it and starts it again.
    `loop` is the event loop, `decode` a rollout's next token, `forward` and `backward` a micro-batch, `reduce` and `update` an
    optimizer's, `command` the rest of a command. Default of a phase: ten times its longest time in that process, at least 10 s.
    Its first ten times, and a process that loads, have `start`."""
    coordinator: Seconds = 120.0
    """Of a lost coordinator to return. Until then agents keep their processes, and the processes keep their state."""
    generate: Seconds = 600.0
    """Of a group's generation, including the wait for a slot."""
    episode: Seconds = 1800.0
    """Of a group's episodes, from its dispatch. Then they are closed as they are. A call within an episode has `generate`."""
    score: Seconds = 120.0
    """Of a group's scores, by rules or model, and its reference log-probabilities; on engine megatron, of those of all groups
    in one request."""
    train: Seconds = 600.0
    """Of a command of a step, and of a group's values, which may have to wait."""
    save: Seconds = 300.0
    """Of a checkpoint or an export."""
    stop: Seconds = 8.0
    """Of a process to end after its order to stop. If more than 9: also of a run to end after Ctrl-C, including saving."""
