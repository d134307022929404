"""Generalised advantage estimation, PPO's: advantages and value targets from a critic's values (arXiv:1506.02438)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.algorithms.interfaces import AdvantageInputs, AdvantageOptions, advantage
from runtime.algorithms.token_returns import gae as estimate
from runtime.algorithms.whitening import whiten

if TYPE_CHECKING:
    from torch import Tensor


@advantage("gae", streamable=lambda options: not options.gae_whitened, needs_values=True)
def gae(inputs: AdvantageInputs, options: AdvantageOptions) -> Tensor:
    """[B, T], whitened over all trained tokens of the batch where `gae_whitened` says so (PPO's advantage normalisation,
    arXiv:1707.06347)."""
    advantages, _ = _estimate(inputs, options)
    return whiten(advantages, inputs.mask, inputs.batch_sum) if options.gae_whitened else advantages


def value_targets(inputs: AdvantageInputs, options: AdvantageOptions) -> Tensor:
    """The returns `A + V` of the same estimate, before any whitening: what the critic is trained towards. [B, T]."""
    return _estimate(inputs, options)[1]


def _estimate(inputs: AdvantageInputs, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    assert inputs.values is not None  # `needs_values`
    return estimate(inputs.token_rewards, inputs.values, inputs.mask, gamma=options.gamma, lam=options.gae_lambda)
