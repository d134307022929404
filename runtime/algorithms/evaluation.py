"""Figures of an evaluation from the samples of each problem, and their standard error."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Return `1 - C(n - c, k) / C(n, k)`: the chance that k of the n samples, c of them correct, hold a correct one.

    Unbiased (Chen et al., arXiv:2107.03374, equation 1). Raises ValueError unless 1 <= k <= n and 0 <= c <= n."""
    if not (1 <= k <= samples and 0 <= correct <= samples):
        raise ValueError(f"pass@{k} of {correct} correct among {samples}: needs 1 <= k <= n and 0 <= c <= n")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def maj_at_k(answers: Sequence[str | None], correct: Sequence[bool], k: int) -> bool:
    """Return whether the answer that most of the first k samples give is correct.

    Each sample votes for its final answer; a sample without an answer (None) does not vote. Without any vote the result is
    False (Wang et al., arXiv:2203.11171, section 2: argmax over a of the count of a_i = a). A tie goes to the answer that
    reached the count first. Equal answers count as equally correct: the verdict of the first stands.
    Raises ValueError unless 1 <= k <= n, for n answers and n verdicts."""
    if not 1 <= k <= len(answers) == len(correct):
        raise ValueError(f"maj@{k} of {len(answers)} answers and {len(correct)} verdicts: needs 1 <= k <= n of both")
    votes: Counter[str] = Counter()
    verdict: dict[str, bool] = {}
    winner: str | None = None
    for answer, right in zip(answers[:k], correct[:k], strict=True):
        if answer is None:
            continue
        verdict.setdefault(answer, right)
        votes[answer] += 1
        if winner is None or votes[answer] > votes[winner]:
            winner = answer
    return winner is not None and verdict[winner]


def clustered_standard_error(means: Sequence[float]) -> float | None:
    """Return the standard error of the mean over problems, each a cluster of samples; None for fewer than two problems.

    `means[i]` is p_i, the mean of problem i's samples, and p their mean over the N problems:
    `sqrt(sum over i of (p_i - p)^2 / (N - 1)) / sqrt(N)`.

    With equally many samples to a problem this is the cluster-robust error of the mean over all samples (Miller, "Adding Error
    Bars to Evals", arXiv:2411.00640, on clustered questions) times sqrt(N / (N - 1)), the correction for few clusters."""
    count = len(means)
    if count < 2:
        return None
    mean = math.fsum(means) / count
    return math.sqrt(math.fsum((value - mean) ** 2 for value in means) / (count - 1) / count)
