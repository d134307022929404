"""Estimates of KL(policy || reference) per token from x = logp - ref_logp (http://joschu.net/blog/kl-approx.html)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from runtime.algorithms.interfaces import KL_ESTIMATORS

if TYPE_CHECKING:
    from torch import Tensor


@KL_ESTIMATORS.register("k1")
def k1(x: Tensor) -> Tensor:
    """x. Unbiased, of high variance, may be negative."""
    return x


@KL_ESTIMATORS.register("k2")
def k2(x: Tensor) -> Tensor:
    """x² / 2. Biased; its gradient is that of the KL."""
    return x.square() / 2


@KL_ESTIMATORS.register("k3_plain")
def k3_plain(x: Tensor) -> Tensor:
    """k3 without clamps."""
    return k3(x)


def k3(x: Tensor, *, clamp: bool = False) -> Tensor:
    """exp(-x) - 1 + x. Unbiased, never negative. `clamp` holds the result at 10 or less, beyond which it has no gradient."""
    if not clamp:
        return (-x).expm1() + x
    x = x.clamp(min=-20.0)  # an exponential that overflows would make the gradient NaN instead
    return ((-x).expm1() + x).clamp(max=10.0)


@KL_ESTIMATORS.register("k3")
def k3_clamped(x: Tensor) -> Tensor:
    """k3 as losses use it: one far token must not overflow the step."""
    return k3(x, clamp=True)


@KL_ESTIMATORS.register("abs")
def absolute(x: Tensor) -> Tensor:
    """|x|."""
    return x.abs()


def importance_weighted(estimate: Tensor, logp: Tensor, behaviour_logp: Tensor) -> Tensor:
    """`exp(logp - behaviour_logp) · estimate`: unbiased, gradient included, for tokens that another policy sampled.

    Of k3 as in DeepSeek-V3.2, arXiv:2512.02556. The exponent is held within ±20.
    """
    return (logp - behaviour_logp).clamp(-20.0, 20.0).exp() * estimate


LARGEST_ERROR = 0.2


@dataclass(frozen=True)
class FixedKl:
    """β stays."""

    coefficient: float

    def after(self, kl: float, samples: float) -> FixedKl:
        return self


@dataclass(frozen=True)
class AdaptiveKl:
    """`β ← β (1 + clip(kl / target - 1, ±0.2) · n / horizon)` (Ziegler et al., arXiv:1909.08593, section 2.2).

    `kl` is the step's mean estimate per token, n its number of samples, `horizon` in samples.
    """

    coefficient: float
    target: float
    horizon: float

    def after(self, kl: float, samples: float) -> AdaptiveKl:
        error = min(max(kl / self.target - 1, -LARGEST_ERROR), LARGEST_ERROR)
        return replace(self, coefficient=self.coefficient * (1 + error * samples / self.horizon))
