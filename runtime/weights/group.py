"""The members of one epoch, connected: the base of all transports, and the way to one of each by its name.

`host` opens a rendezvous and `join` enters it; both return when all are connected, or raise ServiceFault with the ranks that
are missing.

Nothing moves before the sender announces it (`announce`, `await_announcement`). A receiver may therefore be posted a whole
training step ahead: it occupies no device stream, and deadlines count from the announcement.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from runtime.errors import UserError
from runtime.process.network import PortRange
from runtime.types import PolicyVersion
from runtime.weights.link import Transfer
from runtime.weights.plan import GroupAddress, Manifest

BACKENDS = ("gloo", "nccl", "hccl")
TRANSPORTS = ("collective", "shared_memory", "files")


class WeightGroup(ABC):
    """The first ranks send, each its own buckets, and the others receive them all; rank 0 leads. Every member makes the same
    calls in the same order, from one thread."""

    def __init__(self, address: GroupAddress, name: str):
        self.name = name
        self.epoch = address.epoch
        self.rank = address.rank
        self.world_size = address.world_size
        self.aborted = False

    @property
    @abstractmethod
    def sent_bytes(self) -> int:
        """A sender: what went from here to each receiver so far."""

    def describe(self, manifest: Manifest) -> None:  # noqa: B027 - most transports move bytes, whatever they are
        """What the buckets hold, before they are sent or received."""

    @abstractmethod
    def announce(self, version: PolicyVersion) -> None:
        """The senders: the transfer of `version` begins, which rank 0 tells the receivers."""

    @abstractmethod
    def await_announcement(self, version: PolicyVersion) -> None:
        """The receivers: block until `announce`, `abort`, or the loss of rank 0. Raises RuntimeError for the latter two."""

    @abstractmethod
    def send(self, index: int, buffer: torch.Tensor) -> Transfer:
        """Its root: start to move bucket `index`, `buffer` (uint8, host memory). Raises RuntimeError, as does its `wait`."""

    @abstractmethod
    def receive(self, index: int, buffer: torch.Tensor, root: int) -> Transfer:
        """The receivers: start to fill `buffer`, which has the bucket's size. Raises RuntimeError, as does its `wait`."""

    def settle(self, nbytes: int, give_up: float) -> int:
        """The senders: this one's part of the transfer is taken, of `nbytes`.

        Rank 0 blocks until those of all senders are, at most until the monotonic time `give_up`, and returns the bytes of all.
        Raises RuntimeError, which names the sender and says what became of its part.
        """
        return nbytes

    def forfeit(self, message: str) -> None:  # noqa: B027 - a sender that is alone has nobody to tell
        """The senders but rank 0: tell rank 0 that this one's part has failed."""

    def called(self, root: int) -> str | None:
        """What sender `root` is called, where there are several."""
        return None

    def bound(self, seconds: float) -> None:  # noqa: B027 - most transports can be ended at any moment
        """No bucket that starts to move from now on holds a thread for longer than `seconds`, even if `abort` cannot end it."""

    @abstractmethod
    def abort(self) -> None:
        """Leave for good: threads blocked here fail at once, the peers as soon as they see it. Idempotent, from any thread.

        It is also how a group ends in order, but only once the last transfer is verified everywhere: what has arrived may
        fail when its connection closes. A process should leave its groups before it exits.
        """


class PendingGroup(ABC):
    """A rendezvous that is open until `connect` returns or fails, `abort` is called, or this object is dropped."""

    address: GroupAddress
    """Rank 0's; the others are given it with their own rank in it."""

    @abstractmethod
    def connect(self) -> WeightGroup:
        """Block until every member is there; once only.

        Raises ServiceFault, phase "rendezvous", with the ranks that did not come within the address's timeout.
        """

    @abstractmethod
    def abort(self) -> None:
        """Fail `connect`, here and, where rank 0 does it, at everyone who came already. Idempotent, from any thread."""


def host(
    epoch: int,
    world_size: int,
    interface: str,
    backend: str,
    timeout: float,
    name: str = "sender",
    transport: str = "collective",
    folder: str = "",
    full_every: int = 0,
    port_range: PortRange | None = None,
    names: Sequence[str] = (),
    senders: int = 1,
) -> PendingGroup:
    """Open the rendezvous of `epoch` as rank 0, on a free port of `interface`, and of `port_range`; does not block.

    `timeout` is in seconds. The first `senders` of the `world_size` members send; `names` is what messages call the members,
    by rank. `files` meets in `folder` instead, and has neither interface nor backend. With `full_every` versions are deltas,
    one of so many being whole. Raises UserError for an unknown interface, backend or transport, a range without a free port, or
    a folder that cannot be written.
    """
    from runtime.weights import files, store_group

    if backend not in BACKENDS:
        raise UserError(f"publication.backend: {backend!r} is not one of {', '.join(BACKENDS)}")
    if transport not in TRANSPORTS:
        raise UserError(f"publication.transport: {transport!r} is not one of {', '.join(TRANSPORTS)}")
    if transport == "files":
        if senders > 1:
            raise UserError(f"publication.senders: transport files has one sender, not {senders}; must be one")
        return files.host(epoch, world_size, timeout, name, folder, full_every, names)
    return store_group.host(
        epoch, world_size, interface, backend, timeout, name, transport, full_every, port_range, names, senders
    )


def join(address: GroupAddress, name: str = "", interface: str = "") -> WeightGroup:
    """Enter the rendezvous as `address.rank`; blocks until every member is there.

    `interface` defaults to the local address from which `address.host` is reached. Raises ServiceFault, phase "rendezvous".
    """
    from runtime.weights import files, store_group

    name = name or f"rank {address.rank}"
    return files.join(address, name) if address.transport == "files" else store_group.join(address, name, interface)
