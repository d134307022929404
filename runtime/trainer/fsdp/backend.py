"""Training of a Hugging Face model by torch alone: in one process, or with FSDP2 over several."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from runtime.algorithms.losses import token_logprobs
from runtime.config import Config
from runtime.models import forward, hf_folder, hf_policy
from runtime.models.adapters import AdapterBase, HostOffload
from runtime.models.forward import dtype_of
from runtime.process import platform
from runtime.process.spans import at
from runtime.trainer.backend import (
    BatchOutputs,
    ModelBackend,
    PerToken,
    RankInfo,
    Reduced,
    StatePart,
    StepStatistics,
    TrainedRole,
    TrainingPosition,
    compute_dtype,
    holders,
    is_sharded,
    local,
    local_rows,
    token_numbers,
    wholes,
    wire_dtype,
)
from runtime.trainer.fsdp import lora, optimizers, state
from runtime.trainer.fsdp.experts import spread
from runtime.trainer.fsdp.lora import Adapters
from runtime.trainer.fsdp.model import WatchedExperts, loss_factor, reshard, to_device
from runtime.trainer.micro_batch import MicroBatch
from runtime.weights.group import Shard
from runtime.weights.plan import Cut, TensorSpec, in_order

TRIMMED = 1 << 28  # bytes of weights; with more, a step is so long that returning free memory costs nothing
_GRADIENT = "gradient/squared"


class FsdpBackend(ModelBackend):
    """Every rank has its own share of the data. float32 master weights. Computes in `model.dtype`, by default bfloat16 on
    accelerators and float32 on the CPU. With `lora`, only adapters are trained and sent; an export has them merged."""

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
                # The stored dtype is precise enough for frozen weights. torch 2.7's FSDP2 wants one dtype a unit.
                as_stored = rank_info.world_size == 1 and hf_policy.declared_dtype(self._source) == self._compute
                frozen = self._compute if as_stored else torch.float32
                adapted = lora.adapt(self.model, config.lora, self._source, config.run.seed, frozen)
            self._head = hf_policy.take_head(self.model)
        shape = None if self._has_value_head else hf_folder.experts_of(hf_folder.read_raw(self._source))
        blocks = [module for module in self.model.modules() if hasattr(module, "watch")]
        self._experts = WatchedExperts(blocks, shape, config.moe) if shape is not None and blocks else None
        self.routes = None if self._experts is None else self._experts.routes
        elsewhere = spread(self.model, trained, rank_info)
        to_device(self.model, trained, self._compute, rank_info)
        self.adapters = None if adapted is None else Adapters(self.model, adapted, AdapterBase(self._source))
        # Tied tensors appear once, under their first name, as in a Hugging Face export.
        self.parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self._trained = {name: self.parameters.get(name, other) for name, other in elsewhere.items()} or self.parameters
        self._fixed = hf_policy.fixed_tensors(self.model)
        self._policy = {**(self._trained if self.adapters is None else self.adapters.base), **self._fixed}
        self._published = self._policy if self.adapters is None else self.adapters.published
        self.optimizer = optimizers.make_optimizer(trained.options, self.model, self.parameters, self._compute)
        # On a CPU everything is on the host already.
        self.offloaded: Sequence[str] = trained.settings.offloaded if rank_info.device.type != "cpu" else ()
        self.on_host: dict[str, HostOffload] = {}
        large = sum(local(parameter).nbytes for parameter in self.parameters.values()) > TRIMMED
        self._trims = large and rank_info.device.type == "cpu"
        self._held: dict[str, int] = {}  # number of tensors in each HostOffload
        self._loss_factor = loss_factor(rank_info.device, rank_info.world_size)
        super().__init__(rank_info, self.model.config.vocab_size, shares=rank_info)
        self.packs = forward.packs(self.model)

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
        return None if self._experts is None else self._experts.balance(batch, statistics)

    def _forward(self, batch: MicroBatch) -> torch.Tensor:
        """Return the head's inputs [N, H] at the predictors (the logits if the model has the head), or values float32 [N]."""
        if self._experts is not None:
            self._experts.replay(batch)
        packed = (batch.input_ids, batch.position_ids, batch.packing)
        exact = self._compute == torch.float32
        # Products use the compute dtype; residuals, norms and rotations float32, as in rollouts.
        with contextlib.nullcontext() if exact else torch.autocast(self.rank_info.device.type, self._compute):
            if not self._has_value_head:
                return forward.predict(self.model, *packed, batch.predictors)
            arguments, cells = forward.fed(self.model, *packed)
            keep = batch.predictors if cells is None else cells[batch.predictors]
            values: torch.Tensor = self.model(**arguments, keep=keep)
            return values.float()

    def reduce(self, statistics: StepStatistics) -> tuple[Reduced, float]:
        if self.rank_info.world_size > 1:
            reshard(self.model)
        if self._experts is not None:
            self._experts.report(statistics, self.rank_info)
        norms = torch.stack(torch._foreach_norm(self.gradients())).double()
        statistics.total(_GRADIENT, norms.square().sum())
        reduced = statistics.reduce(self.rank_info.world_size)
        return reduced, reduced.sums.pop(_GRADIENT)[0]

    def gradients(self) -> list[torch.Tensor]:
        """Return this rank's shards of the summed gradients. A parameter without a backward pass has gradient 0, not None."""
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return [local(parameter.grad) for parameter in self.parameters.values() if parameter.grad is not None]

    def clear_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        if self._experts is not None:
            self._experts.clear()
        if self._trims:
            platform.trim()  # activations are freed, and the next weight sync needs room

    def update(self, scale: float, rate: float) -> None:
        torch._foreach_mul_(self.gradients(), scale)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        if self._experts is not None:
            self._experts.correct()

    def offload(self) -> None:
        self.clear_gradients()
        for kind in self.offloaded:
            held = [local(tensor) for tensor in self._resident(kind)]
            # Host memory takes long to allocate. It is made anew only if the number of tensors has changed: an optimizer has no
            # state at first.
            if kind not in self.on_host or len(held) != self._held[kind]:
                self.on_host[kind], self._held[kind] = HostOffload(held), len(held)
        super().offload()

    def _resident(self, kind: str) -> list[torch.Tensor]:
        """Return the tensors of `kind` that are on the device between steps; no gradients then."""
        if kind == "param":
            return [*self.model.parameters(), *self.model.buffers()]
        states = self.optimizer.state.values() if kind == "optimizer" else ()
        held = (value for state in states for value in state.values() if isinstance(value, torch.Tensor))
        return [storage for value in held for storage in optimizers.storages(value)]

    def begin_save(self, folder: Path, position: TrainingPosition) -> Callable[[], None]:
        return partial(self._save, folder, position)

    def _save(self, folder: Path, position: TrainingPosition) -> None:
        state.save(folder, self._state(), position, self._source)
        if self._has_value_head and self.rank_info.rank == 0:
            hf_policy.describe_critic(folder / "model", self.model.architecture)

    def load(self, folder: Path) -> TrainingPosition:
        return state.load(folder, self._state())

    def _state(self) -> state.TrainingState:
        trained = self._trained if self.adapters is None else self.adapters.trained
        return state.TrainingState(trained, self.optimizer, self.rank_info, self.adapters, self._fixed)

    def pieces(self) -> list[StatePart]:
        return list(state.pieces(self._state()))

    def counters(self) -> dict[str, int]:
        return {"updates": state.updates(self._state())}

    def restored(self, counters: Mapping[str, int]) -> None:
        optimizers.set_count(self.optimizer, counters["updates"])

    def tensor_specs(self) -> list[TensorSpec]:
        dtypes = {name: str(dtype_of(name, self._wire_dtype)).removeprefix("torch.") for name in self._published}
        return [TensorSpec(name, dtypes[name], tuple(tensor.shape)) for name, tensor in self._published.items()]

    def cuts(self) -> list[Cut]:
        found, whole = [], Cut((tuple(range(self.rank_info.world_size)),))
        for tensor in self._published.values():
            ranks = holders(tensor)
            found.append(Cut(tuple((rank,) for rank in ranks), 0, -(-tensor.shape[0] // len(ranks))) if ranks else whole)
        return found

    @torch.no_grad()
    def shards(self) -> Iterator[Shard]:
        published = list(self._published.items())
        for index in in_order(self.tensor_specs()):
            name, tensor = published[index]
            block, rows = local(tensor), local_rows(tensor) if is_sharded(tensor) else None
            if block.numel():
                part = block if self.adapters is None else self.adapters.scaled(name, block)
                yield Shard(index, () if rows is None else ((rows.start, rows.stop),), part)

    @torch.no_grad()
    def export(self, folder: Path) -> None:
        """Write the policy. With `lora`, also write the adapters in PEFT's format, in the subfolder `adapter`."""
        rank = self.rank_info.rank
        adapted = None if self.adapters is None else self.adapters.merged()
        tensors = wholes(self._policy) if adapted is None else chain(adapted, self._fixed.items())
        hf_policy.write_model(folder, self._policy, tensors, rank, hf_policy.declared_dtype(self._source), self._source)
        if self.adapters is not None:
            self.adapters.write(folder / lora.FOLDER, rank)
