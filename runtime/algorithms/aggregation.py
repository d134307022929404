"""From token values to one number: what a step's mean is taken over.

Each gives a sum and a count that add up over micro-batches and ranks; the step divides once, at its end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.algorithms.interfaces import AGGREGATIONS, Aggregate, AggregationOptions

if TYPE_CHECKING:
    from torch import Tensor


@AGGREGATIONS.register("token_mean")
def token_mean(values: Tensor, mask: Tensor, options: AggregationOptions) -> Aggregate:
    """Every trained token weighs the same (DAPO, arXiv:2503.14476, equation 12)."""
    return Aggregate((values * mask).sum(), mask.sum())


@AGGREGATIONS.register("seq_mean_token_mean")
def seq_mean_token_mean(values: Tensor, mask: Tensor, options: AggregationOptions) -> Aggregate:
    """Every sample weighs the same, whatever its length (GRPO, arXiv:2402.03300, equation 3)."""
    tokens = mask.sum(-1)
    return Aggregate(((values * mask).sum(-1) / tokens.clamp(min=1)).sum(), _trained_rows(tokens))


@AGGREGATIONS.register("seq_mean_token_sum")
def seq_mean_token_sum(values: Tensor, mask: Tensor, options: AggregationOptions) -> Aggregate:
    """The mean over samples of their tokens' sum."""
    return Aggregate((values * mask).sum(), _trained_rows(mask.sum(-1)))


@AGGREGATIONS.register("dr_grpo")
def dr_grpo(values: Tensor, mask: Tensor, options: AggregationOptions) -> Aggregate:
    """`sum / (rows · norm)`: no length of any sample enters (Dr. GRPO, arXiv:2503.20783, section 3.2)."""
    return Aggregate((values * mask).sum(), _trained_rows(mask.sum(-1)) * options.norm)


def _trained_rows(tokens: Tensor) -> Tensor:
    """Fully masked rows are not counted."""
    return (tokens > 0).to(tokens.dtype).sum()
