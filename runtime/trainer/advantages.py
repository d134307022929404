"""From the samples of a step, or of a part of it, to their advantages."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from runtime.algorithms.advantages import missing_eos_penalty, soft_overlong_penalty, value_targets
from runtime.algorithms.interfaces import AdvantageInputs
from runtime.algorithms.token_returns import token_rewards
from runtime.chosen_algorithm import ChosenAlgorithm
from runtime.config import Config
from runtime.trainer.rows import Rows
from runtime.trainer.statistics import StepStatistics


class RowAdvantages:
    """Shapes rewards, places the KL among them where the configuration says so, and asks the estimator. float64 on the host.

    `batch_sum` adds up a tensor over the trainer's ranks: what an estimator that is not streamable needs.
    """

    def __init__(self, config: Config, chosen: ChosenAlgorithm, batch_sum: Callable[[torch.Tensor], torch.Tensor]):
        self._chosen = chosen
        self._batch_sum = batch_sum
        self._max_length = config.sampling.max_new_tokens
        self._buffer = round(config.algorithm.overlong_buffer * self._max_length)
        self._overlong = config.algorithm.overlong_penalty
        self._missing_eos = config.algorithm.missing_eos_penalty
        self._kl_in_reward = config.algorithm.kl_placement == "reward"

    def __call__(self, rows: Rows, kl_coefficient: float, statistics: StepStatistics) -> np.ndarray:
        """[B, R] or [B, 1] float64, of all samples of `rows`."""
        return self._chosen.advantage.compute(
            self._inputs(rows, kl_coefficient, statistics), self._chosen.advantage_options
        ).numpy()

    def value_targets(self, rows: Rows, kl_coefficient: float, statistics: StepStatistics) -> np.ndarray:
        """What the critic learns, from the same inputs: [B, R] float64."""
        return value_targets(self._inputs(rows, kl_coefficient, statistics), self._chosen.advantage_options).numpy()

    def _inputs(self, rows: Rows, kl_coefficient: float, statistics: StepStatistics) -> AdvantageInputs:
        every = np.arange(len(rows.length))
        mask = torch.from_numpy(rows.grid(rows.mask, every)).double()
        rewards, penalties = self._shaped(rows, statistics), None
        if self._kl_in_reward and rows.reference is not None:
            # The tokens are the behaviour policy's, and so is the divergence: it needs no forward pass.
            divergence = self._chosen.kl(torch.from_numpy(rows.grid(rows.behaviour - rows.reference, every)).double() * mask)
            statistics.mean("actor/kl", (divergence * mask).sum(), mask.sum())
            penalties = kl_coefficient * divergence * mask
        return AdvantageInputs(
            rewards=rewards if penalties is None else rewards - penalties.sum(1),
            groups=torch.from_numpy(rows.group),
            valid=torch.from_numpy(rows.valid),
            mask=mask,
            token_rewards=token_rewards(rewards, mask, penalties),
            values=None if rows.values is None else torch.from_numpy(rows.grid(rows.values, every)).double() * mask,
            batch_sum=self._batch_sum,
        )

    def _shaped(self, rows: Rows, statistics: StepStatistics) -> torch.Tensor:
        """[B]: the rewards and what is added for length, 0 where a sample is not valid."""
        valid = torch.from_numpy(rows.valid)
        added = torch.zeros(len(valid), dtype=torch.float64)
        if self._buffer:
            lengths = torch.from_numpy(rows.length).double()
            added += self._overlong * soft_overlong_penalty(lengths, self._max_length, self._buffer)
        if self._missing_eos:
            added += missing_eos_penalty(torch.from_numpy(rows.truncated).double(), self._missing_eos)
        if self._buffer or self._missing_eos:
            statistics.mean("grpo/length_penalty", added[valid].sum(), valid.double().sum())
        return (torch.from_numpy(rows.rewards).double() + added).where(valid, 0.0)
