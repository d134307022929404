"""What is added to a sample's reward, and which groups are worth a step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def has_signal(rewards: Iterable[float], valid: Iterable[bool]) -> bool:
    """Whether the valid rewards of a group are not all equal (dynamic sampling; DAPO, arXiv:2503.14476, section 3.2)."""
    return len({reward for reward, counts in zip(rewards, valid, strict=True) if counts}) > 1


def soft_overlong_penalty(lengths: Tensor, max_length: int, buffer: int) -> Tensor:
    """0 up to `max_length - buffer` tokens, falling to -1 at `max_length` and -1 beyond (DAPO, equation 13).

    lengths float [B] -> [B]; `buffer` is at least 1.
    """
    return ((max_length - buffer - lengths) / buffer).clamp(-1.0, 0.0)


def missing_eos_penalty(truncated: Tensor, penalty: float) -> Tensor:
    """`-penalty` where generation stopped by length, else 0. truncated [B], 1.0 or 0.0 -> [B]."""
    return -penalty * truncated
