"""The sending side of a publication: the trainer's snapshot in flat buckets, sent by a thread while training goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

import torch
import xxhash
from msgspec import Struct

from runtime.errors import DeadlineExceeded, ServiceFault
from runtime.types import PolicyVersion
from runtime.weights import shared as shared_memory
from runtime.weights.gloo_mesh import drop_frames, reason
from runtime.weights.group import WeightGroup
from runtime.weights.link import Transfer
from runtime.weights.plan import TRAILER, Bucket, Manifest, plan_buckets

T = TypeVar("T")

# Buckets under way at once: the next one is hashed (or the last one verified) while one is on the wire.
DEPTH = 2


class SendResult(Struct, frozen=True):
    """`nbytes` as sent to each receiver, trailers included; `seconds` from the announcement to the last bucket."""

    nbytes: int
    seconds: float


class WeightSender:
    """Owns the buckets of one manifest. They outlive epochs: the group is an argument of `send`.

    One set of buckets: `views` waits for the transfer before it, so that a snapshot never overwrites what is being sent.
    Training waits only when a transfer takes longer than a whole step; a second set would cost the model's size again.
    """

    def __init__(self, manifest: Manifest, *, pin: bool = False):
        """`pin` page-locks the buckets, for copies from an accelerator. Raises InvalidMessage for a manifest without a plan."""
        self.buckets = plan_buckets(manifest)
        self._buffers = allocate(self.buckets, pin)
        self._views = views(manifest, self.buckets, self._buffers)
        self._idle = threading.Event()
        self._idle.set()

    def views(self, timeout: float) -> list[torch.Tensor]:
        """The manifest's tensors, in its order, for `TrainEngine.snapshot` to fill.

        Blocks while a transfer reads them; raises DeadlineExceeded after `timeout` seconds.
        """
        if not self._idle.wait(timeout):
            raise DeadlineExceeded("sender", "snapshot", "the transfer before still reads the buckets", timeout)
        return self._views

    def send(self, group: WeightGroup, version: PolicyVersion, deadline: float) -> Future[SendResult]:
        """Send the buckets, stamped with `version`, from a thread; every bucket must be taken within `deadline` seconds.

        On any failure the group is aborted, which fails the receivers too; the future raises ServiceFault, phase "transfer".
        """
        if not self._idle.is_set():
            raise ServiceFault(group.name, "transfer", "the transfer before is not over")
        self._idle.clear()
        return in_thread(f"send-{version}", lambda: self._send(group, version, deadline))

    def _send(self, group: WeightGroup, version: PolicyVersion, deadline: float) -> SendResult:
        began = time.monotonic()
        give_up = began + deadline
        pending: list[Transfer] = []
        taken = 0
        try:
            group.bound(deadline)
            group.announce(version)
            for index, (bucket, buffer) in enumerate(zip(self.buckets, self._buffers, strict=True)):
                stamp(bucket, buffer, version)
                pending.append(group.send(index, buffer))
                if len(pending) == DEPTH:
                    wait_until(pending.pop(0), give_up)
                    taken += 1
            for transfer in pending:
                wait_until(transfer, give_up)
                taken += 1
        except RuntimeError as error:
            group.abort()
            message = f"bucket {taken} of {len(self.buckets)} of version {version} was not taken: {reason(error)}"
            if time.monotonic() >= give_up:
                raise DeadlineExceeded(group.name, "transfer", message, deadline) from error
            raise ServiceFault(group.name, "transfer", message, deadline) from error
        finally:
            self._idle.set()
        return SendResult(sum(bucket.total_bytes for bucket in self.buckets), time.monotonic() - began)


def allocate(buckets: Sequence[Bucket], pin: bool, shared: bool = False) -> list[torch.Tensor]:
    """One zeroed uint8 buffer per bucket, trailer included. Zeroed, because the checksum covers the padding."""
    if shared:
        return [shared_memory.allocate(bucket.total_bytes) for bucket in buckets]
    return [torch.zeros(bucket.total_bytes, dtype=torch.uint8, pin_memory=pin) for bucket in buckets]


def views(manifest: Manifest, buckets: Sequence[Bucket], buffers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The manifest's tensors, in its order, as views into `buffers`."""
    out = []
    for bucket, buffer in zip(buckets, buffers, strict=True):
        for entry in bucket.entries:
            spec = manifest.tensors[entry.tensor]
            flat = buffer[entry.offset : entry.offset + entry.nbytes]
            out.append(flat.view(getattr(torch, spec.dtype)).view(spec.shape))
    return out


def checksum(bucket: Bucket, buffer: torch.Tensor) -> int:
    """xxh3-64 of everything before the trailer."""
    return xxhash.xxh3_64_intdigest(buffer.numpy()[: bucket.data_bytes].data)


def stamp(bucket: Bucket, buffer: torch.Tensor, version: PolicyVersion) -> None:
    TRAILER.pack_into(buffer.numpy().data, bucket.data_bytes, checksum(bucket, buffer), version.pack())


def wait_until(transfer: Transfer, give_up: float) -> None:
    """Wait for `transfer` until the monotonic time `give_up`. Raises RuntimeError."""
    # torch reads a timeout of 0 as none at all.
    transfer.wait(max(give_up - time.monotonic(), 0.001))


def in_thread(name: str, work: Callable[[], T]) -> Future[T]:
    """Run `work` in a thread of its own, which ends with it."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()
    threading.Thread(target=_complete, args=(future, work), name=name, daemon=True).start()
    return future


def _complete(future: Future[T], work: Callable[[], T]) -> None:
    try:
        result = work()
    except BaseException as error:  # noqa: BLE001 - it is the caller's, through the future
        drop_frames(error)
        future.set_exception(error)
    else:
        future.set_result(result)
    del future, work  # the error's traceback holds this frame
