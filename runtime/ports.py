"""What the coordinator asks of each role. `services.rpc.client` implements these over gRPC; tests implement them in memory.

Every method has a deadline of its own (the client's configuration), raises DeadlineExceeded when it passes, ServiceFault
when the service failed or is gone, and may be cancelled.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from runtime.commands import Level, WeightsSent
from runtime.status import Status
from runtime.types import (
    GeneratedGroup,
    GroupRequest,
    LogprobRequest,
    PolicyVersion,
    ScoreRequest,
    Scores,
    StepResult,
    TrainGroup,
    ValueRequest,
)
from runtime.weights.plan import GroupAddress, Manifest

T = TypeVar("T")
Answer = Coroutine[Any, Any, T]


class WeightMember(Protocol):
    """Anything that is a member of the publication group."""

    name: str

    async def abort_weights(self, version: PolicyVersion, epoch: int) -> None:
        """Forget what is staged of `version`, leaving the epoch's group."""


class Replaceable(Protocol):
    """A process, or a group of ranks that live and die together: when it is lost another may come in its place, of the next
    incarnation. Nobody but the register calls these methods."""

    name: str
    incarnation: int

    def when_lost(self, tell: Callable[[str], None]) -> None:
        """Call `tell(why)` once the connection is lost, at once if it is lost already."""

    def give_up(self, reason: str) -> None:
        """Ask nothing of it any more: every call under way, and every later one, raises Unreachable. Idempotent."""


class RolloutPort(WeightMember, Replaceable, Protocol):
    machine: str
    """Where it runs: its `os_process.machine()`."""

    async def status(self) -> Status:
        """What the process says of itself. It answers while it computes."""

    async def join_weights(self, address: GroupAddress, manifest: Manifest) -> None:
        """Join the group of `address.epoch`; returns when the group is connected."""

    async def generate(self, request: GroupRequest) -> GeneratedGroup:
        """All samples of one group."""

    async def cancel(self, group_ids: list[int]) -> None:
        """Withdraw groups; their `generate` calls raise Cancelled."""

    async def receive_weights(self, version: PolicyVersion, epoch: int) -> None:
        """Post the reception of `version` into the staging buffer; returns when it is there whole and its checksums hold."""

    async def commit_weights(self, version: PolicyVersion, epoch: int) -> float:
        """Swap to the staged version between two decode steps; returns the pause in seconds."""

    async def move(self, level: Level) -> None:
        """Take memory, or give it back; returns when that is done. Nothing may be under way."""


class Lendable(Protocol):
    """Has a state on devices that it can give up for a while. Each is done behind the calls before, and changes nothing where
    it was done already."""

    name: str

    def offload(self) -> Answer[None]:
        """Take off the devices what the configuration says; while it is away nothing but `onload` is asked for."""

    def onload(self) -> Answer[None]:
        """Bring it back."""


class RewardPort(Replaceable, Protocol):
    async def score(self, request: ScoreRequest) -> Scores: ...


class ReferencePort(Replaceable, Lendable, Protocol):
    async def logprobs(self, request: LogprobRequest) -> bytes:
        """The encoded `Logprobs`, forwarded opaque to the trainer."""


class UpdatePort(Replaceable, Lendable, Protocol):
    """Trainer and critic. Commands are carried out in the order of these calls, each of which puts its command on its way
    before it returns; what it returns waits for the answer.
    """

    def restore(self, folder: str) -> Answer[None]:
        """Go on from the checkpoint `folder`; without it from the model as it is given. The first command, or none."""

    def begin_step(self, step: int) -> Answer[None]: ...

    def accumulate(self, step: int, groups: list[TrainGroup], last: bool) -> Answer[None]:
        """Add the gradient of `groups`. `last`: they complete the step's batch."""

    def apply(self, step: int) -> Answer[StepResult]:
        """Normalise over everything accumulated, clip, and step the optimizer: the weights become those of step + 1."""

    def save(self, folder: str) -> Answer[None]:
        """Write the state after the commands before into `folder`, which exists and is empty."""


class TrainerPort(WeightMember, UpdatePort, Protocol):
    machines: Mapping[str, str]
    """Where those of its processes run that send weights, by name: each one's `os_process.machine()`."""

    def apply(self, step: int, probes: Sequence[bytes] = ()) -> Answer[StepResult]:
        """Before the update, compare with what the rollouts said of `probes`, which they sampled with the weights as they are:
        the result's `probes` are of these, in their order."""

    async def host_weights(self, epoch: int, names: Sequence[str], transport: str) -> tuple[GroupAddress, Manifest]:
        """Open the rendezvous of a new epoch, as its rank 0. `names` are the trainer's, as one, and the other members' in their
        order; `transport` is one of `runtime.weights.group.TRANSPORTS`."""

    def send_weights(self, version: PolicyVersion, epoch: int) -> Answer[WeightsSent]:
        """Gather the weights after the commands before, and send them: with `publication.overlap` while later commands run."""

    def export(self, folder: str) -> Answer[None]:
        """Write the policy as a Hugging Face folder."""


class CriticPort(UpdatePort, Protocol):
    async def values(self, request: ValueRequest) -> bytes:
        """The encoded `Values`, forwarded opaque to trainer and critic."""
