"""The proximal policy without a forward pass of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def interpolated_proximal(logp: Tensor, behaviour_logp: Tensor, staleness: Tensor) -> Tensor:
    """`α behaviour + (1 - α) logp`, `α = 1 / d` where a token is d >= 1 versions old and 0 where it is fresh
    (A-3PO, arXiv:2512.06547): the policy one version before `logp`, were versions steps on a straight line.

    All [B, T], `staleness` the integer d of each token by the version that sampled it. Without gradient.
    """
    share = staleness.clamp(min=1).to(logp.dtype).reciprocal().masked_fill(staleness < 1, 0.0)
    return logp.detach() + share * (behaviour_logp - logp.detach())
