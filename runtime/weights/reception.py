"""One version on its way to a receiver: who is waited for and how long, and what is wrong with what came."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from runtime.errors import Cancelled, DeadlineExceeded, ServiceFault, SluiceError
from runtime.types import PolicyVersion
from runtime.weights.gloo_mesh import reason
from runtime.weights.group import WeightGroup
from runtime.weights.link import Transfer
from runtime.weights.plan import TRAILER, Bucket
from runtime.weights.sender import DEPTH, checksum, wait_until

BufferOf = Callable[[int], torch.Tensor]


class Reception:
    """To be carried out in a thread: `await_sender`, then `take`. A failure of either aborts the group, but for checksums."""

    def __init__(self, group: WeightGroup, buckets: Sequence[Bucket], version: PolicyVersion, deadline: float):
        self.version = version
        self._group = group
        self._buckets = buckets
        self._deadline = deadline  # seconds from the announcement to the last bucket
        self.began = 0.0  # the announcement, on the monotonic clock

    @property
    def give_up(self) -> float:
        """When every bucket must have arrived, on the monotonic clock."""
        return self.began + self._deadline

    def await_sender(self) -> None:
        """Block until the sender's announcement. Raises ServiceFault, phase "prepare", or Cancelled."""
        group, version = self._group, self.version
        try:
            group.await_announcement(version)
        except RuntimeError as error:
            if group.aborted:
                raise Cancelled(f"{group.name}: version {version} was withdrawn before its transfer") from error
            group.abort()
            raise ServiceFault(group.name, "prepare", f"the sender of version {version} is lost: {reason(error)}") from error
        self.began = time.monotonic()
        group.bound(self._deadline)

    def take(self, buffer_of: BufferOf) -> None:
        """Receive every bucket, also after a bad one: the group stays usable.

        `buffer_of(index)` is where a bucket goes: uint8, of its size.

        Raises ServiceFault of phase "transfer" (DeadlineExceeded when late), or "verify", naming the buckets; Cancelled.
        """
        pending: list[Transfer] = []
        wrong: list[str] = []
        posted = index = 0
        try:
            for index in range(len(self._buckets)):
                while posted < min(index + DEPTH, len(self._buckets)):
                    pending.append(self._group.receive(posted, buffer_of(posted), self._buckets[posted].root))
                    posted += 1
                digest = wait_until(pending.pop(0), self.give_up)
                wrong += self._faults(index, buffer_of(index), digest)
        except RuntimeError as error:
            raise self._failure(index, error) from error
        if wrong:
            raise ServiceFault(self._group.name, "verify", f"version {self.version}: {'; '.join(wrong)}", self._deadline)

    def _failure(self, index: int, error: RuntimeError) -> SluiceError:
        group, version = self._group, self.version
        if group.aborted:
            return Cancelled(f"{group.name}: version {version} was withdrawn during its transfer")
        group.abort()
        source = "" if (called := group.called(self._buckets[index].root)) is None else f" from {called}"
        message = f"bucket {index} of {len(self._buckets)} of version {version} did not arrive{source}: {reason(error)}"
        late = time.monotonic() >= self.give_up
        return (DeadlineExceeded if late else ServiceFault)(group.name, "transfer", message, self._deadline)

    def _faults(self, index: int, buffer: torch.Tensor, digest: int | None) -> list[str]:
        """`digest`: the checksum of what `buffer` holds, unless it is still to be taken."""
        bucket = self._buckets[index]
        sent, packed = TRAILER.unpack_from(buffer.numpy().data, bucket.data_bytes)
        where = f"bucket {index} of {len(self._buckets)}"
        if sent != (checksum(bucket, buffer) if digest is None else digest):
            return [f"{where}: the checksum does not match"]
        if packed != self.version.pack():
            return [f"{where} is of version {PolicyVersion.unpack(packed)}"]
        return []
