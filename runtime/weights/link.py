"""How buckets move from one sender to all receivers: the base of every transport whose members meet in a store."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import torch


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
