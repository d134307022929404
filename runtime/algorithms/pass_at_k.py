"""pass@k, from more samples than k."""

from __future__ import annotations

import math


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """`1 - C(n - c, k) / C(n, k)`: the chance that k of the n samples, c of them correct, hold a correct one.

    Unbiased (Chen et al., arXiv:2107.03374, equation 1). Raises ValueError unless 1 <= k <= n and 0 <= c <= n.
    """
    if not (1 <= k <= samples and 0 <= correct <= samples):
        raise ValueError(f"pass@{k} of {correct} correct among {samples}: needs 1 <= k <= n and 0 <= c <= n")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)
