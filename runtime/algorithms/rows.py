"""Sums and means over the masked tokens of a row."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def row_sum(values: Tensor, mask: Tensor) -> Tensor:
    """[B, 1] from [B, T]; 0 in a row without masked tokens."""
    return (values * mask).sum(-1, keepdim=True)


def row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """[B, 1] from [B, T]; 0 in a row without masked tokens."""
    return row_sum(values, mask) / mask.sum(-1, keepdim=True).clamp(min=1)
