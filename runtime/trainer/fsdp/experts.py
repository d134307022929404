"""Expert parallelism: each rank of an expert group holds a part of every layer's experts, and tokens go to them and come back.

With W ranks and groups of E, neighbouring ranks are a group. Rank r holds the experts of part r mod E, whose parameters FSDP2
shards over the W / E ranks of that part. Tokens of all ranks reach each expert, so that its gradient is a sum over all data.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from runtime.errors import UserError
from runtime.models.experts import computed, inverse, matrices, mixed, products, swiglu
from runtime.trainer.backend import RankInfo, TrainedRole


class SpreadExperts(nn.Module):
    """This rank's part of a block's experts, which keep their numbers as names. `mesh`: the ranks that hold the same part."""

    def __init__(self, experts: nn.ModuleList, group: dist.ProcessGroup, mesh: DeviceMesh):
        """Keep the part of `experts` that belongs to this rank of `group`."""
        super().__init__()
        self.mesh, self._group, self._count, self._ranks = mesh, group, len(experts), group.size()
        each = len(experts) // self._ranks
        first = group.rank() * each
        for index in range(first, first + each):
            self.add_module(str(index), experts[index])

    def forward(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Do what `mixture` does, over the ranks of the group. Collective, and so is its backward pass."""
        return mixed(x, weights, chosen, self._count, self._exchanged)

    def _exchanged(self, rows: torch.Tensor, expert: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Compute rows [n, H], sorted by expert, on the ranks that hold their experts, as a `Run` does."""
        coming = torch.empty_like(counts)
        dist.all_to_all_single(coming, counts, group=self._group)
        of_ranks = torch.stack([counts, coming]).view(2, self._ranks, -1)  # of each rank, by its or by our experts
        sent, given = of_ranks.sum(2).tolist()
        rows = _Exchange.apply(rows.to(computed(rows)), sent, given, self._group)
        own = torch.arange(of_ranks.shape[2], device=rows.device).repeat(self._ranks).repeat_interleave(coming)
        order = own.argsort(stable=True)
        (gate_up, down), counts = matrices(self.children()), of_ranks[1].sum(0)
        made = products(swiglu(products(F.embedding(order, rows), gate_up, counts)), down, counts)
        back: torch.Tensor = _Exchange.apply(F.embedding(inverse(order), made), given, sent, self._group)
        return back


class _Exchange(torch.autograd.Function):
    """Rows to the ranks of a group, and of each rank its rows; in order. Gradients go back."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sent: list[int], given: list[int], group: dist.ProcessGroup) -> torch.Tensor:
        ctx.back = given, sent, group
        return _exchange(rows, sent, given, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        return _exchange(grad, *ctx.back), None, None, None


def _exchange(rows: torch.Tensor, sent: list[int], given: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Return the rows that come: `given` of each rank. `sent`: the numbers of `rows` that go to each rank."""
    coming = rows.new_empty(sum(given), *rows.shape[1:])
    dist.all_to_all_single(coming, rows.contiguous(), given, sent, group=group)
    return coming


def spread(model: Any, trained: TrainedRole, rank_info: RankInfo) -> dict[str, Any]:
    """Leave this rank its part of each block's experts, as `parallel.expert` says. Return by the name of each parameter, in
    order, a stand-in for it if only other ranks hold it, else None. Without expert parallelism do nothing, and return nothing.
    Collective. Raises UserError if the model's experts cannot be spread."""
    if (size := trained.settings.parallel.expert) == 1:
        return {}
    watched = (module for module in model.modules() if hasattr(module, "watch"))
    blocks = [module for module in watched if isinstance(module.experts, nn.ModuleList)]
    if not blocks:
        what = "needs experts that are modules of their own, which this model does not have; must be 1"
        raise UserError(f"services.{trained.role}.parallel.expert: {size} {what}")
    world, part = rank_info.world_size, rank_info.rank % size
    timeout = dist.distributed_c10d._get_default_group()._get_backend(rank_info.device).options._timeout
    group, _ = dist.new_subgroups_by_enumeration([list(range(i, i + size)) for i in range(0, world, size)], timeout)
    alike, _ = dist.new_subgroups_by_enumeration([list(range(i, world, size)) for i in range(size)], timeout)
    mesh = DeviceMesh.from_group(alike, rank_info.device.type)
    named, holders = dict(model.named_parameters()), dict[Any, tuple[int, ...]]()
    for block in blocks:
        for index, expert in enumerate(block.experts):
            holder = index * size // len(block.experts)
            ranks = tuple(range(holder, world, size))
            holders |= {parameter: ranks for parameter in expert.parameters() if holder != part}
        block.experts = SpreadExperts(block.experts, group, mesh)
    return {name: _stand_in(each, holders.get(each), rank_info.device) for name, each in named.items()}


def _stand_in(parameter: torch.Tensor, holders: tuple[int, ...] | None, device: torch.device) -> Any:
    """Return a tensor as `parameter`, without memory of its own, that names the ranks which hold parts of it; None for none."""
    if holders is None:
        return None
    found: Any = parameter.new_zeros((), device=device).expand(parameter.shape)
    found.holders = holders
    return found
