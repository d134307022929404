"""Buffers that other processes of this machine can map: what a trainer publishes, and what an engine's workers read where it
was staged.

They are memory files without a name (memfd): the limit of /dev/shm does not apply, which is 64 MiB in a container by
default, and the kernel frees them with the last process that holds one, however that ends.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import weakref
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from runtime.errors import UserError
from runtime.weights.plan import aligned

AVAILABLE = hasattr(os, "memfd_create")  # on Linux

_FILES: dict[int, int] = {}  # descriptors of the buffers that live, by address


class Location(NamedTuple):
    """Where one tensor lies. Plain values, so that it travels by any codec."""

    name: str
    path: str  # readable by every process of the same user, as long as the buffer lives
    offset: int  # bytes
    dtype: str  # torch's name
    shape: list[int]


def allocate(nbytes: int) -> torch.Tensor:
    """A zeroed uint8 tensor [nbytes] that `locate` knows. Raises UserError where the system has no memory files."""
    if not AVAILABLE:
        raise UserError("services.rollout.engine: vllm needs Linux, whose memory files carry the weights to its workers")
    descriptor = os.memfd_create("sluice-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, nbytes)
        # Who maps the file may rely on its size: to touch what was cut off would be the end of the process.
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        buffer = torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)
    except BaseException:
        os.close(descriptor)
        raise
    _FILES[buffer.data_ptr()] = descriptor
    weakref.finalize(buffer.untyped_storage(), _forget, buffer.data_ptr())
    return buffer


def _forget(address: int) -> None:
    os.close(_FILES.pop(address))


def arena(sizes: Sequence[int], pin: bool = False) -> list[torch.Tensor]:
    """As `allocate`, one tensor for each of `sizes`, all in one memory file. `pin` page-locks it for copies by CUDA."""
    ends = list(accumulate(aligned(size) for size in sizes))
    whole = allocate(max(ends, default=1))
    if pin:
        _page_lock(whole)
    return [whole[end - aligned(size) :][:size] for size, end in zip(sizes, ends, strict=True)]


def _page_lock(buffer: torch.Tensor) -> None:
    """Never run on hardware so far. Raises RuntimeError when CUDA refuses."""
    runtime: Any = torch.cuda.cudart()
    address = buffer.data_ptr()
    torch.cuda.check_error(runtime.cudaHostRegister(address, buffer.numel(), 0))
    # Finalizers run newest first: the lock goes before the memory.
    weakref.finalize(buffer.untyped_storage(), runtime.cudaHostUnregister, address)


def file_of(buffer: torch.Tensor) -> tuple[int, int]:
    """The descriptor of the memory file in which `buffer` lies, uint8, and its offset there. Raises RuntimeError if in none."""
    descriptor = _FILES.get(buffer.untyped_storage().data_ptr())
    if descriptor is None:
        raise RuntimeError("the buffer does not lie in shared memory")
    return descriptor, int(buffer.storage_offset())


def locate(tensors: Mapping[str, torch.Tensor]) -> tuple[list[Location], list[torch.Tensor]]:
    """Where `tensors` lie, and buffers that must outlive the reading: copies of those that are not in shared memory."""
    copies = []
    locations = []
    for name, tensor in tensors.items():
        descriptor = _FILES.get(tensor.untyped_storage().data_ptr())
        offset = int(tensor.storage_offset()) * tensor.itemsize
        if descriptor is None or not tensor.is_contiguous():
            flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
            copy = allocate(max(1, flat.numel()))
            copy[: flat.numel()].copy_(flat)
            copies.append(copy)
            descriptor, offset = _FILES[copy.data_ptr()], 0
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
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
