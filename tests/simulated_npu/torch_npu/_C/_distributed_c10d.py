"""SIMULATION of torch_npu's process group: the host memory of simulated tensors goes over gloo on 127.0.0.1."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from torch_npu.tensors import SimulatedTensor

LONGEST = timedelta(seconds=30)  # of a collective: gloo has no abort, and its end waits for what is under way


class ProcessGroupHCCL(dist.ProcessGroup):
    class Options:
        _timeout = timedelta(minutes=30)

    def __init__(self, store: Any, rank: int, size: int, options: Options):
        super().__init__(rank, size)
        gloo: Any = dist.ProcessGroupGloo
        own = gloo._Options()
        own._devices = [gloo.create_device(hostname="127.0.0.1")]
        own._timeout = min(options._timeout, LONGEST)
        self._gloo: Any = gloo(dist.PrefixStore("simulated", store), rank, size, own)

    def broadcast(self, tensors: list[SimulatedTensor], options: dist.BroadcastOptions) -> Any:
        return self._gloo.broadcast([tensor.host for tensor in tensors], options)

    def abort_hccl_comm(self, reason: str) -> None:
        self._gloo = None
