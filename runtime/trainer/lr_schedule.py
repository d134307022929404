"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math

from runtime.config import Optimizer


def learning_rate(step: int, total_steps: int, optimizer: Optimizer) -> float:
    """The rate of step `step`, counted from 0.

    Warm-up rises linearly and reaches the peak in its last step; linear and cosine then fall from the peak to the minimum,
    which they reach at `total_steps`.
    """
    peak, low, warmup = optimizer.learning_rate, optimizer.min_learning_rate, optimizer.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    if optimizer.schedule == "constant":
        return peak
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    remaining = 1 - progress if optimizer.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return low + (peak - low) * remaining
