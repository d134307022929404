"""The training engine of the policy on megatron-core: its layouts, and its distributed optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from runtime.chosen_algorithm import choose
from runtime.config import Config
from runtime.trainer import model as train_model
from runtime.trainer import policy as train_policy
from runtime.trainer import state as train_state
from runtime.trainer.megatron import vocab_parallel
from runtime.trainer.megatron.update import MegatronUpdateEngine
from runtime.trainer.model import RankPlace
from runtime.trainer.objective import Objective
from runtime.trainer.policy import PolicyLoop
from runtime.trainer.rows import Needs
from runtime.weights.plan import TensorSpec


class MegatronTrainEngine(MegatronUpdateEngine, PolicyLoop):
    """Computes in `model.dtype`, by default bfloat16 on accelerators and float32 on the CPU; master weights are float32.

    `megatron.facade.prepare` has been called in this process.
    """

    def __init__(self, config: Config, *, rank: int = 0, world_size: int = 1, device: torch.device | str = "cpu"):
        """Load the policy from `config.model.path`. Raises UserError for what the configuration or the folder gets wrong."""
        rank_place = RankPlace(rank, world_size, torch.device(device))
        compute = train_model.compute_dtype(config, rank_place.device)
        algorithm = choose(config)
        self._wire_dtype = train_policy.wire_dtype(config)
        needs = Needs(reference=config.algorithm.kl_coefficient != 0, values=algorithm.advantage.needs_values)
        trainer = config.services.trainer
        super().__init__(config, config.model.path, trainer, config.training.optimizer, needs, compute, rank_place)
        logprobs = partial(vocab_parallel.token_logprobs, group=self._grid.tensor_group, start=self._model.vocabulary_start)
        self._objective = Objective(config, algorithm, logprobs)

    # ------------------------------------------------------------------------------------------ what leaves it

    def tensor_specs(self) -> list[TensorSpec]:
        dtype = str(self._wire_dtype).removeprefix("torch.")
        return [TensorSpec(name, dtype, shape) for name, shape in self._weights.shapes.items()]

    def holders(self) -> list[tuple[int, ...]]:
        return [tuple(self._grid.leaders[stage]) for stage in self._weights.stages()]

    @torch.no_grad()
    def gather(self, targets: Sequence[int] = ()) -> Iterator[torch.Tensor]:
        self._updates.settle()
        for _, whole in self._weights.wholes(self._wire_dtype, dict(zip(self._weights.shapes, targets, strict=bool(targets)))):
            yield whole

    @torch.no_grad()
    def export(self, folder: str) -> None:
        self._updates.settle()
        like = {name: torch.empty(shape, device="meta") for name, shape in self._weights.shapes.items()}
        # Copies: numpy, by which files are written, never lets go of memory that it was shown, not even to lend a device out.
        whole = ((name, tensor.to("cpu", copy=True)) for name, tensor in self._weights.wholes(self._wire_dtype))
        train_state.write_model(Path(folder), like, whole, self._rank, self._wire_dtype, self._source)
