"""maj@k: the majority's answer among k samples (self-consistency)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def maj_at_k(answers: Sequence[str | None], correct: Sequence[bool], k: int) -> bool:
    """Whether the answer that most of the first k samples give is correct.

    Each sample has one vote for its final answer; one without an answer (None) has none, and where nobody votes the result is
    False (Wang et al., arXiv:2203.11171, section 2: argmax over a of the count of a_i = a). A tie goes to the answer that was
    the first to reach the count. Equal answers are taken to be equally correct: the first one's verdict stands.
    Raises ValueError unless 1 <= k <= n, for n answers and n verdicts.
    """
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
