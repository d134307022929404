"""Ranges on the command line: `a:b`, either end open, or one value."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from runtime.errors import UserError

N = TypeVar("N", int, float)


def range_of(option: str, text: str | None, kind: Callable[[str], N], most: N) -> tuple[N, N] | None:
    """Both ends included; `most` stands for an open one. None where the option was not given. Raises UserError."""
    if text is None:
        return None
    low, colon, high = text.partition(":")
    try:
        if not colon:
            return kind(low), kind(low)
        bounds = (kind(low) if low else -most), (kind(high) if high else most)
    except ValueError:
        raise UserError(f"{option}: {text!r} is neither a number nor a range a:b") from None
    if bounds[0] > bounds[1]:
        raise UserError(f"{option}: {text!r} ends before it begins; a range is a:b, with a at most b")
    return bounds


def steps_of(option: str, text: str | None) -> tuple[int, int] | None:
    return range_of(option, text, int, 1 << 62)
