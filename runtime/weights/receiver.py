"""The receiving side of a publication: buckets land in a staging set and are verified whole before the engine sees them."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future

import torch

from runtime.errors import Cancelled, DeadlineExceeded, InvariantViolated, ServiceFault
from runtime.types import PolicyVersion
from runtime.weights.gloo_mesh import reason
from runtime.weights.group import WeightGroup
from runtime.weights.link import Transfer
from runtime.weights.plan import TRAILER, Manifest, plan_buckets
from runtime.weights.sender import DEPTH, allocate, checksum, in_thread, views, wait_until


class Staged:
    """A verified version in the staging buckets, readable until `release`."""

    def __init__(self, version: PolicyVersion, tensors: dict[str, torch.Tensor], seconds: float, receiver: WeightReceiver):
        self.version = version
        self.seconds = seconds  # from the sender's announcement to the last checksum
        self._tensors = tensors
        self._receiver = receiver

    def tensors(self) -> dict[str, torch.Tensor]:
        """Views into the staging buckets by Hugging Face name, for `RolloutEngine.swap` to copy."""
        return self._tensors

    def release(self) -> None:
        """Give the staging buckets back: after the swap, or to forget the version. Idempotent."""
        self._receiver._release(self)


class WeightReceiver:
    """Owns the staging buckets of one manifest. They outlive epochs: the group is an argument of `receive`."""

    def __init__(self, manifest: Manifest, *, pin: bool = False, shared: bool = False):
        """`pin` page-locks the buckets, for copies to an accelerator; `shared` ones can be mapped by other processes.

        Raises InvalidMessage for a manifest without a plan.
        """
        self.buckets = plan_buckets(manifest)
        self._buffers = allocate(self.buckets, pin, shared)
        names = (spec.name for spec in manifest.tensors)
        self._tensors = dict(zip(names, views(manifest, self.buckets, self._buffers), strict=True))
        self._lock = threading.Lock()
        self._group: WeightGroup | None = None  # while a reception is under way
        self._staged: Staged | None = None

    def receive(self, group: WeightGroup, version: PolicyVersion, deadline: float) -> Future[Staged]:
        """Receive `version` into the staging buckets, from a thread. Release the version staged before first.

        It may be posted long before the sender starts, and two clocks apply. Until the sender's announcement only `abort`,
        the loss of the sender, or the group's backstop of hours ends the wait, since a whole training step may lie in it.
        From the announcement on, everything must have arrived within `deadline` seconds. A coordinator therefore posts
        early, keeps its own deadline from the moment at which it told the sender to start, and enforces it with `abort`.

        The future raises ServiceFault of phase "prepare" (nothing announced) or "transfer" (DeadlineExceeded when late),
        both with the group aborted; of phase "verify", naming the buckets, with the group whole; Cancelled after `abort`.
        """
        with self._lock:
            if self._group is not None or self._staged is not None:
                busy = (
                    "another version is being received" if self._staged is None else f"{self._staged.version} is still staged"
                )
                raise InvariantViolated(f"{group.name}: cannot receive {version}: {busy}")
            self._group = group
        return in_thread(f"receive-{version}", lambda: self._receive(group, version, deadline))

    def abort(self) -> None:
        """End the reception under way, if there is one, by leaving its group for good; a staged version stays."""
        with self._lock:
            if self._group is not None:
                self._group.abort()

    def _receive(self, group: WeightGroup, version: PolicyVersion, deadline: float) -> Staged:
        try:
            began = self._await_sender(group, version, deadline)
            wrong = self._transfer(group, version, began, deadline)
            if wrong:
                raise ServiceFault(group.name, "verify", f"version {version}: {'; '.join(wrong)}", deadline)
            staged = Staged(version, self._tensors, time.monotonic() - began, self)
            with self._lock:
                self._staged = staged
            return staged
        finally:
            with self._lock:
                self._group = None

    def _await_sender(self, group: WeightGroup, version: PolicyVersion, deadline: float) -> float:
        try:
            group.await_announcement(version)
        except RuntimeError as error:
            if group.aborted:
                raise Cancelled(f"{group.name}: version {version} was withdrawn before its transfer") from error
            group.abort()
            raise ServiceFault(group.name, "prepare", f"the sender of version {version} is lost: {reason(error)}") from error
        return time.monotonic()

    def _transfer(self, group: WeightGroup, version: PolicyVersion, began: float, deadline: float) -> list[str]:
        """Take every bucket, also after a bad one: the group stays usable. Returns what is wrong, one line per bucket."""
        give_up = began + deadline
        group.bound(deadline)
        pending: list[Transfer] = []
        posted = 0
        wrong = []
        try:
            for index in range(len(self.buckets)):
                while posted < min(index + DEPTH, len(self.buckets)):
                    pending.append(group.receive(posted, self._buffers[posted]))
                    posted += 1
                wait_until(pending.pop(0), give_up)
                fault = self._fault(index, version)
                if fault:
                    wrong.append(fault)
        except RuntimeError as error:
            if group.aborted:
                raise Cancelled(f"{group.name}: version {version} was withdrawn during its transfer") from error
            group.abort()
            message = f"bucket {index} of {len(self.buckets)} of version {version} did not arrive: {reason(error)}"
            if time.monotonic() >= give_up:
                raise DeadlineExceeded(group.name, "transfer", message, deadline) from error
            raise ServiceFault(group.name, "transfer", message, deadline) from error
        return wrong

    def _fault(self, index: int, version: PolicyVersion) -> str:
        bucket, buffer = self.buckets[index], self._buffers[index]
        digest, packed = TRAILER.unpack_from(buffer.numpy().data, bucket.data_bytes)
        where = f"bucket {index} of {len(self.buckets)}"
        if digest != checksum(bucket, buffer):
            return f"{where}: the checksum does not match"
        if packed != version.pack():
            return f"{where} is of version {PolicyVersion.unpack(packed)}"
        return ""

    def _release(self, staged: Staged) -> None:
        with self._lock:
            if self._staged is staged:
                self._staged = None
