"""maj@k against a count by hand, and the standard error against the sandwich estimator, written out."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.algorithms.evaluation import clustered_standard_error, maj_at_k

RIGHT = {"a"}


def won_by(answers: tuple[str | None, ...]) -> str | None:
    """The winner by looking at every prefix: the first answer to have the largest final count."""
    counts = {answer: answers.count(answer) for answer in answers if answer is not None}
    most = max(counts.values(), default=0)
    for end in range(1, len(answers) + 1):
        for answer, count in counts.items():
            if count == most and answers[:end].count(answer) == most:
                return answer
    return None


def test_the_majority_decides_and_a_tie_goes_to_the_first_to_reach_the_count() -> None:
    for n in range(1, 6):
        for answers in itertools.product(("a", "b", "c", None), repeat=n):
            verdicts = [answer in RIGHT for answer in answers]
            for k in range(1, n + 1):
                assert maj_at_k(answers, verdicts, k) is (won_by(answers[:k]) in RIGHT), (answers, k)


@pytest.mark.parametrize(
    ("answers", "right"), [("abba", False), ("abab", True), ("baab", True), ("ab", True), ("ba", False), ("cbab", False)]
)
def test_ties(answers: str, right: bool) -> None:
    assert maj_at_k(list(answers), [answer in RIGHT for answer in answers], len(answers)) is right


def test_samples_behind_the_first_k_have_no_vote() -> None:
    assert maj_at_k(["b", "a", "a"], [False, True, True], 1) is False
    assert maj_at_k(["b", "a", "a"], [False, True, True], 3) is True


def test_nobody_votes() -> None:
    assert maj_at_k([None, None], [True, True], 2) is False


@pytest.mark.parametrize("case", [(["a"], [True], 2), (["a"], [True], 0), (["a"], [], 1), ([], [], 1)])
def test_impossible_counts(case: tuple[list[str | None], list[bool], int]) -> None:
    with pytest.raises(ValueError, match="1 <= k <= n"):
        maj_at_k(*case)


@given(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=2, max_size=12))
def test_the_error_is_the_sandwich_of_a_regression_on_a_constant(samples: list[list[bool]]) -> None:
    """Cluster-robust variance (X'X)^-1 (sum over clusters of X'u u'X) (X'X)^-1, times N / (N - 1); X is a column of ones."""
    values = np.array(samples, np.float64)
    clusters = len(values)
    residuals = values - values.mean()
    meat = sum(float(np.ones(3) @ residuals[c]) ** 2 for c in range(clusters))
    variance = meat / values.size**2 * clusters / (clusters - 1)
    assert clustered_standard_error(values.mean(1).tolist()) == pytest.approx(np.sqrt(variance), rel=1e-12, abs=1e-15)


def test_samples_of_one_problem_are_no_evidence_of_their_own() -> None:
    alone = clustered_standard_error([0.0, 1.0, 1.0, 0.0])
    assert alone == pytest.approx(np.std([0, 1, 1, 0], ddof=1) / 2)
    assert clustered_standard_error([0.5] * 4) == 0.0
    assert clustered_standard_error([0.5]) is None
    assert clustered_standard_error([]) is None
