"""The receiving side of a weight sync. A version is staged whole beside the weights in use.

The receiver outlives epochs: the group is an argument of `receive`. A reception may be posted long before the
sender starts, and two clocks apply. Until the sender's announcement only `abort`, the loss of the sender, or the group's
backstop of hours ends the wait, since a whole training step may lie in it. From the announcement on, everything must have
arrived within `deadline` seconds. A coordinator therefore posts early, keeps its own deadline from the moment at which it
told the sender to start, and enforces it with `abort`.

The future of a reception raises ServiceFault of phase "prepare" (nothing announced) or "transfer" (DeadlineExceeded when
late), both with the group aborted; of phase "verify", naming the buckets, with the group whole; Cancelled after `abort`.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future

import torch

from runtime.errors import InvariantViolated
from runtime.types import PolicyVersion
from runtime.weights.group import WeightGroup
from runtime.weights.plan import Manifest, plan_buckets
from runtime.weights.reception import Reception
from runtime.weights.sender import allocate, in_thread, views

Tensors = dict[str, torch.Tensor]


class Staged:
    """A verified version in a set of staging buckets, readable until `release`, or after `adopt` until the next `adopt`."""

    def __init__(self, version: PolicyVersion, seconds: float, buckets: _Set, receiver: WeightReceiver):
        self.version = version
        self.seconds = seconds  # from the sender's announcement to the last checksum
        self._set = buckets
        self._receiver = receiver

    def tensors(self) -> Tensors:
        """Views into the staging buckets by Hugging Face name, for `RolloutEngine.stage`."""
        return self._set.tensors

    def adopt(self) -> None:
        """Say that an engine uses these buckets: they stay as they are, and those adopted before are free. After the swap."""
        self._receiver._settle(self, adopted=True)

    def release(self) -> None:
        """Give the staging buckets back: after a swap that copied them, or to forget the version. Idempotent."""
        self._receiver._settle(self, adopted=False)


class _Set:
    """Buffers for a whole version."""

    def __init__(self, receiver: WeightReceiver, shared: bool):
        self.buffers = allocate(receiver.buckets, pin=False, shared=shared)
        names = (spec.name for spec in receiver.manifest.tensors)
        self.tensors = dict(zip(names, views(receiver.manifest, receiver.buckets, self.buffers), strict=True))


class WeightReceiver:
    """Owns the staging buckets of one manifest: `sets` times, for an engine that adopts what was staged takes two.

    One reception at a time.
    """

    def __init__(self, manifest: Manifest, *, sets: int = 1, shared: bool = False):
        """Buckets that are `shared` can be mapped by other processes.

        A set takes its memory with the first version that it receives: by then the weights with which the engine began are
        gone, so that no more than two copies are ever there. Raises InvalidMessage for a manifest without a plan.
        """
        self.manifest = manifest
        self.buckets = plan_buckets(manifest)
        self._lock = threading.Lock()  # guards what follows
        self._group: WeightGroup | None = None  # while a reception is under way
        self._new_set = lambda: _Set(self, shared)
        self._most = sets
        self._free: list[_Set] = []
        self._made = 0
        self._adopted: _Set | None = None
        self._staged: Staged | None = None

    def abort(self) -> None:
        """End the reception under way, if there is one, by leaving its group for good; a staged version stays."""
        with self._lock:
            if self._group is not None:
                self._group.abort()

    def receive(self, group: WeightGroup, version: PolicyVersion, deadline: float) -> Future[Staged]:
        """Receive `version` into a set that is not in use. The version staged before has to be released or adopted first."""
        with self._lock:
            if self._staged is not None:
                raise InvariantViolated(f"{group.name}: cannot receive {version}: {self._staged.version} is still staged")
            if not self._free and self._made == self._most:
                raise InvariantViolated(f"{group.name}: cannot receive {version}: every set of buckets is in use")
            if self._group is not None:
                raise InvariantViolated(f"{group.name}: cannot receive {version}: another version is being received")
            group.describe(self.manifest)
            self._group = group
            reception = Reception(group, self.buckets, version, deadline)
            return in_thread(f"receive-{version}", lambda: self._until_done(reception))

    def _until_done(self, reception: Reception) -> Staged:
        try:
            return self._receive(reception)
        finally:
            with self._lock:
                self._group = None

    def _receive(self, reception: Reception) -> Staged:
        if not self._free:
            self._free.append(self._new_set())
            self._made += 1
        reception.await_sender()
        buckets = self._free[-1]
        reception.take(buckets.buffers.__getitem__)
        with self._lock:
            self._free.remove(buckets)
            self._staged = Staged(reception.version, time.monotonic() - reception.began, buckets, self)
            return self._staged

    def _settle(self, staged: Staged, adopted: bool) -> None:
        with self._lock:
            if self._staged is not staged:
                return
            self._staged = None
            unused: _Set | None = staged._set
            if adopted:
                unused, self._adopted = self._adopted, unused
            if unused is not None:
                self._free.append(unused)
