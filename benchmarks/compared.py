"""What a bench compares, in the form in which `sluice bench all` puts the benches side by side."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct


class Compared(Struct, frozen=True):
    """One ratio or cost: a value for each round or pair that was measured. `asked`: what it is to be, "≥ 0.85" say."""

    what: str
    values: list[float]
    asked: str = ""

    @classmethod
    def of(cls, what: str, values: Iterable[float | None], asked: str = "") -> Compared:
        """Without the rounds that gave none."""
        return cls(what, [value for value in values if value is not None], asked)
