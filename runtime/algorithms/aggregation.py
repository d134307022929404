"""From token values to one number: what a step's mean is taken over.

Each gives a sum and a count that add up over micro-batches and ranks; the step divides once, at its end. A row without a
trained token adds nothing here, as rows that fill up a batch have none either; what a *sample* without one adds is
`masked_sample`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.algorithms.interfaces import AGGREGATIONS, Aggregate, AggregationOptions

if TYPE_CHECKING:
    from torch import Tensor


@AGGREGATIONS.register("token_mean")
def token_mean(values: Tensor, mask: Tensor, options: AggregationOptions) -> Aggregate:
    """Every trained token weighs the same (DAPO, arXiv:2503.14476, equation 12). A masked sample has none: it counts 0."""
    return Aggregate((values * mask).sum(), mask.sum())


@AGGREGATIONS.register("seq_mean_token_mean")
def seq_mean_token_mean(values: Tensor, mask: Tensor, options: AggregationOptions) -> Aggregate:
    """Every sample weighs the same, whatever its length (GRPO, arXiv:2402.03300, equation 3). A masked one does not count, as
    in verl's `seq-mean-token-mean`: the mean is over those that are trained."""
    tokens = mask.sum(-1)
    return Aggregate(((values * mask).sum(-1) / tokens.clamp(min=1)).sum(), _trained_rows(tokens))


@AGGREGATIONS.register("seq_mean_token_sum")
def seq_mean_token_sum(values: Tensor, mask: Tensor, options: AggregationOptions) -> Aggregate:
    """The mean over samples of their tokens' sum. A masked one does not count, as in verl's `seq-mean-token-sum`."""
    return Aggregate((values * mask).sum(), _trained_rows(mask.sum(-1)))


@AGGREGATIONS.register("dr_grpo")
def dr_grpo(values: Tensor, mask: Tensor, options: AggregationOptions) -> Aggregate:
    """`sum / (samples · norm)`: no length of any sample enters (Dr. GRPO, arXiv:2503.20783, section 3.2).

    A masked sample counts as one of no loss (`masked_sample`), as in the authors' code and in TRL: the constant does not depend
    on what is masked, and the gradients of the others stay as they are.
    """
    return Aggregate((values * mask).sum(), _trained_rows(mask.sum(-1)) * options.norm)


def masked_sample(name: str, options: AggregationOptions) -> float:
    """What a sample without a trained token adds to the count of the aggregation `name`."""
    return options.norm if name == "dr_grpo" else 0.0


def _trained_rows(tokens: Tensor) -> Tensor:
    """How many have a token, from their numbers of them [B]."""
    return (tokens > 0).to(tokens.dtype).sum()
