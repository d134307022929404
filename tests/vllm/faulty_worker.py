"""The worker's extension with a fault that can be switched on: the load breaks off when a tensor's first value says so. Where
the environment names a folder, each worker writes there which elements of each tensor its loader has read."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from runtime.rollout.vllm.worker import WeightLoading

BREAKS = 12345.0
HANGS = 54321.0
HANG_SECONDS = 5.0


READS = "SLUICE_TEST_READS"


class Reads(TorchDispatchMode):
    """Marks what operators read, except those that only make views."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[str, torch.Tensor] = {}
        self.read: dict[str, torch.Tensor] = {}  # bool, of the tensor's shape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        only_views = any(each.alias_info and not each.alias_info.is_write for each in func._schema.returns)
        for each in () if only_views else tree_leaves((args, kwargs)):
            if isinstance(each, torch.Tensor) and each.device.type == "cpu" and each.numel():
                self._mark(each)
        return func(*args, **(kwargs or {}))

    def _mark(self, part: torch.Tensor) -> None:
        for name, whole in self.tensors.items():
            if 0 <= (offset := part.data_ptr() - whole.data_ptr()) < whole.nbytes:
                mask = self.read[name].view(-1)
                torch.as_strided(mask, part.shape, part.stride(), offset // whole.itemsize).fill_(True)


class FaultyLoading(WeightLoading):
    rank: int
    reads: Reads | None = None

    def sluice_load(self, locations: Sequence[Sequence[Any]], first: bool = True, last: bool = True) -> list[str]:
        if (folder := os.environ.get(READS)) is None:
            return super().sluice_load(locations, first, last)
        with Reads() as self.reads:
            fault = super().sluice_load(locations, first, last)
        parallel = self.vllm_config.parallel_config
        torch.save(self.reads.read, f"{folder}/{parallel.data_parallel_index * parallel.world_size + self.rank}")
        return fault

    def sluice_weights(self, locations: Sequence[Sequence[Any]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in super().sluice_weights(locations):
            if self.reads is not None:
                self.reads.read.setdefault(name, torch.zeros(tensor.shape, dtype=torch.bool))
                self.reads.tensors[name] = tensor
                yield name, tensor
                continue
            first = tensor.reshape(-1)[0].item()
            if first == BREAKS:
                raise ValueError(f"injected fault at {name}")
            if first == HANGS:
                time.sleep(HANG_SECONDS)
            yield name, tensor
