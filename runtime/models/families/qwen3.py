"""Qwen3: each head of q and k is normalised."""

from __future__ import annotations

from collections.abc import Iterator

from runtime.models.families.family import Family, ParameterMapping, attention, dense


class Qwen3(Family):
    model_type = "qwen3"
    architecture = "Qwen3"
    unsupported = {"attention_bias": False, "use_sliding_window": False}  # noqa: RUF012

    def layer(self, number: int) -> Iterator[ParameterMapping]:
        yield from attention(self.shape, qk_norm=True)
        yield from dense(self.shape)
