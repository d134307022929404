"""The critic's loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """`0.5 max((V - R)², (clip(V, V_old ± c) - R)²)` per token (Schulman et al. 2017; Engstrom et al., arXiv:2005.12729).

    All [B, T]. Returns the loss and a bool tensor that tells which tokens the clip decided.
    """
    near = values.clamp(old_values - clip, old_values + clip)
    plain, clipped = (values - returns).square(), (near - returns).square()
    return 0.5 * plain.maximum(clipped), clipped > plain
