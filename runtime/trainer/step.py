"""A training step on one rank, from top to bottom: groups → rows → columns → micro-batches → gradients as sums → one or several
optimizer updates.

A `ModelTrainer` is a backend (where the model lies: `fsdp/`, `megatron/`) and an objective (what it learns: the policy's or the
critic's, both in `objective.py`). The step knows neither.

    begin_step ─► accumulate ─► … ─► accumulate ─► apply
                  decode, check       │             one update, or one for each mini-batch and epoch:
                  and, if it streams, │             reduce ─► divide, clip ─► optimizer ─► clear
                  forward, backward ──┘
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from runtime import types
from runtime.chosen_algorithm import choose, streams, updates_per_epoch, updates_per_step
from runtime.config import Config, Optimizer
from runtime.errors import InvariantViolated, ServiceFault
from runtime.process.spans import at
from runtime.telemetry.summary import TrainedTokenLog, TrainedTokens
from runtime.trainer import rows as train_rows
from runtime.trainer.backend import ModelBackend, TrainedRole, TrainingPosition, use_megatron
from runtime.trainer.collectives import RankInfo
from runtime.trainer.micro_batch import Columns, MicroBatch, micro_batches
from runtime.trainer.objective import CriticObjective, Objective, PolicyObjective, add_mismatch
from runtime.trainer.rows import Rows
from runtime.trainer.statistics import NonFiniteReport, Reduced, StepStatistics
from runtime.types import GroupPayload, StepResult, TrainGroup, ValueRequest, Values

# ---- Kept tokens
#
# What is kept of a step's tokens for whoever reads samples: collected on the device, written once the step is over.


class TokenLog:
    """Of this rank, the first `mismatch.keep_tokens` of each step that it trains; none without a run's folder. No pass waits
    for it."""

    def __init__(self, config: Config, rank: int):
        self._most = config.mismatch.keep_tokens if config.run.dir else 0
        self._log = TrainedTokenLog(Path(config.run.dir), f"trainer-{rank}")
        self._parts: list[tuple[Rows, np.ndarray, torch.Tensor]] = []
        self._count = 0

    def add(self, rows: Rows, batch: MicroBatch, logprobs: torch.Tensor, advantages: torch.Tensor) -> None:
        """Of `batch`, which is of `rows`: `logprobs` float [B, R], `advantages` float [B, R] or [B, 1]."""
        take = min(len(batch.places), self._most - self._count)
        if take > 0:
            cells = batch.cells[:take]
            figures = [each.detach().expand(batch.mask.shape).reshape(-1)[cells].float() for each in (logprobs, advantages)]
            self._parts.append((rows, batch.places[:take], torch.stack(figures)))
            self._count += take

    def clear(self) -> None:
        self._parts, self._count = [], 0

    def write(self, step: int) -> None:
        """Append the step's."""
        parts = self._parts
        self.clear()
        if parts:
            places = [_places(rows, flat) for rows, flat, _ in parts]
            group, row, position = (np.concatenate(column) for column in zip(*places, strict=True))
            logprob, advantage = torch.cat([figures for _, _, figures in parts], 1).cpu().numpy()
            self._log.append(TrainedTokens(step, group, row, position, logprob, advantage))


def _places(rows: Rows, flat: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of tokens by their index in the flat arrays: their groups' ids, their rows within these, and their places in those."""
    row = np.searchsorted(rows.start, flat, side="right") - 1
    group = rows.group[row]
    return rows.group_id[group], row - np.searchsorted(rows.group, group), flat - rows.start[row]


# ---- Node part
#
# What a group's ranks on this node have of its checkpoints, where nodes share no folder (`ledger.node_checkpoints`).


def policy_trainer(config: Config, *, rank: int = 0, world_size: int = 1, device: torch.device | str = "cpu") -> ModelTrainer:
    """The policy of `model.path` under training, on the engine of `services.trainer`. Collective.

    With several ranks the caller has initialised torch's default process group, which spans them. Raises UserError for what the
    configuration or the folder gets wrong.
    """
    return model_trainer(PolicyObjective, config, RankInfo(rank, world_size, torch.device(device)))


def critic_trainer(config: Config, *, rank: int = 0, world_size: int = 1, device: torch.device | str = "cpu") -> ModelTrainer:
    """The value model of `critic.path`, or the policy's with a new head, on the engine of `services.critic`; otherwise as
    `policy_trainer`."""
    return model_trainer(CriticObjective, config, RankInfo(rank, world_size, torch.device(device)))


def model_trainer(learned: type[Objective], config: Config, rank_info: RankInfo) -> ModelTrainer:
    """What learns `learned`, on the engine of its role's service. Collective; raises as `policy_trainer`."""
    choose(config)  # what is wrong with a loss of the user's own is told before a model is loaded
    backend = load_backend(config, learned.role, rank_info)
    return ModelTrainer(config, backend, learned(config, backend))


@dataclass(frozen=True)
class ReadySamples:
    """Samples that are ready to be trained on. `live`: bool [B], false where a sample's gradient is exactly 0."""

    rows: Rows
    columns: Columns
    live: np.ndarray


class ModelTrainer:
    """Policy or critic under training. Calls come from one thread, in the same order on every rank; each may be a collective
    over the service's group.

    A step is `begin_step`, `accumulate` any number of times, `apply`. Gradients are sums, unnormalised, until `apply`
    divides them by what the aggregation counts over all accumulated groups of all ranks (tokens or rows), so that a
    step's result depends neither on sharding nor on how its groups were split over calls. Where advantages need the whole
    batch, or a step makes several updates, `accumulate` checks and holds the groups, and `apply` computes.
    """

    phases: dict[str, float] = {}  # noqa: RUF012 - of those that account for none
    """Seconds of the step's parts on this rank, by metric, until the next begins. They are within the result's `seconds`."""

    def __init__(self, config: Config, backend: ModelBackend, objective: Objective):
        self.backend, self.objective = backend, objective
        self.role = objective.role
        self._config = config
        self._options = TrainedRole.of(config, objective.role).options
        self._streams = streams(config)
        self._several_updates = updates_per_step(config) > 1
        self._rate = self._options.learning_rate
        self._kept = TokenLog(config, backend.rank_info.rank)
        self._keeps: Rows | None = None  # the rows of the passes that are made
        self.step = 0
        """The step that comes next, or is under way: the weights are those of version `step`."""
        self._begin()

    # ------------------------------------------------------------------------------------------ the step

    def begin_step(self, step: int) -> None:
        if step != self.step:
            raise InvariantViolated(f"the {self.role}'s weights are of step {self.step}, but step {step} begins")
        self._begin()

    def _begin(self) -> None:
        self.backend.clear_gradients()
        self._seconds = 0.0
        self._held: list[Rows] = []
        self._begin_update()
        self._reduced = Reduced()
        self._norms: list[float] = []
        self._skipped = 0
        self.phases = {}
        self._kept.clear()  # of a step that was given up

    def _begin_update(self) -> None:
        self._statistics = StepStatistics(self.backend.rank_info.device)
        self._added: list[tuple[ReadySamples, np.ndarray]] = []

    def accumulate(self, groups: Sequence[TrainGroup], last: bool = False) -> None:
        """Add the gradient of this rank's `groups` (perhaps none: the ranks still run the same collectives).

        `last`, the same on all ranks: nothing more is added before `apply`, so that what ranks sum up may begin now.
        """
        groups = self.backend.of_share(groups, TrainGroup)
        with self._timed():
            rows = self._decoded(groups)
            if self._streams:
                # Advantages need no more than a group has, and there is one update: passes are made while others generate.
                self._add(self._ready(rows), np.ones(len(rows.length), bool), last)
            else:
                self._held.append(rows)

    def _decoded(self, groups: Sequence[TrainGroup]) -> Rows:
        """As if nothing were trained of episodes whose last row was cut off by length, where `algorithm.truncated` says so."""
        rows = train_rows.decode_groups(groups, self.backend.vocab_size, self.objective.needs)
        if self._config.algorithm.truncated == "train":
            return rows
        cut = rows.truncated[rows.last]
        self._statistics.total("response_length/masked", float((cut & rows.valid & rows.leads).sum()))
        return replace(rows, mask=rows.mask & ~np.repeat(cut, rows.length))

    def apply(self) -> StepResult:
        """The step's optimizer updates: one, or one a mini-batch and epoch."""
        with self._timed():
            if self._streams:
                self._update()
            else:
                # The whole batch is here now. What the loss compares with is computed once, before the first update.
                empty = train_rows.decode_groups([], 0, self.objective.needs)
                samples = self._ready(train_rows.join(self._held or [empty]))
                for epoch in range(self._config.training.epochs):
                    for index in range(updates_per_epoch(self._config)):
                        chosen = (samples.rows.mini_batch == index)[samples.rows.group]
                        self._add(samples, chosen, last=True, keep=not epoch)
                        self._update()
            metrics = self._close_step()
            self._kept.write(self.step)
        self.step += 1
        return StepResult(metrics=metrics, seconds=self._seconds)

    def _ready(self, rows: Rows) -> ReadySamples:
        """With what the loss is computed on: advantages, and log-probabilities of other policies than the one that learns."""
        if self.objective.reference_is_base:
            with self.backend.adapters_off():
                rows = replace(rows, reference=self._per_token_output(rows))
        if self.objective.compares_with_start and (self._several_updates or self.objective.chooses_by_start):
            # In the first update the loss's own pass gives these; in later ones the weights are others.
            with self._phase("old_log_p"):
                rows = replace(rows, proximal=self._per_token_output(rows))
        with self._phase(*self.objective.timed_as):  # no pass runs meanwhile
            columns, live = self.objective.columns(rows, self.step, self._statistics)
        return ReadySamples(rows, columns, live)

    def _add(self, samples: ReadySamples, chosen: np.ndarray, last: bool, keep: bool = True) -> None:
        """Add the gradient of the samples `chosen` (bool [B]) of `samples`, the `last` ones of an update or not. `keep`: their
        tokens are to be kept, as far as there is room."""
        self._added.append((samples, chosen))
        trained = samples.rows.trained() & chosen
        self.objective.count_masked(_episodes(samples.rows, chosen) - _episodes(samples.rows, trained), self._statistics)
        # Samples whose gradient is exactly 0 (all rewards of a group are alike) get a forward pass alone, for the statistics.
        self._keeps = samples.rows if keep else None
        for backward, kind in enumerate((~samples.live, samples.live)):
            batches = self._micro_batches(samples.rows, samples.columns, trained & kind)
            self.backend.run(map(self._counted, batches), self._loss, bool(backward), last)
        self._keeps = None

    def _update(self) -> None:
        """One optimizer update with what was added since the last. A gradient that is not finite changes no weight."""
        # 1. Sum gradients and statistics over all shares of the data.
        with at("reduce"):
            reduced, squared = self.backend.reduce(self._statistics)
        # 2. Losses are sums: what they are averaged over is known only now. Where nothing was trained there is nothing to
        #    divide by, and the gradient is 0.
        averaged = reduced.means.get(self.objective.averaged)
        denominator = averaged.count if averaged else 1.0
        norm = math.sqrt(squared) / denominator if squared >= 0 else math.nan
        if math.isfinite(norm) and (averaged is None or math.isfinite(averaged.total)):
            # 3. Divide and clip by one factor, and update the weights.
            limit = self._options.max_grad_norm
            clip = limit / norm if limit and norm > limit else 1.0
            scheduled = learning_rate(self.step, self._config.training.steps, self._options)
            self._rate = scheduled / self.objective.rate_divisor(self._reduced + reduced)
            with at("update"):
                self.backend.update(clip / denominator, self._rate)
            self._norms.append(norm)
        else:
            self._handle_nonfinite()
        # 4. The next update begins with gradients of 0; the step reports of all its updates together.
        self._reduced += reduced
        self.backend.clear_gradients()
        self._begin_update()

    def _handle_nonfinite(self) -> None:
        """Find the samples that a loss or gradient is not finite for, write them down, and end the step unless updates are
        skipped."""
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
        """The step's metrics."""
        metrics = (self._reduced.finite() if self._skipped else self._reduced).metrics()
        metrics["lr"] = self._rate
        metrics["skipped_updates"] = float(self._skipped)
        if self._norms:
            metrics["grad_norm"] = sum(self._norms) / len(self._norms)
        if "actor/kl" in metrics:
            metrics["actor/kl_coefficient"] = self.objective.adapt_kl(metrics["actor/kl"], self._reduced)
        return self.objective.named(metrics)

    # ------------------------------------------------------------------------------------------ micro-batches

    def _micro_batches(self, rows: Rows, columns: Columns, chosen: np.ndarray) -> Iterator[MicroBatch]:
        """The samples `chosen` (bool [B])."""
        budget = self._config.training.max_tokens_per_microbatch
        return micro_batches(rows, chosen, columns, budget, self.backend.rank_info, self.backend.packs)

    def _counted(self, batch: MicroBatch) -> MicroBatch:
        self._statistics.mean("padding_waste", batch.padding, batch.attended)
        return batch

    def _loss(self, batch: MicroBatch, outputs: torch.Tensor) -> torch.Tensor:
        loss = self.objective.loss(batch, outputs, self._statistics)
        if self._keeps is not None and self.objective.token_figures is not None:
            self._kept.add(self._keeps, batch, *self.objective.token_figures)
        return loss

    @torch.no_grad()
    def _per_token_output(self, rows: Rows) -> np.ndarray:
        """float32 flat: the model's number for every trained token, 0 elsewhere."""
        out = np.zeros(len(rows.tokens), np.float32)
        batches = self._micro_batches(rows, {}, rows.trained())
        for batch, numbers in self.backend.infer(batches, self.objective.per_token_output):
            out[batch.places] = numbers.float().cpu().numpy()[: len(batch.places)]
        return out

    # ------------------------------------------------------------------------------------------ what is asked besides

    def compare(self, probes: Sequence[bytes]) -> list[float]:
        """Compare log-probabilities under the weights as they are with those that came with `probes`, encoded groups whose
        every token these weights are to have sampled. Between `begin_step` and `apply`, whose `mismatch/*` have them too.

        All ranks are given all probes. Returns on rank 0, for each, the mean |rollout's − trainer's| over its tokens, in nats;
        NaN where one is not a number. Raises InvalidMessage for what cannot be decoded, or does not fit the model.
        """
        with self._timed():
            ids = [types.decode(GroupPayload, probe).group_id for probe in probes]
            groups = [ValueRequest(group_id=group, tokens=0, payload=probe) for group, probe in zip(ids, probes, strict=True)]
            groups, needs = groups if self.backend.share == 0 else [], self.objective.needs
            rows = train_rows.decode_samples(groups, self.backend.vocab_size, needs.experts)
            own = self._per_token_output(train_rows.share_prompts(rows))
            add_mismatch(self._statistics, *map(self._with_zero, (rows.behaviour, own, rows.mask)))
        gaps, counted = rows.by_group(np.abs(rows.behaviour - own)), rows.by_group(rows.mask)
        return [float(gap[mask].mean(dtype=np.float64)) for gap, mask in zip(gaps, counted, strict=True)]

    def _with_zero(self, flat: np.ndarray) -> torch.Tensor:
        """On the device, float32, with a 0 behind: there may be none."""
        return torch.from_numpy(np.append(flat, 0).astype(np.float32)).to(self.backend.rank_info.device)

    def values(self, groups: Sequence[ValueRequest]) -> list[Values]:
        """A critic's values of this rank's `groups` (perhaps none), in their order, under the weights as they are.

        Raises InvalidMessage, computing nothing, for a payload that cannot be decoded, or token ids outside the vocabulary.
        """
        groups = self.backend.of_share(groups, ValueRequest)
        rows = train_rows.decode_samples(groups, self.backend.vocab_size)
        parts = rows.by_group(self._per_token_output(rows))
        values = [Values(group_id=group.group_id, values=part) for group, part in zip(groups, parts, strict=True)]
        return values if self.backend.leads else []

    # ------------------------------------------------------------------------------------------ its state

    def begin_save(self, folder: str) -> Callable[[], None]:
        """Begin to write model, optimizer, schedule and RNG under `folder`, which exists and is empty. The caller makes it
        atomic.

        What it returns writes the rest, and returns when all ranks have. With `checkpoint.async_save` that may be in another
        thread, while training goes on: what is written was copied before.
        """
        return self.backend.begin_save(Path(folder), TrainingPosition(self.step, self.objective.kl_control.coefficient))

    def save(self, folder: str) -> None:
        self.begin_save(folder)()

    def load(self, folder: str) -> None:
        """Restore what `save` wrote, bit for bit. Raises UserError when it does not fit the model."""
        position = self.backend.load(Path(folder))
        self.step = position.step
        self.objective.resume(position.kl_coefficient)
        self._begin()

    def offload(self) -> None:
        """Take what `offload_train_*` of its service name off the device, gradients included, which are 0 between steps. Until
        `onload` nothing is called but `values`."""
        self.backend.offload()

    def onload(self) -> None:
        """Bring back what `offload` took off, bit for bit."""
        self.backend.onload()

    # ------------------------------------------------------------------------------------------ time

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


def _episodes(rows: Rows, chosen: np.ndarray) -> int:
    """To how many the rows `chosen` (bool [B]) belong."""
    return int(rows.first_of_episode(chosen).sum())


def learning_rate(step: int, total_steps: int, optimizer: Optimizer) -> float:
    """The rate of step `step`, counted from 0.

    Warm-up rises linearly and reaches the peak in its last step; linear and cosine then fall from the peak to the minimum,
    which they reach at `total_steps`.
    """
    peak, low, warmup = optimizer.learning_rate, optimizer.min_learning_rate, optimizer.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    if optimizer.schedule == "constant":
        return peak
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    remaining = 1 - progress if optimizer.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return low + (peak - low) * remaining


def load_backend(config: Config, role: str, rank_info: RankInfo) -> ModelBackend:
    """Load the model that `role` trains, on the engine that its service names. Raises UserError for what configuration or
    folder get wrong, or when the engine's package is missing."""
    trained = TrainedRole.of(config, role)
    if use_megatron(trained.settings, rank_info.device):
        from runtime.trainer.megatron.backend import MegatronBackend

        return MegatronBackend(config, trained, rank_info)
    from runtime.trainer.fsdp.backend import FsdpBackend

    return FsdpBackend(config, trained, rank_info)
