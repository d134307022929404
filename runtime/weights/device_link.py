"""Broadcasts over NCCL or HCCL: buckets in host memory cross the device on a stream of their own, beside the engine's."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from runtime.process import platform
from runtime.weights.link import Link

KINDS = {"nccl": "cuda", "hccl": "npu"}
POLL = 0.0005  # seconds between two looks at the device
ABORT = 5.0  # seconds that the end of a communicator is waited for


class DeviceTransfer:
    """A broadcast under way. `target` is the host buffer that `staged` goes to; None at the sender."""

    def __init__(self, link: DeviceLink, work: Any, staged: torch.Tensor, target: torch.Tensor | None):
        self._link, self._work, self._staged, self._target = link, work, staged, target

    def wait(self, timeout: float) -> None:
        """Return when the host buffer may be reused, or is filled. Raises RuntimeError.

        Neither backend's own `wait` blocks the thread: it makes the current stream wait. What follows on that stream marks the
        end, which is looked for, so that a broadcast that never ends frees the thread all the same.
        """
        give_up = time.monotonic() + timeout
        stream, module = self._link.stream, self._link.module
        with module.stream(stream):
            self._work.wait(timedelta(seconds=timeout))
            if self._target is not None:
                self._target.copy_(self._staged, non_blocking=True)
            end = module.Event()
            end.record(stream)
        while not end.query():
            if self._link.aborted:
                raise RuntimeError("the group was aborted")
            if time.monotonic() > give_up:
                raise RuntimeError(f"the device did not end the broadcast within {timeout:.1f} s")
            time.sleep(POLL)
        if self._link.aborted:
            raise RuntimeError("the group was aborted")  # which also ends what the stream waited for


class DeviceLink(Link):
    """A ProcessGroupNCCL or ProcessGroupHCCL beside torch's default group."""

    def __init__(self, store: Any, rank: int, size: int, backend: str, timeout: float, backstop: float):
        """Blocks until the communicator stands, which both backends make with the first collective.

        `timeout` and `backstop` are seconds: for that, and the longest that the backend itself lets a collective take. Raises
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
            self._broadcast(torch.zeros(1, dtype=torch.uint8), rank == 0).wait(timeout)
        except RuntimeError:
            self.abort()
            raise

    @property
    def aborted(self) -> bool:
        return self._pg is None

    def send(self, index: int, buffer: torch.Tensor) -> DeviceTransfer:
        self.sent_bytes += buffer.nbytes
        return self._broadcast(buffer, True)

    def receive(self, index: int, buffer: torch.Tensor) -> DeviceTransfer:
        return self._broadcast(buffer, False)

    def _broadcast(self, buffer: torch.Tensor, sends: bool) -> DeviceTransfer:
        pg = self._pg
        if pg is None:
            raise RuntimeError("the group was aborted")
        options = dist.BroadcastOptions()
        options.rootRank = 0
        with self.module.stream(self.stream):
            staged = buffer.to(self._device, non_blocking=True) if sends else torch.empty_like(buffer, device=self._device)
            work = pg.broadcast([staged], options)
        return DeviceTransfer(self, work, staged, None if sends else buffer)

    def abort(self) -> None:
        """Destroy the communicator. Idempotent, from any thread; those that wait for a transfer are freed."""
        pg, self._pg = self._pg, None
        if pg is None:
            return
        # A backend may wait here for what it has under way, as long as it lets a collective take: its own thread does then.
        ending = threading.Thread(target=_abort, args=(pg,), name="abort-weights", daemon=True)
        ending.start()
        del pg
        ending.join(ABORT)


def _abort(pg: Any) -> None:
    if hasattr(pg, "abort_hccl_comm"):
        pg.abort_hccl_comm("reinit")  # torch_npu's own, as in its reinit_process_group; it does not implement `abort`
    else:
        pg.abort()
