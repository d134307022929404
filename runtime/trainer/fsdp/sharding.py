"""A policy sharded over the ranks of the trainer's group by FSDP2, or whole if there is one rank.

Parameters are sharded by rows. Every function here is a collective that all ranks call in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from runtime.errors import UserError


def shard(model: torch.nn.Module, device: torch.device, compute: torch.dtype, cpu_offload: bool) -> None:
    """Apply FSDP2 in place over the default process group: one unit for each decoder layer, and one for the rest.

    Master shards are float32, gathered and computed in `compute`. Gradients are reduced in float32 and summed, not averaged;
    `loss_factor` has multiplied the losses. Raises UserError if torch cannot shard a mixture of experts.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    # From the existing group: with CUDA, init_device_mesh would make an NCCL group beside a gloo group.
    mesh = DeviceMesh.from_group(dist.distributed_c10d._get_default_group(), device.type)
    # The residual stream stays float32, as under autocast without FSDP2: no layer casts its inputs.
    options = {} if compute == torch.float32 else {"param_dtype": compute, "reduce_dtype": torch.float32}
    precision = MixedPrecisionPolicy(**options, cast_forward_inputs=False)
    offload = CPUOffloadPolicy() if cpu_offload else OffloadPolicy()
    layers = set(getattr(model, "_no_split_modules", None) or ())
    units = [module for module in model.modules() if type(module).__name__ in layers]
    for unit in [*units, model]:
        fully_shard(unit, mesh=mesh, mp_policy=precision, offload_policy=offload)
        assert isinstance(unit, FSDPModule)
        if _sums(unit):  # sums, as the step divides once at its end; older torch has nothing else over gloo
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
    if any(getattr(model.config, key, 0) for key in ("num_experts", "num_local_experts", "n_routed_experts")):
        _sum_unused(model)


def loss_factor(device: torch.device, world_size: int) -> float:
    """Return the factor of each rank's loss that makes gradients sums over the ranks. Collective.

    torch 2.7, MindSpeed's version, has an FSDP2 that asks for the average and has no option for sums; its gloo sums all the
    same. The factor is therefore measured by reducing ones.
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
    """Return whether this torch's FSDP2 has an option for sums."""
    return hasattr(unit, "set_gradient_divide_factor") and hasattr(unit, "set_force_sum_reduction_for_comms")


def _sum_unused(model: Any) -> None:
    """Include unused experts in reductions: an expert without tokens on one rank has a gradient on other ranks. Raises
    UserError if torch cannot do so."""
    if not hasattr(model, "set_reduce_scatter_unused_params"):
        raise UserError(
            f"model: torch {torch.__version__} cannot shard a mixture of experts over several processes; must be one process, "
            "a newer torch, or engine megatron"
        )
    model.set_reduce_scatter_unused_params(True)


def reshard(model: torch.nn.Module) -> None:
    """Free gathered parameters, which a forward pass without backward leaves behind: after an update they would be stale."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def full(tensor: torch.Tensor, own: torch.Tensor | None = None) -> torch.Tensor:
    """Return the whole parameter or moment on every rank. With `own`, return the whole tensor of the same shape that has `own`
    as this rank's rows. `full_tensor` is not used: its gather crashes over gloo on CUDA."""
    own = local(tensor) if own is None else own
    if not is_sharded(tensor):
        return own
    sharded: Any = tensor
    own = own.to(sharded.device_mesh.device_type)  # the group's device: with `cpu_offload` the shard is on the host
    ranks = dist.get_world_size()
    padded = own.new_zeros(-(-tensor.shape[0] // ranks), *tensor.shape[1:])
    padded[: len(own)] = own
    whole = own.new_empty(ranks * len(padded), *tensor.shape[1:])
    dist.all_gather(list(whole.chunk(ranks)), padded)
    return whole[: tensor.shape[0]]


def wholes(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and the whole of each of `tensors`, in order; one whole tensor at a time is in memory."""
    for name, tensor in tensors.items():
        yield name, full(tensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows."""
    detached: Any = tensor.detach()
    return detached.to_local() if is_sharded(tensor) else detached


def rows(tensor: Any) -> slice:
    """Return the rows of the whole that `local(tensor)` holds: FSDP2 gives each rank `ceil(rows / ranks)`, the last fewer."""
    if not is_sharded(tensor):
        return slice(0, tensor.shape[0])
    mesh = tensor.device_mesh
    share = -(-tensor.shape[0] // mesh.size())
    begin = min(tensor.shape[0], mesh.get_local_rank() * share)
    return slice(begin, begin + local(tensor).shape[0])


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is a DTensor, without importing that class, which takes half a second."""
    return hasattr(tensor, "device_mesh")
