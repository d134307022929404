"""The members of one epoch, connected (`WeightGroup`), and how buckets move between two of them (`Link`): what transports are.

`rendezvous` opens a group by the name of its transport.

Nothing moves before the sender announces it (`announce`, `await_announcement`). A receiver may therefore be posted a whole
training step ahead: it occupies no device stream, and deadlines count from the announcement.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import torch

from runtime.types import PolicyVersion
from runtime.weights.plan import GroupAddress, Manifest


class Transfer(Protocol):
    """A bucket under way."""

    def wait(self, timeout: float) -> int | None:
        """Return when the buffer may be reused (sender) or is filled (receiver). Raises RuntimeError, also after `timeout`.

        A receiver is given the xxh3-64 of what its buffer holds before the trailer, where that was taken on the way, else None.
        """


class Link(ABC):
    """A sender, rank 0 of the link, and the receivers. All move the same buckets in the same order, each from one thread."""

    sent_bytes = 0
    """Rank 0: what went to each receiver so far."""

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Memory, uint8 [nbytes], out of which rank 0 can send."""
        return torch.empty(nbytes, dtype=torch.uint8)

    @abstractmethod
    def send(self, index: int, buffer: torch.Tensor) -> Transfer:
        """Rank 0: start to move bucket `index`, `buffer` (uint8, host memory), to all others. Raises RuntimeError."""

    @abstractmethod
    def receive(self, index: int, buffer: torch.Tensor) -> Transfer:
        """The others: start to fill `buffer`, which has the bucket's size. Raises RuntimeError."""

    def bound(self, seconds: float) -> None:  # noqa: B027 - most links can be ended at any moment
        """No bucket that starts to move from now on holds a thread for longer than `seconds`, even if `abort` cannot end it."""

    @abstractmethod
    def abort(self) -> None:
        """Leave for good: whoever waits for a transfer is freed. Idempotent, from any thread."""


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

    def report_failure(self, message: str) -> None:  # noqa: B027 - a sender that is alone has nobody to tell
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
