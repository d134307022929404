"""The part of a sender besides rank 0 in publications: it joins an epoch's group when it is told to, and sends its buckets.

Orders come on two ways. The engine's thread gathers the weights, behind the commands that make them (`gather`). Whatever must
not wait for the engine comes aside (`aside`): to join, to leave, to send once more what the buckets hold.

Nobody is told of a failure here: the group is, which fails the receivers and rank 0, who name this sender.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import torch
from msgspec.structs import replace

from runtime.commands import AbortWeights, MeetWeights, ResendWeights
from runtime.errors import SluiceError
from runtime.types import PolicyVersion
from runtime.weights import rendezvous
from runtime.weights.group import WeightGroup
from runtime.weights.plan import GroupAddress
from runtime.weights.sender import SendResult, WeightSender, in_thread

log = logging.getLogger("sluice")


class SenderPart:
    def __init__(self, sender: WeightSender, number: int, name: str, deadline: float):
        """`number`: its rank in the group. `deadline`: seconds of a transfer."""
        self._sender = sender
        self._number = number
        self._name = name
        self._deadline = deadline
        self._orders = ThreadPoolExecutor(1, "publication")  # those that come aside, in their order
        self._changed = threading.Condition()  # guards what follows
        self._address: GroupAddress | None = None  # of the epoch that it is in, or about to join
        self._joined: Future[WeightGroup] | None = None
        self._held: PolicyVersion | None = None  # what the buckets hold, or are being filled with

    def aside(self, command: MeetWeights | AbortWeights | ResendWeights) -> None:
        """Begin to carry out `command`. Does not block."""
        self._orders.submit(self._carry_out, command)

    def gather(self, tensors: Iterable[torch.Tensor], version: PolicyVersion, epoch: int) -> None:
        """Fill the buckets with `version`, and send each as soon as it is whole, if `epoch` is still that of the group.

        Blocks while a transfer of the version before ends; raises DeadlineExceeded when it does not.
        """
        self._sender.begin(self._deadline)
        with self._changed:
            self._held = version
            self._changed.notify_all()
        self._send(version, epoch)
        self._sender.fill(tensors)

    def close(self) -> None:
        """Leave, and take no more orders."""
        self._orders.shutdown(wait=False, cancel_futures=True)
        self._leave()

    def _carry_out(self, command: MeetWeights | AbortWeights | ResendWeights) -> None:
        if isinstance(command, MeetWeights):
            self._leave()
            address = replace(command.address, rank=self._number)
            with self._changed:
                self._address = address
                self._joined = in_thread("join-weights", lambda: rendezvous.join(address, self._name))
        elif isinstance(command, ResendWeights):
            in_thread(f"resend-{command.version}", lambda: self._resend(command))
        elif self._address is not None and self._address.epoch == command.epoch:
            self._leave()

    def _leave(self) -> None:
        with self._changed:
            joined, self._joined, self._address = self._joined, None, None
        self._sender.abort()
        if joined is not None:
            joined.add_done_callback(_abandon)

    def _resend(self, command: ResendWeights) -> None:
        """Rank 0 may be ahead: it has gathered a version, and this rank's engine is still busy with what makes it."""
        with self._changed:
            held = self._changed.wait_for(lambda: self._held == command.version, self._deadline)
        if held:
            self._send(command.version, command.epoch)

    def _send(self, version: PolicyVersion, epoch: int) -> None:
        """Begin a transfer, if there is a group to send to: otherwise whoever waits for it has been told to leave."""
        with self._changed:
            address, joined = self._address, self._joined
        if address is None or joined is None or address.epoch != epoch:
            return
        try:
            group = joined.result(address.timeout)
            self._sender.send(group, version, self._deadline).add_done_callback(self._report)
        except (SluiceError, FutureTimeout) as error:
            log.warning("%s: version %s is not sent: %s", self._name, version, error)

    def _report(self, sending: Future[SendResult]) -> None:
        if (error := sending.exception()) is not None:
            log.warning("%s: %s", self._name, error)


def _abandon(joined: Future[Any]) -> None:
    if joined.exception() is None:
        joined.result().abort()
