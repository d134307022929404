"""A rank of the trainer that sends weights, as a member of the weight sync's group: it joins an epoch, sends, and leaves.

    event loop ── open, connect, resend, leave ──┐
                                                 ├──► SendingMember ──► WeightSender ──► the epoch's group
    engine's thread ── gather ───────────────────┘

What must not wait for the engine comes from the event loop: to join, to leave, to send once more what the buckets hold. The
engine's thread gathers the weights, behind the commands that make them; that takes every rank, so it is done even where nothing
can be sent. All methods may be called from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeout

import torch

from runtime.errors import Cancelled, DeadlineExceeded, ServiceFault, SluiceError
from runtime.types import PolicyVersion
from runtime.weights.group import WeightGroup
from runtime.weights.sender import SendResult, WeightSender, in_thread


class SendingMember:
    def __init__(self, sender: WeightSender, name: str, join_timeout: float, transfer_timeout: float):
        self.sender = sender
        self._name = name
        self._join_timeout = join_timeout
        self._transfer_timeout = transfer_timeout
        self._changed = threading.Condition(threading.RLock())  # guards what follows
        self._epoch = 0  # that it is in, or about to join
        self._group: Future[WeightGroup] | None = None
        self._abort: Callable[[], None] = lambda: None
        self._leaving: Future[None] | None = None
        self._held: PolicyVersion | None = None  # what the buckets hold, or are being filled with

    def open(self, epoch: int) -> Future[None]:
        """Be about to join `epoch`. The future is done once the epoch before is left."""
        with self._changed:
            left = self._leave()
            self._epoch = epoch
            return left

    def connect(
        self, epoch: int, connect: Callable[[], WeightGroup], abort: Callable[[], None] = lambda: None
    ) -> Future[WeightGroup]:
        """Begin to join, in a thread, the group that `connect` returns; `abort` ends that from another. Raises Cancelled when
        the epoch was left meanwhile."""
        with self._changed:
            if epoch != self._epoch:
                abort()
                raise Cancelled(f"{self._name}: epoch {epoch} was given up")
            self._abort, self._group = abort, in_thread("join-weights", connect)
            return self._group

    def leave(self, epoch: int) -> Future[None] | None:
        """Out of the group of `epoch`: done in the future, None where that is not its epoch."""
        with self._changed:
            return self._leave() if epoch == self._epoch else None

    def close(self) -> Future[None]:
        return self._leave()

    def gather(self, tensors: Iterable[torch.Tensor], version: PolicyVersion, epoch: int) -> Future[SendResult]:
        """Fill the buckets with `version`, sending each as soon as it is whole; the future is the transfer's.

        Blocks while a transfer of the version before ends, and while the group connects. The future raises ServiceFault when
        nothing could be sent, of phase "transfer" where the version is kept for another epoch.
        """
        sending: Future[SendResult]
        try:
            self.sender.begin(self._transfer_timeout)
        except SluiceError as error:
            for _ in tensors:  # the other ranks take part in it
                pass
            return _failed(error)
        with self._changed:
            self._held = version
            self._changed.notify_all()
        try:
            sending = self._send(version, epoch)
        except SluiceError as error:
            sending = _failed(error)
        try:
            self.sender.fill(tensors)
        except BaseException:
            with self._changed:
                self._held = None
            raise
        return sending

    def resend(self, version: PolicyVersion, epoch: int) -> Future[SendResult]:
        """Send the version that the buckets hold once more. Blocks until its gathering has begun. Raises ServiceFault, of phase
        "snapshot" when they do not hold it, or no longer as it was gathered."""
        with self._changed:
            self._changed.wait_for(lambda: self._held is not None and self._held >= version, self._transfer_timeout)
            if self._held != version or not self.sender.intact:
                raise ServiceFault(self._name, "snapshot", f"version {version} was not kept: {self._held} is there")
        return self._send(version, epoch)

    def _send(self, version: PolicyVersion, epoch: int) -> Future[SendResult]:
        with self._changed:
            connected = self._group if epoch == self._epoch else None
        if connected is None:
            raise ServiceFault(self._name, "transfer", f"there is no publication group of epoch {epoch}")
        try:
            group = connected.result(self._join_timeout)
        except FutureTimeout:
            raise DeadlineExceeded(self._name, "transfer", "the group is not connected", self._join_timeout) from None
        return self.sender.send(group, version, self._transfer_timeout)

    def _leave(self) -> Future[None]:
        """In a thread, one after the other: to leave a group that meets in a folder takes its server."""
        with self._changed:
            group, abort, before = self._group, self._abort, self._leaving
            self._group, self._abort, self._epoch = None, lambda: None, 0

        def leave() -> None:
            if before is not None:
                wait([before])
            if group is None:
                return
            if not group.done():
                abort()
            self.sender.abort()
            group.add_done_callback(_abandon)

        self._leaving = in_thread("leave-weights", leave)
        return self._leaving


def _failed(error: Exception) -> Future[SendResult]:
    future: Future[SendResult] = Future()
    future.set_exception(error)
    return future


def _abandon(connected: Future[WeightGroup]) -> None:
    if connected.exception() is None:
        connected.result().abort()
