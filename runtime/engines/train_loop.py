"""A training step on one rank, whatever the model: micro-batches, gradients as sums, one or several optimizer updates.

Policy and critic are subclasses: they say what is computed on (`_columns`), how a model's outputs become one number a trained
token (`_outputs`), and the loss.
"""

from __future__ import annotations

import contextlib
import math
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from runtime.chosen_algorithm import choose, kl_control, streams, updates_per_epoch, updates_per_step
from runtime.config import Config, Optimizer
from runtime.engines import train_batch, train_rows, train_sharding, train_state
from runtime.engines.lr_schedule import learning_rate
from runtime.engines.train_advantages import RowAdvantages
from runtime.engines.train_base import UpdateEngine
from runtime.engines.train_batch import Columns, MicroBatch
from runtime.engines.train_model import Placement, make_optimizer
from runtime.engines.train_nonfinite import NonFiniteReport
from runtime.engines.train_rows import Needs, Rows
from runtime.engines.train_statistics import Reduced, StepStatistics
from runtime.errors import InvariantViolated, ServiceFault
from runtime.types import StepResult, TrainGroup

_GRADIENT = "gradient/squared"


@dataclass(frozen=True)
class Work:
    """Samples that are ready to be trained on. `live`: bool [B], false where a sample's gradient is exactly 0."""

    rows: Rows
    columns: Columns
    live: np.ndarray


class TorchUpdateEngine(UpdateEngine):
    """`averaged` names the statistic that counts what losses are averaged over.

    With several ranks the caller has initialised torch's default process group, which spans them; every rank makes the same
    calls, perhaps with nothing to train on.
    """

    role: str
    averaged: str
    _source: str  # the folder that the model came from

    def __init__(
        self, config: Config, model: Any, options: Optimizer, needs: Needs, compute: torch.dtype, placement: Placement
    ):
        """`model` lies where `placement` says, and computes in `compute`."""
        self._config, self._model, self._options, self._needs = config, model, options, needs
        self._compute = compute
        self._rank, self._world_size, self._device = placement.rank, placement.world_size, placement.device
        self._placement = placement
        self._algorithm = choose(config)
        self._kl_control = kl_control(config.algorithm)
        self._streams = streams(config)
        self._several_updates = updates_per_step(config) > 1
        self._advantages = RowAdvantages(
            config, self._algorithm, partial(train_sharding.batch_sum, device=self._device, world_size=self._world_size)
        )
        # Tied tensors come once, under their first name, as in a Hugging Face export.
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._optimizer = make_optimizer(options, self._parameters)
        self._step = 0
        self._begin()

    # ------------------------------------------------------------------------------------------ what a subclass says

    @abstractmethod
    def _columns(self, rows: Rows) -> tuple[Columns, np.ndarray]:
        """What the loss is computed on, and which samples of `rows` are live (as in `Work`)."""

    @abstractmethod
    def _outputs(self, batch: MicroBatch) -> torch.Tensor:
        """[N] of the trained tokens."""

    @abstractmethod
    def _loss(self, batch: MicroBatch) -> torch.Tensor:
        """The unnormalised loss, a sum. Adds what the step reports to `_statistics`."""

    # ------------------------------------------------------------------------------------------ the step

    @property
    def step(self) -> int:
        """The step that comes next, or is under way: the weights are those of version `step`."""
        return self._step

    def begin_step(self, step: int) -> None:
        if step != self._step:
            raise InvariantViolated(f"the {self.role}'s weights are of step {self._step}, but step {step} begins")
        self._begin()

    def _begin(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        self._seconds = 0.0
        self._held: list[Rows] = []
        self._begin_update()
        self._reduced = Reduced()
        self._norms: list[float] = []
        self._skipped = 0

    def _begin_update(self) -> None:
        self._statistics = StepStatistics(self._device)
        self._added: list[tuple[Work, np.ndarray]] = []

    def accumulate(self, groups: Sequence[TrainGroup]) -> None:
        with self._timed():
            rows = train_rows.decode_groups(groups, self._model.config.vocab_size, self._needs)
            if self._streams:
                self._add(self._work(rows), np.ones(len(rows.length), bool))
            else:
                self._held.append(rows)

    def apply(self) -> StepResult:
        with self._timed():
            if self._streams:
                self._update()
            else:
                self._train_held()
            metrics = self._close_step()
        self._step += 1
        return StepResult(step=self._step - 1, metrics=metrics, seconds=self._seconds)

    def _train_held(self) -> None:
        """All updates of the step, of which each is of one mini-batch."""
        empty = [train_rows.decode_groups([], 0, self._needs)]
        work = self._work(train_rows.join(self._held or empty))
        for _ in range(self._config.training.epochs):
            for index in range(updates_per_epoch(self._config)):
                self._add(work, (work.rows.mini_batch == index)[work.rows.group])
                self._update()

    def _work(self, rows: Rows) -> Work:
        return Work(rows, *self._columns(rows))

    def _add(self, work: Work, chosen: np.ndarray) -> None:
        """Add the gradient of the samples `chosen` (bool [B]) of `work`."""
        self._added.append((work, chosen))
        trained = work.rows.trained() & chosen
        for backward, kind in enumerate((~work.live, work.live)):
            for batch in self._micro_batches(work.rows, work.columns, trained & kind):
                self._run(batch, bool(backward))
                self._statistics.mean("padding_waste", batch.padding, batch.attended)

    def _micro_batches(self, rows: Rows, columns: Columns, chosen: np.ndarray) -> Iterator[MicroBatch]:
        """The samples `chosen` (bool [B]). As many on every rank, so that all take part in the collectives of each."""
        plan = train_batch.plan(rows, np.flatnonzero(chosen), self._config.training.max_tokens_per_microbatch)
        for index in range(train_sharding.largest([len(plan)], self._device, self._world_size)[0]):
            if index < len(plan):
                yield train_batch.pack(rows, plan[index], columns, self._device)
            else:
                yield train_batch.nothing(columns, self._device)

    def _run(self, batch: MicroBatch, backward: bool) -> torch.Tensor:
        """One forward pass, and the backward pass that adds to the gradients; returns the loss, a sum."""
        with torch.set_grad_enabled(backward):
            loss = self._loss(batch)
        if backward:
            loss.backward()
        return loss.detach()

    @torch.no_grad()
    def _forward_only(self, rows: Rows) -> np.ndarray:
        """float32 flat: the model's output of every trained token, 0 elsewhere."""
        out = np.zeros(len(rows.tokens), np.float32)
        for batch in self._micro_batches(rows, {}, rows.trained()):
            outputs = self._outputs(batch).float().cpu().numpy()
            out[batch.places] = outputs[: len(batch.places)]
        return out

    # ------------------------------------------------------------------------------------------ the optimizer

    def _update(self) -> None:
        """One optimizer update with what was added since the last. A gradient that is not finite changes no weight."""
        if self._world_size > 1:
            train_sharding.reshard(self._model)
        gradients = self._gradients()
        norms = torch.stack(torch._foreach_norm(gradients)).double()
        self._statistics.mean(_GRADIENT, norms.square().sum(), 1.0)
        reduced = self._statistics.reduce(self._world_size)
        squared = reduced.means.pop(_GRADIENT).total
        averaged = reduced.means.get(self.averaged)
        # Where nothing was trained there is nothing to divide by, and the gradient is 0.
        denominator = averaged.count if averaged else 1.0
        norm = math.sqrt(squared) / denominator if squared >= 0 else math.nan
        if math.isfinite(norm) and (averaged is None or math.isfinite(averaged.total)):
            self._step_optimizer(gradients, norm, denominator)
            self._norms.append(norm)
        else:
            self._refuse()
        self._reduced += reduced
        self._optimizer.zero_grad(set_to_none=True)
        self._begin_update()

    def _gradients(self) -> list[torch.Tensor]:
        """This rank's shards of the summed gradients. A parameter that saw no backward pass has gradient 0, not none."""
        for parameter in self._parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return [train_sharding.local(parameter.grad) for parameter in self._parameters.values() if parameter.grad is not None]

    def _step_optimizer(self, gradients: list[torch.Tensor], norm: float, denominator: float) -> None:
        limit = self._options.max_grad_norm
        clip = limit / norm if limit and norm > limit else 1.0
        torch._foreach_mul_(gradients, clip / denominator)
        rate = learning_rate(self._step, self._config.training.steps, self._options)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()

    def _refuse(self) -> None:
        """Find the samples that a loss or gradient is not finite for, write them down, and end the step unless updates are
        skipped."""
        report = NonFiniteReport(self.role, self._step, self._placement)
        for work, chosen in self._added:
            for batch in self._micro_batches(work.rows, work.columns, work.rows.trained() & chosen):
                self._optimizer.zero_grad(set_to_none=True)
                loss = self._run(batch, backward=True)
                report.add(work.rows, batch, loss, self._gradients())
        what = report.write(Path(self._config.run.dir))
        if self._config.training.on_nonfinite == "end":
            raise ServiceFault(self.role, "apply", f"step {self._step}: {what}; the weights are unchanged")
        self._skipped += 1

    def _close_step(self) -> dict[str, float]:
        """The step's metrics. The coefficient of the KL term adapts between steps."""
        metrics = (self._reduced.finite() if self._skipped else self._reduced).metrics()
        metrics["lr"] = self._optimizer.param_groups[0]["lr"]
        metrics["skipped_updates"] = float(self._skipped)
        if self._norms:
            metrics["grad_norm"] = sum(self._norms) / len(self._norms)
        if "actor/kl" in metrics:
            metrics["actor/kl_coefficient"] = self._kl_control.coefficient
            samples = self._reduced.means["response_length/mean"].count
            self._kl_control = self._kl_control.after(metrics["actor/kl"], samples)
        return metrics

    # ------------------------------------------------------------------------------------------ its state on disk

    def save(self, folder: str) -> None:
        train_state.save(Path(folder), self._training_state(), self._source)

    def load(self, folder: str) -> None:
        position = train_state.load(Path(folder), self._training_state())
        self._step = position.step
        self._kl_control = kl_control(self._config.algorithm, position.kl_coefficient)
        self._begin()

    def _training_state(self) -> train_state.TrainingState:
        position = train_state.Position(self._step, self._kl_control.coefficient)
        return train_state.TrainingState(self._parameters, self._optimizer, position, self._placement)

    def _precision(self) -> contextlib.AbstractContextManager:
        """FSDP2 casts by itself; a single rank computes under autocast, its parameters being the master weights."""
        if self._world_size > 1 or self._compute == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, self._compute)

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._seconds += time.perf_counter() - begin
