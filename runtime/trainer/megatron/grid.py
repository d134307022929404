"""A rank's position among the ranks that hold parts of one model, and among the ranks that hold the same part."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from runtime.config import Spread
from runtime.models.limits import layout_of
from runtime.process import platform


class ProcessGrid:
    """The process groups of megatron-core, made once in a process. Ranks count tensor-parallel first, then context-parallel,
    then blocks, then pipeline stages. All ranks of a model-parallel block get the same data, different blocks different."""

    def __init__(self, settings: Spread, device: torch.device, seed: int, timeout: float):
        """Make the groups. Collective over torch's default group; a single rank without that group makes it."""
        parallel = settings.parallel
        self.device = device
        self.layout = layout_of(parallel)
        if not dist.is_initialized():
            backend = platform.collective_backend(settings.backend, device)
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=timeout))
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=parallel.tensor,
                pipeline_model_parallel_size=parallel.pipeline,
                context_parallel_size=parallel.context,
                expert_model_parallel_size=parallel.expert,
                distributed_timeout_minutes=math.ceil(timeout / 60),
            )
            # Without dropout no generator is used: the tracker for inference keeps none.
            tensor_parallel.model_parallel_cuda_manual_seed(seed, inference_rng_tracker=True)
        self.tensor_rank = parallel_state.get_tensor_model_parallel_rank()
        self.pipeline_rank = parallel_state.get_pipeline_model_parallel_rank()
        self.expert_rank = parallel_state.get_expert_model_parallel_rank()
        self.expert_data_rank = parallel_state.get_expert_data_parallel_rank()
        self.tensor_group = parallel_state.get_tensor_model_parallel_group()
        self.pipeline_group = parallel_state.get_pipeline_model_parallel_group()
        self.context_group = parallel_state.get_context_parallel_group()
        self.data_group = parallel_state.get_data_parallel_group()
        self.expert_group = parallel_state.get_expert_model_parallel_group()
        self.blocks = parallel_state.get_data_parallel_world_size()
        self.block = parallel_state.get_data_parallel_rank()
        self.model_group = parallel_state.get_model_parallel_group()
        self.leads = self.tensor_rank == parallel_state.get_context_parallel_rank() == self.pipeline_rank == 0
        """Whether this rank is the first of its block, the one that gets the block's data."""
        self.places = self._places()  # (tensor rank, pipeline stage, expert rank), by rank
        self.stages: list[int] = dist.get_process_group_ranks(self.pipeline_group)
        self.last = self.pipeline_rank == parallel.pipeline - 1  # whether this rank's stage computes the loss

    def _places(self) -> list[list[int]]:
        own = [self.tensor_rank, self.pipeline_rank, self.expert_rank]
        values = torch.tensor(own, dtype=torch.int32, device=self.device)
        of_ranks = [torch.empty_like(values) for _ in range(dist.get_world_size())]
        dist.all_gather(of_ranks, values)
        return [each.tolist() for each in of_ranks]

    def of_last_stage(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the last stage's tensor. `tensor` has its shape and dtype on every stage, and is overwritten on the others."""
        if len(self.stages) > 1:
            dist.broadcast(tensor, self.stages[-1], group=self.pipeline_group)
        return tensor

    def bytes_of_last_stage(self, data: bytes) -> bytes:
        return self._broadcast(data, -1, self.pipeline_group)

    def bytes_of_leader(self, data: bytes) -> bytes:
        """Return the data of the first rank of this rank's block."""
        return self._broadcast(self._broadcast(data, 0, self.context_group), 0, self.model_group)

    def _broadcast(self, data: bytes, place: int, group: Any) -> bytes:
        """Return the data of the rank at `place` in `group`."""
        ranks = dist.get_process_group_ranks(group)
        if len(ranks) == 1:
            return data
        source = ranks[place]
        size = torch.tensor([len(data)], device=self.device)
        dist.broadcast(size, source, group=group)
        if dist.get_rank() == source:
            payload = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8).to(self.device)
        else:
            payload = torch.empty(max(1, int(size)), dtype=torch.uint8, device=self.device)
        dist.broadcast(payload, source, group=group)
        return payload.cpu().numpy().tobytes()[: int(size)]

    def host_group(self, timeout: float) -> Any:
        """Make a gloo group of all ranks for tensors on the host, used by a thread beside the engine's. Collective."""
        return dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))

    def close(self) -> None:
        parallel_state.destroy_model_parallel()
        for name in vars(parallel_state):  # a group that parallel_state still refers to would keep its port
            if isinstance(getattr(parallel_state, name), dist.ProcessGroup):
                setattr(parallel_state, name, None)
