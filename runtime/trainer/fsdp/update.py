"""How torch's own models run and are updated: one micro-batch after the other, AdamW, FSDP2 when there are several ranks."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from runtime.config import Config, Optimizer, Trainer
from runtime.models.offload import Shelf
from runtime.process import platform
from runtime.trainer import state as train_state
from runtime.trainer.batch import MicroBatch
from runtime.trainer.fsdp import sharding
from runtime.trainer.loop import UpdateLoop
from runtime.trainer.model import RankPlace, make_optimizer
from runtime.trainer.rows import Needs
from runtime.trainer.statistics import Reduced

_GRADIENT = "gradient/squared"


class TorchUpdateEngine(UpdateLoop):
    """Every rank has its own share of the data."""

    _source: str  # the folder that the model came from

    def __init__(
        self, config: Config, model: Any, options: Optimizer, needs: Needs, compute: torch.dtype, rank_place: RankPlace
    ):
        """`model` lies where `rank_place` says, and computes in `compute`."""
        self._model, self._compute = model, compute
        # Tied tensors come once, under their first name, as in a Hugging Face export.
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._optimizer = make_optimizer(options, self._parameters)
        settings: Trainer = getattr(config.services, self.role)
        # What is on the host already is not taken there.
        self._lent = settings.offloaded if rank_place.device.type != "cpu" else ()
        self._loss_factor = sharding.loss_factor(rank_place.device, rank_place.world_size)
        self._shelves: dict[str, Shelf] = {}
        self._shelved: dict[str, int] = {}  # how many tensors each holds
        super().__init__(config, options, needs, rank_place, model.config.vocab_size)

    @abstractmethod
    def _forward(self, batch: MicroBatch) -> torch.Tensor:
        """What the model gives for the trained tokens, N rows."""

    def _run(self, batches: Iterable[MicroBatch], backward: bool, last: bool = False) -> list[torch.Tensor]:
        losses = []  # FSDP2 reduces every micro-batch's gradients: it holds none but its own shard of them
        for batch in batches:
            with torch.set_grad_enabled(backward):
                loss = self._loss(batch, self._forward(batch))
            if backward:
                (loss * self._loss_factor).backward()
            losses.append(loss.detach())
        return losses

    def _infer(self, batches: Iterable[MicroBatch]) -> Iterator[tuple[MicroBatch, torch.Tensor]]:
        for batch in batches:
            yield batch, self._numbers(batch, self._forward(batch))

    @property
    def _place(self) -> int:
        return self._rank

    def _batch_sum(self, part: torch.Tensor) -> torch.Tensor:
        return sharding.batch_sum(part, self._device, self._world_size)

    def _reduce(self) -> tuple[Reduced, float]:
        if self._world_size > 1:
            sharding.reshard(self._model)
        norms = torch.stack(torch._foreach_norm(self._gradients())).double()
        self._statistics.mean(_GRADIENT, norms.square().sum(), 1.0)
        reduced = self._statistics.reduce(self._world_size)
        return reduced, reduced.means.pop(_GRADIENT).total

    def _gradients(self) -> list[torch.Tensor]:
        """This rank's shards of the summed gradients. A parameter that saw no backward pass has gradient 0, not none."""
        for parameter in self._parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return [sharding.local(parameter.grad) for parameter in self._parameters.values() if parameter.grad is not None]

    def _clear_gradients(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def _step_optimizer(self, scale: float, rate: float) -> None:
        torch._foreach_mul_(self._gradients(), scale)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()

    # ------------------------------------------------------------------------------------------ its device, lent out

    def offload(self) -> None:
        self._clear_gradients()
        for kind in self._lent:
            self._shelf(kind).put()
        platform.release(self._device)

    def onload(self) -> None:
        for kind in self._lent:
            self._shelves[kind].take()

    def _shelf(self, kind: str) -> Shelf:
        """The same one as long as it holds all, since its host memory takes long to get: an optimizer has no state at first."""
        held = [sharding.local(tensor) for tensor in self._resident(kind)]
        if kind not in self._shelves or len(held) != self._shelved[kind]:
            self._shelves[kind], self._shelved[kind] = Shelf(held), len(held)
        return self._shelves[kind]

    def _resident(self, kind: str) -> list[torch.Tensor]:
        """What of `kind` is on the device between steps: no gradients."""
        if kind == "param":
            return [*self._model.parameters(), *self._model.buffers()]
        states = self._optimizer.state.values() if kind == "optimizer" else ()
        return [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]

    # ------------------------------------------------------------------------------------------ its state on disk

    def begin_save(self, folder: str) -> Callable[[], None]:
        return partial(train_state.save, Path(folder), self._training_state(), self._source)

    def load(self, folder: str) -> None:
        self._resume(train_state.load(Path(folder), self._training_state()))

    def _training_state(self) -> train_state.TrainingState:
        return train_state.TrainingState(self._parameters, self._optimizer, self._position(), self._rank_place)

    def _precision(self) -> contextlib.AbstractContextManager:
        """FSDP2 casts by itself; a single rank computes under autocast, its parameters being the master weights."""
        if self._world_size > 1 or self._compute == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, self._compute)
