"""What engine torch does to a Hugging Face model: it goes to its device, or FSDP2 shards it by rows over the trainer's group.

Experts are watched. Functions that shard are collectives, which all ranks call in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from runtime.config import Moe
from runtime.errors import UserError
from runtime.models.families.shape import ExpertShape
from runtime.models.hf_folder import count_experts
from runtime.trainer.backend import RankInfo, StepStatistics, TrainedRole
from runtime.trainer.micro_batch import MicroBatch


def to_device(model: Any, trained: TrainedRole, compute: torch.dtype, rank_info: RankInfo) -> None:
    """Bring `model` into training mode and onto its device, or shard it over the ranks. Raises UserError for `cpu_offload`."""
    world_size, device, settings = rank_info.world_size, rank_info.device, trained.settings
    if settings.cpu_offload and (world_size == 1 or device.type == "cpu"):
        key = f"services.{trained.role}"
        raise UserError(
            f"{key}.cpu_offload: true needs accelerators and {key}.processes > 1 "
            f"(here: {device.type}, {world_size}); must be false"
        )
    if settings.activation_checkpointing:
        options: dict[str, Any] = {"use_reentrant": False}
        if settings.activation_checkpointing == "selective":
            options["context_fn"] = partial(create_selective_checkpoint_contexts, _costly())
        model.gradient_checkpointing_enable(options)
    for name, buffer in model.named_buffers():
        if name.endswith("embed_scale"):  # Gemma's; rounded as in rollouts, which compute in this dtype
            buffer.copy_(buffer.to(compute))
    model.train()
    if world_size > 1:
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding):  # FSDP2 casts its output; the residual stream is float32
                module.register_forward_hook(lambda _, given, made: made.float())
        shard(model, device, compute, settings.cpu_offload)
    else:
        model.to(device)


def _costly() -> list[Any]:
    """Return the operators whose results selective checkpointing keeps."""
    aten: Any = torch.ops.aten
    kinds = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
    attention = [getattr(aten, f"_scaled_dot_product_{kind}").default for kind in kinds]
    grouped = [aten._grouped_mm.default] if hasattr(aten, "_grouped_mm") else []
    return [aten.mm.default, aten.addmm.default, aten.bmm.default, *grouped, *attention]


def shard(model: Any, device: torch.device, compute: torch.dtype, cpu_offload: bool) -> None:
    """Apply FSDP2 in place over the default process group: one unit for each decoder layer, and one for the rest. Experts that
    are spread are units of their own, over the ranks that hold them. Master shards are float32, gathered and computed in
    `compute`. Gradients are reduced in float32 and summed, not averaged; `loss_factor` has multiplied the losses. Raises
    UserError if torch cannot shard a mixture of experts."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    from runtime.trainer.fsdp.experts import SpreadExperts

    # From the existing group: with CUDA, init_device_mesh would make an NCCL group beside a gloo group.
    mesh = DeviceMesh.from_group(dist.distributed_c10d._get_default_group(), device.type)
    # The residual stream stays float32, as under autocast without FSDP2: no layer casts its inputs.
    options = {} if compute == torch.float32 else {"param_dtype": compute, "reduce_dtype": torch.float32}
    precision = MixedPrecisionPolicy(**options, cast_forward_inputs=False)
    offload = CPUOffloadPolicy() if cpu_offload else OffloadPolicy()
    layers = set(getattr(model, "_no_split_modules", None) or ())
    modules = list(model.modules())
    spread = [(module, module.mesh) for module in modules if isinstance(module, SpreadExperts)]
    units = [(module, mesh) for module in modules if type(module).__name__ in layers]
    for unit, ranks in [*spread, *units, (model, mesh)]:
        fully_shard(unit, mesh=ranks, mp_policy=precision, offload_policy=offload)
        assert isinstance(unit, FSDPModule)
        if _sums(unit):  # sums, as the step divides once at its end; older torch has nothing else over gloo
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        elif spread:
            raise UserError(f"parallel.expert: torch {torch.__version__} averages gradients; must be 1, or take a newer torch")
    if count_experts(model.config.to_dict()):
        # An expert without tokens on one rank has a gradient on other ranks.
        if not hasattr(model, "set_reduce_scatter_unused_params"):
            raise UserError(
                f"model: torch {torch.__version__} cannot shard a mixture of experts over several processes; must be one "
                "process, a newer torch, or engine megatron"
            )
        model.set_reduce_scatter_unused_params(True)


def loss_factor(device: torch.device, world_size: int) -> float:
    """Return the factor of each rank's loss that makes gradients sums over the ranks. Collective. The FSDP2 of torch 2.7, which
    MindSpeed has, asks for the average, but gloo sums all the same. So the factor is measured by reducing ones."""
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


def reshard(model: torch.nn.Module) -> None:
    """Free gathered parameters, which a forward pass without backward leaves behind: after an update they would be stale."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


# ---- Experts. B rows, T packed tokens; L layers with E experts; a token takes k of the E experts.


class WatchedExperts:
    """Replays the rollout's routing (`replay`, before each pass), balances the experts (`balance` after it, `correct` with each
    update), and counts their load (`report`, before an update)."""

    def __init__(self, blocks: Sequence[Any], shape: ExpertShape, moe: Moe):
        """Watch `blocks`, the model's blocks of experts, in the order of layers."""
        self._blocks, self._moe, self._count, self._sigmoid = blocks, moe, shape.routes[2], shape.corrected
        self.routes = shape.routes if moe.router_replay == "routing" else None
        for block in blocks:
            block.watch.keeps = moe.losses
        self.clear()

    def clear(self) -> None:
        """Forget the passes since the last update."""
        self._loads: torch.Tensor | None = None  # [L, E], how often the tokens chose each expert
        for block in self._blocks:
            block.watch.logits = None

    def replay(self, batch: MicroBatch) -> None:
        for layer, block in enumerate(self._blocks):
            block.watch.taken = None if batch.experts is None else batch.experts[:, layer].long()

    def balance(self, batch: MicroBatch, statistics: StepStatistics) -> torch.Tensor | None:
        """Do what `ModelBackend.balance` says."""
        rows, watches = len(batch.samples), [block.watch for block in self._blocks]  # 0 rows: an empty batch's token is padding
        chosen = torch.stack([watch.chosen for watch in watches]) if rows else batch.cells.new_zeros(len(watches), 0, 1)
        loads = [torch.bincount(each.flatten(), minlength=self._count) for each in chosen]
        self._loads = torch.stack(loads).to(statistics.dtype) + (0 if self._loads is None else self._loads)
        if self._moe.router_replay == "routing":
            own = torch.stack([watch.own for watch in watches]) if rows else chosen
            differ = (own.sort(-1).values != chosen.sort(-1).values).any(-1)
            statistics.mean("moe/routing_differs", differ.sum(), differ.numel())
        if not self._moe.losses:
            return None
        share, found = shares_of_rows(batch), torch.zeros(len(batch.mask), 1, device=batch.mask.device)
        aux = [balance_loss(watch.logits.float(), watch.chosen, share, self._sigmoid) for watch in watches]
        z = [z_loss(watch.logits.float(), share) for watch in watches]
        for name, coefficient, losses in (("aux_loss", self._moe.aux_loss, aux), ("z_loss", self._moe.z_loss, z)):
            total = torch.stack(losses).sum(0)
            statistics.mean(f"moe/{name}", total.detach()[:rows].sum(), rows * len(watches))
            found = found + coefficient * total[:, None]
        return found

    def report(self, statistics: StepStatistics, rank_info: RankInfo) -> None:
        """Sum the loads over all ranks and add them to `statistics`. Collective."""
        none = torch.zeros(len(self._blocks), self._count, dtype=statistics.dtype, device=statistics.device)
        self._loads = rank_info.summed(none if self._loads is None else self._loads)
        counted = float(self._loads.any())
        part = self._loads / self._loads.sum(1, keepdim=True).clamp(min=1)
        statistics.mean("moe/load_max", counted * self._count * part.amax(1).mean(), counted)
        entropy = torch.special.entr(part).sum(1).mean() / math.log(max(2, self._count))
        statistics.mean("moe/load_entropy", counted * entropy, counted)

    @torch.no_grad()
    def correct(self) -> None:
        """Balance as DeepSeek-V3 does without a loss (arXiv:2412.19437, section 2.1.2). The score correction of an expert rises
        by `moe.bias_update` if its load is less than the mean, and falls by it if its load is more."""
        if self._moe.bias_update and self._loads is not None:
            for block, load in zip(self._blocks, self._loads, strict=True):
                block.gate.e_score_correction_bias += self._moe.bias_update * torch.sign(load.mean() - load)


def shares_of_rows(batch: MicroBatch) -> torch.Tensor:
    """Return 1 / (tokens of the row) for each token of a row, shared tokens included, 0 elsewhere; float32 [B, T]."""
    lengths = batch.sequences[:, 1] + batch.sequences[:, 2]
    row = np.repeat(np.arange(len(lengths)), lengths)
    share = np.zeros((len(lengths), batch.input_ids.shape[1]), np.float32)
    share[row, batch.paths] = (1 / lengths)[row]
    return torch.from_numpy(share).to(batch.input_ids.device)


def balance_loss(logits: torch.Tensor, chosen: torch.Tensor, share: torch.Tensor, sigmoid: bool) -> torch.Tensor:
    """Return E · Σ_i f_i · P_i of each row, [B]. f_i is expert i's share of the row's choices, P_i its mean probability; 1 if
    all is balanced (Switch Transformer, arXiv:2101.03961, equations 4 to 6; by rows as in DeepSeek-V3, arXiv:2412.19437,
    equations 17 to 20). `logits` [T, E], `chosen` [T, k], `share` as in `shares_of_rows`. Probabilities are the softmax, or
    with `sigmoid` the sigmoids divided by their sum."""
    scores = torch.sigmoid(logits) if sigmoid else torch.softmax(logits, -1)
    probability = scores / scores.sum(-1, keepdim=True)
    picks = torch.zeros_like(logits).scatter_(1, chosen, 1.0 / chosen.shape[1])
    return logits.shape[1] * ((share @ picks) * (share @ probability)).sum(1)


def z_loss(logits: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Return the mean over a row's tokens of (log Σ exp `logits`)², [B] (ST-MoE, arXiv:2202.08906, equation 5)."""
    return share @ torch.logsumexp(logits, -1).square()
