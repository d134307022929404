"""A training step on one rank: groups → rows → columns → micro-batches → summed gradients → one or several optimizer updates.

A `ModelTrainer` has a backend (how the model is sharded: `fsdp/`, `megatron/`) and an objective (what the model learns: the
policy's or the critic's, both in `objective.py`). The step depends on neither.

    begin_step ─► accumulate ─► … ─► accumulate ─► apply
                  decode, check       │             one update, or one for each mini-batch and epoch:
                  and, if it streams, │             reduce ─► divide, clip ─► optimizer ─► clear
                  forward, backward ──┘
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from runtime import types
from runtime.chosen_algorithm import choose, streams, updates_per_epoch
from runtime.config import Config, Optimizer
from runtime.errors import InvariantViolated, ServiceFault
from runtime.ledger import checkpoint
from runtime.process.spans import at
from runtime.telemetry.summary import TrainedTokenLog, TrainedTokens
from runtime.trainer import rows as train_rows
from runtime.trainer.backend import (
    ModelBackend,
    NonFiniteReport,
    RankInfo,
    Reduced,
    StepStatistics,
    TrainedRole,
    TrainingPosition,
    micro_batches,
)
from runtime.trainer.micro_batch import Columns, MicroBatch
from runtime.trainer.objective import CriticObjective, Objective, PolicyObjective, add_mismatch
from runtime.trainer.rows import DecodedGroup, Rows
from runtime.types import GroupPayload, StepResult, TrainGroup, ValueRequest, Values

KEPT_TOKENS = 2048  # they take 16 KiB of the device until the step is over


class TokenLog:
    """The first `KEPT_TOKENS` that this rank trains of each step, for readers of samples; none without a run's folder. They are
    collected on the device, and written when the step is over: no pass waits."""

    def __init__(self, config: Config, rank: int):
        self._most = KEPT_TOKENS if config.run.dir else 0
        self._log = TrainedTokenLog(Path(config.run.dir), f"trainer-{rank}")
        self._parts: list[tuple[Rows, np.ndarray, torch.Tensor]] = []
        self._count = 0

    def add(self, rows: Rows, batch: MicroBatch, logprobs: torch.Tensor, advantages: torch.Tensor) -> None:
        """Add tokens of `batch`, a micro-batch of `rows`: `logprobs` float [B, R], `advantages` float [B, R] or [B, 1]."""
        take = min(len(batch.places), self._most - self._count)
        if take > 0:
            cells = batch.cells[:take]
            figures = [each.detach().expand(batch.mask.shape).reshape(-1)[cells].float() for each in (logprobs, advantages)]
            self._parts.append((rows, batch.places[:take], torch.stack(figures)))
            self._count += take

    def clear(self) -> None:
        self._parts, self._count = [], 0

    def write(self, step: int) -> None:
        """Append the tokens of `step` to the log file."""
        parts = self._parts
        self.clear()
        if parts:
            places = [_places(rows, flat) for rows, flat, _ in parts]
            group, row, position = (np.concatenate(column) for column in zip(*places, strict=True))
            logprob, advantage = torch.cat([figures for _, _, figures in parts], 1).cpu().numpy()
            self._log.append(TrainedTokens(step, group, row, position, logprob, advantage))


def _places(rows: Rows, flat: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the group ids, the rows within the groups and the positions in the rows of tokens by `flat` index."""
    row = np.searchsorted(rows.start, flat, side="right") - 1
    group = rows.group[row]
    return rows.group_id[group], row - np.searchsorted(rows.group, group), flat - rows.start[row]


def model_trainer(
    learned: type[Objective], config: Config, *, rank: int = 0, world_size: int = 1, device: torch.device | str = "cpu"
) -> ModelTrainer:
    """Load the model of the objective `learned` on the engine of its role's service. Collective: several ranks have initialised
    torch's default group. Raises UserError for a wrong configuration or folder, or if the engine's package is missing."""
    choose(config)  # reports a wrong user-defined loss before a model is loaded
    trained, rank_info = TrainedRole(config, learned.role), RankInfo(rank, world_size, torch.device(device))
    backend: ModelBackend
    if trained.settings.engine == "megatron":
        from runtime.trainer.megatron import facade

        facade.prepare(rank_info.device)
        from runtime.trainer.megatron.backend import MegatronBackend

        backend = MegatronBackend(config, trained, rank_info)
    else:
        from runtime.trainer.fsdp.backend import FsdpBackend

        backend = FsdpBackend(config, trained, rank_info)
    return ModelTrainer(config, backend, learned(config, backend))


policy_trainer, critic_trainer = partial(model_trainer, PolicyObjective), partial(model_trainer, CriticObjective)


class ReadySamples(NamedTuple):
    """Samples with the columns of their loss. `live`: bool [B], false where a sample's gradient is exactly 0."""

    rows: Rows
    columns: Columns
    live: np.ndarray


class ModelTrainer:
    """Policy or critic under training. Calls come from one thread, in the same order on every rank. Each call may be a
    collective over the service's group.

    A step is `begin_step`, `accumulate` any number of times, `apply`. Gradients are unnormalised sums until `apply` divides
    them by what the aggregation counts (tokens or rows) over all accumulated groups of all ranks. A step's result therefore
    depends neither on sharding nor on how groups were split over calls. Where advantages need the whole batch, or a step makes
    several updates, `accumulate` checks and holds the groups, and `apply` computes."""

    phases: dict[str, float] = {}  # noqa: RUF012 - for trainers that account for no phases
    """Seconds of the step's phases on this rank, by metric, until the next step begins. Part of the result's `seconds`."""

    def __init__(self, config: Config, backend: ModelBackend, objective: Objective):
        self.backend, self.objective = backend, objective
        self.role = objective.role
        self._config = config
        self._options = TrainedRole(config, objective.role).options
        self._streams = streams(config)
        self._rate = self._options.learning_rate
        self._kept = TokenLog(config, backend.rank_info.rank)
        self._keeps: Rows | None = None  # the rows whose tokens the present passes add to the log
        self.step = 0  # the step that comes next or is running: the weights are those of version `step`
        self._begin()

    # ------------------------------------------------------------------------------------------ the step

    def begin_step(self, step: int) -> None:
        if step != self.step:
            raise InvariantViolated(f"the {self.role}'s weights are of step {self.step}, but step {step} begins")
        self._begin()

    def _begin(self) -> None:
        self.backend.clear_gradients()
        self._seconds: dict[str, float] = {}
        self._held: list[DecodedGroup] = []
        self._begin_update()
        self._reduced = Reduced()
        self._norms: list[float] = []
        self._skipped = 0
        self.phases = {}
        self._kept.clear()  # tokens of an abandoned step

    def _begin_update(self) -> None:
        self._statistics = StepStatistics(self.backend.rank_info.device)
        self._added: list[tuple[ReadySamples, np.ndarray]] = []

    def accumulate(self, groups: Sequence[TrainGroup], last: bool = False) -> None:
        """Add the gradient of this rank's `groups` (perhaps none: the ranks still run the same collectives). `last`, the same
        on all ranks: no group is added after these before `apply`; ranks may begin to reduce gradients."""
        groups = self.backend.of_share(groups, TrainGroup)
        with timed(self._seconds, "step"):
            self._held += train_rows.check_groups(groups, self.backend.vocab_size, self.objective.needs)
            if self._streams:
                # Advantages need one group only, and there is one update: run passes while rollouts generate other groups.
                samples = self._ready()
                self._add(samples, np.ones(len(samples.live), bool), last)

    def apply(self) -> StepResult:
        """Run the step's optimizer updates: one, or one for each mini-batch and epoch."""
        with timed(self._seconds, "step"):
            if self._streams:
                self._update()
            else:
                # The whole batch is here now. The loss's columns are computed once, before the first update.
                samples = self._ready()
                for epoch in range(self._config.training.epochs):
                    for index in range(updates_per_epoch(self._config)):
                        chosen = (samples.rows.mini_batch == index)[samples.rows.group]
                        self._add(samples, chosen, last=True, keep=not epoch)
                        self._update()
            metrics = self._close_step()
            self._kept.write(self.step)
        self.step += 1
        return StepResult(metrics=metrics, seconds=self._seconds["step"])

    def _ready(self) -> ReadySamples:
        """Take the held samples and return them with the inputs of the loss: advantages, and log-probabilities of the reference
        and proximal policy. If `algorithm.truncated` says so, mask episodes whose last row was cut off by length."""
        rows, self._held = train_rows.rows_of(self._held, self.objective.needs), []
        if self._config.algorithm.truncated != "train":
            cut = rows.truncated[rows.last]
            self._statistics.total("response_length/masked", float((cut & rows.valid & rows.leads).sum()))
            rows = replace(rows, mask=rows.mask & ~np.repeat(cut, rows.length))
        if self.objective.reference_is_base:
            with self.backend.adapters.off():
                rows = replace(rows, reference=self._per_token_output(rows))
        if self.objective.takes_start:
            with timed(self.phases, "timing/old_log_p"):
                rows = replace(rows, proximal=self._per_token_output(rows))
        with timed(self.phases, *self.objective.timed_as):  # no pass runs in this phase
            columns, live = self.objective.columns(rows, self.step, self._statistics)
        return ReadySamples(rows, columns, live)

    def _add(self, samples: ReadySamples, chosen: np.ndarray, last: bool, keep: bool = True) -> None:
        """Add the gradient of the samples `chosen` (bool [B]). `last`: they end an update. `keep`: log their tokens."""
        self._added.append((samples, chosen))
        trained = samples.rows.trained() & chosen
        episodes, seen = (int(samples.rows.first_of_episode(each).sum()) for each in (chosen, trained))
        self.objective.count_masked(episodes - seen, self._statistics)
        # Samples whose gradient is exactly 0 (all rewards of a group are alike) get only a forward pass, for the statistics.
        self._keeps = samples.rows if keep else None
        for backward, kind in enumerate((~samples.live, samples.live)):
            batches = self._micro_batches(samples.rows, samples.columns, trained & kind)
            self.backend.run(batches, self._loss, bool(backward), last)
        self._keeps = None

    def _update(self) -> None:
        """Run one optimizer update on the gradients added since the last one. A non-finite gradient changes no weight."""
        # 1. Sum gradients and statistics over all shares of the data.
        with at("reduce"):
            reduced, squared = self.backend.reduce(self._statistics)
        # 2. Losses are sums: their divisor is known only now. If no token was trained, the gradient is 0 and is divided by 1.
        total, count = reduced.mean(self.objective.averaged)
        denominator = count or 1.0
        norm = math.sqrt(squared) / denominator if squared >= 0 else math.nan
        if math.isfinite(norm) and math.isfinite(total):
            # 3. Divide and clip by one factor, and update the weights.
            limit = self._options.max_grad_norm
            clip = limit / norm if limit and norm > limit else 1.0
            scheduled = learning_rate(self.step, self._config.training.steps, self._options)
            # The bias of a gradient of old samples grows with staleness times learning rate (arXiv:2607.01083). Dividing by
            # staleness itself (arXiv:1511.05950) lowers the rate more than needed.
            age, tokens = (self._reduced + reduced).mean("staleness/token_mean")
            self._rate = scheduled / (1 + age / max(1.0, tokens)) ** self._config.training.lr_staleness_power
            with at("update"):
                self.backend.update(clip / denominator, self._rate)
            self._norms.append(norm)
        else:
            self._handle_nonfinite()
        # 4. The next update begins with gradients of 0. The step reports the statistics of all its updates together.
        self._reduced += reduced
        self.backend.clear_gradients()
        self._begin_update()

    def _handle_nonfinite(self) -> None:
        """Write the samples with a non-finite loss or gradient to a file. End the step unless `on_nonfinite` is to skip."""
        report = NonFiniteReport(self.role, self.step, self.backend.rank_info)
        for samples, chosen in self._added:
            for batch in self._micro_batches(samples.rows, samples.columns, samples.rows.trained() & chosen):
                self.backend.clear_gradients()
                (loss,) = self.backend.run([batch], self._loss, backward=True)
                report.add(samples.rows, batch, loss, self.backend.gradients())
        what = report.write(Path(self._config.run.dir))
        if self._config.training.on_nonfinite == "end":
            raise ServiceFault(self.role, "apply", f"step {self.step}: {what}; the weights are unchanged")
        self._skipped += 1

    def _close_step(self) -> dict[str, float]:
        """Return the step's metrics."""
        metrics = (self._reduced.finite() if self._skipped else self._reduced).metrics()
        metrics |= {f"{self.objective.prefix}lr": self._rate, "skipped_updates": float(self._skipped)}
        if self._norms:
            metrics[f"{self.objective.prefix}grad_norm"] = sum(self._norms) / len(self._norms)
        if "actor/kl" in metrics:
            metrics["actor/kl_coefficient"] = self.objective.adapt_kl(metrics["actor/kl"], self._reduced)
        return self.objective.named(metrics)

    # ------------------------------------------------------------------------------------------ micro-batches

    def _micro_batches(self, rows: Rows, columns: Columns, chosen: np.ndarray) -> Iterator[MicroBatch]:
        """Yield micro-batches of the samples `chosen` (bool [B])."""
        budget, backend = self._config.training.max_tokens_per_microbatch, self.backend
        return micro_batches(rows, chosen, columns, budget, backend.rank_info, backend.packs, backend.routed)

    def _loss(self, batch: MicroBatch, outputs: torch.Tensor) -> torch.Tensor:
        self._statistics.mean("padding_waste", batch.padding, batch.attended)
        loss = self.objective.loss(batch, outputs, self._statistics)
        if self._keeps is not None and self.objective.token_figures is not None:
            self._kept.add(self._keeps, batch, *self.objective.token_figures)
        return loss

    @torch.no_grad()
    def _per_token_output(self, rows: Rows) -> np.ndarray:
        """Return the model's output number for every trained token, 0 elsewhere; float32 flat."""
        out = np.zeros(len(rows.tokens), np.float32)
        batches = self._micro_batches(rows, {}, rows.trained())
        for batch, numbers in self.backend.infer(batches, self.objective.per_token_output):
            out[batch.places] = numbers.float().cpu().numpy()[: len(batch.places)]
        return out

    # ------------------------------------------------------------------------------------------ probes and values

    def compare(self, probes: Sequence[bytes]) -> list[float]:
        """Compare log-probabilities under the present weights with those in `probes`: encoded groups whose every token these
        weights have sampled. Called between `begin_step` and `apply`, on all ranks; `mismatch/*` include the probes. Returns on
        rank 0 each probe's mean |rollout's − trainer's|, in nats, perhaps NaN. Raises InvalidMessage for an unfit probe."""
        with timed(self._seconds, "step"):
            ids = [types.decode(GroupPayload, probe).group_id for probe in probes]
            groups = [ValueRequest(group_id=group, tokens=0, payload=probe) for group, probe in zip(ids, probes, strict=True)]
            groups, needs = groups if self.backend.share == 0 else [], self.objective.needs
            rows = train_rows.decode_samples(groups, self.backend.vocab_size, needs.experts)
            own = self._per_token_output(train_rows.share_prompts(rows))
            add_mismatch(self._statistics, *map(self._with_zero, (rows.behaviour, own, rows.mask)))
        gaps, counted = rows.by_group(np.abs(rows.behaviour - own)), rows.by_group(rows.mask)
        return [float(gap[mask].mean(dtype=np.float64)) for gap, mask in zip(gaps, counted, strict=True)]

    def _with_zero(self, flat: np.ndarray) -> torch.Tensor:
        """Return `flat` with a 0 appended, as `flat` may be empty; float32, on the device."""
        return torch.from_numpy(np.append(flat, 0).astype(np.float32)).to(self.backend.rank_info.device)

    def values(self, groups: Sequence[ValueRequest]) -> list[Values]:
        """Return a critic's values of this rank's `groups` (perhaps none), in their order, under the present weights. Raises
        InvalidMessage before any pass if a payload cannot be decoded or has token ids outside the vocabulary."""
        groups = self.backend.of_share(groups, ValueRequest)
        rows = train_rows.decode_samples(groups, self.backend.vocab_size)
        parts = rows.by_group(self._per_token_output(rows))
        values = [Values(group_id=group.group_id, values=part) for group, part in zip(groups, parts, strict=True)]
        return values if self.backend.leads else []

    # ------------------------------------------------------------------------------------------ state

    def begin_save(self, folder: str) -> Callable[[], None]:
        """Begin to write model, optimizer, schedule and RNG under `folder`, which exists and is empty. The caller makes the
        write atomic. The returned function writes the rest, and returns when all ranks have written. With
        `checkpoint.async_save` another thread may call it while training goes on: all data was copied before."""
        return self.backend.begin_save(Path(folder), self.position())

    def position(self) -> TrainingPosition:
        return TrainingPosition(self.step, self.objective.kl_control.coefficient)

    def save(self, folder: str) -> None:
        self.begin_save(folder)()

    def export(self, folder: Path) -> None:
        """Write the policy as a Hugging Face folder, whole or not at all."""
        first = self.backend.rank_info.rank == 0
        with checkpoint.atomic_folder(folder) if first else contextlib.nullcontext(folder) as target:
            self.backend.export(target)

    def load(self, folder: str) -> None:
        """Restore the state that `save` wrote, bit for bit. Raises UserError if it does not fit the model."""
        self._resume(self.backend.load(Path(folder)))

    def restored(self, counters: Mapping[str, int], position: TrainingPosition) -> None:
        """Go on from `position`. The content of the backend's `pieces` was restored before."""
        self.backend.restored(counters)
        self._resume(position)

    def _resume(self, position: TrainingPosition) -> None:
        self.step = position.step
        self.objective.resume(position.kl_coefficient)
        self._begin()


@contextlib.contextmanager
def timed(seconds: dict[str, float], *names: str) -> Iterator[None]:
    """Add the block's seconds to those of `names`. The block's results must be on the host at its end."""
    begin = time.perf_counter()
    try:
        yield
    finally:
        took = time.perf_counter() - begin
        for name in names:
            seconds[name] = seconds.get(name, 0.0) + took


def learning_rate(step: int, total_steps: int, optimizer: Optimizer) -> float:
    """Return the learning rate of `step`, counted from 0. Warm-up rises linearly and reaches the peak in its last step. The
    schedules linear and cosine then fall from the peak to the minimum, which they reach at `total_steps`."""
    peak, low, warmup = optimizer.learning_rate, optimizer.min_learning_rate, optimizer.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    if optimizer.schedule == "constant":
        return peak
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    remaining = 1 - progress if optimizer.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return low + (peak - low) * remaining
