"""The embedded training engine of the policy: a Hugging Face model, AdamW, and FSDP2 when there is more than one rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from runtime.chosen_algorithm import choose
from runtime.config import Config
from runtime.models import hf_policy
from runtime.trainer import lora
from runtime.trainer import model as train_model
from runtime.trainer import policy as train_policy
from runtime.trainer import state as train_state
from runtime.trainer.batch import Columns, MicroBatch
from runtime.trainer.fsdp import sharding
from runtime.trainer.fsdp.update import TorchUpdateEngine
from runtime.trainer.lora import Adapters
from runtime.trainer.model import RankPlace
from runtime.trainer.objective import Objective
from runtime.trainer.policy import PolicyLoop
from runtime.trainer.rows import Needs, Rows
from runtime.weights.plan import TensorSpec


class TorchTrainEngine(TorchUpdateEngine, PolicyLoop):
    """float32 master weights; computes in `model.dtype`, by default bfloat16 on accelerators and float32 on the CPU.

    With `lora` adapters alone are trained, and the policy that leaves the engine has them merged.
    """

    def __init__(self, config: Config, *, rank: int = 0, world_size: int = 1, device: torch.device | str = "cpu"):
        """Load the policy from `config.model.path`. Raises UserError for what the configuration or the folder gets wrong."""
        rank_place = RankPlace(rank, world_size, torch.device(device))
        algorithm = choose(config)
        self._objective = Objective(config, algorithm)
        compute = train_model.compute_dtype(config, rank_place.device)
        self._source = config.model.path
        model = hf_policy.load_policy(self._source)
        self._wire_dtype = train_policy.wire_dtype(config)
        adapted = None
        if config.lora is not None:
            frozen = self._frozen_dtype(compute, world_size)
            adapted = lora.adapt(model, config.lora, self._source, config.run.seed, frozen)
        train_model.place(model, config.services.trainer, "services.trainer", compute, rank_place)
        diverges = config.algorithm.kl_coefficient != 0
        self._base_is_reference = diverges and config.reference.mode == "adapter_off"
        needs = Needs(reference=diverges and not self._base_is_reference, values=algorithm.advantage.needs_values)
        super().__init__(config, model, config.training.optimizer, needs, compute, rank_place)
        self._adapters = None if adapted is None else Adapters(model, adapted)
        self._policy = self._parameters if self._adapters is None else self._adapters.base

    def _frozen_dtype(self, compute: torch.dtype, world_size: int) -> torch.dtype:
        """Weights that are never updated need no more digits than they came with. torch 2.7's FSDP2 wants one dtype a unit."""
        return compute if world_size == 1 and hf_policy.declared_dtype(self._source) == compute else torch.float32

    def _columns(self, rows: Rows) -> tuple[Columns, np.ndarray]:
        if self._base_is_reference:
            rows = replace(rows, reference=self._base_logprobs(rows))
        return super()._columns(rows)

    def _base_logprobs(self, rows: Rows) -> np.ndarray:
        """float32 flat: what the policy gave to every trained token before training, 0 elsewhere."""
        assert self._adapters is not None
        with self._adapters.off():
            return self._forward_only(rows)

    def _forward(self, batch: MicroBatch) -> torch.Tensor:
        """[N, V] at the predictors."""
        with self._precision():
            logits: torch.Tensor = self._model(
                input_ids=batch.input_ids,
                position_ids=batch.position_ids,
                packing=batch.packing,
                logits_to_keep=batch.predictors,
                use_cache=False,
            ).logits[0]
        return logits

    # ------------------------------------------------------------------------------------------ what leaves it

    def tensor_specs(self) -> list[TensorSpec]:
        dtype = str(self._wire_dtype).removeprefix("torch.")
        return [TensorSpec(name, dtype, tuple(parameter.shape)) for name, parameter in self._policy.items()]

    def holders(self) -> list[tuple[int, ...]]:
        return [tuple(range(self._world_size))] * len(self._policy)

    @torch.no_grad()
    def gather(self, targets: Sequence[int] = ()) -> Iterator[torch.Tensor]:
        for place, (_, whole) in enumerate(self._whole_policy()):
            if self._rank == (targets[place] if targets else 0):
                yield whole

    @torch.no_grad()
    def export(self, folder: str) -> None:
        """With `lora` the adapters besides, in PEFT's format, as the folder `adapter` within."""
        train_state.write_model(Path(folder), self._policy, self._whole_policy(), self._rank, self._wire_dtype, self._source)
        if self._adapters is not None:
            self._adapters.write(Path(folder) / lora.FOLDER, self._rank)

    def _whole_policy(self) -> Iterator[tuple[str, torch.Tensor]]:
        return sharding.wholes(self._policy) if self._adapters is None else self._adapters.merged()

    def _training_state(self) -> train_state.TrainingState:
        state = super()._training_state()
        return state if self._adapters is None else replace(state, parameters=self._adapters.trained, adapters=self._adapters)
