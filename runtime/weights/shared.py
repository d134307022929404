"""Buffers that other processes of this machine can map, for weights that an engine's workers read where they were staged.

They are memory files without a name (memfd): the limit of /dev/shm does not apply, which is 64 MiB in a container by
default, and the kernel frees them with the last process that holds one, however that ends.
"""

from __future__ import annotations

import math
import mmap
import os
import weakref
from collections.abc import Mapping
from typing import NamedTuple

import torch

from runtime.errors import UserError

_PATHS: dict[int, str] = {}  # of the buffers that live, by address


class Location(NamedTuple):
    """Where one tensor lies. Plain values, so that it travels by any codec."""

    name: str
    path: str  # readable by every process of the same user, as long as the buffer lives
    offset: int  # bytes
    dtype: str  # torch's name
    shape: list[int]


def allocate(nbytes: int) -> torch.Tensor:
    """A zeroed uint8 tensor [nbytes] that `locate` knows. Raises UserError where the system has no memory files."""
    if not hasattr(os, "memfd_create"):
        raise UserError("services.rollout.engine: vllm needs Linux, whose memory files carry the weights to its workers")
    descriptor = os.memfd_create("sluice-weights")
    try:
        os.ftruncate(descriptor, nbytes)
        buffer = torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)
    except BaseException:
        os.close(descriptor)
        raise
    _PATHS[buffer.data_ptr()] = f"/proc/{os.getpid()}/fd/{descriptor}"
    weakref.finalize(buffer.untyped_storage(), _forget, buffer.data_ptr(), descriptor)
    return buffer


def _forget(address: int, descriptor: int) -> None:
    del _PATHS[address]
    os.close(descriptor)


def locate(tensors: Mapping[str, torch.Tensor]) -> tuple[list[Location], list[torch.Tensor]]:
    """Where `tensors` lie, and buffers that must outlive the reading: copies of those that are not in shared memory."""
    copies = []
    locations = []
    for name, tensor in tensors.items():
        path = _PATHS.get(tensor.untyped_storage().data_ptr())
        offset = int(tensor.storage_offset()) * tensor.itemsize
        if path is None or not tensor.is_contiguous():
            flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
            copy = allocate(max(1, flat.numel()))
            copy[: flat.numel()].copy_(flat)
            copies.append(copy)
            path, offset = _PATHS[copy.data_ptr()], 0
        locations.append(Location(name, path, offset, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)))
    return locations, copies


class Mapped:
    """Buffers of another process, mapped here while the tensors made of them live."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def tensor(self, location: Location) -> torch.Tensor:
        """A view of the other process's memory. Raises OSError when that process has given it up."""
        buffer = self._buffers.get(location.path)
        if buffer is None:
            descriptor = os.open(location.path, os.O_RDWR)
            try:
                buffer = torch.frombuffer(mmap.mmap(descriptor, 0), dtype=torch.uint8)
            finally:
                os.close(descriptor)
            self._buffers[location.path] = buffer
        dtype: torch.dtype = getattr(torch, location.dtype)
        nbytes = math.prod(location.shape) * dtype.itemsize
        return buffer[location.offset : location.offset + nbytes].view(dtype).view(location.shape)
