"""Which samples run together, and where each lies in arrays that hold runs of different lengths back to back. Pure.

Lengths are tokens of a whole sequence; results of `micro_batches` and `balance` are indices into them.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

SLACK = 0.005  # by how much the largest part may exceed what is possible before `balance` tries harder


def micro_batches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Cut the samples, sorted by length, into runs whose `samples x longest` is at most `budget` tokens.

    Sorting keeps padding small; ties stay in their order. A sample longer than the budget runs alone.
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batches and (len(batches[-1]) + 1) * lengths[index] <= budget:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def length_buckets(lengths: Sequence[int], ratio: float) -> list[int]:
    """Cut ascending `lengths` into runs whose longest is at most `ratio` times the shortest; returns the runs' sizes."""
    sizes: list[int] = []
    shortest = 0
    for length in lengths:
        if sizes and length <= ratio * shortest:
            sizes[-1] += 1
        else:
            sizes.append(1)
            shortest = length
    return sizes


def balance(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Share items out over `parts` so that the largest sum of costs is small.

    Karmarkar and Karp's largest differencing method; then exchanges, as with few items a part it leaves the largest several
    per cent above the mean. Deterministic; every index occurs once, in ascending order within its part. Parts may be empty
    when there are few items.
    """
    if parts < 1:
        raise ValueError(f"parts is at least 1, not {parts}")
    shares = _difference(costs, parts)
    # No sharing is better than the larger of the mean and the dearest item.
    _exchange(costs, shares, max(sum(costs) / parts, max(costs, default=0)) * (1 + SLACK))
    return [sorted(share) for share in shares]


def _difference(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Karmarkar and Karp's largest differencing method (1982, UCB/CSD-82-113)."""
    # A partial solution is its parts in descending order of their sums. The two with the largest spread are merged, the
    # heaviest parts of one with the lightest of the other.
    heap = []
    for index, cost in enumerate(costs):
        heap.append((-cost, index, [(cost, [index])] + [(0, [])] * (parts - 1)))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, order, heavy = heapq.heappop(heap)
        _, _, light = heapq.heappop(heap)
        merged = [(a + b, left + right) for (a, left), (b, right) in zip(heavy, reversed(light), strict=True)]
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], order, merged))
    return [items for _, items in heap[0][2]] if heap else [[] for _ in range(parts)]


def _exchange(costs: Sequence[float], shares: list[list[int]], aim: float) -> None:
    """Move an item of the heaviest part elsewhere, or swap it for another, as long as that lowers the heavier of the two parts
    and until all parts are within `aim`; each time the change that lowers it most."""
    sums = [sum(costs[index] for index in share) for share in shares]
    while (highest := max(sums)) > aim:
        heavy = sums.index(highest)
        best, change = highest, None
        for other, share in enumerate(shares):
            for given in shares[heavy]:
                for taken in (None, *share):
                    moved = costs[given] - (0 if taken is None else costs[taken])
                    heavier = max(highest - moved, sums[other] + moved)
                    if other != heavy and heavier < best:
                        best, change = heavier, (other, given, taken, moved)
        if change is None:
            return
        other, given, taken, moved = change
        sums[heavy] -= moved
        sums[other] += moved
        shares[heavy].remove(given)
        shares[other].append(given)
        if taken is not None:
            shares[other].remove(taken)
            shares[heavy].append(taken)


def balance_each(costs: Sequence[float], kinds: Sequence[int], parts: int) -> list[list[int]]:
    """`balance`, the items of each kind among themselves: for kinds that all parts take up one after the other, together."""
    shares: list[list[int]] = [[] for _ in range(parts)]
    for kind in sorted(set(kinds)):
        items = [index for index, own in enumerate(kinds) if own == kind]
        for share, chosen in zip(shares, balance([costs[index] for index in items], parts), strict=True):
            share += [items[index] for index in chosen]
    return [sorted(share) for share in shares]


def starts(lengths: np.ndarray) -> np.ndarray:
    """int64 [n]: where each run begins."""
    return np.cumsum(lengths) - lengths


def ramps(lengths: np.ndarray) -> np.ndarray:
    """0 .. length-1 of every run, [sum of lengths]."""
    return np.arange(int(lengths.sum())) - np.repeat(starts(lengths), lengths)


def spans(begins: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """begin .. begin+length-1 of every run, [sum of lengths]."""
    return np.repeat(begins, lengths) + ramps(lengths)
