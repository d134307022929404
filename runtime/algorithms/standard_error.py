"""How far the mean over a data set would vary with other problems of its kind."""

from __future__ import annotations

import math
from collections.abc import Sequence


def clustered_standard_error(means: Sequence[float]) -> float | None:
    """The standard error of the mean over problems, whose samples are one cluster each; None for fewer than two problems.

    `means[i]` is p_i, the mean of problem i's samples, and p their mean over the N problems:
    `sqrt(sum over i of (p_i - p)^2 / (N - 1)) / sqrt(N)`.

    With equally many samples to a problem this is the cluster-robust error of the mean over all samples (Miller, "Adding Error
    Bars to Evals", arXiv:2411.00640, on clustered questions) times sqrt(N / (N - 1)), the correction for few clusters.
    """
    count = len(means)
    if count < 2:
        return None
    mean = math.fsum(means) / count
    return math.sqrt(math.fsum((value - mean) ** 2 for value in means) / (count - 1) / count)
