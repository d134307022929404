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


class _HostTransfer:
    def __init__(self, work: Any):
        self._work = work

    def wait(self, timeout: float) -> None:
        self._work.wait(timedelta(seconds=timeout))


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
        return _HostTransfer(pg.broadcast(buffer, 0))

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
