"""Long curves with fewer points, and the same look: a browser draws 2,000 points in the time of a blink, not 10,000 of sixty
curves. Pure."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

MOST_POINTS = 2000


def extremes(values: np.ndarray, most: int = MOST_POINTS) -> np.ndarray:
    """Indices, in order, of at most `most` of `values` [N]: the least and the greatest of each of nearly most / 2 equal parts,
    and both ends, so that no spike is lost. NaNs are never chosen but at the ends."""
    count = len(values)
    if count <= most:
        return np.arange(count)
    edges = np.linspace(0, count, most // 2).astype(np.int64)  # one part fewer, which leaves room for the ends
    chosen = {0, count - 1}
    for begin, end in pairwise(edges.tolist()):
        part = values[begin:end]
        if not np.isnan(part).all():
            chosen |= {begin + int(np.nanargmin(part)), begin + int(np.nanargmax(part))}
    return np.array(sorted(chosen))


def means(values: np.ndarray, most: int = MOST_POINTS) -> np.ndarray:
    """[min(N, most)]: the mean of each of `most` equal parts of `values` [N]. For what is stacked, whose parts add up."""
    count = len(values)
    if count <= most:
        return values
    edges = np.linspace(0, count, most + 1).astype(np.int64)
    return np.add.reduceat(values, edges[:-1]) / np.diff(edges)


def smoothed(values: np.ndarray, window: int) -> np.ndarray:
    """The mean of each value and those before it, over a window; NaNs count for nothing."""
    there = ~np.isnan(values)
    sums = np.cumsum(np.concatenate([[0.0], np.where(there, values, 0.0)]))
    counts = np.cumsum(np.concatenate([[0], there]))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - window, 0)
    number = counts[ends] - counts[starts]
    return np.divide(sums[ends] - sums[starts], number, out=np.full(len(values), np.nan), where=number > 0)
