"""A training step on one rank, whatever the model: micro-batches, gradients as sums, one or several optimizer updates.

Policy and critic are subclasses, and say what is computed on and what is lost; so are the kinds of models (`update_torch`,
`update_megatron`), and say how passes are run and weights updated. An engine is one of each.
"""

from __future__ import annotations

import contextlib
import math
import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from runtime.chosen_algorithm import choose, kl_control, streams, updates_per_epoch, updates_per_step
from runtime.config import Config, Optimizer
from runtime.errors import InvariantViolated, ServiceFault
from runtime.trainer import batch as train_batch
from runtime.trainer import rows as train_rows
from runtime.trainer.advantages import RowAdvantages
from runtime.trainer.batch import Columns, MicroBatch
from runtime.trainer.engine import UpdateEngine
from runtime.trainer.lr_schedule import learning_rate
from runtime.trainer.model import RankPlace, TrainingPosition
from runtime.trainer.nonfinite import NonFiniteReport
from runtime.trainer.rows import Needs, Rows
from runtime.trainer.statistics import Reduced, StepStatistics
from runtime.types import StepResult, TrainGroup


@dataclass(frozen=True)
class ReadySamples:
    """Samples that are ready to be trained on. `live`: bool [B], false where a sample's gradient is exactly 0."""

    rows: Rows
    columns: Columns
    live: np.ndarray


class UpdateLoop(UpdateEngine):
    """`averaged` names the statistic that counts what losses are averaged over.

    With several ranks the caller has initialised torch's default process group, which spans them; every rank makes the same
    calls, perhaps with nothing to train on.
    """

    role: str
    averaged: str

    def __init__(self, config: Config, options: Optimizer, needs: Needs, rank_place: RankPlace, vocab_size: int):
        self._config, self._options, self._needs = config, options, needs
        self._rank, self._world_size, self._device = rank_place.rank, rank_place.world_size, rank_place.device
        self._rank_place = rank_place
        self._vocab_size = vocab_size
        self._algorithm = choose(config)
        self._kl_control = kl_control(config.algorithm)
        self._streams = streams(config)
        self._several_updates = updates_per_step(config) > 1
        self._advantages = RowAdvantages(config, self._algorithm, self._batch_sum)
        self._rate = options.learning_rate
        self._step = 0
        self._begin()

    # ------------------------------------------------------------------------------------------ what a role says

    @abstractmethod
    def _columns(self, rows: Rows) -> tuple[Columns, np.ndarray]:
        """What the loss is computed on, and which samples of `rows` are live (as in `Work`)."""

    @abstractmethod
    def _numbers(self, batch: MicroBatch, outputs: torch.Tensor) -> torch.Tensor:
        """[N] of the trained tokens, from what the model gives for them."""

    @abstractmethod
    def _loss(self, batch: MicroBatch, outputs: torch.Tensor) -> torch.Tensor:
        """The unnormalised loss, a sum. Adds what the step reports to `_statistics`."""

    def _count_masked(self, samples: int) -> None:
        """`samples` of the update have no trained token, so that no pass is made of them."""

    # ------------------------------------------------------------------------------------------ what a kind of model says

    @abstractmethod
    def _run(self, batches: Iterable[MicroBatch], backward: bool, last: bool = False) -> list[torch.Tensor]:
        """Forward passes, and with `backward` those that add to the gradients; the losses, a sum for each of `batches`.

        `last`: nothing more is added before `_reduce`.
        """

    @abstractmethod
    def _infer(self, batches: Iterable[MicroBatch]) -> Iterator[tuple[MicroBatch, torch.Tensor]]:
        """Each of `batches` with its `_numbers`; no gradients."""

    @property
    @abstractmethod
    def _place(self) -> int:
        """Which share of the data is this rank's, from 0."""

    @abstractmethod
    def _batch_sum(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of `part` over all shares of the data, of its dtype and on its device."""

    @abstractmethod
    def _reduce(self) -> tuple[Reduced, float]:
        """The update's statistics over all shares of the data, and the squared norm of the summed gradients (perhaps NaN)."""

    @abstractmethod
    def _gradients(self) -> list[torch.Tensor]:
        """This rank's part of the gradients."""

    @abstractmethod
    def _clear_gradients(self) -> None: ...

    @abstractmethod
    def _step_optimizer(self, scale: float, rate: float) -> None:
        """Update the weights by the gradients times `scale`, at the learning rate `rate`."""

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
        self._clear_gradients()
        self._seconds = 0.0
        self._held: list[Rows] = []
        self._begin_update()
        self._reduced = Reduced()
        self._norms: list[float] = []
        self._skipped = 0
        self.phases = {}

    def _begin_update(self) -> None:
        self._statistics = StepStatistics(self._device)
        self._added: list[tuple[ReadySamples, np.ndarray]] = []

    def accumulate(self, groups: Sequence[TrainGroup], last: bool = False) -> None:
        with self._timed():
            rows = train_rows.decode_groups(groups, self._vocab_size, self._needs)
            if self._streams:
                self._add(self._work(rows), np.ones(len(rows.length), bool), last)
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
        return StepResult(metrics=metrics, seconds=self._seconds)

    def _train_held(self) -> None:
        """All updates of the step, of which each is of one mini-batch."""
        empty = [train_rows.decode_groups([], 0, self._needs)]
        work = self._work(train_rows.join(self._held or empty))
        for _ in range(self._config.training.epochs):
            for index in range(updates_per_epoch(self._config)):
                self._add(work, (work.rows.mini_batch == index)[work.rows.group], last=True)
                self._update()

    def _work(self, rows: Rows) -> ReadySamples:
        return ReadySamples(rows, *self._columns(rows))

    def _add(self, work: ReadySamples, chosen: np.ndarray, last: bool) -> None:
        """Add the gradient of the samples `chosen` (bool [B]) of `work`, the `last` ones of an update or not."""
        self._added.append((work, chosen))
        trained = work.rows.trained() & chosen
        self._count_masked(int((chosen & ~trained).sum()))
        for backward, kind in enumerate((~work.live, work.live)):
            batches = self._micro_batches(work.rows, work.columns, trained & kind)
            self._run(map(self._counted, batches), bool(backward), last)

    def _counted(self, batch: MicroBatch) -> MicroBatch:
        self._statistics.mean("padding_waste", batch.padding, batch.attended)
        return batch

    def _micro_batches(self, rows: Rows, columns: Columns, chosen: np.ndarray) -> Iterator[MicroBatch]:
        """The samples `chosen` (bool [B])."""
        budget = self._config.training.max_tokens_per_microbatch
        return train_batch.micro_batches(rows, chosen, columns, budget, self._device, self._world_size)

    @torch.no_grad()
    def _forward_only(self, rows: Rows) -> np.ndarray:
        """float32 flat: the model's number for every trained token, 0 elsewhere."""
        out = np.zeros(len(rows.tokens), np.float32)
        for batch, numbers in self._infer(self._micro_batches(rows, {}, rows.trained())):
            out[batch.places] = numbers.float().cpu().numpy()[: len(batch.places)]
        return out

    # ------------------------------------------------------------------------------------------ the optimizer

    def _update(self) -> None:
        """One optimizer update with what was added since the last. A gradient that is not finite changes no weight."""
        reduced, squared = self._reduce()
        averaged = reduced.means.get(self.averaged)
        # Where nothing was trained there is nothing to divide by, and the gradient is 0.
        denominator = averaged.count if averaged else 1.0
        norm = math.sqrt(squared) / denominator if squared >= 0 else math.nan
        if math.isfinite(norm) and (averaged is None or math.isfinite(averaged.total)):
            self._rate = learning_rate(self._step, self._config.training.steps, self._options)
            self._step_optimizer(self._clip_factor(norm) / denominator, self._rate)
            self._norms.append(norm)
        else:
            self._refuse()
        self._reduced += reduced
        self._clear_gradients()
        self._begin_update()

    def _clip_factor(self, norm: float) -> float:
        limit = self._options.max_grad_norm
        return limit / norm if limit and norm > limit else 1.0

    def _refuse(self) -> None:
        """Find the samples that a loss or gradient is not finite for, write them down, and end the step unless updates are
        skipped."""
        report = NonFiniteReport(self.role, self._step, self._rank_place)
        for work, chosen in self._added:
            for batch in self._micro_batches(work.rows, work.columns, work.rows.trained() & chosen):
                self._clear_gradients()
                (loss,) = self._run([batch], backward=True)
                report.add(work.rows, batch, loss, self._gradients())
        what = report.write(Path(self._config.run.dir))
        if self._config.training.on_nonfinite == "end":
            raise ServiceFault(self.role, "apply", f"step {self._step}: {what}; the weights are unchanged")
        self._skipped += 1

    def _close_step(self) -> dict[str, float]:
        """The step's metrics. The coefficient of the KL term adapts between steps."""
        metrics = (self._reduced.finite() if self._skipped else self._reduced).metrics()
        metrics["lr"] = self._rate
        metrics["skipped_updates"] = float(self._skipped)
        if self._norms:
            metrics["grad_norm"] = sum(self._norms) / len(self._norms)
        if "actor/kl" in metrics:
            metrics["actor/kl_coefficient"] = self._kl_control.coefficient
            samples = self._reduced.means["response_length/mean"].count
            self._kl_control = self._kl_control.after(metrics["actor/kl"], samples)
        return metrics

    # ------------------------------------------------------------------------------------------ its state on disk

    def _position(self) -> TrainingPosition:
        return TrainingPosition(self._step, self._kl_control.coefficient)

    def _resume(self, position: TrainingPosition) -> None:
        self._step = position.step
        self._kl_control = kl_control(self._config.algorithm, position.kl_coefficient)
        self._begin()

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._seconds += time.perf_counter() - begin

    @contextlib.contextmanager
    def _phase(self, *names: str) -> Iterator[None]:
        """Account the block's seconds to the step's `timing/NAME`. What it computes has to be on the host at its end."""
        begin = time.perf_counter()
        yield
        seconds = time.perf_counter() - begin
        for metric in (f"timing/{name}" for name in names):
            self.phases[metric] = self.phases.get(metric, 0.0) + seconds
