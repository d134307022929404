"""What rows come to before any pass of the model: rewards as they are shaped, advantages, and the tokens that a loss chooses
among. float64 on the host.
"""

from __future__ import annotations

import numpy as np
import torch

from runtime.algorithms.advantages import (
    less_divergence,
    missing_eos_penalty,
    soft_overlong_penalty,
    token_rewards,
    value_targets,
)
from runtime.algorithms.interfaces import AdvantageInputs, StepTokens, TurnRewards, require_shape
from runtime.chosen_algorithm import ChosenAlgorithm
from runtime.config import Config
from runtime.trainer.backend import ModelBackend
from runtime.trainer.rows import Rows
from runtime.trainer.statistics import StepStatistics


class RowAdvantages:
    """Shapes rewards, asks the estimator, and places the KL among either, as the configuration says. float64 on the host."""

    def __init__(self, config: Config, chosen: ChosenAlgorithm, backend: ModelBackend):
        self._chosen = chosen
        self._backend = backend  # adds up over the trainer's ranks: what an estimator that is not streamable needs
        self._max_length = config.sampling.max_new_tokens
        self._buffer = round(config.algorithm.overlong_buffer * self._max_length)
        self._overlong = config.algorithm.overlong_penalty
        self._missing_eos = config.algorithm.missing_eos_penalty
        self._kl_placement = config.algorithm.kl_placement
        self._named = f"algorithm.advantage: what {config.algorithm.advantage} gives"

    def __call__(self, rows: Rows, kl_coefficient: float, statistics: StepStatistics) -> np.ndarray:
        """[B, R] or [B, 1] float64, of all samples of `rows`."""
        inputs = self._inputs(rows, kl_coefficient, statistics)
        advantages = self._chosen.advantage.compute(inputs, self._chosen.advantage_options)
        count, length = inputs.mask.shape
        require_shape(advantages, [(count, 1), (count, length)], self._named, "[B, 1] or [B, T]")
        if self._kl_placement == "advantage" and rows.reference is not None:
            divergence = self._divergence(rows, inputs.mask, statistics)
            advantages = less_divergence(advantages, divergence, inputs.mask, kl_coefficient)
        return advantages.numpy()

    def value_targets(self, rows: Rows, kl_coefficient: float, statistics: StepStatistics) -> np.ndarray:
        """What the critic learns, from the same inputs: [B, R] float64."""
        return value_targets(self._inputs(rows, kl_coefficient, statistics), self._chosen.advantage_options).numpy()

    def _inputs(self, rows: Rows, kl_coefficient: float, statistics: StepStatistics) -> AdvantageInputs:
        every = np.arange(len(rows.length))
        mask = torch.from_numpy(rows.grid(rows.mask, every)).double()
        rewards, penalties = self._shaped(rows, statistics), None
        if self._kl_placement == "reward" and rows.reference is not None:
            penalties = kl_coefficient * self._divergence(rows, mask, statistics)
        per_token, turns = token_rewards(rewards, mask, penalties), _turns(rows)
        if turns is not None:
            per_token = per_token.index_put((turns.rows, turns.tokens), turns.values, accumulate=True)
        return AdvantageInputs(
            rewards=rewards if penalties is None else rewards - _of_episodes(penalties.sum(1), rows),
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
        """[B, R]: of the policy that sampled the tokens from the reference, 0 outside the mask. It needs no forward pass."""
        gap = rows.grid(rows.behaviour - rows.reference, np.arange(len(rows.length)))
        divergence = self._chosen.kl(torch.from_numpy(gap).double() * mask) * mask
        statistics.mean("actor/kl", divergence.sum(), mask.sum())
        return divergence

    def _shaped(self, rows: Rows, statistics: StepStatistics) -> torch.Tensor:
        """[B]: the rewards and what is added for the length of the episode's last row, 0 where it is not valid."""
        valid, last = torch.from_numpy(rows.valid), rows.last
        added = torch.zeros(len(valid), dtype=torch.float64)
        if self._buffer:
            lengths = torch.from_numpy(rows.length[last]).double()
            added += self._overlong * soft_overlong_penalty(lengths, self._max_length, self._buffer)
        if self._missing_eos:
            added += missing_eos_penalty(torch.from_numpy(rows.truncated[last]).double(), self._missing_eos)
        if self._buffer or self._missing_eos:
            counted = valid & torch.from_numpy(rows.leads)
            statistics.mean("score/length_penalty", added[counted].sum(), counted.double().sum())
        return (torch.from_numpy(rows.rewards).double() + added).where(valid, 0.0)


def _of_episodes(values: torch.Tensor, rows: Rows) -> torch.Tensor:
    """[B]: the sum of `values` [B] over the rows of each row's episode."""
    episode = torch.from_numpy(rows.episode)
    return values.new_zeros(len(values)).index_add(0, episode, values)[episode]


def _turns(rows: Rows) -> TurnRewards | None:
    """The rewards of turns, but for those of episodes that are not valid. None where no turn was rewarded."""
    if not len(rows.turn_tokens):
        return None
    kept = rows.mask[rows.turn_tokens]
    tokens = rows.turn_tokens[kept]
    row = np.searchsorted(rows.start, tokens, "right") - 1  # the last that begins there or before: empty ones come first
    return TurnRewards(*map(torch.from_numpy, (row, tokens - rows.start[row], rows.turn_rewards[kept])))


def step_tokens(rows: Rows, advantages: np.ndarray, draw: tuple[int, int]) -> StepTokens:
    """The trained tokens of `rows`, in their order, with their advantages ([B, R] or [B, 1] of all rows). `draw`: seed and
    step, of which, and of its group alone, a token's draw comes."""
    mask = rows.grid(rows.mask, np.arange(len(rows.length))) > 0
    counts = np.bincount(rows.group, weights=rows.trained_tokens(), minlength=len(rows.group_id)).astype(np.int64)
    draws = [np.random.default_rng((*draw, group)).random(count) for group, count in zip(rows.group_id, counts, strict=True)]
    return StepTokens(
        advantages=torch.from_numpy(np.broadcast_to(advantages, mask.shape)[mask]),
        logp=torch.from_numpy(rows.behaviour[rows.mask]).double(),
        draws=torch.from_numpy(np.concatenate([*draws, np.zeros(0)])),
        start=None if rows.proximal is None else torch.from_numpy(rows.proximal[rows.mask]).double(),
    )
