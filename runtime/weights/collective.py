"""Transport `collective`: each bucket is one broadcast, over gloo, NCCL or HCCL.

Buffers are always in host memory: on NCCL and HCCL the group moves them through the device itself, so that the sender, the
receiver and the checksums are the same on every backend.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from runtime.errors import ServiceFault
from runtime.weights.device_link import DeviceLink
from runtime.weights.gloo_mesh import BACKSTOP, GlooMesh, meet, reason
from runtime.weights.link import Link, Transfer
from runtime.weights.plan import GroupAddress

SLICE = 0.05  # seconds within which a wait sees that its group was left

# Between each two members. One connection of gloo leaves both of its ends waiting for each other part of the time; a second one
# fills that, so that checksums cost no throughput. A third gained nothing.
CONNECTIONS = 2


class _HostTransfer:
    def __init__(self, work: Any, mesh: GlooMesh):
        self._work = work
        self._mesh = mesh

    def wait(self, timeout: float) -> None:
        """In slices, as gloo may forget a collective whose connection failed; and torch may give up a moment early."""
        give_up = time.monotonic() + timeout
        while True:
            aborted, left = self._mesh.pg is None, give_up - time.monotonic()
            if self._ends(0.0 if aborted else min(left, SLICE)):
                return
            if aborted or left <= 0:
                raise RuntimeError("the group was aborted" if aborted else "timed out")

    def _ends(self, seconds: float) -> bool:
        try:
            self._work.wait(timedelta(seconds=max(seconds, 0.001)))  # torch reads a timeout of 0 as none at all
        except RuntimeError:
            if not self._work.is_completed():
                return False
        self._work.wait(timedelta(seconds=0.001))  # it may have ended between its timeout and the question
        return True


class GlooLink(Link):
    def __init__(self, mesh: GlooMesh):
        self._mesh = mesh

    def send(self, index: int, buffer: torch.Tensor) -> Transfer:
        self.sent_bytes += buffer.nbytes
        return self._broadcast(buffer)

    def receive(self, index: int, buffer: torch.Tensor) -> Transfer:
        return self._broadcast(buffer)

    def _broadcast(self, buffer: torch.Tensor) -> Transfer:
        pg = self._mesh.pg
        if pg is None:
            raise RuntimeError("the group was aborted")
        return _HostTransfer(pg.broadcast(buffer, 0), self._mesh)

    def bound(self, seconds: float) -> None:
        self._mesh.bound(seconds)

    def abort(self) -> None:
        self._mesh.abort()


def connect(store: Any, address: GroupAddress, labels: Sequence[str], name: str, interface: str) -> Link:
    """Blocks until everybody is connected. Raises ServiceFault, phase "rendezvous"."""
    if address.backend == "gloo":
        mesh = GlooMesh(store, address.rank, labels, interface, address.timeout, name=name, connections=CONNECTIONS)
        return GlooLink(mesh)
    give_up = time.monotonic() + address.timeout
    meet(store, address.rank, "", labels, name, address.timeout)
    left = max(give_up - time.monotonic(), 0.1)
    try:
        return DeviceLink(store, address.rank, address.world_size, address.backend, left, BACKSTOP)
    except RuntimeError as error:
        message = f"{address.backend} could not connect the members: {reason(error)}"
        raise ServiceFault(name, "rendezvous", message, address.timeout) from error
