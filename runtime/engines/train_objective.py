"""What is minimised: the configured algorithm, evaluated on one micro-batch."""

from __future__ import annotations

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from runtime import algorithms  # noqa: F401 - registers the functions by name
from runtime.algorithms.interfaces import (
    ADVANTAGES,
    AGGREGATIONS,
    KL_ESTIMATORS,
    POLICY_LOSSES,
    AdvantageInputs,
    LossInputs,
    LossOptions,
)
from runtime.algorithms.logprobs import token_logprobs
from runtime.config import Algorithm
from runtime.engines.train_batch import MicroBatch, Rows
from runtime.engines.train_statistics import StepStatistics

CHUNK_ELEMENTS = 1 << 26  # float32 log-probabilities of one chunk of tokens: 256 MiB


class Objective:
    """Policy loss + β · KL − c · entropy, aggregated. Raises UserError for a name that is not registered."""

    def __init__(self, algorithm: Algorithm, temperature: float):
        self._estimator = ADVANTAGES.get(algorithm.advantage)
        self._loss = POLICY_LOSSES.get(algorithm.loss)
        self._kl = KL_ESTIMATORS.get(algorithm.kl)
        self._aggregate = AGGREGATIONS.get(algorithm.aggregation)
        self._options = LossOptions(
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            dual_clip=algorithm.dual_clip,
            behaviour_weight_cap=algorithm.behaviour_weight_cap,
        )
        self._kl_coefficient = algorithm.kl_coefficient
        self._entropy_coefficient = algorithm.entropy_coefficient
        self._temperature = temperature

    @property
    def needs_reference(self) -> bool:
        return self._kl_coefficient != 0

    def advantages(self, rows: Rows) -> np.ndarray:
        """[B, R] or [B, 1] float64, of all samples of `rows`."""
        inputs = AdvantageInputs(
            rewards=torch.from_numpy(rows.rewards).double(),
            groups=torch.from_numpy(rows.group),
            valid=torch.from_numpy(rows.valid),
            mask=torch.from_numpy(rows.grid(rows.mask, np.arange(len(rows.length)))).double(),
        )
        return self._estimator.compute(inputs).numpy()

    def has_gradient(self, advantages: np.ndarray) -> np.ndarray:
        """bool [B]: false where the gradient of a sample is exactly 0, so that its backward pass can be left out."""
        if self._kl_coefficient or self._entropy_coefficient or not self._loss.zero_without_advantage:
            return np.ones(len(advantages), bool)
        return (advantages != 0).any(1)

    def __call__(self, batch: MicroBatch, logits: torch.Tensor, statistics: StepStatistics) -> torch.Tensor:
        """The unnormalised loss, a sum, from logits [N, V]. Adds what the step reports to `statistics`."""
        logp, entropy = self._logprobs(logits, batch.targets)
        logp, entropy = _grid(logp, batch), _grid(entropy, batch)
        inputs = LossInputs(
            logp=logp,
            proximal_logp=logp.detach(),  # one update a batch: the step starts from the policy of this very pass
            behaviour_logp=batch.behaviour * batch.mask,
            advantages=batch.advantages,
            mask=batch.mask,
        )
        outputs = self._loss.compute(inputs, self._options)
        values = outputs.loss
        self._report("actor/pg_loss", values, batch, statistics)
        self._report("actor/entropy", entropy, batch, statistics)
        if batch.reference is not None:
            divergence = self._kl(logp - batch.reference * batch.mask)
            self._report("actor/kl_loss", divergence, batch, statistics)
            values = values + self._kl_coefficient * divergence
        if self._entropy_coefficient:
            values = values - self._entropy_coefficient * entropy
        tokens = batch.mask.sum()
        for name, metric in outputs.metrics.items():
            statistics.mean(name, (metric * batch.mask).sum(), tokens)
        mismatch = (inputs.behaviour_logp - inputs.proximal_logp).abs() * batch.fresh
        fresh = batch.fresh.sum()
        statistics.mean("mismatch/abs_logprob", mismatch.sum(), fresh)
        statistics.maximum("mismatch/max", torch.where(fresh > 0, mismatch.max(), -torch.inf))
        return self._aggregate(values, batch.mask).total

    def _report(self, name: str, values: torch.Tensor, batch: MicroBatch, statistics: StepStatistics) -> None:
        aggregate = self._aggregate(values.detach(), batch.mask)
        statistics.mean(name, aggregate.total, aggregate.count)

    def _logprobs(self, logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """In chunks of tokens that are computed again in the backward pass, where a vocabulary times tokens is large."""
        differentiable = self._entropy_coefficient != 0

        def compute(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return token_logprobs(logits, targets, self._temperature, entropy_gradient=differentiable)

        if logits.numel() <= CHUNK_ELEMENTS:
            return compute(logits, targets)
        size = max(1, CHUNK_ELEMENTS // logits.shape[1])
        chunks = zip(logits.split(size), targets.split(size), strict=True)
        logp, entropy = zip(*(checkpoint(compute, *chunk, use_reentrant=False) for chunk in chunks), strict=True)
        return torch.cat(logp), torch.cat(entropy)


def _grid(values: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Values [N] of the trained tokens as [B, R], 0 elsewhere."""
    return values.new_zeros(batch.mask.numel()).index_copy(0, batch.cells, values).view(batch.mask.shape)
