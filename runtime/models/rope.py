"""Rotary position embeddings (Su et al. 2021, RoFormer, arXiv:2104.09864): their keys in config.json and their frequencies,
both as in transformers. Loads torch only to compute.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec

from runtime.errors import UserError

if TYPE_CHECKING:
    import torch

_Factor = Annotated[float, msgspec.Meta(ge=1)]
_Length = Annotated[int, msgspec.Meta(ge=1)]
_Turns = Annotated[float, msgspec.Meta(gt=0)]


class LinearScaling(msgspec.Struct, frozen=True, tag="linear"):
    """Position interpolation (Chen et al. 2023, arXiv:2306.15595): all angles are divided by `factor`."""

    factor: _Factor
    amplitude: ClassVar[float] = 1.0

    def frequencies(self, periods: torch.Tensor, theta: float) -> torch.Tensor:
        return 1.0 / periods / self.factor


class Llama3Scaling(msgspec.Struct, frozen=True, tag="llama3"):
    """Llama 3.1's scaling: low frequencies are divided by `factor`, high ones kept, those in between interpolated."""

    factor: _Factor
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: _Length
    amplitude: ClassVar[float] = 1.0

    def frequencies(self, periods: torch.Tensor, theta: float) -> torch.Tensor:
        found = 1.0 / periods
        turns = self.original_max_position_embeddings * found / (2 * math.pi)  # in the original context
        kept = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return found * (kept + (1 - kept) / self.factor)


class YarnScaling(msgspec.Struct, frozen=True, tag="yarn"):
    """YaRN (Peng et al. 2023, arXiv:2309.00071, sections 3.2 and 3.4). Frequencies with more than `beta_fast` turns in the
    original context are kept, and those with fewer than `beta_slow` divided by `factor`. Cosines and sines are scaled up."""

    factor: _Factor
    original_max_position_embeddings: _Length
    beta_fast: _Turns = 32.0
    beta_slow: _Turns = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True

    def frequencies(self, periods: torch.Tensor, theta: float) -> torch.Tensor:
        import torch

        low, high = (self._index(turns, 2 * len(periods), theta) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * len(periods) - 1)
        width = high - low or 0.001
        kept = 1 - ((torch.arange(len(periods), dtype=torch.float32) - low) / width).clamp(0, 1)
        return 1.0 / (self.factor * periods) * (1 - kept) + 1.0 / periods * kept

    def _index(self, turns: float, dim: int, theta: float) -> float:
        """Return the index of the frequency with `turns` turns in the original context (section 3.2, equation 17 for d)."""
        return dim * math.log(self.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(theta))

    @property
    def amplitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return yarn_growth(self.factor, self.mscale) / yarn_growth(self.factor, self.mscale_all_dim)
        return yarn_growth(self.factor)


_SCALINGS: dict[str, Any] = {"linear": LinearScaling, "llama3": Llama3Scaling, "yarn": YarnScaling}


class Rope(msgspec.Struct, frozen=True):
    """The rotation of queries and keys by position."""

    theta: float
    scaling: LinearScaling | Llama3Scaling | YarnScaling | None = None

    @property
    def amplitude(self) -> float:
        """The factor of cosines and sines."""
        return 1.0 if self.scaling is None else self.scaling.amplitude

    def frequencies(self, dim: int) -> torch.Tensor:
        """Return the angles' steps from one position to the next, float32 [dim / 2]; `dim` elements of a head rotate."""
        import torch

        periods: torch.Tensor = self.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        return 1.0 / periods if self.scaling is None else self.scaling.frequencies(periods, self.theta)


def yarn_growth(factor: float, mscale: float = 1.0) -> float:
    """Return the square root of YaRN's attention temperature factor (section 3.4, equation 22)."""
    return 0.1 * mscale * math.log(factor) + 1.0


def read_rope(raw: Mapping[str, Any], where: str) -> Rope:
    """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

    Raises UserError if the kind is unknown or a key is missing or wrong. `where` is the file's name in messages.
    """
    options = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if isinstance(options, Mapping):
        options = options.get("full_attention", options)  # layers with a window may have options of their own
    if not isinstance(options, Mapping):
        raise UserError(f"{where}: rope_scaling is {options!r}; must be an object or null")
    given = {key: value for key, value in options.items() if value is not None}
    kind = given.get("rope_type", given.get("type", "default"))
    if kind != "default" and kind not in _SCALINGS:
        raise UserError(f"{where}: rope_type {kind!r} is not supported; must be one of {', '.join(['default', *_SCALINGS])}")
    if kind == "yarn":
        given.setdefault("original_max_position_embeddings", raw.get("max_position_embeddings", 2048))
    try:
        theta = msgspec.convert(given.get("rope_theta", raw.get("rope_theta", 10000.0)), Annotated[float, msgspec.Meta(gt=1)])
    except msgspec.ValidationError as error:
        raise UserError(f"{where}: rope_theta: {error}") from error
    try:
        return Rope(theta, None if kind == "default" else msgspec.convert({**given, "type": kind}, _SCALINGS[kind]))
    except msgspec.ValidationError as error:
        raise UserError(f"{where}: rope_scaling: {error}") from error
