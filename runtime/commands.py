"""Commands to a role. `services.rpc.contract` has a row for each: its deadline, and which ranks of a group get it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol, TypeVar

from msgspec import Struct

from runtime.status import Status
from runtime.types import Command, LogprobRequest, PolicyVersion, StepResult, TrainGroup, ValueRequest
from runtime.weights.plan import GroupAddress, Manifest

# ---- Ports
#
# What the coordinator sees of a role. `services.rpc.client` implements it over gRPC; tests implement it in memory.

R = TypeVar("R")


class RolePort(Protocol):
    """A process, or a group of ranks that live and die together: when it is lost another may come in its place, of the next
    incarnation. Nobody but the register calls these methods."""

    name: str
    incarnation: int
    machine: str
    """Where it, or its first rank, runs: `os_process.machine()`."""

    def post(self, command: Command[R]) -> Coroutine[Any, Any, R]:
        """Put a command on its way now; what is returned waits for the answer. Commands of data are carried out in the order of
        these calls, those of control before them.

        Awaiting raises DeadlineExceeded when the command's deadline passes, and ServiceFault when the process failed or is
        gone. It may be cancelled.
        """

    async def call(self, command: Command[R]) -> R:
        """`post`, once this is awaited."""

    def acknowledge(self, command: Command[Any]) -> None:
        """What was answered to `command` is in the ledger. Until then the process keeps its answers about groups under
        training, and to Apply, for a coordinator that asks again."""

    async def status(self) -> Status:
        """What the process says of itself. It answers while it computes."""

    def when_lost(self, tell: Callable[[str], None]) -> None:
        """Call `tell(why)` once the connection is lost, at once if it is lost already."""

    def give_up(self, reason: str) -> None:
        """Ask nothing of it any more: every call under way, and every later one, raises Unreachable. Idempotent."""


class TrainerPort(RolePort, Protocol):
    machines: Mapping[str, str]
    """Where those of its processes run that send weights, by name."""


class Priority(enum.IntEnum):
    """Of a command: those of control are carried out before those of data."""

    CONTROL = 0
    DATA = 1


class Level(enum.IntEnum):
    """What of its memory a rollout has."""

    ASLEEP = 0
    WEIGHTS = 1
    AWAKE = 2  # and keys and values


class Move(Command[None], frozen=True):
    """Take memory, or give it back, to come to a `Level`; answered when that is done. What is being generated ends as the
    rollout goes to sleep, or, with `keeps`, goes on once it is awake."""

    level: int
    keeps: bool = False


class Onload(Command[None], frozen=True):
    """Bring back to the device what Offload took off it. Nothing is done where nothing was taken."""


class Offload(Command[None], frozen=True):
    """Give the device up for a while, as far as the configuration says: what is taken off it comes back with Onload."""


# ------------------------------------------------------------------------------------------------------- gateways


class PeerAddress(Struct, frozen=True):
    """A process that serves, and how one gateway calls it: `token` is what its calls carry. `slots`: what it does at once."""

    name: str
    incarnation: int
    address: str
    machine: str
    slots: int
    token: str = ""


class UsePeers(Command[None], frozen=True):
    """From now on have calls answered by these rollouts, and episodes played by these processes of environments. `key`: by
    which programs ask for tasks; empty: they need none."""

    rollouts: tuple[PeerAddress, ...]
    environments: tuple[PeerAddress, ...] = ()
    key: str = ""


class Hurry(Command[None], frozen=True):
    """The trainer waits for this group alone: its episodes are dealt with as `services.environment.NAME.slow` says."""

    group_id: int


# ------------------------------------------------------------------------------------------------------- weight sync


class WeightsHosted(Struct, frozen=True):
    address: GroupAddress
    manifest: Manifest


class HostWeights(Command[WeightsHosted], frozen=True):
    """Open the rendezvous of a new epoch, as its rank 0. `world_size` counts the trainer as one, the first, however many of its
    ranks send. `transport`: one of `runtime.weights.rendezvous.TRANSPORTS`. A rollout gets it that is to bring others the
    version which it has."""

    epoch: int
    world_size: int
    transport: str
    names: tuple[str, ...] = ()  # of those that are counted, in their order


class JoinWeights(Command[None], frozen=True):
    """Join the group of `address.epoch`; answered when it is connected. Rollouts get it, and the trainer's ranks except
    rank 0: those of them that send weights replace `address.rank` by their own."""

    address: GroupAddress
    manifest: Manifest


class WeightsReceived(Struct, frozen=True):
    """Where the time of a reception went, from the sender's announcement on: seconds, one after the other."""

    wait_seconds: float = 0.0  # for buckets: as they are gathered, or as the network brings them
    copy_seconds: float = 0.0  # of buckets out of another process's memory
    hash_seconds: float = 0.0  # of their checksums
    stage_seconds: float = 0.0  # of what the engine makes of them


class ReceiveWeights(Command[WeightsReceived], frozen=True):
    """Receive `version` beside the weights in use; answered when it is there whole and its checksums hold."""

    version: PolicyVersion
    epoch: int


class WeightsCommitted(Struct, frozen=True):
    pause_seconds: float


class CommitWeights(Command[WeightsCommitted], frozen=True):
    """Swap to the received version between two decode steps."""

    version: PolicyVersion
    epoch: int


class AbortWeights(Command[None], frozen=True):
    """Forget what is on its way of `version`, leaving the epoch's group."""

    version: PolicyVersion
    epoch: int


class WeightsSent(Struct, frozen=True):
    bytes: int
    seconds: float
    gather_seconds: float = 0.0


class SendWeights(Command[WeightsSent], frozen=True):
    """Gather the weights after the commands before, and send them, while later commands run."""

    version: PolicyVersion
    epoch: int


class ResendWeights(Command[WeightsSent], frozen=True):
    """Send what was gathered, or received, of `version` once more, whatever the engine does meanwhile: it is kept until the
    next version is. ServiceFault, phase "snapshot", when it is not."""

    version: PolicyVersion
    epoch: int


# ----------------------------------------------------------------------------------------------- trainer and critic


class Restore(Command[None], frozen=True):
    """Go on from the checkpoint `folder`, whose encoded Position is `place`, as `incarnation`: the first command to a group
    that does not begin with the model as it is given."""

    folder: str
    place: bytes = b""
    incarnation: int = 0


class BeginStep(Command[None], frozen=True):
    step: int


class Accumulate(Command[None], frozen=True):
    """Add the gradient of `groups`, of which each data-parallel leader gets its share. `last`: they complete the batch."""

    step: int
    groups: list[TrainGroup]
    last: bool = False


class Apply(Command[StepResult], frozen=True):
    """Normalise over everything accumulated, clip, and step the optimizer: the weights become those of step + 1.

    `probes`, to the trainer: encoded groups that the rollouts sampled with the weights as they are before the update. The
    result's `probes` are of these, in their order.
    """

    step: int
    probes: tuple[bytes, ...] = ()


class Save(Command[list[str]], frozen=True):
    """Write the state after the commands before into `folder`, which exists and is empty. Where nodes share none, ranks write
    parts for the Position `place`, encoded, and answer with their names; of others those of the steps `keep` count."""

    folder: str
    place: bytes = b""
    keep: tuple[int, ...] = ()


class Export(Command[None], frozen=True):
    """Write the policy as a Hugging Face folder."""

    folder: str


class ComputeValues(Command[list[bytes]], frozen=True):
    """What a critic makes of all `ValueRequest`s that are asked together: an answer each, in their order."""

    groups: list[ValueRequest]


class ComputeLogprobs(Command[list[bytes]], frozen=True):
    """What a reference of several ranks makes of all `LogprobRequest`s that are asked together: an answer each, in order."""

    groups: list[LogprobRequest]
