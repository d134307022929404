"""Plain ways to bring 300 tensors from one process to others, to compare the weight sync with. Each is what a
program without Sluice would do, on torch's default process group over gloo.
"""

from __future__ import annotations

import mmap
import os
import shutil
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash
from safetensors.torch import load_file, save_file

from runtime.weights.group import copy_and_hash
from runtime.weights.plan import TensorSpec

GLOO, COPY, HASHED, BUCKETS, ONE_BY_ONE, DISK, MEMORY_FILE = (
    "raw gloo broadcast",
    "raw copy out of shared memory",
    "... that hashes, one thread",
    "naive buckets",
    "tensor by tensor",
    "safetensors on disk",
    "safetensors in /dev/shm",
)
RAY = "Ray's object store"  # in processes of its own: `ray_trial`
NAIVE_BUCKET = 64_000_000  # bytes
DEADLINE = 120.0  # seconds for any collective of theirs
SHARED_MEMORY = Path("/dev/shm")


class Ways:
    """This process's end of each: rank 0 has the tensors, the others are to have them in tensors of their own.

    A way is entered together, and timed by the clock that all processes of a machine share.
    """

    def __init__(self, rank: int, world_size: int, folder: Path, specs: Sequence[TensorSpec], seed: int):
        store = dist.FileStore(str(folder / "meet"), world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=DEADLINE))
        self._first = rank == 0
        self._folder = folder
        self._flat = torch.empty(sum(spec.nbytes for spec in specs) // 2, dtype=torch.bfloat16)
        if self._first:
            self._flat.view(torch.int16).random_(-(1 << 15), 1 << 15, generator=torch.Generator().manual_seed(seed))
        parts = torch.split(self._flat, [spec.nbytes // 2 for spec in specs])
        self._tensors = dict(zip((spec.name for spec in specs), parts, strict=True))
        self._staging = torch.zeros(max(NAIVE_BUCKET // 2, *map(len, parts)), dtype=torch.bfloat16)
        self._shared = self._share()
        self._ways: dict[str, Callable[[], None]] = {
            GLOO: lambda: dist.broadcast(self._flat.view(torch.uint8), 0),
            COPY: self._copy,
            HASHED: self._copy_and_hash,
            BUCKETS: self._in_buckets,
            ONE_BY_ONE: self._one_by_one,
            DISK: lambda: self._through_file(self._folder),
            MEMORY_FILE: lambda: self._through_file(SHARED_MEMORY),
        }

    def run(self, way: str) -> tuple[float, float]:
        """When it began and ended here, in seconds of the machine's clock."""
        dist.barrier()
        began = time.monotonic()
        self._ways[way]()
        return began, time.monotonic()

    def digest(self) -> int:
        """xxh3-64 of all tensors."""
        return xxhash.xxh3_64_intdigest(self._bytes())

    def forget(self) -> None:
        """The others: have nothing any more."""
        if not self._first:
            self._flat.zero_()

    def rates(self, piece: int) -> dict[str, float]:
        """Bytes per second of one thread: of xxh3-64 over pieces of so many bytes, and of a copy of all of it."""
        flat = self._bytes()
        began = time.monotonic()
        for start in range(0, len(flat), piece):
            xxhash.xxh3_64_intdigest(flat[start : start + piece])
        hashed = time.monotonic()
        self._shared.copy_(self._flat)
        return {"checksum": len(flat) / (hashed - began), "copy": len(flat) / (time.monotonic() - hashed)}

    def close(self) -> None:
        dist.destroy_process_group()

    def _bytes(self) -> memoryview:
        return self._flat.view(torch.uint8).numpy().data

    def _share(self) -> torch.Tensor:
        """Rank 0's tensors once more, in a memory file that the others map."""
        told, nbytes = self._folder / "shared", self._flat.nbytes
        if self._first:
            descriptor = os.memfd_create("sluice-bench")
            os.ftruncate(descriptor, nbytes)
            told.write_text(f"/proc/{os.getpid()}/fd/{descriptor}")
        dist.barrier()
        if not self._first:
            descriptor = os.open(told.read_text(), os.O_RDWR)
        shared = torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.bfloat16)
        if self._first:
            shared.copy_(self._flat)
        dist.barrier()
        os.close(descriptor)
        return shared

    def _copy(self) -> None:
        if not self._first:
            self._flat.copy_(self._shared)

    def _copy_and_hash(self) -> None:
        if not self._first:
            source, target = (tensor.view(torch.uint8).numpy() for tensor in (self._shared, self._flat))
            copy_and_hash(source, [(0, target)], xxhash.xxh3_128(), lambda: None)

    def _in_buckets(self) -> None:
        bucket: list[torch.Tensor] = []
        filled = 0
        for tensor in self._tensors.values():
            if bucket and filled + tensor.nbytes > NAIVE_BUCKET:
                self._bucket(bucket)
                bucket, filled = [], 0
            bucket.append(tensor)
            filled += tensor.nbytes
        self._bucket(bucket)

    def _bucket(self, tensors: list[torch.Tensor]) -> None:
        """Copied together, broadcast, copied apart: one after the other."""
        flat = self._staging[: sum(map(len, tensors))]
        if self._first:
            torch.cat(tensors, out=flat)
        dist.broadcast(flat.view(torch.uint8), 0)
        if not self._first:
            for tensor, part in zip(tensors, torch.split(flat, [len(tensor) for tensor in tensors]), strict=True):
                tensor.copy_(part)

    def _one_by_one(self) -> None:
        for tensor in self._tensors.values():
            dist.broadcast(tensor.view(torch.uint8), 0)

    def _through_file(self, folder: Path) -> None:
        """Written whole, loaded, and copied into place. Not flushed to the disk."""
        path = folder / f"{self._folder.name}.safetensors"
        if self._first:
            save_file(self._tensors, path)
        dist.barrier()
        if not self._first:
            for name, tensor in load_file(path).items():
                self._tensors[name].copy_(tensor)
        dist.barrier()
        if self._first:
            path.unlink()


def room(folder: Path, nbytes: int) -> bool:
    """Whether a file of `nbytes` fits into `folder`, with as much to spare."""
    return folder.is_dir() and shutil.disk_usage(folder).free > 2 * nbytes
