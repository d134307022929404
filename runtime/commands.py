"""Commands to a role. `services.rpc.contract` has a row for each: its deadline, and which ranks of a group get it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol, TypeVar

from msgspec import Struct

from runtime.status import Status
from runtime.types import Command, LogprobRequest, PolicyVersion, StepResult, TrainGroup, ValueRequest
from runtime.weights.plan import GroupAddress, Manifest

# ---- A role as the coordinator sees it. `services.rpc.client` implements it over gRPC, tests in memory

R = TypeVar("R")


HANDED_OVER = "handed over"
"""The message of a cancellation that does not withdraw a call: the process goes on, and another caller asks for the answer."""


class RolePort(Protocol):
    """A process, or a group of ranks that live and die together. After a loss a replacement may come, with the next
    incarnation. Only the register calls `when_lost` and `give_up`."""

    name: str
    incarnation: int
    machine: str
    """The machine of the process, or of the first rank: `os_process.machine()`."""
    machines: Mapping[str, str]
    """The machines of all its processes, by name, in order: those of a trainer send weights, those of a rollout receive."""

    def post(self, command: Command[R]) -> Coroutine[Any, Any, R]:
        """Send a command now; the returned coroutine waits for the answer. The process carries out data commands in the order
        of these calls, and control commands before them. Awaiting may be cancelled. Raises DeadlineExceeded after the command's
        deadline, and ServiceFault if the process failed."""

    async def call(self, command: Command[R]) -> R:
        """Send a command when awaited, and wait for the answer."""

    def acknowledge(self, command: Command[Any]) -> None:
        """Confirm that the answer to `command` is in the ledger. Until then the process keeps its answers about groups under
        training, and to Apply, for a coordinator that asks again."""

    async def status(self) -> Status:
        """Return the process's status. The process answers while it computes."""

    def when_lost(self, notify: Callable[[str], None]) -> None:
        """Call `notify(reason)` once the connection is lost, at once if it is lost already."""

    def give_up(self, reason: str) -> None:
        """Stop calling the process: every current and later call raises Unreachable. Idempotent."""


class Priority(enum.IntEnum):
    """The priority of a command: control commands are carried out before data commands."""

    CONTROL = 0
    DATA = 1


class Level(enum.IntEnum):
    """The memory that a rollout has allocated."""

    ASLEEP = 0
    WEIGHTS = 1
    AWAKE = 2  # weights, keys and values


class SetLevel(Command[None], frozen=True):
    """Allocate or free memory to reach a `Level`; answered when done. Sleep ends generation; with `keeps` it goes on after."""

    level: int
    keeps: bool = False


class Onload(Command[None], frozen=True):
    """Bring back to the device what Offload took off it. Without Offload this does nothing."""


class Offload(Command[None], frozen=True):
    """Take state off the device, as far as the configuration says. Onload brings it back."""


class PeerAddress(Struct, frozen=True):
    """A serving process, and how one gateway calls it with `token`. `slots`: how many requests it serves at once."""

    name: str
    incarnation: int
    address: str
    machine: str
    slots: int
    token: str = ""


class UpdateEndpoints(Command[None], frozen=True):
    """Send calls to these rollouts, and episodes to these environment processes, from now on. `key`: the key with which
    programs ask for tasks; empty: no key is needed."""

    rollouts: tuple[PeerAddress, ...]
    environments: tuple[PeerAddress, ...] = ()
    key: str = ""


class FinishGroup(Command[None], frozen=True):
    """The trainer waits for this group alone: treat its episodes as `services.environment.NAME.slow` says."""

    group_id: int


class WeightGroupReady(Struct, frozen=True):
    address: GroupAddress
    manifest: Manifest


class InitWeightGroup(Command[WeightGroupReady], frozen=True):
    """Open the rendezvous of a new epoch, as its rank 0. A rollout gets it to send its version on."""

    epoch: int
    names: tuple[str, ...]  # of the rollouts' processes, in order
    machines: tuple[str, ...]  # of the senders and then the rollouts, as `runtime.weights.plan.shared_machines` returns them


class JoinWeights(Command[None], frozen=True):
    """Join the group of `address.epoch`; answered when it is connected. Rollouts get it, with the rank of their first worker,
    and the trainer's ranks except rank 0; sending ranks and a rollout's further processes replace `address.rank`."""

    address: GroupAddress
    manifest: Manifest


class WeightsReceived(Struct, frozen=True):
    """The phases of a reception, from the sender's announcement on, as consecutive seconds."""

    wait_seconds: float = 0.0  # for buckets: until gathered, or until the network brings them
    copy_seconds: float = 0.0  # to copy buckets out of another process's memory
    hash_seconds: float = 0.0  # for the buckets' checksums
    stage_seconds: float = 0.0  # for the engine to stage them


class OfVersion(Command[R], frozen=True):
    """A command about one version of the weights, in one epoch of the group."""

    version: PolicyVersion
    epoch: int


class ReceiveWeights(OfVersion[WeightsReceived], frozen=True):
    """Receive `version` beside the weights in use; answered when it is complete and its checksums match."""


class WeightsCommitted(Struct, frozen=True):
    pause_seconds: float


class CommitWeights(OfVersion[WeightsCommitted], frozen=True):
    """Swap to the received version between two decode steps."""


class AbortWeights(OfVersion[None], frozen=True):
    """Drop the unfinished `version` and leave the epoch's group."""


class WeightsSent(Struct, frozen=True):
    bytes: int
    seconds: float
    gather_seconds: float = 0.0


class SendWeights(OfVersion[WeightsSent], frozen=True):
    """Gather the weights after the commands before, and send them while later commands run."""


class ResendWeights(OfVersion[WeightsSent], frozen=True):
    """Send the gathered or received buckets of `version` again, whatever the engine does. They are kept until the next version.
    Raises ServiceFault, phase "snapshot", if they are gone."""


class Restore(Command[None], frozen=True):
    """Go on from the checkpoint `folder`, whose encoded Position is `place`, as `incarnation`. The first command to a group
    that does not begin with the given model."""

    folder: str
    place: bytes = b""
    incarnation: int = 0


class BeginStep(Command[None], frozen=True):
    step: int


class Accumulate(Command[None], frozen=True):
    """Add the gradient of `groups`; each data-parallel leader gets a share of them. `last`: they complete the batch."""

    step: int
    groups: list[TrainGroup]
    last: bool = False


class Apply(Command[StepResult], frozen=True):
    """Normalise over all accumulated groups, clip, and step the optimizer: the weights become those of step + 1.

    `probes`, to the trainer: encoded groups, sampled with the weights before the update. The result's are in their order."""

    step: int
    probes: tuple[bytes, ...] = ()


class Keep(Command[None], frozen=True):
    """Copy the state after the commands before, which is that of `version`, into memory that outlives the ranks; answered when
    the copies are whole. A later step goes on beside it."""

    version: PolicyVersion


class Recalled(Struct, frozen=True):
    """The `version` whose state all ranks have found in memory; None, and the `reason`, if there is no such version."""

    version: PolicyVersion | None
    reason: str


class Recall(Command[Recalled], frozen=True):
    """Go on from the newest state in memory: that of `version`, or of the version after it."""

    version: PolicyVersion


class Save(Command[list[str]], frozen=True):
    """Write the state after the commands before into the empty folder `folder`. If nodes share no folder, ranks write parts for
    the encoded Position `place` and answer with the parts' names. Of older parts they keep those of the steps `keep`."""

    folder: str
    place: bytes = b""
    keep: tuple[int, ...] = ()


class Export(Command[None], frozen=True):
    """Write the policy as a Hugging Face folder."""

    folder: str


class ComputeValues(Command[list[bytes]], frozen=True):
    """Compute the critic's values for a batch of `ValueRequest`s: one answer each, in order."""

    groups: list[ValueRequest]


class ComputeLogprobs(Command[list[bytes]], frozen=True):
    """Compute a reference group's log-probabilities for a batch of `LogprobRequest`s: one answer each, in order."""

    groups: list[LogprobRequest]
