"""Whitening over all trained tokens of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from runtime.algorithms.interfaces import own_part

if TYPE_CHECKING:
    from torch import Tensor

EPS = 1e-8


def whiten(values: Tensor, mask: Tensor, batch_sum: Callable[[Tensor], Tensor] = own_part) -> Tensor:
    """`(x - mean) / sqrt(var + 1e-8)` with moments of the masked values, variance unbiased; 0 outside the mask. [B, T].

    `batch_sum` adds up a tensor over the parts of the batch. Mean and squares take a sum each, as the square of a sum
    loses digits where the mean is large.
    """
    count = batch_sum(mask.sum())
    mean = batch_sum((values * mask).sum()) / count.clamp(min=1)
    centred = (values - mean) * mask
    variance = batch_sum(centred.square().sum()) / (count - 1).clamp(min=1)
    return centred / (variance + EPS).sqrt()
