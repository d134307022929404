"""A model under training on megatron-core: pipelined micro-batches and the distributed optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from runtime import types
from runtime.config import Config
from runtime.models import hf_policy
from runtime.models.adapters import AdapterBase, HostOffload
from runtime.models.families.adapters import sync_name
from runtime.models.forward import dtype_of
from runtime.trainer.backend import (
    BatchOutputs,
    ModelBackend,
    RankInfo,
    Reduced,
    StatePart,
    StepStatistics,
    TrainedRole,
    TrainingPosition,
    compute_dtype,
    wire_dtype,
)
from runtime.trainer.fsdp.lora import FOLDER
from runtime.trainer.megatron import state
from runtime.trainer.megatron.grid import ProcessGrid
from runtime.trainer.megatron.lora import MegatronAdapters
from runtime.trainer.megatron.optimizer import MegatronOptimizer
from runtime.trainer.megatron.passes import MegatronPasses
from runtime.trainer.megatron.weights import ModelWeights
from runtime.trainer.micro_batch import MicroBatch
from runtime.weights.group import Shard
from runtime.weights.plan import Cut, TensorSpec

T = TypeVar("T")


class MegatronBackend(MegatronPasses, ModelBackend):
    """Every block of ranks that holds the model has its own share of the data: the share of its first rank. Computes in
    `model.dtype`, by default bfloat16 on accelerators and float32 on the CPU. Master weights are float32. With `lora`, only
    adapters are trained; an export has them merged. Call `megatron.facade.prepare` first."""

    def __init__(self, config: Config, trained: TrainedRole, rank_info: RankInfo):
        """Load the model. Raises UserError if the configuration or the folder is wrong."""
        device, settings, compute = rank_info.device, trained.settings, compute_dtype(config, rank_info.device)
        self._source, seed = trained.source, config.run.seed
        grid = ProcessGrid(settings, device, seed, config.deadlines.train)
        MegatronPasses.__init__(self, self._source, settings, compute, grid, trained.has_value_head)
        self.adapters: MegatronAdapters | None = None
        if not trained.has_value_head:
            self.watch_experts(config.moe, config.moe.router_replay == "routing")
            self._wire_dtype = wire_dtype(config, device)
            if config.lora is not None:
                self.adapters = MegatronAdapters(self, config.lora, AdapterBase(self._source), seed)
        stored = compute if self.adapters is None else torch.float32
        self.optimizer = MegatronOptimizer(self.model.train(), trained.options, stored, device)
        self.passed = self.optimizer.model
        save = config.deadlines.save
        self._writer = state.Writer(self.grid.host_group(save), trained.role, save, config.checkpoint.gather)
        self.on_host = {kind: HostOffload(self.optimizer.tensors(kind), keep=kind != "grad") for kind in settings.offloaded}
        shares = RankInfo(self.grid.block, self.grid.blocks, device, self.grid.data_group)
        ModelBackend.__init__(self, rank_info, self.shape.vocab_size, shares, self.grid.leads)
        self.routes = None if self.experts is None else self.experts.routes

    def of_share(self, items: Sequence[T], kind: type[T]) -> Sequence[T]:
        return types.decode(list[kind], self.grid.bytes_of_leader(types.encode(list(items))))  # type: ignore[valid-type]

    def run(self, batches: Iterable[MicroBatch], loss: BatchOutputs, backward: bool, last: bool = False) -> list[torch.Tensor]:
        def report(batch: MicroBatch, outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            """Return what megatron-core expects: the loss sum, its number of tokens, and the value to report."""
            lost = loss(batch, outputs)
            return lost, torch.ones((), dtype=torch.int, device=lost.device), lost.detach()

        held = list(batches)
        with torch.set_grad_enabled(backward), self.optimizer.passes(last):
            losses = self.pipeline(held, report, counts=True, forward_only=not backward)
        return self.of_last_stage([lost[None] for lost in losses], [1] * len(held))

    def reduce(self, statistics: StepStatistics) -> tuple[Reduced, float]:
        squared = self.optimizer.finish()
        reduced = statistics.reduce(self.grid.blocks, self.grid.data_group) if self.grid.last else Reduced()
        reduced = types.decode(Reduced, self.grid.bytes_of_last_stage(types.encode(reduced)))
        return reduced if self.experts is None else reduced + self.experts.report(self.rank_info), squared

    def gradients(self) -> list[torch.Tensor]:
        return self.optimizer.gradients()

    def clear_gradients(self) -> None:
        self.optimizer.clear()
        if self.experts is not None:
            self.experts.clear()

    def update(self, scale: float, rate: float) -> None:
        self.optimizer.step(scale, rate)
        if self.experts is not None:
            self.experts.correct()

    def offload(self) -> None:
        self.optimizer.settle()
        super().offload()

    def begin_save(self, folder: Path, position: TrainingPosition) -> Callable[[], None]:
        self.optimizer.settle()
        if self.adapters is not None:
            return self.adapters.prepare(folder, self.optimizer, position)
        return state.prepare(folder, self.optimizer, position, self._source, self._writer)

    def needed(self, folder: Path) -> set[str]:
        return state.needed(folder, self.optimizer) if self.adapters is None else set()

    def load(self, folder: Path) -> TrainingPosition:
        return self.adapters.load(folder, self.optimizer) if self.adapters is not None else state.load(folder, self.optimizer)

    def pieces(self) -> list[StatePart]:
        stage = f"{self.grid.tensor_rank}.{self.grid.pipeline_rank}"
        corrections = () if self.experts is None else self.experts.pieces(stage)
        return [*self.optimizer.pieces(stage, self.grid.expert_rank), *corrections]

    def counters(self) -> dict[str, int]:
        return {"updates": self.optimizer.count}

    def restored(self, counters: Mapping[str, int]) -> None:
        self.optimizer.restored(counters["updates"])

    def _sync_weights(self) -> ModelWeights:
        return self.weights if self.adapters is None else self.adapters.published()

    def tensor_specs(self) -> list[TensorSpec]:
        name_of = str if self.adapters is None else sync_name
        dtypes = {name: str(dtype_of(name, self._wire_dtype)).removeprefix("torch.") for name in self._sync_weights().shapes}
        return [TensorSpec(name_of(name), dtypes[name], shape) for name, shape in self._sync_weights().shapes.items()]

    def cuts(self) -> list[Cut]:
        return self._sync_weights().cuts()

    @torch.no_grad()
    def shards(self) -> Iterator[Shard]:
        self.optimizer.settle()
        return self._sync_weights().shards()

    @torch.no_grad()
    def export(self, folder: Path) -> None:
        """Write the policy. With `lora`, also write the adapters in PEFT's format, in the subfolder `adapter`."""
        self.optimizer.settle()
        like = {name: torch.empty(shape, device="meta") for name, shape in self.weights.shapes.items()}
        # Copies: files are written through numpy, which never frees memory that it was shown, not even to lend out a device.
        dtype = hf_policy.declared_dtype(self._source)
        whole = ((name, tensor.to("cpu", copy=True)) for name, tensor in self.weights.wholes(dtype))
        hf_policy.write_model(folder, like, whole, self.rank_info.rank, dtype, self._source)
        if self.adapters is not None:
            self.adapters.write(folder / FOLDER)
