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


class _HostTransfer:
    def __init__(self, work: Any, mesh: GlooMesh):
        self._work = work
        self._mesh = mesh

    def wait(self, timeout: float) -> None:
        """In slices, as gloo may forget a collective whose connection failed."""
        give_up = time.monotonic() + timeout
        while (left := give_up - time.monotonic()) > SLICE and self._mesh.pg is not None:
            if self._ends(SLICE):
                return
        if not self._ends(left if self._mesh.pg is not None else 0.0):
            raise RuntimeError("the group was aborted" if self._mesh.pg is None else "timed out")

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
        return GlooLink(GlooMesh(store, address.rank, labels, interface, address.timeout, name=name))
    give_up = time.monotonic() + address.timeout
    meet(store, address.rank, "", labels, name, address.timeout)
    left = max(give_up - time.monotonic(), 0.1)
    try:
        return DeviceLink(store, address.rank, address.world_size, address.backend, left, BACKSTOP)
    except RuntimeError as error:
        message = f"{address.backend} could not connect the members: {reason(error)}"
        raise ServiceFault(name, "rendezvous", message, address.timeout) from error
