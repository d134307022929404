"""Commands to a role that are more than one value. The same Structs are the actors' messages and what rank 0 relays."""

from __future__ import annotations

import enum

from msgspec import Struct

from runtime.types import LogprobRequest, PolicyVersion, TrainGroup, ValueRequest
from runtime.weights.plan import GroupAddress, Manifest


class Command(Struct, frozen=True, tag=True):
    """Base of all: tagged by its name, so that a union of commands decodes without ambiguity."""


PartKey = tuple[str, int, int]
"""Names a part of the data: its kind, step and part. The same for all ranks, each of which has its own share of it."""


class Cancel(Command, frozen=True):
    group_ids: list[int]


class Level(enum.IntEnum):
    """What of its memory a rollout has."""

    ASLEEP = 0
    WEIGHTS = 1
    AWAKE = 2  # and keys and values


class Move(Command, frozen=True):
    """Take memory, or give it back, to come to a `Level`."""

    level: int


class Onload(Command, frozen=True):
    """Bring back to the device what Offload took off it. Nothing is done where nothing was taken."""


class Offload(Command, frozen=True):
    """Give the device up for a while, as far as the configuration says: what is taken off it comes back with Onload."""


class HostWeights(Command, frozen=True):
    """`world_size` counts the trainer as one, the first, however many of its ranks send."""

    epoch: int
    world_size: int
    transport: str
    names: tuple[str, ...] = ()  # of those that are counted, in their order


class WeightsHosted(Command, frozen=True):
    address: GroupAddress
    manifest: Manifest


class JoinWeights(Command, frozen=True):
    address: GroupAddress
    manifest: Manifest


class ReceiveWeights(Command, frozen=True):
    version: PolicyVersion
    epoch: int


class CommitWeights(Command, frozen=True):
    version: PolicyVersion
    epoch: int


class WeightsCommitted(Command, frozen=True):
    pause_seconds: float


class AbortWeights(Command, frozen=True):
    version: PolicyVersion
    epoch: int


class SendWeights(Command, frozen=True):
    version: PolicyVersion
    epoch: int


class MeetWeights(Command, frozen=True):
    """To the ranks that send besides rank 0: join the group that rank 0 hosts."""

    address: GroupAddress


class ResendWeights(Command, frozen=True):
    """To them: send once more what the buckets hold, as rank 0 does."""

    version: PolicyVersion
    epoch: int


class WeightsSent(Command, frozen=True):
    bytes: int
    seconds: float


class Restore(Command, frozen=True):
    """Go on from the checkpoint `folder`: the first command to a group that does not begin with the model as it is given."""

    folder: str


class BeginStep(Command, frozen=True):
    step: int


class Accumulate(Command, frozen=True):
    """`part` numbers the calls of a step: every data-parallel leader gets each part, perhaps without groups. `last`: nothing
    more comes before Apply.
    """

    step: int
    part: int
    groups: list[TrainGroup]
    last: bool = False

    @property
    def key(self) -> PartKey:
        return type(self).__name__, self.step, self.part


class Apply(Command, frozen=True):
    step: int


class ApplyProbed(Apply, frozen=True):
    """To the trainer. `probes`: encoded groups that the rollouts sampled with the weights as they are before the update."""

    probes: list[bytes] = []


class ComputeValues(Command, frozen=True):
    """`part` numbers these calls: every data-parallel leader of the critic gets each part, perhaps without groups."""

    part: int
    groups: list[ValueRequest]

    @property
    def key(self) -> PartKey:
        return type(self).__name__, 0, self.part


class ComputeLogprobs(Command, frozen=True):
    """`part` numbers these calls: every data-parallel leader of the reference gets each part, perhaps without groups."""

    part: int
    groups: list[LogprobRequest]

    @property
    def key(self) -> PartKey:
        return type(self).__name__, 0, self.part


Shared = Accumulate | ComputeValues | ComputeLogprobs
"""Commands of which every data-parallel leader gets its own share of the groups."""


class Save(Command, frozen=True):
    """Write the state into `folder`, which exists and is empty."""

    folder: str


class Export(Command, frozen=True):
    folder: str
