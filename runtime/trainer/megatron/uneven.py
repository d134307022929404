"""Collectives over parts of different sizes, which gloo has not: expert ranks get as many tokens as were routed to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


def all_gather(wholes: list[torch.Tensor], own: torch.Tensor, group: Any = None, **options: Any) -> Any:
    """As torch.distributed's, but for `wholes` that differ in their first dimension, for which there are no `options`."""
    if _alike(wholes):
        return dist.all_gather(wholes, own, group=group, **options)
    assert not options
    wholes[dist.get_rank(group)].copy_(own)
    for source, whole in zip(dist.get_process_group_ranks(group), wholes, strict=True):
        if whole.numel():
            dist.broadcast(whole, source, group=group)
    return None


def reduce_scatter(
    own: torch.Tensor, parts: list[torch.Tensor], op: Any = dist.ReduceOp.SUM, group: Any = None, **options: Any
) -> Any:
    """As torch.distributed's, but for `parts` that differ in their first dimension, for which there are no `options`."""
    if _alike(parts):
        return dist.reduce_scatter(own, parts, op, group=group, **options)
    assert not options
    for target, part in zip(dist.get_process_group_ranks(group), parts, strict=True):
        total = part.clone()  # of which those that are not the target's are left undefined
        if total.numel():
            dist.reduce(total, target, op, group=group)
        if target == dist.get_rank():
            own.copy_(total)
    return None


def _alike(tensors: Sequence[torch.Tensor]) -> bool:
    return len({tensor.shape for tensor in tensors}) == 1
