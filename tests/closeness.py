"""How far two computations of one number may lie apart when only the order of their additions differs.

Another processor, another shape of a batch or another number of ranks adds in another order. What two results may then differ
by is bounded by Higham, "Accuracy and Stability of Numerical Algorithms" (2nd ed.), chapter 3: a sum of n products, in any
order, is off by at most γ_n Σ|x_i y_i|, where γ_n = n·u / (1 - n·u) and u is the unit round-off of the arithmetic. A chain of
such sums, as a forward pass is, adds up their lengths (lemma 3.3: γ_j + γ_k + γ_j γ_k ≤ γ_{j+k}), so that `terms` is the
total length of the sums between the inputs and the number.

The size to multiply with is that of the result, not Σ|x_i y_i|: with signs at random the result is smaller than that sum by
about √n, and so is the error smaller than its bound (Higham and Mary, "A New Approach to Probabilistic Rounding Error
Analysis", 2019: √n·u instead of n·u). It is the size of the whole tensor, or of what was added up: one element may be as
small as a cancellation makes it, and its error does not become smaller by that.

`pytest.approx` with its own tolerance of 1e-6 stays where Python floats or float64 are compared: that is 10^10 round-offs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

FLOAT32, BFLOAT16 = 2.0**-24, 2.0**-8  # unit round-off: half the distance from 1 to the next number

# The largest shapes among the tiny models of training_cases and tiny_models.
_HIDDEN, _INTERMEDIATE, _HEAD, _VOCABULARY = 32, 48, 12, 61
LOGITS = 8.0  # none of their logits is larger


def forward_terms(tokens: int, layers: int = 2) -> int:
    """`terms` of a log-probability of those models, of a text of so many tokens.

    A layer sums in its norms, in the projections to queries, in the scores, the softmax over and the mean of the tokens, in the
    projection of attention, and in the MLP; the head in a norm, the logits and the softmax.
    """
    layer = 2 * _HIDDEN + _HIDDEN + _HEAD + 2 * tokens + _HIDDEN + _HIDDEN + _INTERMEDIATE
    return layers * layer + 2 * _HIDDEN + _VOCABULARY


# `terms` of a training step on the groups of training_cases: there, back, and the sum over at most 400 trained tokens.
STEP = 2 * forward_terms(tokens=46) + 400


def gamma(terms: int, unit: float = FLOAT32) -> float:
    """γ_n: relative, of `terms` roundings."""
    assert terms * unit < 1, f"{terms} roundings of {unit} leave nothing"
    return terms * unit / (1 - terms * unit)


def assert_close(
    actual: Any, expected: Any, *, terms: int, scale: float | None = None, unit: float = FLOAT32, what: str = ""
) -> None:
    """No element of `actual` is further from that of `expected` than 2 γ_n · scale, as each of the two may be off by γ_n.

    Both have any shape, the same. `scale` is the size of what is compared; without it, the largest magnitude in `expected`.

    Raises AssertionError, with the element that is the furthest off and the bound.
    """
    left, right = _as_float64(actual), _as_float64(expected)
    assert left.shape == right.shape, f"{what}: shape {left.shape}, must be {right.shape}"
    assert np.isfinite(right).all(), f"{what}: what is expected is not finite"
    if not right.size:
        return
    bound = 2 * gamma(terms, unit) * (float(np.abs(right).max()) if scale is None else scale)
    apart = np.abs(left - right)
    worst = np.unravel_index(apart.argmax(), apart.shape)  # NaN counts as the largest
    assert apart[worst] <= bound, (
        f"{what} {[*map(int, worst)]}: {left[worst]} is {apart[worst]:.3g} off {right[worst]}, at most {bound:.3g}"
    )


def _as_float64(value: Any) -> np.ndarray:
    return np.asarray(value.detach().double() if isinstance(value, torch.Tensor) else value, np.float64)
