"""What vLLM 0.30 lacks on CPUs for experts and pipelines: the exchange of tokens between data-parallel ranks, a kernel that
knows which experts a worker has, the gathering of whole numbers, and buffers between stages. All else that the tests run is
vLLM's own. Put in before an engine starts, its processes inherit them, as they are forked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from runtime.rollout.vllm import shim


def all_gatherv(self: Any, given: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """Of each tensor, the rows of all ranks, which may have different numbers of them."""
    if not isinstance(given, torch.Tensor):
        return [all_gatherv(self, each, dim, sizes) for each in given]
    sizes = sizes or [given.shape[0]] * self.world_size
    padded = given.new_zeros((max(sizes), *given.shape[1:]))
    padded[: given.shape[0]] = given
    found = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(found, padded, group=self.cpu_group)
    return torch.cat([each[:size] for each, size in zip(found, sizes, strict=True)])


def reduce_scatterv(self: Any, given: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
    """The sum over all ranks, of which each gets its own rows."""
    total = given.clone()
    dist.all_reduce(total, group=self.cpu_group)
    return total.split(sizes or given.shape[0] // self.world_size)[self.rank_in_group].contiguous()


def put_in(patch: pytest.MonkeyPatch) -> None:
    shim.prepare_environment(on_cpu=True)
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator, _CPUSHMDistributed
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.v1.worker.cpu_worker import CPUWorker

    apply, gather = CPUUnquantizedExperts.apply, _CPUSHMDistributed.all_gather_into_tensor
    warm_up = CPUWorker.compile_or_warm_up_model

    def apply_own(self: Any, *, expert_map: Any, topk_weights: Any, topk_ids: Any, **rest: Any) -> None:
        if expert_map is not None:  # int32 [experts]: the place of each here, or -1
            places = expert_map.to(topk_ids.dtype)[topk_ids.long()]
            topk_weights, topk_ids = topk_weights.masked_fill(places < 0, 0.0), places.clamp(min=0)
        apply(self, expert_map=expert_map, topk_weights=topk_weights, topk_ids=topk_ids, **rest)

    def gather_all(self: Any, output: torch.Tensor, given: torch.Tensor, group: Any = None) -> None:
        if given.dtype == torch.int32:
            output, given = output.view(torch.float32), given.contiguous().view(torch.float32)
        gather(self, output, given, group)

    def with_buffers(self: Any) -> Any:
        runner = self.model_runner
        if self.parallel_config.pipeline_parallel_size > 1:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
        return warm_up(self)

    patch.setattr(CpuCommunicator, "all_gatherv", all_gatherv)
    patch.setattr(CpuCommunicator, "reduce_scatterv", reduce_scatterv)
    patch.setattr(CPUUnquantizedExperts, "apply", apply_own)
    patch.setattr(_CPUSHMDistributed, "all_gather_into_tensor", gather_all)
    patch.setattr(CPUWorker, "compile_or_warm_up_model", with_buffers)
