"""The objectives of the policy and of the critic: the configured algorithm, evaluated on one micro-batch."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch

from runtime.algorithms.advantages import (
    less_divergence,
    missing_eos_penalty,
    soft_overlong_penalty,
    token_rewards,
    value_targets,
)
from runtime.algorithms.interfaces import (
    AdvantageInputs,
    Aggregate,
    LossInputs,
    StepTokens,
    TurnRewards,
    require_loss,
    require_shape,
)
from runtime.algorithms.losses import clipped_value_loss, importance_weighted, interpolated_proximal, k3
from runtime.chosen_algorithm import ChosenAlgorithm, choose, kl_control, updates_per_step
from runtime.config import Config
from runtime.trainer.backend import ROW_WEIGHT, ModelBackend, Reduced, StepStatistics
from runtime.trainer.micro_batch import MicroBatch
from runtime.trainer.rows import Needs, Rows


class RowAdvantages:
    """Shapes rewards, calls the advantage estimator, and adds the KL to the rewards or the advantages. float64 on the host."""

    def __init__(self, config: Config, chosen: ChosenAlgorithm, backend: ModelBackend):
        self._chosen, self._options, self._max_length = chosen, config.algorithm, config.sampling.max_new_tokens
        self._backend = backend  # sums over the trainer's ranks, for estimators that need the whole batch

    def __call__(self, rows: Rows, kl_coefficient: float, statistics: StepStatistics) -> np.ndarray:
        """Return the advantages of all samples of `rows`, [B, R] or [B, 1] float64."""
        inputs = self._inputs(rows, kl_coefficient, statistics)
        advantages = self._chosen.advantage.compute(inputs, self._chosen.advantage_options)
        count, length = inputs.mask.shape
        named = f"algorithm.advantage: what {self._options.advantage} gives"
        require_shape(advantages, [(count, 1), (count, length)], named, "[B, 1] or [B, T]")
        if self._options.kl_placement == "advantage" and rows.reference is not None:
            divergence = self._divergence(rows, inputs.mask, statistics)
            advantages = less_divergence(advantages, divergence, inputs.mask, kl_coefficient)
        return advantages.numpy()

    def value_targets(self, rows: Rows, kl_coefficient: float, statistics: StepStatistics) -> np.ndarray:
        """Return the critic's targets, from the same inputs: [B, R] float64."""
        return value_targets(self._inputs(rows, kl_coefficient, statistics), self._chosen.advantage_options).numpy()

    def _inputs(self, rows: Rows, kl_coefficient: float, statistics: StepStatistics) -> AdvantageInputs:
        every = np.arange(len(rows.length))
        mask = torch.from_numpy(rows.grid(rows.mask, every)).double()
        rewards, penalties = self._shaped(rows, statistics), None
        if self._options.kl_placement == "reward" and rows.reference is not None:
            penalties = kl_coefficient * self._divergence(rows, mask, statistics)
        per_token, turns = token_rewards(rewards, mask, penalties), _turns(rows)
        if turns is not None:
            per_token = per_token.index_put((turns.rows, turns.tokens), turns.values, accumulate=True)
        return AdvantageInputs(
            rewards=rewards if penalties is None else rewards - _episode_sums(penalties.sum(1), rows),
            groups=torch.from_numpy(rows.group),
            valid=torch.from_numpy(rows.valid),
            mask=mask,
            token_rewards=per_token,
            values=None if rows.values is None else torch.from_numpy(rows.grid(rows.values, every)).double() * mask,
            batch_sum=self._backend.batch_sum,
            leads=torch.from_numpy(rows.leads),
            turns=turns,
        )

    def _divergence(self, rows: Rows, mask: torch.Tensor, statistics: StepStatistics) -> torch.Tensor:
        """Return the divergence of the behaviour policy from the reference, [B, R], 0 outside the mask. No forward pass."""
        gap = rows.grid(rows.behaviour - rows.reference, np.arange(len(rows.length)))
        divergence = self._chosen.kl(torch.from_numpy(gap).double() * mask) * mask
        statistics.mean("actor/kl", divergence.sum(), mask.sum())
        return divergence

    def _shaped(self, rows: Rows, statistics: StepStatistics) -> torch.Tensor:
        """Return the rewards plus the length penalties of the episode's last row, [B]; 0 for an invalid episode."""
        valid, last = torch.from_numpy(rows.valid), rows.last
        added = torch.zeros(len(valid), dtype=torch.float64)
        buffer, missing_eos = round(self._options.overlong_buffer * self._max_length), self._options.missing_eos_penalty
        if buffer:
            lengths = torch.from_numpy(rows.length[last]).double()
            added += self._options.overlong_penalty * soft_overlong_penalty(lengths, self._max_length, buffer)
        if missing_eos:
            added += missing_eos_penalty(torch.from_numpy(rows.truncated[last]).double(), missing_eos)
        if buffer or missing_eos:
            counted = valid & torch.from_numpy(rows.leads)
            statistics.mean("score/length_penalty", added[counted].sum(), counted.double().sum())
        return (torch.from_numpy(rows.rewards).double() + added).where(valid, 0.0)


def _episode_sums(values: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Return the sum of `values` [B] over the rows of each row's episode, [B]."""
    episode = torch.from_numpy(rows.episode)
    return values.new_zeros(len(values)).index_add(0, episode, values)[episode]


def _turns(rows: Rows) -> TurnRewards | None:
    """Return the rewards of turns of valid episodes; None if no turn was rewarded."""
    if not len(rows.turn_tokens):
        return None
    kept = rows.mask[rows.turn_tokens]
    tokens = rows.turn_tokens[kept]
    row = np.searchsorted(rows.start, tokens, "right") - 1  # the last row that begins there or before: empty rows come first
    return TurnRewards(*map(torch.from_numpy, (row, tokens - rows.start[row], rows.turn_rewards[kept])))


def step_tokens(rows: Rows, advantages: np.ndarray, draw: tuple[int, int]) -> StepTokens:
    """Return the trained tokens of `rows`, in order, with their advantages ([B, R] or [B, 1] of all rows). A token's random
    draw depends only on `draw` (seed and step) and its group."""
    mask = rows.grid(rows.mask, np.arange(len(rows.length))) > 0
    counts = np.bincount(rows.group, weights=rows.trained_tokens(), minlength=len(rows.group_id)).astype(np.int64)
    draws = [np.random.default_rng((*draw, group)).random(count) for group, count in zip(rows.group_id, counts, strict=True)]
    return StepTokens(
        advantages=torch.from_numpy(np.broadcast_to(advantages, mask.shape)[mask]),
        logp=torch.from_numpy(rows.behaviour[rows.mask]).double(),
        draws=torch.from_numpy(np.concatenate([*draws, np.zeros(0)])),
        start=None if rows.proximal is None else torch.from_numpy(rows.proximal[rows.mask]).double(),
    )


FAR = 0.1  # nats: a larger gap of log-probabilities counts in `mismatch/over_0.1`


class Objective(ABC):
    """What a role's model learns on any backend: a loss, and the loss's input columns."""

    role: ClassVar[str]
    prefix: ClassVar[str]  # of its metrics
    averaged: ClassVar[str]  # the statistic whose count divides the losses
    timed_as: ClassVar[tuple[str, ...]] = ()  # the metrics of the seconds that `columns` takes
    takes_start = False
    """Whether the loss needs the column "proximal": `per_token_output` under the weights at the start of the step. Until the
    first update the loss's own pass gives these numbers, unless the loss chooses tokens of the whole step by them."""
    reference_is_base = False  # the reference is the policy without its adapters
    token_figures: tuple[torch.Tensor, torch.Tensor] | None = None
    """The last micro-batch's log-probabilities at the start of the step, [B, R], and advantages, [B, R] or [B, 1]."""
    needs = Needs()

    def __init__(self, config: Config, backend: ModelBackend):
        self._config, self._backend = config, backend
        self._algorithm = choose(config)
        self.kl_control = kl_control(config.algorithm)
        self.advantages = RowAdvantages(config, self._algorithm, backend)

    @abstractmethod
    def columns(self, rows: Rows, step: int, statistics: StepStatistics) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Return the loss's input columns by name, and which samples are live, bool [B]: their gradient is not exactly 0."""

    @abstractmethod
    def per_token_output(self, batch: MicroBatch, outputs: torch.Tensor) -> torch.Tensor:
        """Return the number of each trained token, [N], from the model's outputs."""

    @abstractmethod
    def loss(self, batch: MicroBatch, outputs: torch.Tensor, statistics: StepStatistics) -> torch.Tensor:
        """Return the unnormalised loss, a sum. Adds the step's metrics to `statistics`."""

    def count_masked(self, episodes: int, statistics: StepStatistics) -> None:  # noqa: B027 - a critic counts none
        """Add episodes without a trained token, which no pass sees, to the counts that losses are averaged over."""

    def named(self, metrics: dict[str, float]) -> dict[str, float]:
        """Return a step's metrics under the names of this role."""
        return metrics

    def adapt_kl(self, divergence: float, reduced: Reduced) -> float:
        """Adapt the KL term's coefficient to the `divergence` of the step's samples; return the coefficient before."""
        before = self.kl_control.coefficient
        self.kl_control = self.kl_control.after(divergence, reduced.sums["samples"][0])
        return before

    def resume(self, kl_coefficient: float | None) -> None:
        self.kl_control = kl_control(self._config.algorithm, kl_coefficient)


class PolicyObjective(Objective):
    """Policy loss + β · KL − c · entropy, aggregated. The model's outputs are the inputs of its head, [N, H]."""

    role, prefix = "trainer", "actor/"
    averaged = "actor/pg_loss"
    timed_as = ("timing/adv", "timing/non_overlap_adv")

    def __init__(self, config: Config, backend: ModelBackend):
        super().__init__(config, backend)
        algorithm = config.algorithm
        diverges = algorithm.kl_coefficient != 0
        self.reference_is_base = diverges and config.reference.source == "adapter_off"
        reference = diverges and not self.reference_is_base
        self.needs = Needs(reference, self._algorithm.advantage.needs_values, backend.routes)
        self._kl_in_loss = diverges and algorithm.kl_placement == "loss"
        self._entropy_coefficient = algorithm.entropy_coefficient
        self.takes_start = updates_per_step(config) > 1 or self._algorithm.loss.by_start

    def columns(self, rows: Rows, step: int, statistics: StepStatistics) -> tuple[dict[str, np.ndarray], np.ndarray]:
        _report_rows(rows, step, statistics)
        advantages = self.advantages(rows, self.kl_control.coefficient, statistics)
        if self._config.critic is not None:
            mask = rows.grid(rows.mask, np.arange(len(rows.length))) > 0
            _report_numbers("advantages", np.broadcast_to(advantages, mask.shape)[mask], statistics)
        age = (step - rows.steps) * rows.mask
        fresh, older = (age == 0) & rows.mask, np.zeros_like(rows.mask)
        if self._config.weight_sync.in_flight == "keep":
            older = _after_older(age, rows)
        columns = _episode_columns(rows) | {
            "advantages": advantages,
            "behaviour": rows.behaviour * rows.mask,
            "age": age,
            "fresh": fresh & ~older,
            "older_keys": fresh & older,
        }
        for name, values in (("reference", rows.reference), ("proximal", rows.proximal)):
            if values is not None:
                columns[name] = values * rows.mask
        chooses = self._algorithm.loss.chooses
        if chooses is not None:
            columns["chosen"] = chosen = rows.mask.copy()
            tokens = step_tokens(rows, advantages, (self._config.run.seed, step))
            chosen[rows.mask] = chooses(tokens, self._backend.batch_sum).numpy()
        if self._config.moe.losses:
            columns[ROW_WEIGHT] = self._row_weights(rows, columns)
        return columns, self.has_gradient(advantages)

    def _row_weights(self, rows: Rows, columns: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the column `ROW_WEIGHT`. Aggregations are linear in the tokens' values."""
        mask = torch.from_numpy(rows.grid(rows.mask, np.arange(len(rows.length))))
        added = torch.zeros(len(mask), 1, requires_grad=True)
        of_rows = {name: torch.from_numpy(columns[name]) for name in (EPISODE_TOKENS, COUNTS) if name in columns}
        total = self._aggregate(added.expand_as(mask), mask, of_rows).total
        return torch.autograd.grad(total, added)[0].numpy()

    def has_gradient(self, advantages: np.ndarray) -> np.ndarray:
        """Return false where the gradient of a sample is exactly 0, bool [B]."""
        always = self._kl_in_loss or self._entropy_coefficient or self._config.moe.losses
        if always or not self._algorithm.loss.zero_without_advantage:
            return np.ones(len(advantages), bool)
        return (advantages != 0).any(1)

    def per_token_output(self, batch: MicroBatch, outputs: torch.Tensor) -> torch.Tensor:
        return self._logprobs(batch, outputs)[0]

    def _logprobs(self, batch: MicroBatch, outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probability and entropy, [N] each."""
        temperature, learns_entropy = self._config.sampling.temperature, self._entropy_coefficient != 0
        return self._backend.token_logprobs(outputs, batch, temperature, entropy_gradient=learns_entropy)

    def loss(self, batch: MicroBatch, outputs: torch.Tensor, statistics: StepStatistics) -> torch.Tensor:
        logp, entropy = (batch.grid(values) for values in self._logprobs(batch, outputs))
        tokens = batch.mask.sum()
        behaviour, reference = batch.columns["behaviour"], batch.columns.get("reference")
        start = batch.columns.get("proximal", logp.detach())
        interpolated = self._config.algorithm.proximal == "interpolated"
        proximal = interpolated_proximal(logp, behaviour, batch.columns["age"]) if interpolated else start
        correction = self._algorithm.correction
        inputs = LossInputs(
            logp=logp,
            old_logp=behaviour if correction is None else proximal,
            proximal_logp=proximal,
            behaviour_logp=behaviour,
            advantages=batch.columns["advantages"],
            mask=batch.mask,
            chosen=batch.columns.get("chosen"),
        )
        given = self._algorithm.loss.compute(inputs, self._algorithm.loss_options)
        computed = require_loss(given, inputs, self._config.algorithm.loss)
        # k1 of KL(behaviour || policy): its tokens were drawn from the behaviour policy.
        values, metrics = computed.loss, {"actor/ppo_kl": behaviour - logp.detach()} | computed.metrics
        if correction is not None:
            corrected = correction(proximal - behaviour, batch.mask, self._algorithm.correction_options)
            values = corrected.weight * values
            metrics = metrics | {"correction/weight": corrected.weight, "correction/altered": corrected.altered}
        for name, metric in metrics.items():
            statistics.mean(name, (metric.detach() * batch.mask).sum(), tokens)
        self._report("actor/pg_loss", values, batch, statistics)
        self._report("actor/entropy", entropy, batch, statistics)
        if self._kl_in_loss and reference is not None:
            divergence = self._algorithm.kl(logp - reference)
            if self._config.algorithm.kl_importance_weighted:
                divergence = importance_weighted(divergence, logp, behaviour)
            self._report("actor/kl_loss", divergence, batch, statistics)
            statistics.mean("actor/kl", (divergence.detach() * batch.mask).sum(), tokens)
            values = values + self.kl_control.coefficient * divergence
        if self._entropy_coefficient:
            values = values - self._entropy_coefficient * entropy
        if (balance := self._backend.balance(batch, statistics)) is not None:
            values = values + balance
        fresh, older = batch.columns["fresh"], batch.columns["older_keys"]
        add_mismatch(statistics, behaviour, start, fresh)
        add_older_keys(statistics, behaviour, start, older)
        self.token_figures = start, batch.columns["advantages"]
        statistics.total("mismatch/tokens_of_other_versions", tokens - fresh.sum() - older.sum())
        return self._aggregate(values, batch.mask, batch.columns).total

    def _aggregate(self, values: torch.Tensor, mask: torch.Tensor, columns: Mapping[str, torch.Tensor]) -> Aggregate:
        options = self._algorithm.aggregation_options
        if EPISODE_TOKENS in columns:
            options = replace(options, episode_tokens=columns[EPISODE_TOKENS], counts=columns[COUNTS])
        return self._algorithm.aggregation(values, mask, options)

    def count_masked(self, episodes: int, statistics: StepStatistics) -> None:
        count = episodes * self._algorithm.masked_sample
        if self._algorithm.masked_sample:
            for name in ("actor/pg_loss", "actor/entropy", *(["actor/kl_loss"] if self._kl_in_loss else [])):
                statistics.mean(name, 0.0, count)

    def _report(self, name: str, values: torch.Tensor, batch: MicroBatch, statistics: StepStatistics) -> None:
        aggregate = self._aggregate(values.detach(), batch.mask, batch.columns)
        statistics.mean(name, aggregate.total, aggregate.count)

    def named(self, metrics: dict[str, float]) -> dict[str, float]:
        if all(metrics.get(f"episode/{name}", alone) == alone for name, alone in REPLY.items()):
            metrics = {name: value for name, value in metrics.items() if not name.startswith("episode/")}
        return metrics


REPLY = {"rows": 1, "turns": 1, "environment_tokens": 0}  # values of `episode/*` if all episodes are replies
EPISODE_TOKENS, COUNTS = "episode_tokens", "counts"  # columns: as in `AggregationOptions`


def _episode_columns(rows: Rows) -> dict[str, np.ndarray]:
    """Return the episode columns, [B, 1] each; none if each row is an episode."""
    if len(rows.episode) == rows.leads.sum():
        return {}
    tokens = rows.trained_tokens()
    of_episode = np.bincount(rows.episode, weights=tokens)[rows.episode]
    return {EPISODE_TOKENS: of_episode[:, None], COUNTS: rows.first_of_episode(tokens > 0)[:, None]}


def _after_older(age: np.ndarray, rows: Rows) -> np.ndarray:
    """Return for each token, bool flat, whether its row has a token of older weights before it. After a swap in flight the
    rollout kept keys and values of those weights. Tokens that another row trains are not seen."""
    before = np.concatenate([[0], np.cumsum(age > 0)])  # one more than tokens: a row without a token may begin at the end
    return before[:-1] > np.repeat(before[rows.start], rows.length)


def _report_rows(rows: Rows, step: int, statistics: StepStatistics) -> None:
    prompts = rows.prompt_length[rows.group]
    scores = rows.rewards[rows.valid & rows.leads]
    for name, values in (("response_length", rows.length), ("prompt_length", prompts), ("score", scores)):
        _report_numbers(name, values, statistics)
    age = (step - rows.steps)[rows.mask]
    statistics.mean("staleness/token_mean", float(age.sum()), float(len(age)))
    statistics.total("samples", float(rows.leads.sum()))
    episodes, valid = float((rows.valid & rows.leads).sum()), np.repeat(rows.valid, rows.length)
    for name, count in (("rows", rows.valid), ("turns", rows.turn_begins()), ("environment_tokens", valid & ~rows.mask)):
        statistics.mean(f"episode/{name}", float(count.sum()), episodes)


def _report_numbers(name: str, values: np.ndarray, statistics: StepStatistics) -> None:
    numbers = values.astype(np.float64)
    statistics.mean(f"{name}/mean", float(numbers.sum()), float(len(numbers)))
    statistics.maximum(f"{name}/max", float(numbers.max(initial=-math.inf)))
    statistics.minimum(f"{name}/min", float(numbers.min(initial=math.inf)))


def add_mismatch(statistics: StepStatistics, sampled: torch.Tensor, trained: torch.Tensor, counted: torch.Tensor) -> None:
    """Add how far two engines differ on the same tokens under the same weights. `sampled`, `trained`: the log-probabilities of
    the sampling engine and of the trainer, of one shape with at least one element. `counted`: 1 for a token that counts, or 0.
    k1 and k3 estimate KL(rollout || trainer) per token, after John Schulman, "Approximating KL divergence" (2020)."""
    gap, tokens = (sampled - trained) * counted, counted.sum()
    size = gap.abs()
    statistics.mean("mismatch/abs_logprob", size.sum(), tokens)
    statistics.mean("mismatch/k1", gap.sum(), tokens)
    statistics.mean("mismatch/k3", k3(gap).sum(), tokens)
    statistics.mean("mismatch/over_0.1", (size > FAR).sum(), tokens)
    statistics.maximum("mismatch/max", torch.where(tokens > 0, size.max(), -torch.inf))
    statistics.histogram("mismatch/abs_logprob", size, counted)
    statistics.total("mismatch/tokens", tokens)


def add_older_keys(statistics: StepStatistics, sampled: torch.Tensor, trained: torch.Tensor, counted: torch.Tensor) -> None:
    """Add how far the engines differ on tokens that the version being trained sampled over keys of older weights."""
    size, tokens = (sampled - trained).abs() * counted, counted.sum()
    statistics.mean("mismatch/older_keys_abs_logprob", size.sum(), tokens)
    statistics.maximum("mismatch/older_keys_max", torch.where(tokens > 0, size.max(), -torch.inf))
    statistics.total("mismatch/older_keys_tokens", tokens)


class CriticObjective(Objective):
    """Learns the value targets of the advantage estimator by the clipped value loss, averaged over all tokens of the step. A
    token's value is that of the state before it. The model's outputs, at the tokens that predict, are values, float32 [N]."""

    role, prefix = "critic", "critic/"
    averaged = "critic/vf_loss"

    def __init__(self, config: Config, backend: ModelBackend):
        super().__init__(config, backend)
        assert config.critic is not None
        self._clip = config.critic.value_clip or float("inf")  # largest change of a value from the recorded one
        reference = config.algorithm.kl_coefficient != 0 and config.algorithm.kl_placement == "reward"
        self.needs = Needs(reference=reference, values=self._algorithm.advantage.needs_values)

    def columns(self, rows: Rows, step: int, statistics: StepStatistics) -> tuple[dict[str, np.ndarray], np.ndarray]:
        assert rows.values is not None
        targets = self.advantages.value_targets(rows, self.kl_control.coefficient, statistics)
        statistics.total("samples", float(rows.leads.sum()))
        return {"targets": targets, "recorded": rows.values * rows.mask}, np.ones(len(rows.length), bool)

    def per_token_output(self, batch: MicroBatch, outputs: torch.Tensor) -> torch.Tensor:
        return outputs

    def loss(self, batch: MicroBatch, outputs: torch.Tensor, statistics: StepStatistics) -> torch.Tensor:
        values, tokens = batch.grid(outputs), batch.mask.sum()
        targets = batch.columns["targets"]
        losses, clipped = clipped_value_loss(values, batch.columns["recorded"], targets, self._clip)
        loss = (losses * batch.mask).sum()
        for name, each in (
            ("vf_loss", losses),
            ("vf_clipfrac", clipped),
            ("values/mean", values),
            ("returns/mean", targets),
            ("vf_error", (values - targets).square()),
        ):
            statistics.mean(self.prefix + name, (each.detach() * batch.mask).sum(), tokens)
        counted = batch.mask != 0
        for name, each in (("values", values.detach()), ("returns", targets)):
            statistics.maximum(f"{self.prefix}{name}/max", each.masked_fill(~counted, -torch.inf).max())
            statistics.minimum(f"{self.prefix}{name}/min", each.masked_fill(~counted, torch.inf).min())
        return loss

    def named(self, metrics: dict[str, float]) -> dict[str, float]:
        metrics[f"{self.prefix}skipped_updates"] = metrics["skipped_updates"]
        return {name: value for name, value in metrics.items() if name.startswith(self.prefix)}
