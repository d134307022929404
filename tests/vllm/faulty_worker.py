"""The worker's extension with a fault that can be switched on: the load breaks off when a tensor's first value says so."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from runtime.rollout.vllm.worker import WeightLoading

BREAKS = 12345.0
HANGS = 54321.0
HANG_SECONDS = 5.0


class FaultyLoading(WeightLoading):
    def sluice_weights(self, locations: Sequence[Sequence[Any]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in super().sluice_weights(locations):
            first = tensor.reshape(-1)[0].item()
            if first == BREAKS:
                raise ValueError(f"injected fault at {name}")
            if first == HANGS:
                time.sleep(HANG_SECONDS)
            yield name, tensor
