"""A manifest of several buckets with weights that a seed determines, and what a transfer may leave behind."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path

import torch

from runtime.weights.plan import Manifest, TensorSpec
from runtime.weights.sender import WeightSender

SPECS = (
    TensorSpec("embed", "bfloat16", (50, 128)),
    TensorSpec("bias", "float32", (7,)),
    TensorSpec("scale", "float32", ()),
    TensorSpec("steps", "int64", (3, 5)),
    *(TensorSpec(f"layer.{index}", "float32", (64, 100)) for index in range(8)),
    TensorSpec("tail", "bfloat16", (3,)),
)


MANIFEST = Manifest(SPECS, 48 << 10)  # more buckets than are under way at once

PATIENCE = 60.0  # seconds for what is to happen, on however busy a machine

IN_A_STORE = ("collective", "shared_memory", "collective+delta", "shared_memory+delta")  # whose members meet in a store
WAYS = (*IN_A_STORE, "files", "files+delta")  # each transport with each encoding


def transport_and_encoding(way: str) -> tuple[str, int]:
    """The transport of one of `WAYS`, and `full_every`."""
    transport, _, delta = way.partition("+")
    return transport, 50 if delta else 0


def fill(tensors: list[torch.Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors:
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 100)


def expected(seed: int) -> dict[str, torch.Tensor]:
    tensors = [torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in SPECS]
    fill(tensors, seed)
    return dict(zip((spec.name for spec in SPECS), tensors, strict=True))


def gather(sender: WeightSender, seed: int) -> None:
    """Another version is in the sender's buckets."""
    sender.begin(PATIENCE)
    sender.fill(expected(seed).values())


def same(tensors: dict[str, torch.Tensor], seed: int) -> bool:
    want = expected(seed)
    return tensors.keys() == want.keys() and all(
        tensors[name].dtype == want[name].dtype and torch.equal(tensors[name], want[name]) for name in want
    )


def threads_and_files() -> list[int]:
    return [len(list(Path("/proc/self/task").iterdir())), len(list(Path("/proc/self/fd").iterdir()))]


def mappings() -> set[str]:
    """Where memory files of weights are mapped into this process: lines with address and file, so that what a test before left
    to the garbage collector is told from a test's own."""
    return {line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:sluice-weights" in line}


def settles(counts: Callable[[], list[int]], most: list[int]) -> bool:
    """Whether threads that are just ending are gone in time."""
    give_up = time.monotonic() + PATIENCE
    while any(count > limit for count, limit in zip(counts(), most, strict=True)):
        if time.monotonic() > give_up:
            return False
        gc.collect()  # an exception and the frames of its traceback hold each other
        time.sleep(0.01)
    return True
