"""A policy spread over the ranks of the trainer's group: FSDP2, or nothing at all when there is one rank.

Parameters are sharded by rows; every helper is a collective that all ranks call in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from runtime.errors import UserError


def shard(model: torch.nn.Module, device: torch.device, compute: torch.dtype, cpu_offload: bool) -> None:
    """Apply FSDP2 in place over the default process group: one unit a decoder layer, and one for the rest.

    float32 master shards, gathered and computed in `compute`, gradients reduced in float32: summed (not averaged), of losses
    that `loss_factor` has multiplied. Raises UserError for a mixture of experts where torch cannot spread one.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    # Of the group that there is: a mesh made by init_device_mesh has one over NCCL beside a gloo group, where torch sees CUDA.
    mesh = DeviceMesh.from_group(dist.distributed_c10d._get_default_group(), device.type)
    # What layers add to stays float32, as under autocast without FSDP2: no layer casts what it is called with.
    options = {} if compute == torch.float32 else {"param_dtype": compute, "reduce_dtype": torch.float32}
    precision = MixedPrecisionPolicy(**options, cast_forward_inputs=False)
    offload = CPUOffloadPolicy() if cpu_offload else OffloadPolicy()
    layers = set(getattr(model, "_no_split_modules", None) or ())
    units = [module for module in model.modules() if type(module).__name__ in layers]
    for unit in [*units, model]:
        fully_shard(unit, mesh=mesh, mp_policy=precision, offload_policy=offload)
        assert isinstance(unit, FSDPModule)
        if _sums(unit):  # which is what the step's one division at its end expects, and all that gloo has in older torch
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
    if any(getattr(model.config, key, 0) for key in ("num_experts", "num_local_experts", "n_routed_experts")):
        _sum_unused(model)


def loss_factor(device: torch.device, world_size: int) -> float:
    """By what each rank multiplies its loss, so that gradients come out as sums over the ranks. Collective.

    torch 2.7, which MindSpeed is declared for, has an FSDP2 that asks for the average and cannot be told otherwise; its gloo
    sums all the same. So what that reduction makes of ones says it.
    """
    if world_size == 1:
        return 1.0
    from torch.distributed.fsdp import FSDPModule

    if _sums(FSDPModule):
        return 1.0
    reduced = torch.empty(1, device=device)
    dist.reduce_scatter_tensor(reduced, torch.ones(world_size, device=device), dist.ReduceOp.AVG)
    return world_size / reduced.item()


def _sums(unit: Any) -> bool:
    """Whether this torch's FSDP2 can be told to sum."""
    return hasattr(unit, "set_gradient_divide_factor") and hasattr(unit, "set_force_sum_reduction_for_comms")


def _sum_unused(model: Any) -> None:
    """An expert that no token of one rank was given to has a gradient on others: all take part in its sum."""
    if not hasattr(model, "set_reduce_scatter_unused_params"):
        raise UserError(
            f"model: torch {torch.__version__} cannot spread a mixture of experts over several processes; must be one process, "
            "a newer torch, or engine megatron"
        )
    model.set_reduce_scatter_unused_params(True)


def reshard(model: torch.nn.Module) -> None:
    """Free gathered parameters, which a forward pass without a backward one leaves behind; they would be stale after a step."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def full(tensor: torch.Tensor, own: torch.Tensor | None = None) -> torch.Tensor:
    """The whole of a parameter or moment, on every rank; with `own`, of what is shaped as it is, of which these are this rank's
    rows. Not by `full_tensor`, whose gather crashes over gloo on CUDA."""
    own = local(tensor) if own is None else own
    if not is_sharded(tensor):
        return own
    sharded: Any = tensor
    own = own.to(sharded.device_mesh.device_type)  # where the group is: with `cpu_offload` it is on the host
    ranks = dist.get_world_size()
    padded = own.new_zeros(-(-tensor.shape[0] // ranks), *tensor.shape[1:])
    padded[: len(own)] = own
    whole = own.new_empty(ranks * len(padded), *tensor.shape[1:])
    dist.all_gather(list(whole.chunk(ranks)), padded)
    return whole[: tensor.shape[0]]


def wholes(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Each of `tensors`, whole, by its name and in their order; one at a time is in memory."""
    for name, tensor in tensors.items():
        yield name, full(tensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's rows."""
    detached: Any = tensor.detach()
    return detached.to_local() if is_sharded(tensor) else detached


def rows(tensor: Any) -> slice:
    """Which rows of the whole `local(tensor)` holds: FSDP2 gives each rank `ceil(rows / ranks)`, the last ones fewer."""
    if not is_sharded(tensor):
        return slice(0, tensor.shape[0])
    mesh = tensor.device_mesh
    share = -(-tensor.shape[0] // mesh.size())
    begin = min(tensor.shape[0], mesh.get_local_rank() * share)
    return slice(begin, begin + local(tensor).shape[0])


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor, whose class takes half a second to import."""
    return hasattr(tensor, "device_mesh")
