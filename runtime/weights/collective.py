"""Transport `collective`: each bucket is one broadcast, over gloo, NCCL or HCCL.

Buffers are always in host memory: on NCCL and HCCL the group copies them through the device. So the sender, the receiver
and the checksums are the same on every backend.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from runtime import timeouts
from runtime.errors import ServiceFault
from runtime.process import platform
from runtime.weights.gloo_mesh import GlooMesh, meet, reason
from runtime.weights.group import Link, Transfer
from runtime.weights.plan import GroupAddress

# Connections between each two members. With one gloo connection, both ends wait for each other part of the time. A second
# connection fills these gaps, so that checksums cost no throughput. A third connection gained nothing.
CONNECTIONS = 2

KINDS = {"nccl": "cuda", "hccl": "npu"}


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
        return partial(self._wait, pg.broadcast(buffer, 0))

    def _wait(self, work: Any, give_up: float) -> None:
        """Wait in slices: gloo may forget a collective whose connection failed, and torch may give up a moment early.

        A member's last data may still be on its way when its connection is seen closed. So two looks must find the loss.
        """
        look, lost = time.monotonic() + timeouts.COLLECTIVE_LOSS, False
        while True:
            aborted, now = self._mesh.pg is None, time.monotonic()
            if _ends(work, 0.0 if aborted else min(give_up - now, timeouts.COLLECTIVE_SLICE)):
                return
            if aborted or now >= give_up:
                raise RuntimeError("the group was aborted" if aborted else "timed out")
            if now >= look:
                if lost:
                    raise RuntimeError("the connection to a member was lost")
                look, lost = now + timeouts.COLLECTIVE_LOSS, self._mesh.lost()

    def set_timeout(self, seconds: float) -> None:
        self._mesh.set_timeout(seconds)

    def abort(self) -> None:
        self._mesh.abort()


def _ends(work: Any, seconds: float) -> bool:
    try:
        work.wait(timedelta(seconds=max(seconds, timeouts.TORCH_LEAST)))
    except RuntimeError:
        if not work.is_completed():
            return False
    # The collective may have ended between its timeout and `is_completed`: this `wait` raises its error, if any.
    work.wait(timedelta(seconds=timeouts.TORCH_LEAST))
    return True


class DeviceLink(Link):
    """A ProcessGroupNCCL or ProcessGroupHCCL beside torch's default group."""

    def __init__(self, store: Any, rank: int, size: int, backend: str, timeout: float, backstop: float):
        """Connect, and block until the communicator is up: both backends make it with the first collective.

        `timeout`: seconds for the connection. `backstop`: the backend's own limit for one collective, in seconds. Raises
        RuntimeError.
        """
        kind = KINDS[backend]
        self.module = torch.get_device_module(kind)
        self._device = torch.device(kind, self.module.current_device())
        self.stream = self.module.Stream(device=self._device)
        group = platform.process_group_class(backend)
        options = group.Options()
        options._timeout = timedelta(seconds=backstop)
        self._pg: Any = group(dist.PrefixStore(backend, store), rank, size, options)
        try:
            self._broadcast(torch.zeros(1, dtype=torch.uint8), rank == 0)(time.monotonic() + timeout)
        except RuntimeError:
            self.abort()
            raise

    def send(self, index: int, buffer: torch.Tensor) -> Transfer:
        self.sent_bytes += buffer.nbytes
        return self._broadcast(buffer, True)

    def receive(self, index: int, buffer: torch.Tensor) -> Transfer:
        return self._broadcast(buffer, False)

    def _broadcast(self, buffer: torch.Tensor, sends: bool) -> Transfer:
        pg = self._running()
        options = dist.BroadcastOptions()
        options.rootRank = 0
        with self.module.stream(self.stream):
            staged = buffer.to(self._device, non_blocking=True) if sends else torch.empty_like(buffer, device=self._device)
            work = pg.broadcast([staged], options)
        return partial(self._wait, work, staged, None if sends else buffer)

    def _wait(self, work: Any, staged: torch.Tensor, target: torch.Tensor | None, give_up: float) -> None:
        """Wait for a broadcast, and copy `staged` to `target`, a receiver's host buffer.

        The `wait` of NCCL and HCCL does not block the thread: it makes the current stream wait. So an event marks the end on
        that stream, and this thread polls the event. The poll ends by `give_up` even if the broadcast never does.
        """
        timeout = max(give_up - time.monotonic(), timeouts.TORCH_LEAST)
        with self.module.stream(self.stream):
            work.wait(timedelta(seconds=timeout))
            if target is not None:
                target.copy_(staged, non_blocking=True)
            end = self.module.Event()
            end.record(self.stream)
        while not end.query():
            self._running()
            if time.monotonic() > give_up:
                raise RuntimeError(f"the device did not end the broadcast within {timeout:.1f} s")
            time.sleep(timeouts.COLLECTIVE_POLL)
        self._running()  # an abort also completes the event, without the data

    def _running(self) -> Any:
        """Return the communicator. Raises RuntimeError after `abort`."""
        if (pg := self._pg) is None:
            raise RuntimeError("the group was aborted")
        return pg

    def abort(self) -> None:
        """Destroy the communicator, and free the threads that wait for a transfer. Idempotent, from any thread."""
        pg, self._pg = self._pg, None
        if pg is None:
            return
        # A backend may block here until its running collective ends, at most for its backstop: hence a separate thread.
        ending = threading.Thread(target=_abort, args=(pg,), name="abort-weights", daemon=True)
        ending.start()
        del pg
        ending.join(timeouts.COLLECTIVE_ABORT)


def _abort(pg: Any) -> None:
    if hasattr(pg, "abort_hccl_comm"):
        pg.abort_hccl_comm("reinit")  # as torch_npu's reinit_process_group does; torch_npu does not implement `abort`
    else:
        pg.abort()


def connect(store: Any, address: GroupAddress, labels: Sequence[str], name: str, interface: str) -> Link:
    """Connect, and block until all members are connected. Raises ServiceFault, phase "rendezvous"."""
    if address.backend == "gloo":
        mesh = GlooMesh(store, address.rank, labels, interface, address.timeout, name=name, connections=CONNECTIONS)
        return GlooLink(mesh)
    give_up = time.monotonic() + address.timeout
    meet(store, address.rank, "", labels, name, address.timeout)
    left = max(give_up - time.monotonic(), timeouts.RENDEZVOUS_LEAST)
    try:
        return DeviceLink(
            store.unauthenticated(), address.rank, address.world_size, address.backend, left, timeouts.GLOO_BACKSTOP
        )
    except RuntimeError as error:
        message = f"{address.backend} could not connect the members: {reason(error)}"
        raise ServiceFault(name, "rendezvous", message, address.timeout) from error
