"""Training of a Hugging Face model by torch alone: in one process, or with FSDP2 over several."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from runtime.algorithms.losses import token_logprobs
from runtime.config import Config, Moe
from runtime.errors import UserError
from runtime.models import forward, hf_folder, hf_policy
from runtime.models.adapters import AdapterBase, HostOffload
from runtime.models.families.shape import ExpertShape
from runtime.models.forward import dtype_of
from runtime.process import platform
from runtime.process.spans import at
from runtime.trainer.backend import (
    BatchOutputs,
    ModelBackend,
    PerToken,
    Reduced,
    StepStatistics,
    TrainedRole,
    TrainingPosition,
    compute_dtype,
    token_numbers,
    wire_dtype,
)
from runtime.trainer.collectives import RankInfo
from runtime.trainer.fsdp import lora, optimizers, sharding, state
from runtime.trainer.fsdp.lora import Adapters
from runtime.trainer.micro_batch import MicroBatch
from runtime.weights.delta import Shard
from runtime.weights.plan import TensorSpec

# ---- Experts
#
# The experts of a policy under training: replays the rollout's routing, balances the experts, and counts their load.
#
# B rows, T packed tokens; L layers with E experts; a token takes k of the E experts.


class WatchedExperts:
    """Call `replay` before each pass of a model, `balance` after it, `report` before an update and `correct` with it."""

    def __init__(self, model: Any, shape: ExpertShape | None, moe: Moe):
        """Find the model's blocks of experts. Without a `shape` there are none, and all methods do nothing."""
        self._moe, (layers, _, self._count) = moe, (0, 0, 1) if shape is None else shape.routes
        self.routes = shape.routes if shape is not None and moe.router_replay == "routing" else None
        self._sigmoid = shape is not None and shape.corrected
        self._blocks = [module for module in model.modules() if layers and hasattr(module, "watch")]
        for block in self._blocks:
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
        if not self._blocks:
            return None
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
        if not self._blocks:
            return
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


TRIMMED = 1 << 28  # bytes of weights; with more, a step is so long that returning free memory costs nothing
_GRADIENT = "gradient/squared"


class FsdpBackend(ModelBackend):
    """Every rank has its own share of the data. float32 master weights. Computes in `model.dtype`, by default bfloat16 on
    accelerators and float32 on the CPU.

    With `lora`, only adapters are trained and sent in weight syncs. An export has the adapters merged into the model.
    """

    def __init__(self, config: Config, trained: TrainedRole, rank_info: RankInfo):
        """Load the model. Raises UserError if the configuration or the folder is wrong."""
        self._source, self._has_value_head = trained.source, trained.has_value_head
        self._compute = compute_dtype(config, rank_info.device)
        adapted = None
        if self._has_value_head:
            self.model: Any = hf_policy.load_critic(self._source)
        else:
            self.model = hf_policy.load_policy(self._source)
            self._wire_dtype = wire_dtype(config, rank_info.device)
            if config.lora is not None:
                frozen = self._frozen_dtype(rank_info.world_size)
                adapted = lora.adapt(self.model, config.lora, self._source, config.run.seed, frozen)
            self._head = hf_policy.take_head(self.model)
        shape = None if self._has_value_head else hf_folder.experts_of(hf_folder.read_raw(self._source))
        self._experts = WatchedExperts(self.model, None if config.lora else shape, config.moe)
        self.routes = self._experts.routes
        to_device(self.model, trained, self._compute, rank_info)
        self._adapters = None if adapted is None else Adapters(self.model, adapted, AdapterBase(self._source))
        # Tied tensors appear once, under their first name, as in a Hugging Face export.
        self.parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self._fixed = hf_policy.fixed_tensors(self.model)
        self._policy = {**(self.parameters if self._adapters is None else self._adapters.base), **self._fixed}
        self._published = self._policy if self._adapters is None else self._adapters.published
        self.optimizer = optimizers.make_optimizer(trained.options, self.model, self.parameters, self._compute)
        # On a CPU everything is on the host already.
        self.offloaded: Sequence[str] = trained.settings.offloaded if rank_info.device.type != "cpu" else ()
        self._on_host: dict[str, HostOffload] = {}
        large = sum(sharding.local(parameter).nbytes for parameter in self.parameters.values()) > TRIMMED
        self._trims = large and rank_info.device.type == "cpu"
        self._held: dict[str, int] = {}  # number of tensors in each HostOffload
        self._loss_factor = sharding.loss_factor(rank_info.device, rank_info.world_size)
        super().__init__(rank_info, self.model.config.vocab_size, shares=rank_info)
        self.packs = forward.packs(self.model)

    def _frozen_dtype(self, world_size: int) -> torch.dtype:
        """Return the dtype of frozen weights: the stored dtype is precise enough. torch 2.7's FSDP2 wants one dtype a unit."""
        as_stored = world_size == 1 and hf_policy.declared_dtype(self._source) == self._compute
        return self._compute if as_stored else torch.float32

    # ------------------------------------------------------------------------------------------ passes

    def run(self, batches: Iterable[MicroBatch], loss: BatchOutputs, backward: bool, last: bool = False) -> list[torch.Tensor]:
        losses = []  # FSDP2 reduces every micro-batch's gradients, so that a rank holds only its own shard of them
        for number, batch in enumerate(batches):
            with at("forward", f"micro-batch {number}"), torch.set_grad_enabled(backward):
                lost = loss(batch, self._forward(batch))
            if backward:
                with at("backward", f"micro-batch {number}"):
                    (lost * self._loss_factor).backward()
            losses.append(lost.detach())
        return losses

    def infer(self, batches: Iterable[MicroBatch], output: BatchOutputs) -> Iterator[tuple[MicroBatch, torch.Tensor]]:
        for number, batch in enumerate(batches):
            with at("forward", f"micro-batch {number}"):
                found = output(batch, self._forward(batch))
            yield batch, found

    def token_logprobs(
        self, outputs: torch.Tensor, batch: MicroBatch, temperature: float, *, entropy_gradient: bool
    ) -> PerToken:
        numbers = partial(token_logprobs, temperature=temperature, entropy_gradient=entropy_gradient)
        weight = None
        if self._head is not None:
            weight, outputs = self._head.weight.to(self._compute), outputs.to(self._compute)
        return token_numbers(numbers, outputs, weight, self.vocab_size, batch)

    def balance(self, batch: MicroBatch, statistics: StepStatistics) -> torch.Tensor | None:
        return self._experts.balance(batch, statistics)

    def _forward(self, batch: MicroBatch) -> torch.Tensor:
        """Return the outputs at the predictors: the head's inputs [N, H] (the logits if the head is part of the model), or
        values float32 [N]."""
        self._experts.replay(batch)
        packed = (batch.input_ids, batch.position_ids, batch.packing)
        with self._precision():
            if not self._has_value_head:
                return forward.predict(self.model, *packed, batch.predictors)
            arguments, cells = forward.fed(self.model, *packed)
            keep = batch.predictors if cells is None else cells[batch.predictors]
            values: torch.Tensor = self.model(**arguments, keep=keep)
            return values.float()

    def _precision(self) -> contextlib.AbstractContextManager:
        """Return a pass's context. Products use the compute dtype; residuals, norms and rotations float32, as in rollouts."""
        if self._compute == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.rank_info.device.type, self._compute)

    # ------------------------------------------------------------------------------------------ gradients and updates

    def reduce(self, statistics: StepStatistics) -> tuple[Reduced, float]:
        if self.rank_info.world_size > 1:
            sharding.reshard(self.model)
        self._experts.report(statistics, self.rank_info)
        norms = torch.stack(torch._foreach_norm(self.gradients())).double()
        statistics.mean(_GRADIENT, norms.square().sum(), 1.0)
        reduced = statistics.reduce(self.rank_info.world_size)
        return reduced, reduced.means.pop(_GRADIENT).total

    def gradients(self) -> list[torch.Tensor]:
        """Return this rank's shards of the summed gradients. A parameter without a backward pass has gradient 0, not None."""
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return [sharding.local(parameter.grad) for parameter in self.parameters.values() if parameter.grad is not None]

    def clear_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self._experts.clear()
        if self._trims:
            platform.trim()  # activations are freed, and the next weight sync needs room

    def update(self, scale: float, rate: float) -> None:
        torch._foreach_mul_(self.gradients(), scale)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self._experts.correct()

    # ------------------------------------------------------------------------------------------ offload

    def offload(self) -> None:
        self.clear_gradients()
        for kind in self.offloaded:
            self._host_of(kind).offload()
        platform.release(self.rank_info.device)

    def onload(self) -> None:
        for kind in self.offloaded:
            self._on_host[kind].onload()

    def _host_of(self, kind: str) -> HostOffload:
        """Return the HostOffload of `kind`. Its host memory takes long to allocate, so it is only made anew if the number of
        tensors has changed: an optimizer has no state at first."""
        held = [sharding.local(tensor) for tensor in self._resident(kind)]
        if kind not in self._on_host or len(held) != self._held[kind]:
            self._on_host[kind], self._held[kind] = HostOffload(held), len(held)
        return self._on_host[kind]

    def _resident(self, kind: str) -> list[torch.Tensor]:
        """Return the tensors of `kind` that are on the device between steps; no gradients then."""
        if kind == "param":
            return [*self.model.parameters(), *self.model.buffers()]
        states = self.optimizer.state.values() if kind == "optimizer" else ()
        held = (value for state in states for value in state.values() if isinstance(value, torch.Tensor))
        return [storage for value in held for storage in optimizers.storages(value)]

    # ------------------------------------------------------------------------------------------ checkpoints

    def begin_save(self, folder: Path, position: TrainingPosition) -> Callable[[], None]:
        return partial(self._save, folder, self._state(position))

    def _save(self, folder: Path, saved: state.TrainingState) -> None:
        state.save(folder, saved, self._source)
        if self._has_value_head and self.rank_info.rank == 0:
            hf_policy.describe_critic(folder / "model", self.model.architecture)

    def load(self, folder: Path) -> TrainingPosition:
        return state.load(folder, self._state(TrainingPosition(0, None)))

    def _state(self, position: TrainingPosition) -> state.TrainingState:
        trained = self.parameters if self._adapters is None else self._adapters.trained
        return state.TrainingState(trained, self.optimizer, position, self.rank_info, self._adapters, self._fixed)

    # ------------------------------------------------------------------------------------------ weight sync and export

    def tensor_specs(self) -> list[TensorSpec]:
        dtypes = {name: str(dtype_of(name, self._wire_dtype)).removeprefix("torch.") for name in self._published}
        return [TensorSpec(name, dtypes[name], tuple(tensor.shape)) for name, tensor in self._published.items()]

    def holders(self) -> list[tuple[int, ...]]:
        return [tuple(range(self.rank_info.world_size))] * len(self._published)

    @torch.no_grad()
    def gather(self, targets: Sequence[int] = ()) -> Iterator[torch.Tensor]:
        for index, (name, whole) in enumerate(sharding.wholes(self._published)):
            if self.rank_info.rank == (targets[index] if targets else 0):
                yield self._scaled(name, whole)

    def _scaled(self, name: str, part: torch.Tensor) -> torch.Tensor:
        return part if self._adapters is None else self._adapters.scaled(name, part)

    def shards(self, targets: Sequence[int]) -> Iterator[Shard]:
        return (
            Shard(
                index,
                (sharding.rows(tensor),),
                self._scaled(name, sharding.local(tensor)).to(dtype_of(name, self._wire_dtype)),
            )
            for index, (name, tensor) in enumerate(self._published.items())
            if self.rank_info.rank == 0 or sharding.is_sharded(tensor)
        )

    @torch.no_grad()
    def export(self, folder: Path) -> None:
        """Write the policy. With `lora`, also write the adapters in PEFT's format, in the subfolder `adapter`."""
        rank = self.rank_info.rank
        adapted = None if self._adapters is None else self._adapters.merged()
        wholes = sharding.wholes(self._policy) if adapted is None else chain(adapted, self._fixed.items())
        hf_policy.write_model(folder, self._policy, wholes, rank, hf_policy.declared_dtype(self._source), self._source)
        if self._adapters is not None:
            self._adapters.write(folder / lora.FOLDER, rank)


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
        sharding.shard(model, device, compute, settings.cpu_offload)
    else:
        model.to(device)


def _costly() -> list[Any]:
    """Return the operators whose results selective checkpointing keeps."""
    aten: Any = torch.ops.aten
    kinds = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
    attention = [getattr(aten, f"_scaled_dot_product_{kind}").default for kind in kinds]
    return [aten.mm.default, aten.addmm.default, aten.bmm.default, *attention]
