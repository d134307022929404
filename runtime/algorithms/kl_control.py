"""The coefficient β of the KL term from step to step."""

from __future__ import annotations

from dataclasses import dataclass, replace

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
