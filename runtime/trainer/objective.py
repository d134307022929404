"""What is minimised: the configured algorithm, evaluated on one micro-batch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from runtime.algorithms.corrections import interpolated_proximal
from runtime.algorithms.interfaces import LossInputs
from runtime.algorithms.kl import importance_weighted, k3
from runtime.algorithms.losses import token_logprobs
from runtime.chosen_algorithm import ChosenAlgorithm
from runtime.config import Config
from runtime.trainer.batch import MicroBatch
from runtime.trainer.rows import Rows
from runtime.trainer.statistics import StepStatistics

CHUNK_ELEMENTS = 1 << 26  # float32 log-probabilities of one chunk of tokens: 256 MiB
FAR = 0.1  # nats: of a token whose log-probability is counted as far off

TokenLogprobs = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""(logits, tokens, temperature, *, entropy_gradient) -> log-probabilities and entropies, [N] each."""


class Objective:
    """Policy loss + β · KL − c · entropy, aggregated. `kl_coefficient` is β as it is now.

    `logprobs` says how `algorithms.logprobs.token_logprobs` is computed of a model's logits.
    """

    def __init__(self, config: Config, chosen: ChosenAlgorithm, logprobs: TokenLogprobs | None = None):
        self._chosen = chosen
        self._token_logprobs = logprobs or in_chunks
        self.kl_coefficient = config.algorithm.kl_coefficient
        self._kl_in_loss = config.algorithm.kl_coefficient != 0 and config.algorithm.kl_placement == "loss"
        self._kl_importance_weighted = config.algorithm.kl_importance_weighted
        self._entropy_coefficient = config.algorithm.entropy_coefficient
        self._temperature = config.sampling.temperature
        self._interpolated = config.algorithm.proximal == "interpolated"

    def has_gradient(self, advantages: np.ndarray) -> np.ndarray:
        """bool [B]: false where the gradient of a sample is exactly 0, so that its backward pass can be left out."""
        if self._kl_in_loss or self._entropy_coefficient or not self._chosen.loss.zero_without_advantage:
            return np.ones(len(advantages), bool)
        return (advantages != 0).any(1)

    def columns(self, rows: Rows, advantages: np.ndarray, step: int) -> dict[str, np.ndarray]:
        """What `__call__` computes on, but for "proximal": the log-probabilities under the policy at the start of the step,
        which are those of the loss's own forward pass unless the step made updates before.
        """
        age = step - rows.steps
        columns = {
            "advantages": advantages,
            "behaviour": rows.behaviour * rows.mask,
            "age": age * rows.mask,
            "fresh": (age == 0) & rows.mask,
        }
        if rows.reference is not None:
            columns["reference"] = rows.reference * rows.mask
        return columns

    def __call__(self, batch: MicroBatch, logits: torch.Tensor, statistics: StepStatistics) -> torch.Tensor:
        """The unnormalised loss, a sum, from logits [N, V], or the part of V that is this rank's. Adds what the step reports to
        `statistics`."""
        logp, entropy = (batch.grid(values) for values in self.logprobs(logits, batch.targets))
        tokens = batch.mask.sum()
        behaviour, reference = batch.columns["behaviour"], batch.columns.get("reference")
        start = batch.columns.get("proximal", logp.detach())
        proximal = interpolated_proximal(logp, behaviour, batch.columns["age"]) if self._interpolated else start
        correction = self._chosen.correction
        inputs = LossInputs(
            logp=logp,
            old_logp=behaviour if correction is None else proximal,
            proximal_logp=proximal,
            behaviour_logp=behaviour,
            advantages=batch.columns["advantages"],
            mask=batch.mask,
        )
        outputs = self._chosen.loss.compute(inputs, self._chosen.loss_options)
        values, metrics = outputs.loss, outputs.metrics
        if correction is not None:
            corrected = correction(proximal - behaviour, batch.mask, self._chosen.correction_options)
            values = corrected.weight * values
            metrics = metrics | {"correction/weight": corrected.weight, "correction/altered": corrected.altered}
        for name, metric in metrics.items():
            statistics.mean(name, (metric * batch.mask).sum(), tokens)
        self._report("actor/pg_loss", values, batch, statistics)
        self._report("actor/entropy", entropy, batch, statistics)
        if self._kl_in_loss and reference is not None:
            divergence = self._chosen.kl(logp - reference)
            if self._kl_importance_weighted:
                divergence = importance_weighted(divergence, logp, behaviour)
            self._report("actor/kl_loss", divergence, batch, statistics)
            statistics.mean("actor/kl", (divergence.detach() * batch.mask).sum(), tokens)
            values = values + self.kl_coefficient * divergence
        if self._entropy_coefficient:
            values = values - self._entropy_coefficient * entropy
        fresh = batch.columns["fresh"]
        add_mismatch(statistics, behaviour, start, fresh)
        statistics.total("mismatch/tokens_of_other_versions", tokens - fresh.sum())
        return self._chosen.aggregation(values, batch.mask, self._chosen.aggregation_options).total

    def count_masked(self, samples: int, statistics: StepStatistics) -> None:
        """What samples without a trained token, of which no pass is made, add to what the losses are averaged over."""
        count = samples * self._chosen.masked_sample
        if self._chosen.masked_sample:
            for name in ("actor/pg_loss", "actor/entropy", *(["actor/kl_loss"] if self._kl_in_loss else [])):
                statistics.mean(name, 0.0, count)

    def _report(self, name: str, values: torch.Tensor, batch: MicroBatch, statistics: StepStatistics) -> None:
        aggregate = self._chosen.aggregation(values.detach(), batch.mask, self._chosen.aggregation_options)
        statistics.mean(name, aggregate.total, aggregate.count)

    def logprobs(self, logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability and entropy, [N] each."""
        return self._token_logprobs(logits, targets, self._temperature, entropy_gradient=self._entropy_coefficient != 0)


def add_mismatch(statistics: StepStatistics, sampled: torch.Tensor, trained: torch.Tensor, counted: torch.Tensor) -> None:
    """How far two engines are apart on the same tokens under the same weights: the log-probabilities of the one that `sampled`
    them and of the trainer, of one shape with at least one element, where `counted` is 1 (elsewhere 0).

    k1 and k3 estimate KL(rollout || trainer) per token, after John Schulman, "Approximating KL divergence" (2020).
    """
    gap, tokens = (sampled - trained) * counted, counted.sum()
    size = gap.abs()
    statistics.mean("mismatch/abs_logprob", size.sum(), tokens)
    statistics.mean("mismatch/k1", gap.sum(), tokens)
    statistics.mean("mismatch/k3", k3(gap).sum(), tokens)
    statistics.mean("mismatch/over_0.1", (size > FAR).sum(), tokens)
    statistics.maximum("mismatch/max", torch.where(tokens > 0, size.max(), -torch.inf))
    statistics.histogram("mismatch/abs_logprob", size, counted)
    statistics.total("mismatch/tokens", tokens)


def in_chunks(
    logits: torch.Tensor, tokens: torch.Tensor, temperature: float, *, entropy_gradient: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """`token_logprobs`, in chunks of tokens that are computed again in the backward pass, where a vocabulary times tokens is
    large."""

    def compute(logits: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return token_logprobs(logits, tokens, temperature, entropy_gradient=entropy_gradient)

    if logits.numel() <= CHUNK_ELEMENTS:
        return compute(logits, tokens)
    size = max(1, CHUNK_ELEMENTS // logits.shape[1])
    chunks = zip(logits.split(size), tokens.split(size), strict=True)
    logp, entropy = zip(*(checkpoint(compute, *chunk, use_reentrant=False) for chunk in chunks), strict=True)
    return torch.cat(logp), torch.cat(entropy)
