"""The machines, the network between them, and after which time something counts as failed."""

from __future__ import annotations

from typing import Literal

from runtime.config.base import NonNegative, Port, Seconds, Section


class Node(Section, frozen=True):
    """A machine."""

    name: str
    """The one that its agent gives; each is there once."""
    devices: NonNegative | None = None
    """Its accelerators. Null: as many as its agent finds."""
    supernode: str = ""
    """Nodes of one are near each other, and a group of ranks is put into one that holds it. Empty: none."""


class Cluster(Section, frozen=True):
    """The machines of a run, each with an agent (`python -m sluice.node CONFIG`)."""

    nodes: Literal["auto"] | list[Node] = "auto"
    """`auto`: the run's machines are those whose agents come. Or a list: nobody else may come."""
    min_nodes: NonNegative = 0
    """The run starts once so many are there, at most as many as are named. Rollouts, rewards and references for which these
    have no room start with the nodes that come later. 0: all that are named; with `auto`, one."""
    shared_folder: bool = True
    """Whether all nodes see one folder at `run.dir`. `false`: each has its own, with logs, spans and its part of checkpoints,
    and a copy of each model; ledger and data are the coordinator's alone."""


class Tls(Section, frozen=True):
    """Certificates of your own, PEM. Each node has its own files at these paths; new connections take them as they are then."""

    ca: str
    """A file with the authorities whose certificates are believed."""
    certificate: str
    """A file with this node's certificate, for servers and clients, and for the addresses by which others reach it; after it
    those between it and the authority."""
    key: str
    """A file with its private key, without a password."""


class Network(Section, frozen=True):
    """Addresses and ports, and who may connect."""

    interface: str = "127.0.0.1"
    """The address that all services bind to, and by which they are reached; on several nodes a network (`10.1.0.0/16`) or an
    interface (`eth0`), by which each node finds its own, or `auto`: the one by which it reaches the coordinator."""
    port_range: tuple[Port, Port] | None = None
    """First and last of the ports that services listen on. The ports of gloo's and NCCL's own connections cannot be chosen.
    Null: any free ones."""
    security: Literal["auto", "token", "tls", "none"] = "auto"
    """Who may call a process of the run. `token`: who knows the run's secret, or a key made of it; `tls`: the same, and both
    ends show certificates and all is encrypted (TLS 1.3); `auto`: `tls`, but gateways speak plain HTTP where `interface` is
    loopback and there is no section `tls`; `none`: anybody who reaches it."""
    tls: Tls | None = None
    """Null: the run makes its own certificates."""


StallPhase = Literal["loop", "decode", "forward", "backward", "reduce", "update", "command"]


class Deadlines(Section, frozen=True):
    """After which something counts as failed."""

    start: Seconds = 120.0
    """A process, from its start to its registration; a run without any rollout, or a request without any reward or reference to
    ask, until one is back; a trainer or critic to be back, after the longest backoff, and to read its checkpoint."""
    silence: Seconds = 30.0
    """A process that answers no ping, or a rollout that tells nothing of itself: the run does without it, and it is started
    again, a rank with its group, a coordinator alone."""
    stall: dict[StallPhase, Seconds] = {}
    """By phase, a process's work without progress: it is ended by its agent, with its stacks in its log, and started again.
    `loop` is its event loop, `decode` a rollout's next token, `forward` and `backward` a micro-batch, `reduce` and `update` an
    optimizer's, `command` the rest of a command. A phase that is not named has ten times the longest that it has taken in that
    process, 10 s at least; the first ten times, and a process that loads, have `start`."""
    coordinator: Seconds = 120.0
    """The return of a coordinator that was lost: until then agents keep their processes, and these what they have."""
    generate: Seconds = 600.0
    """A group's generation, waiting for a slot included."""
    episode: Seconds = 1800.0
    """A group's episodes, from its dispatch on; then they are closed with what is there. A call within one has `generate`."""
    score: Seconds = 120.0
    """A group's scores, by rules or model, and its reference log-probabilities; on engine megatron those of all groups that
    were asked for together."""
    train: Seconds = 600.0
    """A command of a step, and a group's values, for which it may have to wait."""
    save: Seconds = 300.0
    """A checkpoint or an export."""
    stop: Seconds = 8.0
    """The end of a process that was told to stop; and, where it is more than 9, the end of a run after Ctrl-C, saving
    included."""
